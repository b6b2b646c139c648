"""Random redistributions between two meshes of a world, there and back; `check_across(case)` runs one again."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch

import tritondt as T
from tests.harness.oracle import arithmetic
from tests.harness.oracle.cases import DTYPES, parsed
from tests.harness.oracle.random_layouts import MESH_SHAPES, random_placements, random_shape
from tritondt.comm import world
from tritondt.comm.transports.threads import run_ranks
from tritondt.errors import PeerError
from tritondt.planning.between_hosts import MeshRanks
from tritondt.planning.planner import least_between_hosts
from tritondt.sharding.placement import placements_text


class Side(NamedTuple):
    """A mesh and a layout on it."""

    mesh_shape: tuple[int, ...]
    ranks: tuple[int, ...]
    placements: str
    order: tuple[int, ...] | None

    def spec(self, meta: T.TensorMeta) -> T.DTensorSpec:
        """The spec of a tensor on the calling rank."""
        return T.DTensorSpec(T.Mesh(self.mesh_shape, ranks=self.ranks), parsed(self.placements), meta, self.order)

    def without_terms(self) -> tuple[T.Placement, ...]:
        """Placements with Replicate for Partial, as a gradient has them."""
        return tuple(T.Replicate() if item.is_partial() else item for item in parsed(self.placements))

    def mean_size(self) -> int:
        """Number of terms of a mean of the layout."""
        return arithmetic.mean_size(self.mesh_shape, parsed(self.placements))


@dataclass(frozen=True)
class AcrossCase:
    """One redistribution from a mesh to another, and the gradient's way back."""

    seed: int
    shape: tuple[int, ...]
    dtype: str
    source: Side
    target: Side

    @property
    def meta(self) -> T.TensorMeta:
        """Shape and dtype of the tensor."""
        return T.TensorMeta.contiguous(self.shape, getattr(torch, self.dtype))

    @property
    def differentiable(self) -> bool:
        """Whether backward is defined: floats and complex, sums and means."""
        ops = {op for side in (self.source, self.target) for op in arithmetic.ops_of(parsed(side.placements)) if op}
        return self.dtype.startswith(("float", "bfloat", "complex")) and ops <= {"sum", "avg"}

    def least_between(self, hosts: Sequence[int]) -> int:
        """The fewest elements that can cross between the hosts of the world's ranks."""
        ranks = MeshRanks(self.source.ranks, self.target.ranks)
        source, target = (
            T.Layout(side.mesh_shape, parsed(side.placements), self.shape, side.order)
            for side in (self.source, self.target)
        )
        found = least_between_hosts(source, target, tuple(hosts[rank] for rank in ranks.either), ranks)
        assert found is not None, f"{self} has few items"
        return found


def random_across_case(seed: int, world_size: int) -> AcrossCase:
    """The case of a seed; its meshes share all, some or no ranks, in any order."""
    chosen = random.Random(seed)
    shape, dtype = random_shape(chosen), chosen.choice(DTYPES)

    def side() -> Side:
        mesh_shape = chosen.choice(MESH_SHAPES[chosen.randint(1, min(world_size, 6))])
        placements, order = random_placements(chosen, mesh_shape, shape, getattr(torch, dtype))
        ranks = chosen.sample(range(world_size), prod(mesh_shape))
        return Side(mesh_shape, tuple(ranks), placements_text(placements), order)

    return AcrossCase(seed, shape, dtype, side(), side())


class Inputs(NamedTuple):
    """Whole tensor and whole gradient of a case, and the parts that ranks are given."""

    full: torch.Tensor
    locals: dict[int, torch.Tensor]
    grad: torch.Tensor
    local_grads: dict[int, torch.Tensor]


class Outcome(NamedTuple):
    """Result, gradient of the input, and bytes: received, as explain says, and those of all ranks between hosts."""

    result: torch.Tensor
    grad: torch.Tensor | None
    received: int
    explained: int
    between_hosts: int = 0


def inputs_of(case: AcrossCase) -> Inputs:
    """Parts that go into a case, equal whoever computes them."""
    generator = torch.Generator().manual_seed(case.seed)
    full, grad = (arithmetic.whole_tensor(case.shape, case.meta.dtype, generator) for _ in range(2))
    source, target = case.source, case.target
    given = arithmetic.local_tensors(full, source.mesh_shape, parsed(source.placements), source.order, generator)
    arriving = arithmetic.local_tensors(grad, target.mesh_shape, target.without_terms(), target.order, generator)
    return Inputs(
        full,
        dict(zip(source.ranks, given.values(), strict=True)),
        grad * target.mean_size(),
        dict(zip(target.ranks, arriving.values(), strict=True)),
    )


def run_across(case: AcrossCase, inputs: Inputs, rank: int) -> Outcome:
    """This rank's part of a case."""
    source, target = case.source.spec(case.meta), case.target.spec(case.meta)
    nothing = torch.empty(0, dtype=case.meta.dtype)
    given = inputs.locals.get(rank, nothing)
    local = given.clone().requires_grad_(case.differentiable)
    explanation = T.explain(source, target)
    explained, crossing = explanation.received_bytes, sum(each[2] for each in explanation.between_hosts)
    ranks = tuple(sorted({*case.source.ranks, *case.target.ranks}))
    if rank not in ranks:
        result = T.redistribute(local, source, target)
        assert result.shape == (0,)
        return Outcome(result, None, 0, explained, crossing)
    carriers = [world.current().communicator(ranks)]
    hosts = world.current().hosts(ranks)
    if len(set(hosts)) > 1:
        near = tuple(other for other, host in zip(ranks, hosts, strict=True) if host == hosts[ranks.index(rank)])
        carriers += world.current().communicator(near, inside=ranks), world.current().communicator(near)
    before = sum(each.traffic.received_bytes for each in carriers)
    result = T.redistribute(local, source, target)
    received = sum(each.traffic.received_bytes for each in carriers) - before
    later = T.DTensor(given, source).redistribute(target.mesh, target.placements, order=target.order, async_op=True)
    work = later.work
    assert torch.equal(later.to_local(), result.detach()), "the asynchronous result is another one"
    assert work is None or work.is_completed()
    grad = None
    if case.differentiable:
        arriving = inputs.local_grads.get(rank, nothing)
        (grad,) = torch.autograd.grad(result, local, arriving)
    assert torch.equal(local.detach(), given), "the input has changed"
    return Outcome(result.detach(), grad, received, explained, crossing)


def check_across_outcomes(
    case: AcrossCase, inputs: Inputs, outcomes: Sequence[Outcome], hosts: Sequence[int] = ()
) -> None:
    """Checks results, gradients and bytes of all ranks of the world, which are on `hosts` or on one."""
    source, target = case.source, case.target
    results = {rank: outcomes[rank].result for rank in target.ranks}
    _assert_holds(results, inputs.full, target, parsed(target.placements))
    if case.differentiable:
        whole = inputs.grad if source.mean_size() == 1 else inputs.grad / source.mean_size()
        grads = {rank: grad for rank in source.ranks if (grad := outcomes[rank].grad) is not None}
        _assert_holds(grads, whole, source, source.without_terms())
    itemsize = case.meta.dtype.itemsize
    for rank, outcome in enumerate(outcomes):
        assert outcome.received == outcome.explained, f"rank {rank} received {outcome.received} bytes"
        if not hosts and not any(item.is_partial() for side in (source, target) for item in parsed(side.placements)):
            lacking = _mask(case, target, rank) & ~_mask(case, source, rank)
            assert outcome.received == int(lacking.sum()) * itemsize, f"rank {rank} received {outcome.received} bytes"
    if not hosts:
        assert sum(outcome.received for outcome in outcomes) <= _most_elements(case) * itemsize
        return
    least = case.least_between(hosts) * itemsize
    assert {outcome.between_hosts for outcome in outcomes} == {least}, f"{outcomes[0].between_hosts} bytes of {least}"


def _most_elements(case: AcrossCase) -> int:
    """Elements that move where n ranks hold terms of an element and k others want it: n - 1 to add it up, then k."""
    terms = prod(
        size
        for size, op in zip(case.source.mesh_shape, arithmetic.ops_of(parsed(case.source.placements)), strict=True)
        if op
    )
    holders = sum(int(_mask(case, case.target, rank).sum()) for rank in case.target.ranks)
    if not case.shape:  # a scalar has no dim to cut: each that wants it may add it up
        return terms * holders
    return prod(case.shape) * (terms - 1) + holders


def _mask(case: AcrossCase, side: Side, rank: int) -> torch.Tensor:
    if rank not in side.ranks:
        return torch.zeros(case.shape, dtype=torch.bool)
    coordinate = list(arithmetic.coordinates(side.mesh_shape))[side.ranks.index(rank)]
    return arithmetic.held_mask(side.mesh_shape, parsed(side.placements), case.shape, coordinate, side.order)


def _assert_holds(
    found: dict[int, torch.Tensor], full: torch.Tensor, side: Side, placements: tuple[T.Placement, ...]
) -> None:
    by_coordinate = dict(
        zip(arithmetic.coordinates(side.mesh_shape), (found[rank] for rank in side.ranks), strict=True)
    )
    arithmetic.assert_holds(by_coordinate, full, side.mesh_shape, placements, side.order)


def check_across(*cases: AcrossCase, world_size: int = 8, hosts: Sequence[int] = ()) -> None:
    """Runs cases one after another on thread ranks, as on `hosts` where these are given, and checks every one."""
    inputs = [inputs_of(case) for case in cases]

    def body(rank: int) -> list[Outcome]:
        found = []
        for case, given in zip(cases, inputs, strict=True):
            try:
                found.append(run_across(case, given, rank))
            except PeerError:  # the rank that failed says why
                raise
            except BaseException as error:
                raise AssertionError(
                    f"rank {rank}: {error!r}; run it again with check_across({case!r}, hosts={hosts})"
                ) from error
        return found

    check_all_across(cases, run_ranks(world_size, body, hosts=hosts or None), hosts)


def check_all_across(
    cases: Sequence[AcrossCase], outcomes_of_ranks: Sequence[Sequence[Outcome]], hosts: Sequence[int] = ()
) -> None:
    """Checks the outcomes of every case on every rank of the world."""
    for case, *outcomes in zip(cases, *outcomes_of_ranks, strict=True):
        try:
            check_across_outcomes(case, inputs_of(case), outcomes, hosts)
        except AssertionError as error:
            raise AssertionError(f"{error}; run it again with check_across({case!r}, hosts={hosts})") from error
