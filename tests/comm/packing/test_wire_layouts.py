"""Messages narrower than their tensors, between random layouts: as torch casts, moves and casts back."""

import random
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import pytest
import torch

import tritondt as T
from tests.comm.packing.wire_values import equal, numbers, of_like_size, rounded
from tests.harness.oracle import arithmetic
from tests.harness.oracle.random_layouts import MESH_SHAPES, random_placements, random_shape
from tritondt import events, identity
from tritondt.comm.packing.wire_dtype import is_scaled
from tritondt.comm.transports.threads import run_ranks
from tritondt.kernels.boxes import SCALE_BYTES
from tritondt.planning.plan import Step
from tritondt.redistribution.compile import plan_for
from tritondt.sharding.placement import ReduceOp

FP8_PAIRS = [
    (dtype, wire_dtype)
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    for wire_dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
]
PAIRS = [
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.float64, torch.bfloat16),
    (torch.float64, torch.float16),
    (torch.float64, torch.float32),
    *FP8_PAIRS,
]
OPS: tuple[ReduceOp, ...] = ("sum", "avg", "max", "min")


class Side(NamedTuple):
    """The layout before or after."""

    placements: tuple[T.Placement, ...]
    order: tuple[int, ...] | None


class Case:
    """A tensor, the dtype it travels in, and random layouts of it on a mesh of 2 to 8 ranks."""

    def __init__(
        self, seed: int, pairs: Sequence[tuple[torch.dtype, torch.dtype]], terms: ReduceOp | None = None
    ) -> None:
        self.chosen = chosen = random.Random(seed)
        self.dtype, self.wire_dtype = pairs[seed % len(pairs)]
        self.mesh_shape = chosen.choice(MESH_SHAPES[chosen.randint(2, 8)])
        self.num_ranks = prod(self.mesh_shape)
        self.shape = random_shape(chosen)
        self.source = self._side(T.Replicate() if terms is None else T.Partial(terms))
        self.target = self._side(T.Replicate())
        self.text = f"seed {seed}: {self.source} -> {self.target} as {self.wire_dtype}"

    def _side(self, of_partial: T.Placement) -> Side:
        placements, order = random_placements(self.chosen, self.mesh_shape, self.shape, self.dtype)
        return Side(tuple(of_partial if item.is_partial() else item for item in placements), order)

    def specs(self) -> tuple[T.DTensorSpec, T.DTensorSpec]:
        """Before and after, for the rank that asks."""
        mesh, meta = T.Mesh(self.mesh_shape), T.TensorMeta.contiguous(self.shape, self.dtype)
        source, target = (T.DTensorSpec(mesh, side.placements, meta, side.order) for side in (self.source, self.target))
        return source, target

    def held(self, full: torch.Tensor, side: Side, coordinate: tuple[int, ...]) -> torch.Tensor:
        """What is held of a tensor at a coordinate."""
        indices = arithmetic.held_indices(self.mesh_shape, side.placements, self.shape, coordinate, side.order)
        return arithmetic.take(full, indices)

    def among_replicas(self, coordinate: Sequence[int]) -> torch.Tensor:
        """What the target's replicas at a coordinate have in common."""
        sides = zip(coordinate, self.target.placements, strict=True)
        return torch.tensor([0 if item.is_replicate() else index for index, item in sides])


def coordinate_of(spec: T.DTensorSpec) -> tuple[int, ...]:
    """The asking rank's, which is in the mesh."""
    coordinate = spec.mesh.coordinate
    assert coordinate is not None
    return coordinate


def sends(step: Step) -> bool:
    """Whether any rank sends anything in a step of a plan."""
    return any(step.exchange(coordinate).sends for coordinate in step.target_layout.coordinates())


def assert_replicas_are_equal(results: Sequence[tuple[torch.Tensor, torch.Tensor]], text: str) -> None:
    """Of what replicas have in common and what each has."""
    of_replicas: dict[tuple[int, ...], torch.Tensor] = {}
    for place, found in results:
        equal(found, of_replicas.setdefault(tuple(place.tolist()), found), text)


def test_what_nobody_sends_is_not_rounded():
    """One row, which the first rank has before and after; and an axis of one rank."""
    fine = torch.tensor([[1 + 2**-12]])

    def body(rank: int) -> None:
        for shape, source, target in (((2,), "S0", "S1"), ((2, 1), "R, S0", "R, R"), ((1,), "P", "R")):
            mesh, meta = T.Mesh(shape, ranks=range(shape[0])), T.TensorMeta.contiguous((1, 1), torch.float32)
            if mesh.coordinate is None:
                continue
            before, after = (T.DTensorSpec(mesh, T.parse_placements(text), meta) for text in (source, target))
            given = fine[: before.local_shape[0]]
            found = T.redistribute(given, before, after, wire_dtype=torch.bfloat16)
            equal(found, fine[:, : after.local_shape[1]], f"{source} -> {target} on {shape}")

    run_ranks(2, body)


@pytest.mark.parametrize("seed", range(66))
def test_random_layouts_hold_what_was_cast_moved_and_cast_back(seed: int) -> None:
    case = Case(seed, PAIRS)
    dtype, wire_dtype = case.dtype, case.wire_dtype
    full = (of_like_size if is_scaled(wire_dtype) else numbers)(case.shape, dtype, seed)
    told: dict[int, list[int]] = {rank: [] for rank in range(case.num_ranks)}

    def body(rank: int) -> None:
        source, target = case.specs()
        at = coordinate_of(source)
        given = case.held(full, case.source, at)
        is_moved = any(map(sends, plan_for(source, target, wire_dtype).steps))
        if case.chosen.random() < 0.5 and given.ndim > 1:
            given = given.transpose(0, 1).contiguous().transpose(0, 1)
        found = T.redistribute(given, source, target, wire_dtype=wire_dtype)
        equal(found, case.held(rounded(full, wire_dtype) if is_moved else full, case.target, at), case.text)
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
        run_ranks(case.num_ranks, body)
    finally:
        unsubscribe()


@pytest.mark.parametrize("seed", range(len(OPS) * len(PAIRS)))
def test_terms_are_rounded_and_added_up_as_wide_as_the_tensor(seed: int) -> None:
    """The same as of terms that were rounded before, where nothing else is; replicas have the same bits."""
    case = Case(seed, PAIRS, OPS[seed // len(PAIRS)])

    def body(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        source, target = case.specs()
        at = coordinate_of(source)
        # Replicas hold the same, so what a rank holds is drawn by its place among the terms.
        terms = [index for index, item in zip(at, source.placements, strict=True) if item.is_partial()]
        given = case.held(of_like_size(case.shape, case.dtype, sum(terms) + 100 * seed), case.source, at)
        found = T.redistribute(given, source, target, wire_dtype=case.wire_dtype)
        num_moving = sum(map(sends, plan_for(source, target, case.wire_dtype).steps))
        before = rounded(given, case.wire_dtype) if num_moving else given
        expected = T.redistribute(before, source, target)
        if num_moving > 1:
            expected = rounded(expected, case.wire_dtype)
        equal(found, expected, f"{case.text}, {num_moving} moves")
        return case.among_replicas(at), found

    assert_replicas_are_equal(run_ranks(case.num_ranks, body), case.text)


@pytest.mark.parametrize("seed", range(24))
def test_replicas_have_the_same_bits_whatever_the_sizes_of_numbers(seed: int) -> None:
    case = Case(seed, FP8_PAIRS)
    full = numbers(case.shape, torch.float32, seed).to(case.dtype)

    def body(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        source, target = case.specs()
        at = coordinate_of(source)
        given = case.held(full, case.source, at)
        return case.among_replicas(at), T.redistribute(given, source, target, wire_dtype=case.wire_dtype)

    assert_replicas_are_equal(run_ranks(case.num_ranks, body), case.text)
