"""Runs the tests in `interpreted`, where the kernels run in Triton's interpreter, in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"


def run_interpreted(mark: str, *paths: Path) -> None:
    """Runs the tests of `paths` that pytest's expression `mark` chooses, by their marks."""
    pytest.importorskip("triton", reason="Triton is not installed")
    completed = subprocess.run(
        [sys.executable, "-m", "pytest", "--quiet", "--no-header", "-m", mark, *map(str, paths)],
        cwd=FOLDER.parents[2],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=590,
        check=False,
    )
    # A file may have no test of the tier: pytest says so by this status, and by nothing else.
    allowed = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    assert completed.returncode in allowed, completed.stdout[-20_000:] + completed.stderr


@pytest.mark.timeout(600)
def test_kernels_give_the_references_bits_in_the_core() -> None:
    run_interpreted("not extended and not soak", FOLDER)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", [pytest.param(path, id=path.stem) for path in sorted(FOLDER.glob("test_*.py"))])
@pytest.mark.parametrize(
    "tier", [pytest.param("extended", marks=pytest.mark.extended), pytest.param("soak", marks=pytest.mark.soak)]
)
def test_kernels_give_the_references_bits(path: Path, tier: str) -> None:
    run_interpreted(tier, path)
