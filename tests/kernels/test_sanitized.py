"""The kernels under compute-sanitizer, where it is installed: accesses beyond memory, races in shared memory."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).with_name("test_gpu_kernels.py")
# Few cases: under the sanitizer a launch takes some hundred times as long.
CASES = "test_random_copies and 450 or test_transpositions and shape3 or test_random_reductions and sum and float16"


def sanitizer():
    """Where it is installed, if it is."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=f"{home}/bin")


@pytest.mark.gpu
@pytest.mark.timeout(1200)
@pytest.mark.skipif(sanitizer() is None, reason="compute-sanitizer, of the CUDA toolkit, is not installed")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_nothing_is_found(tool):
    command = [sanitizer(), "--tool", tool, "--error-exitcode", "9", "--target-processes", "all"]
    completed = subprocess.run(
        [*command, sys.executable, "-m", "pytest", "--quiet", "-p", "no:cacheprovider", str(TESTS), "-k", CASES],
        # Each tensor is memory of its own, so that what lies behind it is nobody's.
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        cwd=TESTS.parents[2],
        capture_output=True,
        text=True,
        timeout=1190,
        check=False,
    )
    assert completed.returncode == 0, completed.stdout[-20_000:] + completed.stderr[-5_000:]
    assert "ERROR SUMMARY: 0 errors" in completed.stdout or "0 hazards" in completed.stdout
