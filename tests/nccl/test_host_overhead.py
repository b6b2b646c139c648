"""`python -m benchmarks.nccl.host_overhead` runs, on doubles of library, streams and kernels that do nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.harness.optional_packages import missing

pytestmark = pytest.mark.extended


@pytest.mark.skipif(bool(missing()), reason="benchmarks need the extra cli")
@pytest.mark.skipif(sys.platform != "linux", reason="the double is built for Linux")
def test_a_short_run_tells_the_time_of_each_case(tmp_path: Path) -> None:
    told = tmp_path / "told.json"
    command = [
        sys.executable,
        "-m",
        "benchmarks.nccl.host_overhead",
        "--ranks",
        "2",
        "--rounds",
        "3",
        "--json",
        str(told),
    ]
    ran = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(told.read_text())
    kinds = {case["case"]: case["kind"] for case in found["cases"]}
    assert kinds["S0 -> S1"] == "redistribution"
    assert kinds["all_reduce"] == "collective"
    for case in found["cases"]:
        times = [case, case["fake"]] if case["kind"] == "collective" else [case]
        assert all(0 < each["fastest_us"] <= each["waited_us"] for each in times)
