"""`bench COLLECTIVE`: nccl-tests' sizes, factors and columns, the check of every collective, and what is refused."""

import csv
import io
import json
from dataclasses import replace
from functools import partial

import pytest
from click.testing import CliRunner

from tests.cli import corrupted
from tritondt.cli import ranks as joined_ranks
from tritondt.cli.bench import nccl_tests
from tritondt.cli.bench.collective import data
from tritondt.cli.bench.collective.case import make_case
from tritondt.cli.bench.collective.documents import COLUMNS
from tritondt.cli.bench.collective.kinds import KINDS
from tritondt.cli.bench.collective.on_rank import Device, Devices, Starting, measure_on_rank
from tritondt.cli.bench.collective.overlap import Overlap
from tritondt.cli.bench.collective.record import Request, Row, label
from tritondt.cli.bench.collective.table import Table
from tritondt.cli.launch import RankFailedError, run_on_ranks
from tritondt.cli.main import bench, main

RANKS = 3
FLOAT = ("float", 4)
CORRUPTED = f"{corrupted.__name__}:bind"
RING = "examples.own_collective:bind"
SIDES = ("tritondt", "engine", "shared-memory", "torch", CORRUPTED, RING)
MOVES = ("engine", "shared-memory")


def case_of(name, num_bytes=1 << 12, ranks=RANKS, skew=0.5, redop="sum", root=0):
    case = make_case(name, ranks, FLOAT, redop, root, num_bytes, skew)
    assert case is not None
    return case


@pytest.fixture(scope="module")
def measured():
    """Rows of three collectives by every side, from one start of three ranks."""
    cases = (case_of("all_reduce"), case_of("all_gather_v"), case_of("gather", root=1))
    messages: list[object] = []
    request = Request("all", cases, SIDES, iterations=6, warmup=0, breaks_down=True, compute_ms=1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITONDT_TRANSPORT", "sockets")  # whose steps a breakdown takes apart
        run_on_ranks(RANKS, measure_on_rank, request, on_message=messages.append)
    return request, messages


def rows_of(messages):
    return [message for message in messages if isinstance(message, Row)]


def check_rows(request, messages):
    rows = rows_of(messages)
    assert len(rows) == len(request.cases) * len(request.sides)
    for row in rows:
        name, side = row.case.kind.name, row.side
        if side in MOVES and name in ("all_to_all_v", "sendrecv"):
            assert row.note == f"{name} is no move from one layout to another"
            continue
        if side == RING and (name, row.case.redop) != ("all_reduce", "sum"):
            assert row.note == "the ring adds up for an all_reduce, and does nothing else"
            continue
        assert row.note is None, (name, side)
        has_in_place = row.case.kind.has_in_place and side not in MOVES
        assert set(row.timings) == {"out", "in"} if has_in_place else {"out"}
        num_wrong = int(side == CORRUPTED)
        assert all(timing.num_wrong == num_wrong for timing in row.timings.values()), (name, side)
        assert all(len(timing.seconds) == RANKS for timing in row.timings.values())


def test_collectives_are_right_by_every_side(measured):
    check_rows(*measured)


@pytest.mark.extended
def test_every_collective_is_right_by_every_side():
    cases = tuple(case_of(name, root=1) for name in KINDS)
    cases += tuple(case_of(name, skew=1.0, root=1) for name in ("all_gather_v", "reduce_scatter_v", "all_to_all_v"))
    cases += tuple(case_of("reduce", redop=redop, root=1) for redop in ("prod", "max", "min"))
    messages: list[object] = []
    request = Request("all", cases, SIDES, iterations=1, warmup=0)
    run_on_ranks(RANKS, measure_on_rank, request, on_message=messages.append)
    check_rows(request, messages)


def test_one_wrong_element_is_counted_and_no_ratio_is_reported(measured):
    request, messages = measured
    rows = rows_of(messages)
    lines = Table(request, None).footer(rows, None)
    assert any(line.startswith("# Out of bounds values : ") and line.endswith(" FAILED") for line in lines)
    asked = replace(request, sides=("tritondt", "torch", CORRUPTED))
    against = [line for line in Table(asked, None).footer(rows, None) if "time of" in line]
    assert "95 % interval" in against[0]
    assert against[1] == "# time of tritondt / bind: not said, since a result is wrong"
    unchecked = replace(asked, check=0)
    (line,) = [line for line in Table(unchecked, None).footer(without_checks(rows), None) if "/ torch" in line]
    assert line.endswith("not said, since results were not checked (-c 0)")


def without_checks(rows):
    return [
        Row(
            row.case,
            row.side,
            *(timing and replace(timing, num_wrong=None) for timing in (row.out_of_place, row.in_place)),
        )
        for row in rows
    ]


@pytest.fixture
def replayed(measured, monkeypatch):
    """The command without its ranks: it is told what was measured of the collective that it asks for."""

    def run_on_ranks(_, __, request, *, on_message):
        on_message(Devices(tuple(Device(rank, 7, "host", None, None, "cpu, 1 thread") for rank in range(RANKS))))
        for case in request.cases:
            on_message(Starting(case))
            for row in rows_of(measured[1]):
                if row.case.kind == case.kind and row.side in request.sides:
                    on_message(replace(row, case=case, overlap=row.overlap if request.compute_ms else None))

    monkeypatch.setattr(joined_ranks, "run_on_ranks", run_on_ranks)
    return partial(CliRunner().invoke, main)


ALL_REDUCE = ["bench", "all_reduce", "--ranks", "3", "-b", "4K", "-n", "6"]


def test_flags_of_nccl_tests_that_ask_for_what_is_done_anyway_are_taken(replayed, tmp_path):
    path = tmp_path / "found.json"
    taken = [word for flag in nccl_tests.FLAGS for value in flag.taken[:1] for word in (flag.short, value)]
    ended = replayed(["bench", "all_reduce", "-g", "3", "-b", "4K", *taken, "--impl", "tritondt", "-J", str(path)])
    assert ended.exit_code == 0, ended.output
    assert json.loads(path.read_text())["config"]["ranks"] == 3


def test_the_table_has_the_columns_of_nccl_tests(replayed):
    ended = replayed([*ALL_REDUCE, "--impl", "tritondt"])
    assert ended.exit_code == 0, ended.output
    lines = ended.stdout.splitlines()
    names = next(line for line in lines if "#wrong" in line).lstrip("#").split()
    assert names == ["size", "count", "type", "redop", "root", *["time", "algbw", "busbw", "#wrong"] * 2]
    (row,) = [line.split() for line in lines if not line.startswith("#")]
    assert row[:5] == ["4096", "1024", "float", "sum", "-1"]
    assert (row[8], row[12]) == ("0", "0")
    assert "# Out of bounds values : 0 OK" in lines
    assert any(line.startswith("# Avg bus bandwidth    : ") for line in lines)
    assert "# Collective test concluded: all_reduce" in lines
    assert max(map(len, lines)) <= 130
    assert ended.stderr == ""


@pytest.mark.in_core(3)
@pytest.mark.parametrize("columns", [80, 118, 130])
def test_every_line_of_the_table_fits_the_terminal(measured, columns):
    request, messages = measured
    table = Table(replace(request, sides=SIDES[:3]), columns)
    rows = [row for row in rows_of(messages) if row.side in SIDES[:3]]
    device = Device(0, 1234567, "a-host-with-a-name-of-some-length.example", None, None, "cpu, 1 thread")
    lines = table.title(
        Devices((device,)), {"tritondt": "0.1.0", "torch": "2.13.0+cpu", "python": "3.11.7"}, ["x " * 99]
    )
    lines += [line for row in rows for line in table.row(row)]
    lines += table.iterations(rows) + table.parts(rows) + table.overlaps(rows) + table.footer(rows, None)
    assert max(map(len, lines)) <= columns
    assert all(line.startswith("#") or line.split()[0].isdigit() for line in lines)
    # Three collectives of one size: each row of the table, and each name in it, is told from all others.
    assert any("out-of-place" in line for line in lines) == (columns >= 118)


def test_narrow_rows_of_several_reductions_and_roots_are_told_apart(measured):
    request, messages = measured
    (row,) = [row for row in rows_of(messages) if row.case.kind.name == "all_reduce" and row.side == "torch"]
    cases = [replace(row.case, redop=redop) for redop in ("sum", "sum", "max")]
    cases[1] = replace(cases[1], matrix=((row.case.total // 2,),))
    table = Table(replace(request, cases=tuple(cases), sides=("torch",)), 80)
    lines = [line for case in cases for line in table.row(replace(row, case=case))]
    assert [line for line in lines if line.startswith("#")] == ["# float sum:", "# float max:"]
    assert len(lines) == 2 + 2 * 3
    alone = Table(replace(request, cases=tuple(cases[:2]), sides=("torch",)), 80)
    assert not [line for case in cases[:2] for line in alone.row(replace(row, case=case)) if line.startswith("#")]


def test_json_is_all_that_stdout_gets_and_has_the_keys_of_nccl_tests(replayed):
    ended = replayed([*ALL_REDUCE, "--impl", "tritondt,torch", "--json"])
    assert ended.exit_code == 0, ended.output
    found = json.loads(ended.stdout)
    assert "# Collective test concluded: all_reduce" in ended.stderr
    # All that nccl-tests 2.19.6 writes but the environment.
    keys = {"version", "start_time", "args", "nccl_version", "config", "results", "out_of_bounds", "errors", "end_time"}
    assert {*keys, "average_bus_bandwidth", "machine", "versions"} <= set(found)
    assert "env" not in found
    assert found["start_time"] <= found["end_time"]
    assert found["average_bus_bandwidth"]["okay"] == "unchecked"
    config = {"nthreads", "ngpus", "minimum_bytes", "maximum_bytes", "warmup_iters", "iterations", "validation"}
    config |= {"aggregated_iterations", "graph", "blocking_collectives", "per_iter_timing", "per_iter_skip"}
    assert {*config, "parallel_init", "devices"} <= set(found["config"])
    device = {"rank", "group", "pid", "hostname", "device", "device_hex", "device_info"}
    assert set(found["config"]["devices"][0]) == device
    assert found["complete"]
    assert found["out_of_bounds"] == {"count": 0, "okay": True}
    assert [each["rank"] for each in found["config"]["devices"]] == [0, 1, 2]
    for result in found["results"]:
        keys = {"size", "count", "type", "redop", "root", "actual_iterations", "experiment_name", "implementation"}
        assert keys <= set(result)
        assert set(result["in_place"]) == {"time", "alg_bw", "bus_bw", "nwrong"}
        assert result["in_place"]["bus_bw"] == pytest.approx(result["in_place"]["alg_bw"] * 4 / 3)
        per_iteration = result["out_of_place_per_iter"]
        keys = {"min_us", "max_us", "avg_us", "p50_us", "p95_us", "p99_us", "stdev_us", "cv_pct", "skipped_iterations"}
        assert keys | {"times_us", "per_process_max_times_us", "rank_spread_pct"} == set(per_iteration)
        assert len(per_iteration["times_us"]) == 6
        assert [len(times) for times in per_iteration["per_process_max_times_us"]] == [6, 6, 6]


def test_the_engines_moves_are_broken_down_in_table_json_and_csv(replayed, measured, tmp_path):
    rows = [row for row in rows_of(measured[1]) if row.parts is not None]
    assert [(row.case.kind.name, row.side) for row in rows] == [
        (case.kind.name, "engine") for case in measured[0].cases
    ]
    # Of 3 parts of 4 KB each rank sends two and receives two, twice: to reduce and to gather.
    assert rows[0].parts.busiest_bytes == pytest.approx(4 / 3 * rows[0].case.size, rel=0.01)
    path = tmp_path / "found.csv"
    ended = replayed([*ALL_REDUCE, "--impl", "engine,torch", "--breakdown", "--json", "--csv", str(path)])
    assert ended.exit_code == 0, ended.output
    ours, theirs = json.loads(ended.stdout)["results"]
    assert ours["breakdown"]["share_of_peak"] == rows[0].parts.share_of_peak
    assert len(ours["breakdown"]["local_seconds"]) == len(ours["breakdown"]["messages_seconds"]) == 6
    assert "breakdown" not in theirs
    assert "# messages alone; the share of the shorter" in ended.stderr
    ours, *theirs = csv.DictReader(io.StringIO(path.read_text()))
    assert float(ours["local_us"]) > 0
    assert float(ours["messages_us"]) > 0
    assert {line["local_us"] for line in theirs} == {""}
    refused = replayed([*ALL_REDUCE, "--impl", "torch", "--breakdown"])
    assert refused.exit_code == 1
    assert "--breakdown takes the moves of engine apart; --impl torch has none of them" in refused.output


def test_calls_that_can_be_issued_are_timed_beside_a_compute(replayed, measured):
    found = {(row.case.kind.name, row.side) for row in rows_of(measured[1]) if row.overlap is not None}
    # Uneven parts and a gather are no operation of torch.distributed's own; the engine issues any move.
    assert found == {("all_reduce", side) for side in ("tritondt", "engine", "torch")} | {
        ("all_gather_v", "engine"),
        ("gather", "engine"),
    }
    flags = ["--impl", "tritondt,shared-memory", "--compute-overlap", "1", "--json"]
    ended = replayed([*ALL_REDUCE, *flags])
    assert ended.exit_code == 0, ended.output
    document = json.loads(ended.stdout)
    assert document["config"]["compute_overlap_ms"] == 1
    ours, other = document["results"]
    assert "overlap" not in other
    times = ours["overlap"]
    assert all(times[name] > 0 for name in ("alone_us", "compute_us", "both_us"))
    overlap = Overlap(*(times[name] / 1e6 for name in ("alone_us", "compute_us", "both_us", "noise_us")))
    assert times["share"] == pytest.approx(overlap.share)
    assert "how much of the shorter is hidden:" in ended.stderr
    assert "# shared: all_reduce is not issued by itself, and has no overlap" in ended.stderr
    assert "overlap" not in replayed([*ALL_REDUCE, "--impl", "shared-memory"]).output


@pytest.mark.parametrize(
    ("both", "noise", "said"),
    [
        *[(500.0, 1.0, "50%"), (900.0, 1.0, "0%"), (398.0, 3.0, "100%"), (300.0, 3.0, "not measurable")],
        *[(500.0, 101.0, "not measurable"), (500.0, None, "not measurable")],
    ],
)
def test_an_overlap_is_between_0_and_100_percent_or_not_measurable(measured, both, noise, said):
    request, rows = measured[0], rows_of(measured[1])
    row = next(row for row in rows if row.overlap is not None)
    overlap = Overlap(200e-6, 400e-6, both * 1e-6, None if noise is None else noise * 1e-6)
    *_, line = Table(request, 120).overlaps([replace(row, overlap=overlap)])
    assert line.endswith(f"{said:>16}  {label(row.side)}")
    assert line.split()[-4 - len(said.split()) :][:3] == ["200.0", "400.0", f"{both:.1f}"]


def test_the_noise_of_an_overlap_is_of_what_both_save_in_the_same_iteration():
    alone, computed = [2.0, 9.0, 2.0, 2.0, 3.0, 2.0], [4.0, 4.0, 8.0, 4.0, 4.0, 4.0]
    both = [one + other - 1.0 for one, other in zip(alone, computed, strict=True)]
    assert Overlap.of(alone, computed, both) == Overlap(2.0, 4.0, 5.5, 0.0)
    assert Overlap.of(alone[:4], computed[:4], both[:4]).noise_s is None
    noisy = [each + chance for each, chance in zip(both, (-2.0, 3.0, -3.0, 2.0, 0.0, 0.0), strict=True)]
    assert (Overlap.of(alone, computed, noisy).noise_s or 0.0) > 1.0


@pytest.mark.parametrize(
    ("flags", "step", "said"),
    [
        (["-e", "16K", "-f", "2"], {"step_factor": 2.0}, " step: 2(factor) "),
        (["-e", "16K", "-i", "4K"], {"step_bytes": 4096}, " step: 4096(bytes) "),
        (["-e", "16K"], {"step_bytes": 1 << 20}, " step: 1048576(bytes) "),
        ([], {}, None),
    ],
)
def test_header_and_json_say_how_sizes_rise(replayed, flags, step, said):
    ended = replayed([*ALL_REDUCE, *flags, "--impl", "tritondt", "--json"])
    config = json.loads(ended.stdout)["config"]
    assert {key: value for key, value in config.items() if key.startswith("step")} == step
    assert ("step:" in ended.stderr) == (said is not None)
    assert said is None or said in ended.stderr


def test_percentiles_of_several_types_and_reductions_are_told_apart(replayed):
    printed = replayed([*ALL_REDUCE, "--impl", "tritondt", "-d", "all", "-o", "all"]).stdout.splitlines()
    percentiles = printed[next(number for number, line in enumerate(printed) if "p95" in line) + 1 :]
    said = [line for line in percentiles if line.endswith(":")]
    assert said[:2] == ["# int8 sum:", "# int8 prod:"]
    assert (
        len(said)
        == len(set(said))
        == len(data.DTYPES) * len(data.REDOPS) - sum(not dtype.is_floating_point for dtype in data.DTYPES.values())
    )
    alone = replayed([*ALL_REDUCE, "--impl", "tritondt"]).stdout
    assert "# float sum:" not in alone


def test_csv_has_a_line_for_each_tuple(replayed, tmp_path):
    path = tmp_path / "found.csv"
    ended = replayed([*ALL_REDUCE, "-e", "8K", "-f", "2", "--impl", "tritondt,engine", "--csv", str(path)])
    assert ended.exit_code == 0, ended.output
    lines = list(csv.DictReader(io.StringIO(path.read_text())))
    assert tuple(lines[0]) == COLUMNS
    found = [(line["size"], line["implementation"], line["place"]) for line in lines]
    expected = [("tritondt", "out"), ("tritondt", "in"), ("engine", "out")]
    assert found == [(size, *each) for size in ("4096", "8192") for each in expected]
    assert {line["nwrong"] for line in lines} == {"0"}


def test_the_exit_status_is_that_of_nccl_tests(replayed):
    assert replayed([*ALL_REDUCE, "--impl", CORRUPTED]).exit_code == 1
    too_slow = replayed([*ALL_REDUCE, "--impl", "tritondt", "--min-bw", "1e9"])
    assert (too_slow.exit_code, "FAILED" in too_slow.stdout) == (1, True)
    assert replayed([*ALL_REDUCE, "--impl", "tritondt"], env={"NCCL_TESTS_MIN_BW": "1e-9"}).exit_code == 0


@pytest.mark.parametrize(
    ("error", "status", "sentence"),
    [
        (KeyboardInterrupt(), 130, "partial, 1 of 2 cases were measured: interrupted"),
        (joined_ranks.Terminated(), 130, "partial, 1 of 2 cases were measured: terminated"),
        (
            RankFailedError("rank 1 of 3 was ended by SIGKILL before it was done"),
            1,
            "measured: rank 1 of 3 was ended by",
        ),
    ],
)
def test_what_was_measured_before_the_end_is_kept_and_said_to_be_partial(
    measured, monkeypatch, tmp_path, error, status, sentence
):
    def run_on_ranks(_, __, request, *, on_message):
        on_message(Devices(()))
        row = next(row for row in rows_of(measured[1]) if row.case.kind.name == "all_reduce")
        on_message(replace(row, case=request.cases[0]))
        raise error

    monkeypatch.setattr(joined_ranks, "run_on_ranks", run_on_ranks)
    path = tmp_path / "found.json"
    ended = CliRunner().invoke(main, [*ALL_REDUCE, "-e", "8K", "-f", "2", "--json", str(path)])
    assert (ended.exit_code, sentence in ended.stderr) == (status, True), ended.stderr
    found = json.loads(path.read_text())
    assert (found["complete"], len(found["results"])) == (False, 1)
    assert len(found["errors"]) == 1


def test_each_collective_has_its_command():
    assert set(KINDS) <= set(bench.commands)
    listed = CliRunner().invoke(main, ["bench", "--help"]).stdout
    assert all(name in listed for name in (*KINDS, "redistribute", "compare"))
