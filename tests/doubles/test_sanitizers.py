"""The double under sanitizers: its driver ends well. That a planted error is found, tests/csrc shows."""

import subprocess
from pathlib import Path

import pytest

from tests.csrc.test_sanitizers import skip_unless_there

MAKEFILE = Path(__file__).parent / "fake_nccl" / "Makefile"

pytestmark = pytest.mark.extended


@pytest.mark.slow
@pytest.mark.timeout(400)  # the first build takes half a minute on two cores
@pytest.mark.parametrize("sanitizer", ["thread", pytest.param("address", marks=pytest.mark.soak)])
def test_the_double_has_no_races_and_no_errors_of_memory(sanitizer: str, tmp_path: Path) -> None:
    skip_unless_there(sanitizer, tmp_path)
    ran = subprocess.run(
        ["make", "--jobs", "2", "--file", MAKEFILE, sanitizer], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "background: " in ran.stdout  # the last part came to its end
