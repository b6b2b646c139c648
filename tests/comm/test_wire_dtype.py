"""Redistributions whose messages are narrower than their tensors: values, bytes, gradients, and what is refused.

What comes out is what torch gives by casting, moving and casting back.
"""

import random
from math import prod
from typing import Any

import pytest
import torch

import tritondt as T
from tests.gloo_ranks import GlooRanks
from tests.ops.sharded import distribute
from tests.oracle import arithmetic
from tests.oracle.random_layouts import MESH_SHAPES, random_placements, random_shape
from tritondt import events, identity
from tritondt.comm import world
from tritondt.comm.casting import casting_transfer
from tritondt.comm.communicator import Transfer
from tritondt.comm.threads import run_ranks
from tritondt.debug import CommDebugMode
from tritondt.kernels import reference
from tritondt.kernels.boxes import CastBox
from tritondt.kernels.scaled_tables import SCALE_BYTES
from tritondt.placement import ReduceOp
from tritondt.planning.exchange import exchange
from tritondt.planning.geometry import blocks
from tritondt.runnable import plan_for
from tritondt.wire import is_scaled

PAIRS = [
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.float64, torch.bfloat16),
    (torch.float64, torch.float16),
    (torch.float64, torch.float32),
    (torch.float32, torch.float8_e4m3fn),
    (torch.float32, torch.float8_e5m2),
    (torch.bfloat16, torch.float8_e4m3fn),
    (torch.bfloat16, torch.float8_e5m2),
    (torch.float16, torch.float8_e4m3fn),
    (torch.float16, torch.float8_e5m2),
]


def rounded(x: torch.Tensor, wire_dtype: torch.dtype) -> torch.Tensor:
    """What torch's casts give; to fp8 in the middle of its range, as a scale puts numbers of like size."""
    if is_scaled(wire_dtype):
        return (x.float() * 16).to(wire_dtype).float().div(16).to(x.dtype)
    return x.to(wire_dtype).to(x.dtype)


def equal(found: torch.Tensor, expected: torch.Tensor, text: str = "") -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True, msg=lambda said: f"{text}: {said}")


def numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Of all sizes, a few too large or too small for any wire dtype, infinite, or none."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(shape, generator=generator, dtype=dtype)
    found *= torch.pow(2.0, torch.randint(-30, 20, shape, generator=generator))
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 3e38, -1e-40, 65519.9, 1e-7], dtype=dtype)
    places = torch.randint(0, 40, shape, generator=generator)
    return torch.where(places < len(odd), odd[places.clamp(max=len(odd) - 1)], found)


def of_like_size(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Zeros, and numbers of both signs between 1/8 and 1: a power of two as a scale does not change how they round."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.rand(shape, generator=generator, dtype=torch.float64) * 7 / 8 + 1 / 8
    return (found * torch.randint(-1, 2, shape, generator=generator)).to(dtype)


@pytest.mark.parametrize("seed", range(66))
def test_random_layouts_hold_what_was_cast_moved_and_cast_back(seed: int) -> None:
    chosen = random.Random(seed)
    dtype, wire_dtype = PAIRS[seed % len(PAIRS)]
    mesh_shape = chosen.choice(MESH_SHAPES[chosen.randint(2, 8)])
    shape = random_shape(chosen)
    full = (of_like_size if is_scaled(wire_dtype) else numbers)(shape, dtype, seed)
    meta = T.TensorMeta.contiguous(shape, dtype)
    sides = []
    for _ in range(2):
        placements, order = random_placements(chosen, mesh_shape, shape, dtype)
        sides.append((tuple(T.Replicate() if item.is_partial() else item for item in placements), order))
    told: dict[int, list[int]] = {rank: [] for rank in range(prod(mesh_shape))}

    def body(rank: int) -> None:
        mesh = T.Mesh(mesh_shape)
        source, target = (T.DTensorSpec(mesh, placements, meta, order) for placements, order in sides)
        at = mesh.coordinate
        assert at is not None
        given, expected = (
            arithmetic.take(values, arithmetic.held_indices(mesh_shape, placements, shape, at, order))
            for values, (placements, order) in zip((full, rounded(full, wire_dtype)), sides, strict=True)
        )
        if not any(step.moving_axes for step in plan_for(source, target, wire_dtype).steps):
            expected = arithmetic.take(full, arithmetic.held_indices(mesh_shape, sides[1][0], shape, at, sides[1][1]))
        if chosen.random() < 0.5 and given.ndim > 1:
            given = given.transpose(0, 1).contiguous().transpose(0, 1)
        found = T.redistribute(given, source, target, wire_dtype=wire_dtype)
        equal(found, expected, f"seed {seed}: {source} -> {target} as {wire_dtype}")
        explained = T.explain(source, target, wire_dtype=wire_dtype)
        wide = T.explain(source, target)
        for narrow, whole, messages in (
            (explained.sent_bytes, wide.sent_bytes, explained.messages),
            (explained.received_bytes, wide.received_bytes, sum(step.num_received for step in explained.steps)),
        ):
            scales = narrow - whole * wire_dtype.itemsize // dtype.itemsize
            assert scales % SCALE_BYTES == 0
            assert scales >= messages * SCALE_BYTES if is_scaled(wire_dtype) else scales == 0
        assert told[rank] == [step.sent_bytes for step in explained.steps]

    def note(event: events.StepRan) -> None:
        told[identity.current().rank].append(event.sent_bytes)

    unsubscribe = events.subscribe(note)
    try:
        run_ranks(prod(mesh_shape), body)
    finally:
        unsubscribe()


@pytest.mark.parametrize("seed", range(44))
def test_terms_are_rounded_and_added_up_as_wide_as_the_tensor(seed: int) -> None:
    """The same as of terms that were rounded before, where nothing else is; replicas have the same bits."""
    chosen = random.Random(seed)
    dtype, wire_dtype = PAIRS[seed % len(PAIRS)]
    mesh_shape = chosen.choice(MESH_SHAPES[chosen.randint(2, 8)])
    shape = random_shape(chosen)
    op: ReduceOp = chosen.choice(("sum", "avg", "max", "min"))
    meta = T.TensorMeta.contiguous(shape, dtype)
    sides = []
    for side in range(2):
        placements, order = random_placements(chosen, mesh_shape, shape, dtype)
        terms = T.Partial(op) if side == 0 else T.Replicate()
        sides.append((tuple(terms if item.is_partial() else item for item in placements), order))

    def body(rank: int) -> tuple[torch.Tensor, ...]:
        mesh = T.Mesh(mesh_shape)
        source, target = (T.DTensorSpec(mesh, placements, meta, order) for placements, order in sides)
        at = mesh.coordinate
        assert at is not None
        # Replicas hold the same, so what a rank holds is drawn by its place among the terms.
        terms = [index for index, item in zip(at, source.placements, strict=True) if item.is_partial()]
        full = of_like_size(shape, dtype, sum(terms) + 100 * seed)
        given = arithmetic.take(full, arithmetic.held_indices(mesh_shape, sides[0][0], shape, at, sides[0][1]))
        found = T.redistribute(given, source, target, wire_dtype=wire_dtype)
        num_moving = sum(bool(step.moving_axes) for step in plan_for(source, target, wire_dtype).steps)
        before = rounded(given, wire_dtype) if num_moving else given
        expected = T.redistribute(before, source, target)
        if num_moving > 1:
            expected = rounded(expected, wire_dtype)
        equal(found, expected, f"seed {seed}: {source} -> {target} as {wire_dtype}, {num_moving} moves")
        alike = [0 if item.is_replicate() else index for index, item in zip(at, target.placements, strict=True)]
        return torch.tensor(alike), found

    of_replicas: dict[tuple[int, ...], torch.Tensor] = {}
    for place, found in run_ranks(prod(mesh_shape), body):
        equal(found, of_replicas.setdefault(tuple(place.tolist()), found), f"seed {seed}")


@pytest.mark.parametrize(("target", "again"), [("S0", False), ("S1", False), ("R", True)])
def test_a_sum_by_torch(target: str, again: bool) -> None:
    terms = [numbers((9, 7), torch.float32, rank).nan_to_num(1.0, 2.0, 3.0).clamp(-1e4, 1e4) for rank in range(4)]
    total = terms[0].bfloat16().float()
    for term in terms[1:]:
        total = total + term.bfloat16().float()
    whole = rounded(total, torch.bfloat16) if again else total

    def body(rank: int) -> None:
        mesh, meta = T.Mesh((4,)), T.TensorMeta.contiguous((9, 7))
        source, after = (T.DTensorSpec(mesh, T.parse_placements(text), meta) for text in ("P", target))
        found = T.redistribute(terms[rank], source, after, wire_dtype=torch.bfloat16)
        indices = arithmetic.held_indices((4,), after.placements, (9, 7), (rank,))
        equal(found, arithmetic.take(whole, indices))

    run_ranks(4, body)


def test_what_needs_no_message_is_not_rounded() -> None:
    full = numbers((6, 4), torch.float32, 1)

    def body(rank: int) -> None:
        x = distribute(full, T.Mesh((2,)), "R")
        equal(x.redistribute(placements=[T.Shard(0)], wire_dtype=torch.float16).to_local(), full.chunk(2)[rank])
        assert x.redistribute(placements=[T.Replicate()], wire_dtype=torch.float16) is x
        own = distribute(full, T.Mesh((2,)), "S0").redistribute(placements=[T.Shard(1)], wire_dtype=torch.float32)
        equal(own.to_local(), full.chunk(2, 1)[rank])

    run_ranks(2, body)


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("source", ["S0", "S1", "P"])
def test_dtensors_in_half_the_bytes(source: str, async_op: bool) -> None:
    full = torch.arange(77.0).reshape(7, 11)

    def moved(x: T.DTensor, **options: Any) -> tuple[torch.Tensor, int]:
        with CommDebugMode() as comm:
            whole = x.redistribute(placements=[T.Replicate()], async_op=async_op, **options).to_local()
        return whole, comm.get_sent_bytes()

    def body(rank: int) -> None:
        x = distribute(full, T.Mesh((3,)), source)
        traffic = world.current().communicator(range(3)).traffic
        _, wide = moved(x)
        before = traffic.sent_bytes
        found, narrow = moved(x, wire_dtype=torch.bfloat16)
        equal(found, full)
        assert narrow * 2 == wide
        assert traffic.sent_bytes - before == narrow > 0

    run_ranks(3, body)


def test_prefetch_is_found_with_the_same_wire_dtype_only() -> None:
    full = numbers((8, 5), torch.float32, 2)

    def body(rank: int) -> None:
        x = distribute(full, T.Mesh((2,)), "S0")
        T.prefetch(x, [T.Replicate()], wire_dtype=torch.bfloat16)
        equal(x.redistribute(placements=[T.Replicate()]).to_local(), full)
        traffic = world.current().communicator(range(2)).traffic
        before = traffic.num_sent
        found = x.redistribute(placements=[T.Replicate()], wire_dtype=torch.bfloat16)
        equal(found.to_local(), rounded(full, torch.bfloat16))
        assert traffic.num_sent == before

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("options", "wire_dtype"),
    [
        ({"wire_dtype": torch.bfloat16}, torch.bfloat16),
        ({"wire_dtype": torch.bfloat16, "grad_wire_dtype": torch.float16}, torch.float16),
        ({"wire_dtype": torch.bfloat16, "grad_wire_dtype": torch.float32}, torch.float32),
        ({"grad_wire_dtype": torch.float16}, torch.float16),
    ],
)
def test_gradients_travel_alike_unless_told_otherwise(options: dict[str, Any], wire_dtype: torch.dtype) -> None:
    full = numbers((6, 6), torch.float32, 3)
    arriving = torch.randn(6, 6, generator=torch.Generator().manual_seed(4))

    def body(rank: int) -> None:
        mesh = T.Mesh((3,))
        x = distribute(full, mesh, "S0")
        x.requires_grad_()
        y = x.redistribute(placements=[T.Shard(1)], **options)
        y.backward(distribute(arriving, mesh, "S1"))
        assert isinstance(x.grad, T.DTensor)
        equal(x.grad.to_local(), rounded(arriving, wire_dtype).chunk(3)[rank])

        source, target = (
            T.DTensorSpec(mesh, T.parse_placements(text), T.TensorMeta.contiguous((6, 6))) for text in ("S0", "S1")
        )
        local = full.chunk(3)[rank].clone().requires_grad_()
        found = T.redistribute(local, source, target, **options)
        found.backward(arriving.chunk(3, 1)[rank])
        assert local.grad is not None
        equal(local.grad, rounded(arriving, wire_dtype).chunk(3)[rank])
        equal(found.detach(), rounded(full, options.get("wire_dtype", torch.float32)).chunk(3, 1)[rank])

    run_ranks(3, body)


def test_a_gradient_of_another_dtype_travels_as_it_is() -> None:
    def body(rank: int) -> None:
        x = distribute(torch.ones(4, 4), T.Mesh((2,)), "S0")
        x.requires_grad_()
        whole = [T.Replicate()]
        x.redistribute(placements=whole, backward_dtype=torch.bfloat16, wire_dtype=torch.bfloat16).sum().backward()
        assert isinstance(x.grad, T.DTensor)
        equal(x.grad.full_tensor(), torch.ones(4, 4))
        with pytest.raises(T.TransportError, match="were asked for a tensor of float16"):
            x.redistribute(placements=whole, backward_dtype=torch.float16, wire_dtype=torch.bfloat16)

    run_ranks(2, body)


def test_gradients_of_gradients() -> None:
    full = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(5))

    def body(rank: int) -> None:
        mesh, meta = T.Mesh((2,)), T.TensorMeta.contiguous((4, 4), torch.float64)
        source, target = (T.DTensorSpec(mesh, T.parse_placements(text), meta) for text in ("S0", "S1"))
        local = full.chunk(2)[rank].clone().requires_grad_()
        found = T.redistribute(local, source, target, wire_dtype=torch.float32)
        (grad,) = torch.autograd.grad(found.square().sum(), local, create_graph=True)
        equal(grad.detach(), 2 * rounded(full, torch.float32).chunk(2)[rank])
        (second,) = torch.autograd.grad(grad.sum(), local)
        equal(second, torch.full((2, 4), 2.0, dtype=torch.float64))

    run_ranks(2, body)


def test_a_graph_knows_the_wire_dtype() -> None:
    full = numbers((6, 4), torch.float32, 6)

    def body(rank: int) -> None:
        x = distribute(full, T.Mesh((2,)), "S0")

        @torch.compile(backend="aot_eager", fullgraph=True)
        def whole(x: T.DTensor) -> T.DTensor:
            moved = x.redistribute(placements=[T.Replicate()], wire_dtype=torch.bfloat16) * 1.0
            assert isinstance(moved, T.DTensor)
            return moved

        equal(whole(x).to_local(), rounded(full, torch.bfloat16))

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("dtype", "wire_dtype", "text"),
    [
        (
            torch.float32,
            torch.float64,
            "messages of torch.float64 were asked for a tensor of float32; "
            "allowed for float32 is bfloat16, float16, float8_e4m3fn, float8_e5m2 and its own",
        ),
        (torch.float64, torch.float8_e4m3fn, "allowed for float64 is float32, bfloat16, float16 and its own"),
        (torch.float32, torch.int8, "messages of torch.int8 were asked for a tensor of float32"),
        (torch.float64, "bfloat16", "messages of 'bfloat16' .* is float32, bfloat16, float16 and its own"),
        (torch.bfloat16, torch.float16, "allowed for bfloat16 is float8_e4m3fn, float8_e5m2 and its own"),
        (torch.float16, torch.float32, "allowed for float16 is float8_e4m3fn, float8_e5m2 and its own"),
        (torch.int32, torch.bfloat16, "were asked for a tensor of int32; allowed for int32 is its own"),
        (torch.complex64, torch.bfloat16, "allowed for complex64 is its own"),
    ],
)
def test_what_is_refused_on_all_ranks(dtype: torch.dtype, wire_dtype: Any, text: str) -> None:
    def body(rank: int) -> str:
        mesh, meta = T.Mesh((2,)), T.TensorMeta.contiguous((4, 2), dtype)
        source, target = (T.DTensorSpec(mesh, T.parse_placements(way), meta) for way in ("S0", "S1"))
        x = T.DTensor.from_local(torch.ones(2, 2, dtype=dtype), mesh, [T.Shard(0)])
        calls = [
            lambda: T.redistribute(x.to_local(), source, target, wire_dtype=wire_dtype),
            lambda: T.redistribute(x.to_local(), source, target, grad_wire_dtype=wire_dtype),
            lambda: x.redistribute(placements=[T.Shard(1)], wire_dtype=wire_dtype),
            lambda: x.redistribute(placements=[T.Shard(1)], wire_dtype=wire_dtype, async_op=True),
            lambda: T.prefetch(x, [T.Shard(1)], wire_dtype=wire_dtype),
            lambda: T.explain(source, target, wire_dtype=wire_dtype),
        ]
        said = set()
        for call in calls:
            with pytest.raises(T.TransportError, match=text) as found:
                call()
            said.add(str(found.value))
        (only,) = said
        traffic = world.current().communicator(range(2)).traffic
        assert (traffic.num_sent, traffic.num_received) == (0, 0)
        # Nothing is lost.
        torch.testing.assert_close(x.full_tensor(), torch.ones(4, 2, dtype=dtype), rtol=0, atol=0)
        return only

    first, second = run_ranks(2, body)
    assert first == second


def test_ranks_that_ask_for_different_wire_dtypes_are_told() -> None:
    def body(rank: int) -> None:
        x = distribute(torch.ones(4, 4), T.Mesh((2,)), "S0")
        x.redistribute(placements=[T.Shard(1)], wire_dtype=(torch.bfloat16, torch.float16)[rank])

    with pytest.raises(T.MismatchError, match=r"float32 as (bfloat16|float16)"):
        run_ranks(2, body)


def test_a_part_for_several_peers_is_packed_once_and_nothing_goes_past_the_buffers() -> None:
    before, after = (T.Layout((4,), T.parse_placements(text), (8, 3)) for text in ("S0", "R"))
    transfer = Transfer(
        exchange(before, after, (1,)),
        (blocks(before, (1,)),),
        (blocks(after, (1,)),),
        (torch.float32,),
        (None,),
        1,
        "a test",
        wire_dtype=torch.bfloat16,
    )
    found = casting_transfer(transfer, torch.bfloat16)
    assert [tuple(item) for item in found.sends] == [(2, None, 0, 12), (3, None, 0, 12), (0, None, 0, 12)]
    assert [tuple(item) for item in found.receives] == [(2, None, 0, 12), (3, None, 12, 12), (0, None, 24, 12)]
    assert (found.packed_bytes, found.staged_bytes, found.sent_bytes, found.received_bytes) == (12, 36, 36, 36)
    assert found.pack is not None
    assert found.pack.num_boxes == 1


def test_each_part_has_a_scale_of_its_own() -> None:
    """Rows of 1e-6 and rows of 1e6 keep their digits alike, as the reference gives them."""
    full = numbers((12, 5), torch.float32, 7).nan_to_num(0.0, 1.0, 2.0).clamp(-1.0, 1.0)
    full *= torch.tensor([1e-6] * 3 + [1.0] * 3 + [1e6] * 3 + [0.0] * 3)[:, None]
    expected = torch.empty_like(full)
    for rows, out in zip(full.chunk(4), expected.chunk(4), strict=True):
        sent, scales, box = (
            torch.empty(15).to(torch.float8_e4m3fn),
            torch.empty(1),
            CastBox(0, 0, 0, 0, (15,), (1,), (1,)),
        )
        reference.quantize_boxes([rows.flatten()], [sent], scales, [box])
        reference.dequantize_boxes([sent], [out.view(-1)], scales, [box])

    def body(rank: int) -> None:
        x = distribute(full, T.Mesh((4,)), "S0")
        traffic = world.current().communicator(range(4)).traffic
        found = x.redistribute(placements=[T.Replicate()], wire_dtype=torch.float8_e4m3fn).to_local()
        equal(found, expected)
        assert traffic.sent_bytes == 3 * (SCALE_BYTES + 15)

    run_ranks(4, body)


@pytest.mark.parametrize("seed", range(24))
def test_replicas_have_the_same_bits_whatever_the_sizes_of_numbers(seed: int) -> None:
    chosen = random.Random(seed)
    mesh_shape, shape = chosen.choice(MESH_SHAPES[chosen.randint(2, 8)]), random_shape(chosen)
    dtype, wire_dtype = PAIRS[5 + seed % 6]
    full, meta = numbers(shape, torch.float32, seed).to(dtype), T.TensorMeta.contiguous(shape, dtype)
    sides = [random_placements(chosen, mesh_shape, shape, dtype) for _ in range(2)]
    sides = [(tuple(T.Replicate() if item.is_partial() else item for item in items), order) for items, order in sides]

    def body(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        mesh = T.Mesh(mesh_shape)
        source, target = (T.DTensorSpec(mesh, placements, meta, order) for placements, order in sides)
        at = mesh.coordinate
        assert at is not None
        given = arithmetic.take(full, arithmetic.held_indices(mesh_shape, sides[0][0], shape, at, sides[0][1]))
        alike = [0 if item.is_replicate() else index for index, item in zip(at, target.placements, strict=True)]
        return torch.tensor(alike), T.redistribute(given, source, target, wire_dtype=wire_dtype)

    of_replicas: dict[tuple[int, ...], torch.Tensor] = {}
    for place, found in run_ranks(prod(mesh_shape), body):
        equal(found, of_replicas.setdefault(tuple(place.tolist()), found), f"seed {seed}")


def on_processes(rank: int, source: str, target: str) -> tuple[int, int, torch.Tensor]:
    """Bytes sent in full and in bfloat16, and what this rank held in the end."""
    full = numbers((37, 29), torch.float32, 8).nan_to_num(0.0, 1.0, 2.0)
    x = distribute(full, T.Mesh((2, 2)), source)
    sent = list[int]()
    for wire_dtype in (None, torch.bfloat16):
        with CommDebugMode() as comm:
            found = x.redistribute(placements=T.parse_placements(target), wire_dtype=wire_dtype, async_op=bool(sent))
            local = found.to_local()
        sent.append(comm.get_sent_bytes())
    return sent[0], sent[1], local


@pytest.mark.parametrize(("source", "target"), [("S0, S1", "R, R"), ("S0, S0", "S1, S1"), ("R, S1", "S0, S0")])
def test_on_processes(four_ranks: GlooRanks, source: str, target: str) -> None:
    whole = rounded(numbers((37, 29), torch.float32, 8).nan_to_num(0.0, 1.0, 2.0), torch.bfloat16)
    for rank, (wide, narrow, local) in enumerate(four_ranks.run(on_processes, source, target)):
        assert wide == 2 * narrow > 0
        indices = arithmetic.held_indices((2, 2), T.parse_placements(target), (37, 29), divmod(rank, 2))
        equal(local, arithmetic.take(whole, indices))


def test_sums_on_processes(four_ranks: GlooRanks) -> None:
    found = four_ranks.run(on_processes, "P, P", "R, R")
    for wide, narrow, local in found:
        assert wide == 2 * narrow > 0
        equal(local, found[0][2])
