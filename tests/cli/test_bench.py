"""`bench redistribute`: what it counts, what it refuses, and one small run of all of it."""

import csv
import io
import json
import random
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from rich.console import Console

import tritondt as T
from tritondt.cli.bench import compare, harness, page
from tritondt.cli.bench.cases import Case, default_pairs, make_cases, mesh_shape, parse_pairs, with_reductions
from tritondt.cli.bench.harness import Times
from tritondt.cli.bench.inputs import DTYPES, source_part, target_part
from tritondt.cli.bench.measure import Counts, Measured
from tritondt.cli.bench.minimum import fewest_elements
from tritondt.cli.bench.report import line, print_report, summarise
from tritondt.cli.main import main
from tritondt.comm.transports.threads import run_ranks
from tritondt.sharding.layout import Layout
from tritondt.sharding.placement import OPS_OF_KIND, Replicate, Shard, parse_placements

COMMAND = ["bench", "redistribute"]
SIDES = ["tritondt", "torch", "shared-memory", "gloo"]


@pytest.fixture(scope="module")
def small_run(tmp_path_factory):
    """A run of two cases by every implementation: its status, the JSON object, stderr, and the files it wrote."""
    options = ["--pairs", "S0->S1; P->R", "--sizes", "5x7", "-n", "3", "-w", "3", "--breakdown"]
    options += ["--impl", ",".join(["nccl", *SIDES])]
    folder = tmp_path_factory.mktemp("small")
    ended = CliRunner().invoke(main, [*COMMAND, "--ranks", "2", *options, "--json", "--csv", str(folder / "found.csv")])
    assert ended.exit_code == 0, ended.output
    (folder / "found.json").write_text(ended.stdout)  # all else is on stderr
    return json.loads(ended.stdout), ended.stderr, folder


@pytest.mark.extended
def test_a_small_run_against_torch(small_run):
    found, printed, _ = small_run
    assert max(map(len, printed.partition("minimum:")[0].splitlines())) <= 80
    assert max(map(len, printed.partition("parts in ms")[2].partition("time /")[0].splitlines())) <= 80
    assert (found["ranks"], found["threads"], found["dtype"], found["against"]) == (2, 1, "float32", "torch")
    assert set(found["machine"]) == {"platform", "processor", "cores"}
    assert set(found["versions"]) == {"tritondt", "torch", "python"}
    assert found["geometric_means"]["ratio_median"] > 0
    assert set(found["geometric_means"]["sizes"]) == {"5x7"}
    exchange, reduction = found["cases"]
    assert (exchange["shape"], exchange["mesh"], exchange["rounds"]) == ([5, 7], [2], 3)
    assert (exchange["source"], exchange["target"]) == ("(S0)", "(S1)")
    # The busiest rank moves 3 x 3 floats.
    assert exchange["bus_gb_per_s"] == pytest.approx(3 * 3 * 4 / exchange["median_s"] / 1e9)
    # Rank 0 holds 3 of 5 rows and wants 4 of 7 columns: it lacks 2 x 4, the other one 3 x 3.
    assert exchange["sent_bytes"] == exchange["minimum_bytes"] == 17 * 4
    assert exchange["messages"] == 2
    assert reduction["minimum_bytes"] == 2 * 35 * 4
    assert reduction["received_over_limit"] <= 1
    assert found["complete"]
    assert (found["warmup_iters"], found["validation"], found["average"]) == (3, 1, 3)
    for case in found["cases"]:
        assert len(case["seconds"]) == len(case["torch_seconds"]) == 3
        assert case["p50_s"] <= case["p95_s"] <= case["p99_s"]
        assert case["ratio_median"] == case["median_s"] / case["torch_median_s"]
        assert case["ratio_fastest"] == case["fastest_s"] / case["torch_fastest_s"]
        assert len(case["local_seconds"]) == len(case["messages_seconds"]) == 3
        assert case["share_of_peak"] > 0


@pytest.mark.extended
def test_implementations_take_turns_in_any_number(small_run):
    found, printed, folder = small_run
    rows = [(source, side) for source in ("(S0)", "(P(sum))") for side in SIDES]
    lines = list(csv.DictReader(io.StringIO((folder / "found.csv").read_text())))
    assert [(line["source"], line["implementation"]) for line in lines] == rows
    assert "nccl is not available: torch " in printed
    assert all(f"time / {side}'s, geometric mean of 2 cases" in printed for side in SIDES[1:])
    assert set(found["geometric_means_of"]) == set(SIDES[1:])
    entries, _ = compare.read(folder / "found.json")
    assert [entry.side for entry in entries] == 2 * SIDES
    assert [point.side for point in page.points_of(found)] == 2 * SIDES


@pytest.mark.extended
def test_results_have_the_keys_of_nccl_tests(small_run):
    found, *_ = small_run
    assert {"version", "start_time", "args", "nccl_version", "out_of_bounds", "errors", "end_time"} <= set(found)
    assert found["average_bus_bandwidth"]["bandwidth"] > 0
    assert [result["implementation"] for result in found["results"]] == 2 * SIDES
    for result in found["results"]:
        assert (result["size"], result["count"], result["type"]) == (5 * 7 * 4, 35, "float")
        assert result["redop"] == ("sum" if result["source"] == "(P(sum))" else "none")
        assert (result["out_of_place"]["nwrong"], result["in_place"], result["actual_iterations"]) == (0, None, 3)
        times = result["out_of_place_per_iter"]["times_us"]
        assert result["out_of_place"]["time"] == pytest.approx(sum(times) / 3)


def test_a_rank_that_fails_ends_the_run_with_its_traceback(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRITONDT_TIMEOUT", "soon")
    ended = CliRunner().invoke(main, [*COMMAND, "--ranks", "2", "--sizes", "2x2"])
    assert ended.exit_code == 1
    assert "Traceback" in ended.stderr
    assert "WorldError: TRITONDT_TIMEOUT='soon'" in ended.stderr
    assert "Error: partial, 0 of 8 cases were measured: rank" in ended.stderr


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--pairs", "S0"], "cannot read the pair 'S0'; allowed is source->target"),
        (["--pairs", "S0->R,R"], "has 1 placements before and 2 after"),
        (["--pairs", "S0->P"], "cannot be checked element by element"),
        (["--pairs", "S0(unit=4)->R"], "cannot be checked element by element"),
        (["--pairs", "S2->R"], "axis 0 shards dim 2"),
        (["--ranks", "3", "--pairs", "S0,S0->R,R"], "3 ranks make no mesh of 2 axes"),
        (["--ranks", "4", "--pairs", "P(max),P->R,R"], "cannot be checked element by element"),
        (["-o", "avg", "-d", "int32"], "a reduction by avg was asked for of int32; allowed are sum, max, min, product"),
        (["--pairs", "P(avg)->R", "-d", "int64"], "a reduction by avg was asked for of int64"),
        (["--sizes", "4*4"], "cannot read the sizes '4*4'"),
        (["-b", "1M", "-e", "1K"], "sizes from 1048576 to 1024 bytes were asked for"),
        (["--json", "/nowhere/found.json"], "/nowhere/found.json cannot be written: No such file or directory"),
        (["--ranks", "100000"], "--ranks 100000: at most"),
        (["-w", "0"], "0 is not in the range x>=1"),
        (["-c", "-1"], "-1 is not in the range x>=0"),
        (["-a", "4"], "4 is not in the range 0<=x<=3"),
    ],
)
def test_refuses_what_it_cannot_measure(options, sentence):
    ended = CliRunner().invoke(main, [*COMMAND, *options])
    assert ended.exit_code in (1, 2)
    assert sentence in ended.output


def test_every_default_pair_is_measured_on_4_ranks():
    pairs = default_pairs(4)
    assert len(pairs) == 20
    assert len(make_cases(4, [(64, 96), (5, 7)], pairs)) == 40
    assert {len(pair.source) for pair in default_pairs(3)} == {1}


@pytest.mark.parametrize("num_ranks", [1, 2, 6, 7, 8, 12, 30])
def test_a_mesh_takes_all_ranks(num_ranks):
    for num_axes in (1, 2, 3):
        sizes = mesh_shape(num_ranks, num_axes)
        if sizes is not None:
            total = 1
            for size in sizes:
                total *= size
            assert (len(sizes), total) == (num_axes, num_ranks)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 6])
def test_every_reduction_is_exact_in_any_order(num_ranks, dtype):
    texts = ["P->R", "P->S1", *(["P,P->R,S0", "P,S0->S1,R"] if num_ranks in (4, 6) else [])]
    element = DTYPES[dtype]
    ops = OPS_OF_KIND["float" if element.is_floating_point else "int"]
    cases = make_cases(num_ranks, [(13, 15)], with_reductions(parse_pairs(";".join(texts)), ops))
    assert {case.pair.reduce_op for case in cases} == set(ops)

    def body(_):
        for case in cases:
            mesh, meta = T.Mesh(case.mesh_shape), T.TensorMeta.contiguous(case.shape, element)
            source, target = (T.DTensorSpec(mesh, each, meta) for each in (case.pair.source, case.pair.target))
            assert source.coordinate is not None
            found = T.redistribute(source_part(case, element, source.coordinate), source, target)
            expected = target_part(case, element, source.coordinate)
            torch.testing.assert_close(found, expected, rtol=0, atol=0, msg=str(case))
            assert expected.any() or not expected.numel(), f"{case} would be right if nothing were moved"

    run_ranks(num_ranks, body)


def test_fewest_elements_is_what_ranks_lack():
    random.seed(1)
    choices = [Replicate(), Shard(0), Shard(1)]
    for _ in range(300):
        mesh = tuple(random.choices((1, 2, 3), k=random.choice((1, 2, 3))))
        shape = (random.randrange(7), random.randrange(7))
        source, target = (Layout(mesh, random.choices(choices, k=len(mesh)), shape) for _ in range(2))
        lacking = sum(
            len(_elements(target, coordinate) - _elements(source, coordinate))
            for coordinate in product(*map(range, mesh))
        )
        assert fewest_elements(source, target) == lacking, f"{source!r} -> {target!r}"


def _elements(layout: Layout, coordinate: tuple[int, ...]) -> set[tuple[int, ...]]:
    return {
        element for box in layout.boxes(coordinate) for element in product(*(range(start, stop) for start, stop in box))
    }


@pytest.mark.parametrize(
    ("source", "target", "sends"),
    [
        ("P, R", "S0, R", 2),  # 1 of 2 terms travels, and on the other index of the second axis as well
        ("P, P", "R, R", 6),  # 3 bring 4 terms together, 3 take the sum to the others
        ("P, P", "S0, S1", 3),
        ("P, S0", "S0, S0", 1.5),  # two ranks have a term of all that they want, two of none
    ],
)
def test_fewest_elements_of_reductions(source, target, sends):
    before, after = (Layout((2, 2), parse_placements(text), (8, 8)) for text in (source, target))
    assert fewest_elements(before, after) == sends * 64


def test_summary_means_and_worst_case():
    pair = parse_pairs("S0->R")[0]

    def measured(length: int, ours_s: float, theirs_s: float) -> Measured:
        counts = (Counts(0, 0, 0, 0),) * 2
        times = Times((ours_s,) * 3), {"torch": Times((theirs_s,) * 3)}
        return Measured(Case((length,), (2,), pair), 4, *times, counts, 0, None, None)

    found = [measured(4, 1e-3, 2e-3), measured(2, 4e-3, 1e-3), measured(8, 6e-3, 8e-3), measured(8, 3e-3, 8e-3)]
    (summary,) = summarise(found)
    assert summary.other == "torch"
    assert [size.size for size in summary.sizes] == ["2", "4", "8"]
    assert summary.sizes[0].ratio.median == pytest.approx(4)
    assert summary.sizes[1].ratio.median == pytest.approx(0.5)
    assert summary.sizes[1].ratio_median_up_to == pytest.approx(2**0.5)
    assert summary.sizes[2].num_cases == 2
    assert summary.ratio.fastest == pytest.approx((0.5 * 4 * 0.75 * 0.375) ** 0.25)
    assert summary.worst is found[2]


def test_without_a_reference_there_is_no_summary():
    case = Case((4,), (2,), parse_pairs("S0->R")[0])
    counts = (Counts(0, 0, 0, 0),) * 2
    assert summarise([Measured(case, 4, Times((1.0,)), {}, counts, 0, None, None)]) == []


def test_without_a_check_there_is_no_ratio():
    case, times = Case((4,), (2,), parse_pairs("S0->R")[0]), (Times((1.0,)), {"torch": Times((2.0,))})
    found = Measured(case, 4, *times, (Counts(0, 0, 0, 0),) * 2, 0, None, None, is_checked=False)
    assert found.ratios == {}
    assert summarise([found]) == []
    assert line(found).endswith("ratio N/A")
    printed = io.StringIO()
    print_report([found], Console(file=printed, width=80), 3)
    assert printed.getvalue().count("N/A") == 2


@pytest.mark.parametrize("names", [(), ("torch",), ("shared-memory",), ("torch", "gloo", "a.module:function")])
def test_tables_of_any_implementations_fit_80_columns(names):
    case, slow = Case((4096, 4096), (2, 2), parse_pairs("S0,S1->S1,S0")[0]), Times((99.9, 98.8))
    found = Measured(case, 4, slow, dict.fromkeys(names, slow), (Counts(0, 0, 0, 0),) * 4, 0, None, None)
    printed = io.StringIO()
    print_report([found], Console(file=printed, width=80), 3)
    tables = printed.getvalue().partition("minimum:")[0]
    assert max(map(len, tables.splitlines())) <= 80
    assert tables.count("1.000") == 2 * len(names)


@pytest.mark.parametrize(("average", "seconds"), [(0, 3.0), (1, 2.5), (2, 2.0), (3, 3.0)])
def test_a_round_takes_as_long_as_which_rank_was_asked_for(monkeypatch, average, seconds):
    def all_reduce(own: torch.Tensor, op: Any) -> None:
        both = torch.stack([own, torch.full_like(own, 3.0)])
        own.copy_(
            {dist.ReduceOp.SUM: both.sum(0), dist.ReduceOp.MIN: both.amin(0), dist.ReduceOp.MAX: both.amax(0)}[op]
        )

    # Rank 1 of two, which takes 2 s; rank 0 takes 3.
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "broadcast", lambda own, source: own.fill_(3.0))
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(harness, "own_seconds", lambda runs, count: torch.full((len(runs), count), 2.0))
    (times,) = harness.time_interleaved([lambda: None], 4, 1.0, 1, average)
    assert times.seconds == (seconds,) * 4
