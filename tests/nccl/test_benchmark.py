"""`python -m benchmarks.nccl`: what it times, in which order, how it judges, and that it runs over the double."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.nccl import __main__ as command
from benchmarks.nccl import sides, timing
from benchmarks.nccl.judging import LIMITS, Measured, judged, slowest, worst
from benchmarks.nccl.timing import Job, jobs, seconds_in_turns, timed
from tests.nccl.conftest import SettingOf


def test_one_rank_is_judged_by_medians_and_two_by_the_fastest() -> None:
    seconds = {"communicator": [1.0, 2.0, 9.0], "backend": [4.0, 5.0, 3.0], "torch": [2.0, 4.0, 8.0]}
    alone = judged("time", "all_reduce of 8 bytes", [seconds])
    assert alone.values == {"communicator": 0.5, "backend": 1.0}
    assert (alone.limit, alone.figure, alone.holds) == (1.05, "median", True)
    slower = {"communicator": [3.0, 1.0, 1.0], "backend": [1.0] * 3, "torch": [1.0] * 3}
    assert slowest([seconds, slower])["communicator"] == [3.0, 2.0, 9.0]
    shared = judged("time", "all_reduce of 8 bytes", [seconds, slower])
    assert shared.values == {"communicator": 1.0, "backend": 1.5}
    assert (shared.limit, shared.figure, shared.holds) == (1.15, "fastest", False)


def test_an_overhead_is_in_microseconds_beyond_the_calls() -> None:
    seconds = {"redistribution": [50e-6, 40e-6, 60e-6], "nccl": [26e-6, 20e-6, 30e-6]}
    found = judged("overhead", "S0 -> S1", [seconds, seconds])
    assert found.values["redistribution"] == pytest.approx(24.0)
    assert (found.limit, found.holds) == (25.0, True)


def test_the_worst_case_of_each_kind_and_side_is_named() -> None:
    found = [
        Measured("time", "a", {}, {"backend": 1.0, "communicator": 0.9}, 1.05, "median"),
        Measured("time", "b", {}, {"backend": 1.2, "communicator": 0.8}, 1.05, "median"),
    ]
    assert worst(found) == {
        "time, backend": {"value": 1.2, "limit": 1.05, "case": "b"},
        "time, communicator": {"value": 0.9, "limit": 1.05, "case": "a"},
    }


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_job_has_a_limit(ranks: int) -> None:
    found = jobs(ranks, [1024, 1 << 26])
    assert {job.kind for job in found} == {kind for kind, of_ranks in LIMITS if of_ranks == ranks}
    assert len({(job.kind, job.case) for job in found}) == len(found)
    assert {job.arguments[0] for job in found if job.kind == "time"} == set(sides.COLLECTIVES)


def test_sides_take_turns_in_an_order_that_turns_too(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setattr(timing, "meet", lambda: events.append("|"))
    given: Any = {"a": lambda: events.append("a"), "b": lambda: events.append("b")}
    found = seconds_in_turns(given, 2, 2, lambda: events.append("."), to_the_end=True)
    a, b = ".|aa..", ".|bb.."
    assert "".join(events) == b + a + a + b + b + a + a + b + b + a
    assert {side: len(seconds) for side, seconds in found.items()} == {"a": 2, "b": 2}


@pytest.mark.extended
@pytest.mark.parametrize("ranks", [1, 2])
def test_jobs_run_over_the_double(setting_of: SettingOf, ranks: int) -> None:
    tiny: dict[str, tuple[object, ...]] = {"redistribution": ((7, 5),), "slots": ((7, 5),), "issued": (8,)}
    all_jobs = jobs(ranks, [64])
    host = [job for job in all_jobs if job.kind == "host"][:1]  # the same sides as "time"
    for job in [*(job for job in all_jobs if job.kind != "host"), *host]:
        arguments = (*tiny.get(job.make, ()), *job.arguments[1:]) if job.make in tiny else job.arguments
        of_ranks = setting_of("host", ranks).ranks.run(timed, "host", job._replace(arguments=arguments, calls=1), 2)
        found = judged(job.kind, job.case, of_ranks)
        assert all(seconds > 0 for seconds in found.seconds.values())
        assert set(found.seconds) - {"torch", "nccl", "messages"} == set(found.values)


def plant_a_wrong_result(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sides, "_of_group", lambda *arguments: lambda: None)
        with pytest.raises(AssertionError, match="all_reduce of 64 bytes: backend gives something else than the comm"):
            sides.collective(rank, "host", "all_reduce", 64)


def test_sides_that_differ_are_not_timed(setting_of: SettingOf) -> None:
    setting_of("host", 2).ranks.run(plant_a_wrong_result)


def test_it_is_refused_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert command.main([]) == 1
    assert (
        capsys.readouterr().err == f"Error: this benchmark needs a CUDA device; torch {torch.__version__} sees none\n"
    )


@pytest.mark.parametrize(("backend", "status"), [(1.04, 0), (1.06, 1)])
def test_a_missed_limit_is_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], backend: float, status: int
) -> None:
    class Ranks:
        """Stands for ranks on a GPU."""

        size = 1

        def __init__(self, where: str, size: int, **variables: str) -> None:
            assert (where, size) == ("gpu", 1)

        def __enter__(self) -> "Ranks":
            return self

        def __exit__(self, *error: object) -> None: ...

        def run(self, body: Any, *arguments: Any, timeout_s: float) -> list[Any]:
            if body is timed:
                return [{"communicator": [1.0], "backend": [backend], "torch": [1.0]}]
            return [{"nccl": "2.28.9", "nccl_path": "/lib/libnccl.so.2", "device": "a GPU"}]

    monkeypatch.setattr(command, "start", Ranks)
    monkeypatch.setattr(command, "why_not", lambda where, size: None)
    path = tmp_path / "nccl.json"
    assert command.main(["--only", "reduce_scatter of 65536*", "--json", str(path)]) == status
    assert "1/1  time: reduce_scatter of 65536 bytes: communicator 1.00, backend" in capsys.readouterr().out
    written = json.loads(path.read_text())
    assert written["holds"] == (status == 0)
    assert written["ratios"] == {"time, communicator": 1.0, "time, backend": backend}
    assert written["limits"] == {"time, communicator": 1.05, "time, backend": 1.05}
    assert (written["nccl"], written["device"], written["ranks"], written["rounds"]) == ("2.28.9", "a GPU", 1, 50)
    assert {"machine", "versions", "date", "cases"} <= set(written)


def test_a_glob_that_names_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(["--double", "--only", "sort*"])
    assert "--only sort* names no case" in capsys.readouterr().err


def test_a_job_is_a_value_that_ranks_can_be_sent() -> None:
    assert jobs(2, [64])[-1] == Job("overhead", "S0 -> S1 of 512 x 512, async", "issued", (512,), 10)
