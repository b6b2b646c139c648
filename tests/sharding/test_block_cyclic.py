"""Shard(dim, block=...): blocks of a dim dealt to coordinates in turns, against plain indexing, wherever layouts go."""

import copy
import json
import pickle
import random
from collections.abc import Iterator
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.testing import assert_close

import tritondt as T
from tests.fsdp.models import DataAxes
from tests.harness.gloo_ranks import GlooRanks
from tests.harness.oracle.random_layouts import MESH_SHAPES, random_placements
from tritondt.comm.transports.threads import run_ranks
from tritondt.debug import sharding_text
from tritondt.fsdp import fully_shard
from tritondt.interop.checkpoint_folder import CheckpointFolder
from tritondt.planning.cost import CostTable
from tritondt.planning.explain import explain_layouts
from tritondt.sharding.placement import placements_code

ROWS, COLUMNS = T.Shard(0, block=2), T.Shard(1, block=3)


def dealt(length: int, block: int, parts: int, index: int) -> list[int]:
    """Indices that ScaLAPACK's INDXG2P gives to process `index`: (i // NB) mod NPROCS."""
    return [i for i in range(length) if i // block % parts == index]


def numroc(length: int, block: int, parts: int, index: int) -> int:
    """ScaLAPACK's NUMROC for ISRCPROC=0, as its source counts."""
    num_blocks = length // block
    held = num_blocks // parts * block
    extra = num_blocks % parts
    return held + (block if index < extra else length % block if index == extra else 0)


@pytest.mark.parametrize("block", [1, 2, 3, 64])
@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_ranks_hold_what_scalapack_deals(parts: int, block: int) -> None:
    for length in (0, 1, 5, 12, 64, 131):
        layout = T.Layout((parts,), (T.Shard(0, block=block),), (length,))
        for index in range(parts):
            held = [i for start, stop in layout.intervals(0, (index,)) for i in range(start, stop)]
            assert held == dealt(length, block, parts, index)
            assert layout.local_shape((index,)) == (numroc(length, block, parts, index),)
        assert layout.max_local_shape == (max(numroc(length, block, parts, index) for index in range(parts)),)


def test_several_axes_deal_what_the_one_before_has_left() -> None:
    layout = T.Layout((2, 2), (ROWS, T.Shard(0, block=1)), (11,))
    assert [layout.intervals(0, at) for at in ((0, 0), (0, 1), (1, 0), (1, 1))] == [
        ((0, 1), (4, 5), (8, 9)),
        ((1, 2), (5, 6), (9, 10)),
        ((2, 3), (6, 7), (10, 11)),
        ((3, 4), (7, 8)),
    ]
    turned = T.Layout((2, 2), (T.Shard(0), ROWS), (11,), order=(1, 0))
    assert turned.intervals(0, (0, 1)) == ((2, 4), (6, 7))  # of 2, 3, 6, 7 and 10 the first three


@pytest.mark.parametrize("text", ["S0(block=64)", "S2(block=1)", "S-1(block=7)"])
def test_the_text_form_reads_back(text: str) -> None:
    placement: Any
    (placement,) = T.parse_placements(text)
    assert repr(placement) == text
    assert eval(placements_code([placement]), vars(T)) == [placement]
    assert pickle.loads(pickle.dumps(placement)) == placement == copy.deepcopy(placement)
    assert hash(placement) == hash(eval(placements_code([placement]), vars(T))[0])
    assert placement != T.Shard(placement.dim)
    assert placement.is_shard(placement.dim)


def test_layouts_are_one_object_and_differ_from_others() -> None:
    layout = T.Layout((4,), [ROWS], (9, 3))
    assert layout is T.Layout((4,), T.parse_placements("S-2(block=2)"), (9, 3))
    assert layout is pickle.loads(pickle.dumps(layout))
    assert layout is not T.Layout((4,), [T.Shard(0)], (9, 3))
    assert layout is not T.Layout((4,), [T.Shard(0, block=3)], (9, 3))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"block": 0}, r"Shard\(0\) got block=0; allowed is an int of 1 or more"),
        ({"block": True}, r"Shard\(0\) got block=True; allowed is an int of 1 or more"),
        ({"block": 4, "unit": 2}, r"Shard\(0\) got unit=2, block=4; allowed is block alone: blocks are dealt in turns"),
        ({"block": 4, "sizes": (4, 4)}, r"Shard\(0\) got sizes=4/4, block=4; allowed is block alone"),
        ({"block": 4, "repeats": 2}, r"Shard\(0\) got repeats=2, block=4; allowed is block alone"),
    ],
)
def test_what_is_no_block_is_refused(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(T.LayoutError, match=f"^{sentence}"):
        T.Shard(0, **arguments)


def test_later_units_divide_blocks() -> None:
    T.Layout((2, 2), (T.Shard(0, block=4), T.Shard(0, unit=2)), (24,))
    with pytest.raises(
        T.LayoutError,
        match="axis 1 cuts dim 0 in units of 2 after axis 0 has cut it in blocks of 3; a later unit must divide every "
        "earlier one: give axis 0 block=6",
    ):
        T.Layout((2, 2), (T.Shard(0, block=3), T.Shard(0, unit=2)), (24,))
    with pytest.raises(
        T.LayoutError, match=r"cannot read the placement 'S0\(block=-1\)'; allowed are .*S<dim>\(block=64"
    ):
        T.parse_placements("S0(block=-1)")


def test_an_offset_is_refused_where_there_are_several_blocks() -> None:
    def offset(rank: int) -> Any:
        return T.compute_local_shape_and_global_offset((7,), T.Mesh((2,)), [T.Shard(0, block=4)])

    assert run_ranks(2, offset) == [((4,), (0,)), ((3,), (4,))]

    def offsets(rank: int) -> Any:
        return T.compute_local_shape_and_global_offset((7,), T.Mesh((2,)), [ROWS])

    with pytest.raises(T.LayoutError, match=r"gives coordinate \(0,\) 2 boxes, which have no one offset"):
        run_ranks(2, offsets)
    with pytest.raises(T.LayoutError, match=r"S0\(block=2\) gives piece 0 of 7 indices 2 blocks, at no one offset"):
        ROWS.local_shard_size_and_offset(7, 2, 0)


def indices_of(layout: T.Layout, coordinate: tuple[int, ...]) -> list[torch.Tensor]:
    """Indices of each dim by plain indexing of what cuts before have left; plain chunks, units and blocks alone."""
    found = [torch.arange(length) for length in layout.shape]
    for axis in layout.order:
        placement = layout.placements[axis]
        if not isinstance(placement, T.Shard):
            continue
        held, parts = found[placement.dim], layout.mesh_shape[axis]
        if placement.block is None:
            assert placement == T.Shard(placement.dim), placement
            pieces = [*held.chunk(parts)]
            pieces += [held[:0]] * (parts - len(pieces))
            found[placement.dim] = pieces[coordinate[axis]]
        else:
            found[placement.dim] = held[dealt(len(held), placement.block, parts, coordinate[axis])]
    return found


def part(whole: torch.Tensor, layout: T.Layout, coordinate: tuple[int, ...]) -> torch.Tensor:
    for dim, indices in enumerate(indices_of(layout, coordinate)):
        whole = whole[(slice(None),) * dim + (indices,)]
    return whole.clone()


def random_dealt(chosen: random.Random, mesh_shape: tuple[int, ...], shape: tuple[int, ...]) -> list[T.Placement]:
    choices: list[T.Placement] = [T.Replicate()]
    for dim in range(len(shape)):
        choices += [T.Shard(dim), *(T.Shard(dim, block=block) for block in (1, 2, 3, 5))]
    return [chosen.choice(choices) for _ in mesh_shape]


def moved(rank: int, mesh_shape: tuple[int, ...], shape: tuple[int, ...], source: Any, target: Any) -> torch.Tensor:
    mesh, meta = T.Mesh(mesh_shape), T.TensorMeta.contiguous(shape, torch.int64)
    before, after = (T.DTensorSpec(mesh, placements, meta) for placements in (source, target))
    assert before.coordinate is not None
    local = part(torch.arange(prod(shape)).reshape(shape), before.layout, before.coordinate)
    return T.redistribute(local, before, after)


@pytest.mark.in_core(2)
@pytest.mark.parametrize("chunk", range(8))
def test_redistributions_from_and_to_any_other_layout(chunk: int) -> None:
    """From dealt blocks, plain cuts and whole dims to any of them; the oracle's cases have sizes and units, too."""
    for seed in range(chunk * 25, chunk * 25 + 25):
        chosen = random.Random(seed)
        size = chosen.randint(2, 8)
        mesh_shape = chosen.choice(MESH_SHAPES[size])
        shape = tuple(chosen.choice((0, 1, 4, 7, 11, 16)) for _ in range(chosen.randint(1, 3)))
        source, target = (random_dealt(chosen, mesh_shape, shape) for _ in range(2))
        whole = torch.arange(prod(shape)).reshape(shape)
        layout = T.Layout(mesh_shape, target, shape)
        move = partial(moved, mesh_shape=mesh_shape, shape=shape, source=source, target=target)
        for rank, found in enumerate(run_ranks(size, move)):
            expected = part(whole, layout, layout.coordinate(rank))
            assert_close(found, expected, rtol=0, atol=0, msg=lambda text, seed=seed: f"seed {seed}: {text}")  # type: ignore[misc]


def test_a_plan_sends_what_is_missing_and_no_more() -> None:
    shape = (64, 48)
    for source, target in ((ROWS, T.Shard(0)), (T.Shard(0), ROWS), (ROWS, COLUMNS), (ROWS, T.Replicate())):
        before, after = (T.Layout((4,), [placement], shape) for placement in (source, target))
        for rank in range(4):
            held, wanted = (
                {tuple(at) for at in torch.cartesian_prod(*indices_of(layout, (rank,))).tolist()}
                for layout in (before, after)
            )
            found = explain_layouts(before, after, 4, CostTable(), (rank,))
            assert found.received_bytes == 4 * len(wanted - held), (source, target)
            assert repr(source) in str(found)
            assert repr(source) in json.loads(found.to_json())["source"]


def operators(rank: int) -> None:
    mesh = T.Mesh((3,))
    whole = torch.arange(77.0, dtype=torch.float64).reshape(11, 7)
    other = torch.arange(77.0, dtype=torch.float64).reshape(11, 7).flip(0)

    def check(found: Any, expected: torch.Tensor, *placements: T.Placement) -> None:
        assert list(found.placements) == list(placements), found.placements
        assert_close(found.full_tensor(), expected, rtol=0, atol=0)

    x: Any = T.distribute_tensor(whole, mesh, [ROWS])
    y: Any = T.distribute_tensor(other, mesh, [ROWS])
    assert_close(x.to_local(), whole[dealt(11, 2, 3, rank)], rtol=0, atol=0)
    # Kept: elementwise, with another cut alike, beside reduced dims, outside of contracted ones, moved and new dims.
    check(x * y + 1, whole * other + 1, ROWS)
    check(x + T.distribute_tensor(other, mesh, [T.Replicate()]), whole + other, ROWS)
    check(x.sum(1), whole.sum(1), ROWS)
    check(x.sum(0), whole.sum(0), T.Partial())
    check(x.amax(0, keepdim=True), whole.amax(0, keepdim=True), T.Partial("max"))
    check(x @ T.distribute_tensor(whole.t().contiguous(), mesh, [T.Replicate()]), whole @ whole.t(), ROWS)
    check(x.t(), whole.t(), T.Shard(1, block=2))
    check(x.t() @ y, whole.t() @ other, T.Partial())
    check(x.unsqueeze(0), whole.unsqueeze(0), T.Shard(1, block=2))
    check(x[None].expand(4, 11, 7), whole.expand(4, 11, 7), T.Shard(1, block=2))
    check(x.softmax(1), whole.softmax(1), ROWS)
    check(x.cumsum(1), whole.cumsum(1), ROWS)
    check(torch.stack([x, y], 1), torch.stack([whole, other], 1), ROWS)
    check(torch.cat([x, y], 1), torch.cat([whole, other], 1), ROWS)
    check(x[6:], whole[6:], ROWS)  # from the first coordinate's second block on
    check(x[:, 2:5], whole[:, 2:5], ROWS)
    check(x.flatten(), whole.flatten(), T.Shard(0, block=14))
    check(x.flatten().view(11, 7), whole, ROWS)
    check(x.repeat(1, 2), whole.repeat(1, 2), ROWS)
    twelve = T.distribute_tensor(whole[:6], mesh, [ROWS])
    check(torch.cat([twelve, x]), torch.cat([whole[:6], whole]), ROWS)
    check(torch.zeros_like(x), torch.zeros_like(whole), ROWS)


def moving_operators(rank: int) -> None:
    mesh = T.Mesh((3,))
    whole = torch.arange(77.0, dtype=torch.float64).reshape(11, 7)
    x: Any = T.distribute_tensor(whole, mesh, [ROWS])
    # A view moves nothing unasked.
    with pytest.raises(T.PropagationError, match=r"S1\(block=2\) would deal its blocks anew in each of 7 indices"):
        x.t().flatten()
    # Others redistribute, and give what one device gives.
    for function in (
        lambda a: a[1:],
        lambda a: a[::2],
        lambda a: a.cumsum(0),
        lambda a: a.sort(0).values,
        lambda a: a.flip(0),
        lambda a: torch.cat([a, a]),
        lambda a: a.repeat(2, 1),
        lambda a: torch.nn.functional.pad(a, (0, 0, 1, 2)),
        lambda a: a.tril(),
        lambda a: a.roll(1, 0),
        lambda a: a.argmax(0),
        lambda a: a.var(0),
        lambda a: a[4],
    ):
        found: Any = function(x)
        assert_close(found.full_tensor(), function(whole), rtol=0, atol=0)

    places = torch.tensor([9, 0, 4])
    rows = x.index_select(0, T.distribute_tensor(places, mesh, [T.Replicate()]))
    assert_close(rows.full_tensor(), whole.index_select(0, places), rtol=0, atol=0)
    labels = torch.tensor([3, 0, 10, 2])
    table: Any = torch.nn.functional.embedding(T.distribute_tensor(labels, mesh, [T.Replicate()]), x)
    assert_close(table.full_tensor(), whole[labels], rtol=0, atol=0)


def test_operators_keep_the_blocks_or_redistribute() -> None:
    run_ranks(3, operators)
    run_ranks(3, moving_operators)


def gradients(rank: int) -> None:
    mesh = T.Mesh((2, 2))
    whole = torch.arange(35.0, dtype=torch.float64).reshape(7, 5)
    weight = torch.arange(20.0, dtype=torch.float64).reshape(5, 4)
    x, w = whole.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = ((x @ w).sin() * x[:, :4]).sum()
    loss.backward()
    given: Any = T.distribute_tensor(whole, mesh, [ROWS, T.Shard(0, block=1)]).requires_grad_()
    factor: Any = T.distribute_tensor(weight, mesh, [T.Replicate(), T.Shard(1, block=1)]).requires_grad_()
    moved = given.redistribute(placements=[ROWS, T.Replicate()])
    found: Any = ((moved @ factor).sin() * moved[:, :4]).sum()
    found.backward()
    assert x.grad is not None
    assert w.grad is not None
    assert given.grad is not None
    assert given.grad.placements == given.placements
    for tensor, expected in ((given, x.grad), (factor, w.grad)):
        assert tensor.grad is not None
        assert_close(tensor.grad.full_tensor(), expected)


def test_gradients_come_back_in_blocks() -> None:
    run_ranks(4, gradients)


def fully_sharded(rank: int) -> Any:
    """A linear layer whose rows are dealt over tp, each rank's part of which fully_shard cuts over dp."""
    torch.manual_seed(0)
    plain = nn.Linear(6, 11, dtype=torch.float64)
    model: Any = copy.deepcopy(plain)
    whole, first = T.Mesh((2, 2), ("dp", "tp")), rank // 2 * 2
    tp = T.Mesh((2,), ("tp",), ranks=(first, first + 1))
    for name in ("weight", "bias"):
        parameter = T.distribute_tensor(getattr(plain, name).detach(), tp, [ROWS], src_data_rank=None)
        setattr(model, name, nn.Parameter(parameter))
    fully_shard(model, mesh=whole, dp_mesh_dims=DataAxes("dp"))
    assert_close(model.weight.full_tensor(), plain.weight.detach(), rtol=0, atol=0)
    x = torch.arange(24.0, dtype=torch.float64).reshape(4, 6) + rank // 2
    model(T.distribute_tensor(x, tp, [T.Replicate()], src_data_rank=None)).square().sum().backward()
    for each in (0, 1):
        plain(x - rank // 2 + each).square().sum().div(2).backward()
    for name in ("weight", "bias"):
        assert_close(getattr(model, name).grad.full_tensor(), getattr(plain, name).grad)
    return model.weight.placements


def test_parameters_of_dealt_rows_are_fully_sharded() -> None:
    assert run_ranks(4, fully_sharded) == [(T.Shard(0), ROWS)] * 4


def from_local(rank: int) -> None:
    mesh = T.Mesh((2,))
    whole = torch.arange(8)
    found = T.DTensor.from_local(whole[dealt(8, 2, 2, rank)], mesh, [ROWS])
    assert found.shape == (8,)
    assert_close(found.full_tensor(), whole, rtol=0, atol=0)
    uneven = T.DTensor.from_local(whole[:7][dealt(7, 2, 2, rank)], mesh, [ROWS], shape=(7,))
    assert_close(uneven.full_tensor(), whole[:7], rtol=0, atol=0)
    with pytest.raises(T.LocalTensorError, match=r"give shape=\.\.\. for uneven shards"):
        T.DTensor.from_local(torch.zeros(3), mesh, [ROWS])  # 6 elements would be 4 and 2
    assert "(S0(block=2)) of (8)" in repr(found) or "S0(block=2)" in repr(found)
    assert pickle.loads(pickle.dumps(found._spec.layout)) is found._spec.layout
    torch.manual_seed(5)
    drawn = T.rand(7, 3, device_mesh=mesh, placements=[ROWS]).full_tensor()
    torch.manual_seed(5)
    assert_close(drawn, T.rand(7, 3, device_mesh=mesh, placements=[T.Replicate()]).full_tensor(), rtol=0, atol=0)


def test_parts_become_tensors_and_whole_ones() -> None:
    run_ranks(2, from_local)


def pictured(rank: int) -> str:
    return sharding_text(T.DTensorSpec(T.Mesh((2,)), [ROWS], T.TensorMeta.contiguous((7, 2))))


def test_a_picture_has_the_turns() -> None:
    text = run_ranks(2, pictured)[0]
    rows = [line.replace("|", " ").split() for line in text.splitlines()[3::2]]
    assert rows == [["0-1", "0"], ["2-3", "1"], ["4-5", "0"], ["6", "1"]], text


@pytest.fixture(scope="module")
def ranks() -> Iterator[GlooRanks]:
    with GlooRanks(4) as made:
        yield made


LAYOUTS: dict[str, tuple[tuple[int, ...], list[T.Placement]]] = {
    "rows": ((4,), [ROWS]),
    "grid": ((2, 2), [ROWS, COLUMNS]),
    "twice": ((2, 2), [ROWS, T.Shard(0, block=1)]),
    "plain": ((2, 2), [T.Shard(1), T.Replicate()]),
}


def saved_and_loaded(rank: int, folder: str, of_saved: str, of_loaded: str) -> None:
    whole = torch.arange(17.0 * 8).reshape(17, 8)

    def state(layout: str, values: torch.Tensor) -> dict[str, Any]:
        mesh_shape, placements = LAYOUTS[layout]
        return {"weight": T.distribute_tensor(values, T.Mesh(mesh_shape), placements), "step": 3}

    dcp.save(state(of_saved, whole), checkpoint_id=f"{folder}/dcp")
    found = state(of_loaded, torch.zeros_like(whole))
    dcp.load(found, checkpoint_id=f"{folder}/dcp")
    assert_close(found["weight"].full_tensor(), whole, rtol=0, atol=0)
    checkpoints = CheckpointFolder(Path(folder) / "folder")
    checkpoints.save(state(of_saved, whole + 1), 7)
    assert checkpoints.load(found) == 7
    assert_close(found["weight"].full_tensor(), whole + 1, rtol=0, atol=0)


@pytest.mark.in_core(2)
@pytest.mark.parametrize(
    ("of_saved", "of_loaded"), [("rows", "grid"), ("grid", "plain"), ("plain", "twice"), ("twice", "rows")]
)
def test_checkpoints_are_read_in_other_layouts(ranks: GlooRanks, tmp_path: Path, of_saved: str, of_loaded: str) -> None:
    ranks.run(saved_and_loaded, str(tmp_path), of_saved, of_loaded)


def as_torch_has_it(rank: int) -> None:
    mesh = T.init_device_mesh("cpu", (4,))
    whole = torch.arange(16.0)
    # Four blocks of four are what torch.chunk gives.
    same: Any = T.to_torch(T.distribute_tensor(whole, mesh, [T.Shard(0, block=4)]))
    assert_close(same.full_tensor(), whole, rtol=0, atol=0)
    with pytest.raises(T.LayoutError, match=r"torch's DTensor cannot hold \(S0\(block=2\)\) of \(16,\)"):
        T.to_torch(T.distribute_tensor(whole, mesh, [ROWS]))


def test_torch_gets_what_it_can_hold(ranks: GlooRanks) -> None:
    ranks.run(as_torch_has_it)


def compiled(rank: int) -> None:
    mesh = T.Mesh((4,))
    whole = torch.arange(33.0).reshape(11, 3)

    def function(x: Any) -> Any:
        return (x * 2).redistribute(placements=[T.Replicate()]).sum(0) + 1

    x = T.distribute_tensor(whole, mesh, [ROWS])
    found: Any = torch.compile(function, backend="aot_eager", fullgraph=True)(x)
    assert_close(found.full_tensor(), (whole * 2).sum(0) + 1, rtol=0, atol=0)


@pytest.mark.extended
def test_graphs_have_the_blocks(ranks: GlooRanks) -> None:
    ranks.run(compiled)


def test_random_layouts_have_dealt_blocks() -> None:
    """The oracle's cases, the random programs and the tests of plans draw them."""
    chosen = random.Random(0)
    drawn = [random_placements(chosen, (2, 2), (8, 6), torch.float32)[0] for _ in range(100)]
    assert any(isinstance(p, T.Shard) and p.block is not None for placements in drawn for p in placements)
