"""Runs the tests in `interpreted`, where the kernels run in Triton's interpreter, in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"
PATHS = sorted(FOLDER.glob("test_*.py"))
# Of the core are the copies, which all tables are made of.
MARKS = {path.stem: () if path.stem == "test_copy_boxes" else pytest.mark.extended for path in PATHS}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", [pytest.param(path, id=path.stem, marks=MARKS[path.stem]) for path in PATHS])
def test_kernels_give_the_references_bits(path):
    pytest.importorskip("triton", reason="Triton is not installed")
    completed = subprocess.run(
        [sys.executable, "-m", "pytest", "--quiet", "--no-header", str(path)],
        cwd=FOLDER.parents[2],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=590,
        check=False,
    )
    assert completed.returncode == 0, completed.stdout[-20_000:] + completed.stderr
