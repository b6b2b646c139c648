"""`python -m tritondt plan`: what it says, and what it refuses."""

import gc
import json
import random
import re
from itertools import product
from math import prod
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import tritondt as T
from tests.harness.torch_versions import needs_torch
from tritondt.cli import torch_moves
from tritondt.cli.main import main
from tritondt.comm.transports.threads import run_ranks
from tritondt.planning.cost import CostTable
from tritondt.planning.planner import make_plan
from tritondt.planning.traffic import rank_traffic
from tritondt.sharding.layout import Layout
from tritondt.sharding.placement import parse_placements


def run_plan(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["plan", *arguments])


def test_rows_to_columns_of_four_ranks():
    result = run_plan("--mesh", "4", "--shape", "8,4", "--from", "S0", "--to", "S1")
    assert result.exit_code == 0, result.output
    title, header, step, _, slots = result.output.splitlines()
    assert title == "(S0) -> (S1) of (8, 4) at (0,)"
    assert header.split()[0] == "step"
    # Of the 2 x 4 elements that the rank holds, it sends 2 to each of the 3 others.
    assert step.split()[:5] == ["exchange", "(S0)", "(S1)", "3", "24"]
    assert slots == "up to 24 bytes go through slots of shared memory, where peers read them"


def test_what_lies_in_slots_of_shared_memory_is_told(monkeypatch):
    arguments = ("--mesh", "4", "--shape", "8,4", "--from", "P", "--to", "R")
    monkeypatch.delenv("TRITONDT_TRANSPORT", raising=False)
    for result in (run_plan(*arguments, "--transport", "shared-memory"), run_plan(*arguments)):
        assert result.exit_code == 0, result.output
        _, _, step, peak, slot, reason = result.output.splitlines()
        # Each rank packs its 32 elements once, and reads those of the 3 others.
        assert step.split()[:8] == ["reduce", "(P(sum))", "(R)", "3", "384", "3", "384", "0"]
        assert peak.startswith("peak temporary 0 bytes; 3 peers")
        assert slot == "up to 128 bytes go through slots of shared memory, where peers read them"
        assert reason.startswith("every term goes to everybody in one step, 384 bytes a rank")
    over_sockets = run_plan(*arguments, "--transport", "sockets").output
    assert "slot" not in over_sockets
    assert [line.split()[0] for line in over_sockets.splitlines()[2:4]] == ["reduce", "gather"]
    too_many = run_plan("--mesh", "16", *arguments[2:], "--transport", "shared-memory").output
    assert "slot" not in too_many


@pytest.mark.parametrize(("dtype", "itemsize"), [("float32", 4), ("bfloat16", 2), ("complex128", 16), ("bool", 1)])
def test_bytes_follow_the_dtype(dtype, itemsize):
    result = run_plan("--mesh", "2", "--shape", "5,3", "--from", "S0", "--to", "R", "--dtype", dtype, "--json")
    explanation = json.loads(result.stdout)
    # Rank 0 holds 3 of the 5 rows.
    assert explanation["sent_bytes"] == 9 * itemsize
    assert explanation["received_bytes"] == 6 * itemsize
    assert explanation["messages"] == 1


@pytest.mark.parametrize(("coordinate", "received"), [("0,0", 0), ("1,0", 12), ("1,1", 0)])
def test_each_coordinate_sees_its_own_part(coordinate, received):
    # Rows in halves, then halves of halves by the later axis; columns of the axes exchanged.
    arguments = ("--mesh", "2,2", "--shape", "4,3", "--from", "S0,S0", "--to", "S0,S0", "--to-order", "1,0")
    explanation = json.loads(run_plan(*arguments, "--coordinate", coordinate, "--json").stdout)
    assert explanation["coordinate"] == [int(index) for index in coordinate.split(",")]
    assert explanation["received_bytes"] == received


def test_a_unit_with_commas_inside_is_one_placement():
    arguments = ("--mesh", "4", "--shape", "192,5", "--from", "S0(unit=32)", "--to", "R", "--json")
    explanation = json.loads(run_plan(*arguments, "--coordinate", "3").stdout)
    assert explanation["sent_bytes"] == 0
    assert explanation["received_bytes"] == 192 * 5 * 4


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("--mesh", "4", "--shape", "7,3", "--from", "P", "--to", "S5"), 1, "axis 0 shards dim 5, .* has dims 0..1"),
        (("--mesh", "4", "--shape", "7,3", "--from", "X", "--to", "R"), 1, "cannot read the placement 'X'"),
        (("--mesh", "2,2", "--shape", "7", "--from", "R", "--to", "R,R"), 1, "takes 2 placements, one per axis; got 1"),
        (("--mesh", "4x", "--shape", "7", "--from", "R", "--to", "R"), 2, "'4x' is not a list of whole numbers"),
        (("--mesh", "4", "--shape", "7", "--from", "R", "--to", "R", "--coordinate", "4"), 2, r"allowed are \(0..3\)"),
        (("--mesh", "4", "--shape", "7", "--from", "R"), 2, "Missing option '--to'"),
    ],
)
def test_bad_input_ends_with_a_sentence(arguments, status, message):
    result = run_plan(*arguments)
    assert result.exit_code == status
    assert "Traceback" not in result.output
    assert re.search(message, result.output), result.output


def test_all_ranks_are_counted_one_by_one():
    arguments = ("--mesh", "4", "--shape", "5,3", "--from", "S0", "--to", "R", "--all-ranks")
    found = json.loads(run_plan(*arguments, "--json").stdout)["ranks"]
    # Rows 2, 2, 1 and 0 of 12 bytes go to 3 ranks each, which receive the rest.
    assert found["sent bytes"] == {"least": 0, "mean": 45.0, "most": 72, "total": 180, "most_on": 0}
    assert found["received bytes"] == {"least": 36, "mean": 45.0, "most": 60, "total": 180, "most_on": 3}
    assert found["messages"]["total"] == 9
    lines = run_plan(*arguments).stdout.splitlines()
    assert lines[-3].split() == ["sent", "bytes", "0", "45.0", "72", "0", "180"]


def test_garbage_is_not_collected_while_a_plan_is_made():
    phases: list[str] = []

    def note(phase: str, _: dict[str, int]) -> None:
        phases.append(phase)

    arguments = ("--mesh", "1024", "--shape", "1024,1024", "--from", "P", "--to", "R", "--all-ranks")
    gc.callbacks.append(note)
    try:
        assert run_plan(*arguments).exit_code == 0
    finally:
        gc.callbacks.remove(note)
    # 59 with collections; without, those of the command line around the plan are left.
    assert phases.count("start") < 10
    assert gc.isenabled()


def test_what_all_ranks_send_is_what_their_transports_count():
    rng = random.Random(0)
    for _ in range(12):
        mesh = rng.choice([(4,), (2, 2)])
        texts = [",".join(rng.choices(["S0", "S1", "R"] + ["P"] * (not side), k=len(mesh))) for side in range(2)]
        shape = (rng.randrange(1, 9), rng.randrange(1, 9))

        def count_on(rank: int) -> tuple[int, int, int]:
            device_mesh, meta = T.Mesh(mesh), T.TensorMeta.contiguous(shape)  # noqa: B023  called at once
            source, target = (T.DTensorSpec(device_mesh, parse_placements(text), meta) for text in texts)  # noqa: B023
            T.redistribute(torch.ones(source.local_shape), source, target)
            counted = T.comm.world.current().communicator(range(4)).traffic
            return counted.sent_bytes, counted.received_bytes, counted.num_sent

        layouts = [Layout(mesh, parse_placements(text), shape) for text in texts]
        found = rank_traffic(make_plan(*layouts, 4, CostTable(ranks_per_host=4)), 4)
        expected = list(zip(found.sent, found.received, found.messages, strict=True))
        assert run_ranks(4, count_on) == expected, (mesh, texts, shape)


@pytest.mark.extended
@pytest.mark.parametrize("mesh", [(3,), (2, 2)])
def test_what_every_pair_sends_is_what_its_transports_count(mesh):
    befores = ["S0", "S1", "R", "P"]
    texts = [list(map(",".join, product(names, repeat=len(mesh)))) for names in (befores, befores[:3])]
    pairs, shape = list(product(*texts)), (7, 5)

    def count_on(rank: int) -> list[tuple[int, ...]]:
        meta, found = T.TensorMeta.contiguous(shape), []
        for pair in pairs:
            source, target = (T.DTensorSpec(T.Mesh(mesh), parse_placements(text), meta) for text in pair)
            traffic = T.comm.world.current().communicator(range(prod(mesh))).traffic
            before = traffic.sent_bytes, traffic.received_bytes, traffic.num_sent
            T.redistribute(torch.ones(source.local_shape), source, target)
            after = traffic.sent_bytes, traffic.received_bytes, traffic.num_sent
            found.append(tuple(late - early for early, late in zip(before, after, strict=True)))
        return found

    counted = run_ranks(prod(mesh), count_on)
    for number, pair in enumerate(pairs):
        layouts = [Layout(mesh, parse_placements(text), shape) for text in pair]
        foretold = rank_traffic(make_plan(*layouts, 4, CostTable(ranks_per_host=prod(mesh))), 4)
        expected = list(zip(foretold.sent, foretold.received, foretold.messages, strict=True))
        assert [of_rank[number] for of_rank in counted] == expected, pair


def test_links_of_a_topology_are_told():
    arguments = ("--mesh", "8", "--shape", "8,8", "--from", "S0", "--to", "S1", "--topology", "fat-tree:2,2")
    found = json.loads(run_plan(*arguments, "--json").stdout)["links"]
    # Each of 8 ranks sends 4 bytes to each of the 4 that are below the other leaf.
    assert found["leaf up"] == {"least": 64, "mean": 64.0, "most": 64, "total": 128, "most_on": 0} | {
        "busiest": ["leaf up", 0, 0]
    }
    assert run_plan(*arguments).stdout.splitlines()[-7].split()[:3] == ["bytes", "over", "links"]
    wide = run_plan("--mesh", "2,4", "--shape", "65536,65536", "--from", "S0,R", "--to", "R,S0", "--all-ranks")
    assert max(map(len, wide.stdout.partition("a rank's")[2].splitlines())) <= 80
    refused = run_plan(*arguments[:-1], "ring:4")
    assert refused.exit_code == 1
    assert "cannot read the topology 'ring:4'" in refused.output


def test_pictures_show_who_sends_to_whom(tmp_path):
    arguments = ("--mesh", "4", "--shape", "5,3", "--from", "S0", "--to", "R")
    page, image = tmp_path / "plan.html", tmp_path / "plan.png"
    assert run_plan(*arguments, "--html", str(page), "--png", str(image)).exit_code == 0
    text = page.read_text()
    assert text.count("<svg") == 1
    assert "receivers across; a darker colour is more, the darkest 24 bytes" in text
    assert (text.count(">24</text>"), text.count(">0</text>")) == (6, 7 + 3)  # 4 ranks' cells, and 0 on three axes
    assert "bytes over links" not in text
    assert image.read_bytes().startswith(b"\x89PNG")


def test_the_page_has_the_links_and_what_torch_would_move(tmp_path):
    page = tmp_path / "plan.html"
    arguments = ("--mesh", "8", "--shape", "8,8", "--from", "S0", "--to", "S1", "--topology", "fat-tree:2,2")
    assert run_plan(*arguments, "--against", "torch", "--html", str(page)).exit_code == 0
    text = page.read_text()
    assert "<td>leaf up</td><td>64</td><td>64.0</td><td>64</td><td>0 -&gt; 0</td>" in text
    assert re.search(r"<p>torch [^<]* would receive [0-9]+ bytes, [0-9.]+ of ours", text)


def test_large_worlds_are_drawn_in_groups_however_many_their_messages_are(tmp_path):
    page = tmp_path / "plan.html"
    arguments = ("--mesh", "256,2", "--shape", "512,4", "--from", "S0,R", "--to", "S0,S1", "--html", str(page))
    assert run_plan(*arguments).exit_code == 0
    assert "in groups of 8 neighbouring ranks" in page.read_text()
    large = ("--mesh", "1024", "--shape", "1024,1024", "--from", "S0", "--to", "S1")
    found = run_plan(*large, "--topology", "fat-tree:8,4", "--html", str(page), "--json")
    assert found.exit_code == 0, found.output
    fields = json.loads(found.stdout)
    assert fields["ranks"]["messages"] == {
        "least": 1023,
        "mean": 1023.0,
        "most": 1023,
        "total": 1024 * 1023,
        "most_on": 0,
    }
    # Every leaf has 32 of the ranks, each of which sends 4 bytes to each of 992 others.
    assert fields["links"]["leaf up"]["least"] == fields["links"]["leaf up"]["most"] == 32 * 992 * 4
    assert "in groups of 16 neighbouring ranks" in page.read_text()
    assert ">bytes between groups of 16 ranks</text>" in page.read_text()


def test_a_picture_that_cannot_be_written_is_refused():
    both = run_plan("--mesh", "4", "--shape", "5,3", "--from", "S0", "--to", "R", "--html", "a", "--png", "a")
    assert both.exit_code == 2
    assert "--html and --png both go to a" in both.output
    ended = run_plan("--mesh", "4", "--shape", "5,3", "--from", "S0", "--to", "R", "--png", "/nowhere/plan.png")
    assert ended.exit_code == 2
    assert "/nowhere/plan.png cannot be written: No such file" in ended.output


def torchs(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run_plan(*arguments, "--against", "torch", "--json").stdout)["torch"]
    return found


@pytest.mark.in_core(4)
@pytest.mark.parametrize(
    ("source", "target", "device", "collectives"),
    [
        # 7 rows are 2, 2, 2 and 1: each rank sends 2, padded. A row is 5 columns of 4 bytes.
        ("S0", "R", "cpu", [("all_gather_into_tensor", 4, 3 * 2 * 20)]),
        # 5 columns are 2, 2, 1 and 0, padded to 8: over NCCL of 2 rows of 8 columns three quarters go and come.
        pytest.param(
            *("S0", "S1", "cuda", [("shard_dim_alltoall", 4, 2 * 8 * 4 * 3 // 4)]),
            marks=needs_torch("2.11", "it makes no mesh of CUDA devices on a machine without one"),
        ),
        ("S0", "S1", "cpu", [("all_gather_into_tensor", 4, 3 * 2 * 8 * 4)]),
        ("P", "S0", "cpu", [("reduce_scatter_tensor", 4, 3 * 2 * 20)]),
        ("P", "R", "cpu", [("all_reduce", 4, 2 * 3 * 7 * 20 // 4)]),
        ("R", "S1", "cpu", []),
    ],
)
def test_what_torch_would_move(source, target, device, collectives):
    arguments = ("--mesh", "4", "--shape", "7,5", "--from", source, "--to", target, "--device", device)
    found = torchs(*arguments)
    assert [tuple(each.values()) for each in found["collectives"]] == collectives
    assert found["received_bytes"] == sum(received for _, _, received in collectives)
    assert found["version"] == str(torch.__version__)


def test_what_torch_would_move_is_a_line():
    arguments = ("--mesh", "2,2", "--shape", "8,8", "--from", "S0,S0", "--to", "R,R", "--coordinate", "1,0")
    *_, last = run_plan(*arguments, "--against", "torch").output.splitlines()
    assert last == (
        f"torch {torch.__version__} would receive 192 bytes, 1.00 of ours; all_gather_into_tensor of 2 ranks 64; "
        "all_gather_into_tensor of 2 ranks 128"
    )


def test_what_torch_refuses_is_explained_all_the_same():
    found = torchs("--mesh", "4", "--shape", "7,5", "--from", "S0", "--to", "P(max)")
    assert found["refusal"].startswith("torch's DTensor does not go from (S0) to (P(max)): ")


def test_a_torch_that_divides_by_the_number_of_gpus_is_one_line(monkeypatch):
    """As 2.10 does where there is none."""
    monkeypatch.setattr(torch_moves, "init_device_mesh", lambda *_: 1 % 0)
    arguments = ("--mesh", "4", "--shape", "7,5", "--from", "S0", "--to", "R", "--device", "cuda")
    assert torchs(*arguments)["refusal"] == (
        "torch makes no mesh of cuda on a machine without such a device; allowed are --device cpu, "
        "a machine with one, and torch from 2.11 on"
    )


def test_a_collective_of_another_torch_is_no_silent_zero(monkeypatch):
    monkeypatch.delitem(torch_moves._RECEIVED, "all_reduce")
    ended = run_plan("--mesh", "4", "--shape", "7,5", "--from", "P", "--to", "R", "--against", "torch")
    assert ended.exit_code != 0
    text = f"torch {torch.__version__} called _c10d_functional.all_reduce.default; what it moves is not known"
    assert text in ended.output + str(ended.exception)


def test_what_torch_would_move_is_not_asked_within_a_world(monkeypatch):
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    ended = run_plan("--mesh", "4", "--shape", "7,5", "--from", "P", "--to", "R", "--against", "torch")
    assert ended.exit_code != 0
    assert "this one has called init_process_group" in ended.output + str(ended.exception)


def test_layouts_that_torch_cannot_hold_are_explained_all_the_same():
    arguments = ("--mesh", "2", "--shape", "9,5", "--from", "S0(unit=3)", "--to", "R")
    assert torchs(*arguments)["refusal"].startswith("torch's DTensor cannot hold (S0(unit=3)) of (9, 5)")
    result = run_plan(*arguments, "--against", "torch")
    assert result.exit_code == 0
    assert "cannot hold" in result.output.splitlines()[-1]


def test_plans_for_the_hosts_of_a_topology() -> None:
    """Links between hosts carry the bytes that cross."""
    asked = ("--mesh", "8", "--shape", "64,64", "--from", "P", "--to", "R", "--topology", "rail-optimised:4", "--json")
    found = json.loads(run_plan(*asked).output)
    assert sum(row[2] for row in found["between_hosts"]) == 2 * 64 * 64 * 4
    assert found["links"]["card out"]["total"] == 2 * 64 * 64 * 4
    assert found["links"]["card out"]["least"] == found["links"]["card out"]["most"]
