"""Torch's DTensor and ours on one memory, and torch's redistributions on our engine, on four Gloo processes."""

import random
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.distributed.tensor as torch_tensor

import tritondt as T
from tests.harness.gloo_ranks import GlooRanks
from tests.harness.oracle import arithmetic
from tests.harness.oracle.random_layouts import random_shape
from tritondt.comm.transports.threads import run_ranks
from tritondt.interop import acceleration

NUM_RANDOM = 300
FULL = torch.arange(35.0).view(5, 7)
EVEN = torch.arange(48.0).view(8, 6)


@pytest.fixture(scope="module")
def ranks() -> Iterator[GlooRanks]:
    """Four processes with a Gloo group."""
    with GlooRanks(4) as started:
        yield started


@lru_cache
def mesh_of(shape: tuple[int, ...]) -> T.DeviceMesh:
    """A mesh of all ranks, made once in each process."""
    return T.init_device_mesh("cpu", shape)


def plain(of: Any, placement: T.Placement) -> Any:
    """A placement of torch's."""
    if isinstance(placement, T.Shard):
        return of.Shard(placement.dim)
    return of.Partial(placement.reduce_op) if isinstance(placement, T.Partial) else of.Replicate()


def random_case(seed: int) -> tuple[torch.Tensor, tuple[int, ...], list[T.Placement], list[T.Placement]]:
    """A whole tensor, a mesh shape, and the placements before and after, of kinds that torch redistributes between."""
    chosen = random.Random(seed)
    mesh_shape = chosen.choice([(4,), (2, 2)])
    dtype = chosen.choice([torch.float32, torch.float64, torch.bfloat16, torch.int64])
    shape = random_shape(chosen)
    op: Any = chosen.choice(["sum", "avg", "max"] if dtype.is_floating_point else ["sum", "max"])
    sides: list[list[T.Placement]] = [[], []]
    for _ in mesh_shape:
        kinds = chosen.choice("RPSS"), chosen.choice("RSS")
        for side, kind in zip(sides, kinds, strict=True):
            side.append(T.Partial(op) if kind == "P" else T.Replicate())
            if kind == "S" and shape:
                side[-1] = T.Shard(chosen.randrange(len(shape)))
        if kinds[0] == "P" and chosen.random() < 0.2:
            sides[1][-1] = sides[0][-1]
    full = arithmetic.whole_tensor(shape, dtype, torch.Generator().manual_seed(seed))
    return full, mesh_shape, sides[0], sides[1]


def check_random_redistributions(rank: int, first: int, count: int) -> int:
    """Torch's redistributions on our engine against the oracle; returns how many torch ran itself."""
    torch_ran = 0

    def counted(original: Any) -> Any:
        def run(*arguments: Any, **options: Any) -> Any:
            nonlocal torch_ran
            torch_ran += 1
            return original(*arguments, **options)

        return run

    with T.accelerate_torch():
        kept = acceleration._original
        acceleration._original = counted(kept)
        try:
            for seed in range(first, first + count):
                check_one(rank, seed)
        finally:
            acceleration._original = kept
    return torch_ran


def check_one(rank: int, seed: int) -> None:
    full, mesh_shape, source, target = random_case(seed)
    generator = torch.Generator().manual_seed(seed)
    given = list(arithmetic.local_tensors(full, mesh_shape, source, None, generator).values())
    x = torch_tensor.DTensor.from_local(
        given[rank],
        mesh_of(mesh_shape),
        [plain(torch_tensor, p) for p in source],
        shape=full.shape,
        stride=full.stride(),
    )
    y = x.redistribute(placements=[plain(torch_tensor, p) for p in target])
    whole = y.full_tensor()
    torch.testing.assert_close(whole, full, rtol=0, atol=0, msg=lambda text: f"seed {seed}: {text}")
    if any(p.is_partial() for p in target):
        return
    coordinate = list(arithmetic.coordinates(mesh_shape))[rank]
    expected = arithmetic.take(full, arithmetic.held_indices(mesh_shape, target, full.shape, coordinate))
    torch.testing.assert_close(y.to_local(), expected, rtol=0, atol=0, msg=lambda text: f"seed {seed}: {text}")


@pytest.mark.extended
def test_random_redistributions_of_torch_run_on_the_engine(ranks: GlooRanks) -> None:
    assert ranks.run(check_random_redistributions, 0, NUM_RANDOM) == [0] * 4


def check_what_stays_with_torch(rank: int) -> None:
    """New terms, which torch makes in its own way, and masked ones: its function runs, and the values are its own."""
    mesh, ran = mesh_of((4,)), list[str]()
    replicated: Any = torch_tensor.distribute_tensor(FULL, mesh)
    table = torch_tensor.distribute_tensor(EVEN, mesh, [torch_tensor.Shard(0)])  # torch takes no empty shard here
    indices = torch_tensor.distribute_tensor(torch.tensor([4, 0, 2]), mesh)
    with T.accelerate_torch():
        kept: Any = acceleration._original

        def counted(local: Any, source: Any, target: Any, **options: Any) -> Any:
            ran.append(f"{source.placements} -> {target.placements}")
            return kept(local, source, target, **options)

        acceleration._original = counted
        try:
            target = torch_tensor._dtensor_spec.DTensorSpec(
                mesh, (torch_tensor.Partial(),), replicated._spec.tensor_meta
            )
            own = torch_tensor._redistribute.redistribute_local_tensor(FULL, replicated._spec, target)
            assert len(ran) == 1
            terms = torch_tensor.DTensor.from_local(own, mesh, target.placements)
            torch.testing.assert_close(terms.full_tensor(), FULL)
            assert len(ran) == 1  # what reduces them is ours
            looked_up: Any = torch.nn.functional.embedding(indices, table)
            torch.testing.assert_close(looked_up.full_tensor(), EVEN[[4, 0, 2]], rtol=0, atol=0)
        finally:
            acceleration._original = kept


@pytest.mark.extended
def test_terms_of_torchs_own_kinds_stay_with_torch(ranks: GlooRanks) -> None:
    ranks.run(check_what_stays_with_torch)


def check_calls_of_the_method(rank: int) -> None:
    """Torch's method runs where a gradient or an option is asked for, and for what the engine cannot tell."""
    mesh, own = mesh_of((4,)), torch_tensor.DTensor.redistribute
    x: Any = torch_tensor.distribute_tensor(FULL, mesh, [torch_tensor.Shard(0)])
    needs_gradient: Any = x.detach().requires_grad_()
    columns, rows, whole = torch_tensor.Shard(1), torch_tensor.Shard(0), torch_tensor.Replicate()
    ran = 0

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal ran
        ran += 1
        return own(*arguments, **options)

    calls = [
        (0, lambda: x.redistribute(placements=[columns])),
        (0, lambda: x.redistribute(None, (whole,))),
        (1, lambda: x.redistribute(placements=[torch_tensor.Shard(-1)])),
        (1, lambda: x.redistribute(mesh, [columns])),
        (1, lambda: x.redistribute(placements=[columns], async_op=True)),
        (1, lambda: x.redistribute(placements=[rows])),
        (1, lambda: needs_gradient.redistribute(placements=[columns])),
    ]
    with T.accelerate_torch():
        kept, acceleration._original_method = acceleration._original_method, counted
        try:
            for expected, call in calls:
                ran = 0
                y = call()
                assert ran == expected
                assert (type(y), y.shape, y.stride()) == (torch_tensor.DTensor, x.shape, x.stride())
                torch.testing.assert_close(y.full_tensor().detach(), FULL, rtol=0, atol=0)
            # What was found for a spec is of its fields, which torch may set.
            x._local_tensor, x._spec.placements = x.redistribute(placements=[columns])._local_tensor, (columns,)
            torch.testing.assert_close(x.redistribute(placements=[whole]).to_local(), FULL, rtol=0, atol=0)
            with pytest.raises(RuntimeError, match="redistributing to Partial is for internal use only"):
                x.redistribute(placements=[torch_tensor.Partial()])
            with pytest.raises(RuntimeError, match="placements is needed for redistribute"):
                x.redistribute()
        finally:
            acceleration._original_method = kept
    assert torch_tensor.DTensor.redistribute is own


@pytest.mark.extended
def test_without_gradients_torchs_method_is_not_run(ranks: GlooRanks) -> None:
    ranks.run(check_calls_of_the_method)


def train_step(rank: int, accelerated: bool) -> list[torch.Tensor]:
    mesh = mesh_of((4,))
    generator = torch.Generator().manual_seed(0)
    handle = T.accelerate_torch() if accelerated else None
    weight, x = (torch.randint(-3, 4, shape, generator=generator).float() for shape in ((7, 6), (5, 7)))
    w = torch_tensor.distribute_tensor(weight, mesh, [torch_tensor.Shard(0)]).requires_grad_()
    y: Any = torch_tensor.distribute_tensor(x, mesh, [torch_tensor.Shard(0)])
    out = (y @ w).redistribute(placements=[torch_tensor.Shard(1)])
    (out * out).sum().backward()
    if handle is not None:
        handle.undo()
        handle.undo()  # once is enough
    assert w.grad is not None
    return [out.full_tensor().detach(), w.grad.full_tensor()]  # type: ignore[attr-defined]


@pytest.mark.extended
def test_operators_and_gradients_of_torch_on_the_engine(ranks: GlooRanks) -> None:
    torch.testing.assert_close(ranks.run(train_step, True), ranks.run(train_step, False), rtol=0, atol=0)


def check_there_and_back(rank: int) -> None:
    mesh = mesh_of((2, 2))
    for text in ("S0, S1", "S0, S0", "R, S1", "P, S0", "R, R"):
        placements = T.parse_placements(text)
        x: Any = T.distribute_tensor(FULL, mesh, placements).requires_grad_()
        y: Any = x.to_torch()
        assert type(y) is torch_tensor.DTensor
        assert y.to_local().data_ptr() == x.to_local().data_ptr()
        torch.testing.assert_close(y.full_tensor(), FULL, rtol=0, atol=0)
        back = T.from_torch(y)
        assert back._spec is x._spec
        assert back.to_local().data_ptr() == x.to_local().data_ptr()
        (back.full_tensor() * 3).sum().backward()
        assert isinstance(x.grad, T.DTensor)
        torch.testing.assert_close(x.grad.full_tensor(), torch.full((5, 7), 3.0), rtol=0, atol=0)
    strided = torch_tensor.placement_types._StridedShard(0, split_factor=2)
    even: Any = T.distribute_tensor(EVEN, mesh, T.parse_placements("S0, S0"), order=(1, 0)).requires_grad_()
    y = even.to_torch()
    assert y.placements == (strided, torch_tensor.Shard(0))
    torch.testing.assert_close(y.full_tensor(), EVEN, rtol=0, atol=0)
    assert T.from_torch(y)._spec is even._spec
    (T.from_torch(y).full_tensor() * 3).sum().backward()
    torch.testing.assert_close(even.grad.full_tensor(), torch.full((8, 6), 3.0), rtol=0, atol=0)
    with T.accelerate_torch():
        torch.testing.assert_close(y.full_tensor(), EVEN, rtol=0, atol=0)
    whole = torch_tensor.distribute_tensor(EVEN, mesh, [strided, torch_tensor.Shard(0)])
    assert T.from_torch(whole)._spec is even._spec
    torch.testing.assert_close(T.from_torch(whole).full_tensor(), EVEN, rtol=0, atol=0)
    strange = T.distribute_tensor(FULL, mesh, T.parse_placements("S0, S0"), order=(1, 0))
    with pytest.raises(T.LayoutError, match=r"torch's DTensor cannot hold \(S0, S0\) in order \(1, 0\) of \(5, 7\)"):
        T.to_torch(strange)
    y = T.to_torch(T.distribute_tensor(FULL, mesh))
    spec = torch_tensor._dtensor_spec.DTensorSpec(mesh, (strided, torch_tensor.Shard(0)), y._spec.tensor_meta)
    with pytest.raises(T.LayoutError, match="allowed are Shard, Replicate and Partial: redistribute it to these first"):
        T.from_torch(torch_tensor.DTensor(torch.ones(2, 7), spec, requires_grad=False))


@pytest.mark.extended
def test_tensors_there_and_back_share_memory_and_gradients(ranks: GlooRanks) -> None:
    ranks.run(check_there_and_back)


def test_what_is_no_tensor_of_the_other() -> None:
    def body(rank: int) -> None:
        x = T.ones(4, device_mesh=T.Mesh((2,)), placements=[T.Shard(0)])
        with pytest.raises(T.MixedTensorsError, match="from_torch was given a DTensor; allowed is a torch"):
            T.from_torch(x)
        with pytest.raises(T.MixedTensorsError, match="to_torch was given a Tensor; allowed is a tritondt DTensor"):
            T.to_torch(torch.ones(2))  # type: ignore[arg-type]
        with pytest.raises(T.MeshError, match="has no process groups; give to_torch a DeviceMesh of the same ranks"):
            T.to_torch(x)

    run_ranks(2, body)
