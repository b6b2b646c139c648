"""Modules that a program may import before those of torch's that they add to."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
NAMES = ["tritondt.interop.checkpoint", "tritondt.interop.checkpoint_folder", "tritondt.sharded.checkpoint"]
# One import of torch for all: a fork for each.
PROGRAM = """
import importlib, os, sys, traceback
import tritondt
failed = []
for name in sys.argv[1:]:
    if os.fork() == 0:
        try:
            importlib.import_module(name)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.wait()[1]:
        failed.append(name)
sys.exit(" ".join(failed) or 0)
"""


@pytest.mark.extended
def test_each_module_may_be_imported_first() -> None:
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, *NAMES],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
