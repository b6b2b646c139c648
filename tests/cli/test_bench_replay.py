"""`bench replay`: the collectives that a trace or a flight record has, in their order, and what is refused."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.cli import corrupted
from tests.cli.flight.recorded import as_file, done, flight
from tests.cli.test_trace import run_trace
from tritondt.cli import ranks as joined_ranks
from tritondt.cli.bench.collective.replay import read_recording
from tritondt.cli.main import main

SENTENCES = (
    "all_reduce (sum) of 1000 float32",
    "all_gather_into_tensor of 12 bfloat16",
    "all_reduce (sum) of 1000 float32",
    "step 1 of 1 (exchange (S0) -> (S1)) of (8, 8) float32",
    "all_gather of 3 + 5 float32",
    "reduce_scatter_tensor (product) of 7 int32",
    "broadcast of 9 uint8, root 1",
    "reduce (max) of 2 float64, root 1",
    "barrier",
    "all_reduce (band) of 4 int32",
    "all_reduce (sum) of 4 complex64",
    "all_to_all_single of float32",
)
FOUND = [
    ("all_reduce", 4000, "float", "sum", -1),
    ("all_gather", 2 * 24, "bfloat16", "none", -1),
    ("all_reduce", 4000, "float", "sum", -1),
    ("all_gather_v", 32, "float", "none", -1),
    ("reduce_scatter", 2 * 28, "int32", "prod", -1),
    ("broadcast", 9, "uint8", "none", 1),
    ("reduce", 16, "double", "max", 1),
]


def as_trace(*sentences: str) -> str:
    """A trace of two ranks that have run these exchanges; rank 1 has one more, and events are in no order."""
    events: list[dict[str, object]] = [{"ph": "M", "name": "process_name", "pid": 0}]
    for rank in (1, 0):
        named = [*sentences, *(["all_reduce (sum) of 1 float32"] if rank else [])]
        events += [
            {"ph": "X", "cat": "exchange", "name": name, "ts": 10.0 * place, "dur": 5.0, "pid": rank, "tid": 0}
            for place, name in reversed(list(enumerate(named)))
        ]
    return json.dumps({"traceEvents": events, "otherData": {"ranks": 2}})


def as_flight(*sentences: str) -> str:
    entries = [done(place, operation=text, sent_bytes=400) for place, text in enumerate(sentences, 1)]
    return str(as_file(flight(1, *entries, world_size=2)))


def listed(cases) -> list[tuple[object, ...]]:
    return [(case.kind.name, case.size, case.type, case.redop, case.root) for case in cases]


def test_collectives_of_a_trace_keep_their_sizes_and_their_order(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text(as_trace(*SENTENCES))
    found = read_recording(tmp_path / "trace.json", None)
    assert (found.num_ranks, listed(found.cases)) == (2, FOUND)
    assert found.left_out == {"other exchanges": 1, "barrier": 1, "all_reduce": 2, "all_to_all_single": 1}
    # On other ranks parts that were uneven have no sizes.
    wider = read_recording(tmp_path / "trace.json", 4)
    assert [name for name, *_ in listed(wider.cases)] == [name for name, *_ in FOUND if name != "all_gather_v"]


def test_a_flight_record_has_the_sizes_of_an_all_to_all_as_well(tmp_path: Path) -> None:
    (tmp_path / "rank-1.json").write_text(as_flight(*SENTENCES))
    found = read_recording(tmp_path / "rank-1.json", None)
    assert listed(found.cases) == [*FOUND, ("all_to_all", 800, "float", "none", -1)]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[]", "it is no flight recorder's: it has no version; allowed are a file of `trace --out` and a rank-*.json"),
        ("{", "it is no JSON"),
        ('{"traceEvents": [{}], "otherData": {"ranks": 2}}', "it is no trace of `trace`: KeyError('ph')"),
        ('{"traceEvents": [], "otherData": {"ranks": "two"}}', "its otherData has ranks 'two'"),
        (as_trace("barrier"), "has no collective of the backend tritondt among 1 exchanges to replay"),
        (as_trace("all_reduce (sum) of 100000000000000 float32"), "GB are free; take a smaller -e, or fewer --ranks"),
        (
            as_trace("all_reduce (sum) of 1 float32").replace('"ranks": 2', '"ranks": 1'),
            "was recorded on 1 rank; write",
        ),
        (None, "it cannot be read"),
    ],
)
def test_what_cannot_be_replayed_is_refused(tmp_path: Path, monkeypatch, text: str | None, sentence: str) -> None:
    monkeypatch.setattr(joined_ranks, "run", None)  # nothing is started
    path = tmp_path / "recorded.json"
    if text is not None:
        path.write_text(text)
    ended = CliRunner().invoke(main, ["bench", "replay", str(path)])
    assert (ended.exit_code, sentence in ended.stderr) == (1, True), ended.output


def test_a_recording_is_replayed_by_each_implementation_and_checked(tmp_path: Path) -> None:
    path, wrong = tmp_path / "trace.json", f"{corrupted.__name__}:bind"
    path.write_text(as_trace(*SENTENCES))
    sides = ("tritondt", "examples.own_collective:bind", wrong)
    ended = CliRunner().invoke(main, ["bench", "replay", str(path), "--impl", ",".join(sides), "-n", "6", "--json"])
    assert ended.exit_code == 1, ended.output  # by the wrong elements
    found = json.loads(ended.stdout)
    assert [each["name"] for each in found["collectives"]] == list(dict.fromkeys(name for name, *_ in FOUND))
    assert found["order"] == [0, 1, 0, 2, 3, 4, 5]
    ours, refused, corrupt = sorted(found["replayed"], key=lambda each: sides.index(each["implementation"]))
    assert (ours["nwrong"], len(ours["times_us"]), len(ours["mean_call_us"])) == (0, 6, 6)
    # The calls of an iteration are its time, but for what lies between them, and for the slowest of the ranks.
    calls = sum(ours["mean_call_us"][place] for place in found["order"])
    assert 0 < calls <= 1.01 * sum(ours["times_us"]) / 6
    assert corrupt["nwrong"] > 0
    assert refused["refusal"] == "the ring adds up for an all_reduce, and does nothing else"
    assert f"# Out of bounds values : {corrupt['nwrong']} FAILED" in ended.stderr
    assert "# time of" not in ended.stderr  # of what is wrong no ratio is said


@pytest.mark.extended
def test_what_a_program_does_is_recorded_and_replayed(tmp_path: Path) -> None:
    program = """
import torch
import torch.distributed as dist
import tritondt

dist.init_process_group("tritondt")
for size in (5, 300, 5):
    dist.all_reduce(torch.ones(size))
dist.destroy_process_group()
"""
    (tmp_path / "traced.py").write_text(program)
    ended = run_trace(tmp_path, "--ranks", "2", "--out", "found.json", "--", "traced.py")
    assert ended.returncode == 0, ended.stderr
    assert [case.size for case in read_recording(tmp_path / "found.json", None).cases] == [20, 1200, 20]
    replayed = CliRunner().invoke(main, ["bench", "replay", str(tmp_path / "found.json"), "-n", "5"])
    assert replayed.exit_code == 0, replayed.output
    assert "# 3 collectives, 2 different, on 2 ranks" in replayed.output
