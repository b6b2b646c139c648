"""Runs the tests in `interpreted`, where the kernels run in Triton's interpreter, in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", sorted(FOLDER.glob("test_*.py")), ids=lambda path: path.stem)
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
