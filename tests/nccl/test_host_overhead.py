"""`python -m benchmarks.nccl.host_overhead` runs, on doubles of library, streams and kernels that do nothing."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.nccl.host_overhead.timing import Round, summary
from tests.conftest import REPOSITORY
from tests.harness.optional_packages import missing

pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(bool(missing()), reason="benchmarks need the extra cli"),
    pytest.mark.skipif(sys.platform != "linux", reason="the double is built for Linux"),
]


def told_by(tmp_path: Path, *options: str) -> Any:
    """What a short run writes."""
    told = tmp_path / "told.json"
    command = [sys.executable, "-m", "benchmarks.nccl.host_overhead", "--ranks", "2", "--rounds", "3", *options]
    ran = subprocess.run([*command, "--json", str(told)], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return json.loads(told.read_text())


def test_a_short_run_tells_the_time_of_each_case(tmp_path: Path) -> None:
    found = told_by(tmp_path)
    kinds = {case["case"]: case["kind"] for case in found["cases"]}
    assert kinds["S0 -> S1"] == "redistribution"
    assert kinds["all_reduce"] == "collective"
    for case in found["cases"]:
        times = [case, case["fake"]] if case["kind"] == "collective" else [case]
        assert all(0 < each["fastest_us"] <= each["waited_us"] for each in times)
        assert all(0 <= each["full_speed"] <= 1 < each["loop_us"] for each in times)


def test_rounds_count_in_which_the_machine_was_at_full_speed() -> None:
    rounds = [Round(30, 40, 10), Round(32, 42, 11.5), Round(34, 44, 11.6), Round(10, 20, 50), Round(90, 99, 20)]
    assert summary(rounds, 11.5) == (31, 41, 20, 0.4, 10.75)
    assert summary(rounds[2:], 11.5) == (34, 44, 20, 0, 11.6)  # none was: the closest


def test_calls_of_cuda_take_their_time(tmp_path: Path) -> None:
    """Triton's launcher reaches the stub, once for each table: S0 -> S1 packs and keeps at once, S0 -> R keeps."""
    pytest.importorskip("triton", reason="Triton is not installed")
    found = told_by(tmp_path, "--cuda", "--only", "S0 -> *")
    cases = {case["case"]: case for case in found["cases"]}
    calls = {name: case["device"]["calls"] for name, case in cases.items()}
    assert {name: made["launch"] for name, made in calls.items()} == {"S0 -> S1": 1, "S0 -> R": 1}
    assert {name: made["allocation"] for name, made in calls.items()} == {"S0 -> S1": 1, "S0 -> R": 1}  # of the result
    for name, case in cases.items():
        device = case["device"]
        assert calls[name].items() >= {"event_record": 2, "stream_wait_event": 1, "event_query": 1}.items()
        assert calls[name]["is_capturing"] == 2  # by the queue and by the launch
        expected = sum(count * found["costs_ns"][call] for call, count in calls[name].items())
        assert device["calls_us"] * 1000 == pytest.approx(expected)
        assert case["fastest_us"] > device["calls_us"]  # a stub that took no time would not hold this
        assert device["parts_us"]["launches"] > calls[name]["launch"] * found["costs_ns"]["launch"] / 1000
