"""Modules that a program may import before those of torch's that they add to."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
NAMES = ["tritondt.interop.checkpoint", "tritondt.interop.checkpoint_folder", "tritondt.sharded.checkpoint"]
# One import of torch for all: a fork for each.
# Whatever stands when a program imports a part of the library: torch's modules that it adds to, and transformers'.
LOADED = ["torch.distributed.checkpoint", "torch.distributed._state_dict_utils", "torch.distributed.fsdp"]
PARTS = [
    f"tritondt.{name}" for name in ("parallel", "fsdp", "sharded", "debug", "random", "found_plan", "experimental")
]
PROGRAM = """
import importlib, os, sys, traceback
import tritondt
for name in filter(None, os.environ["LOADED"].split(",")):
    importlib.import_module(name)
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
@pytest.mark.parametrize("loaded", [[], [*LOADED, "transformers.modeling_utils"]], ids=["alone", "after transformers"])
def test_each_module_may_be_imported_first(loaded: list[str]) -> None:
    if loaded and find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, *(PARTS if loaded else NAMES)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "LOADED": ",".join(loaded)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
