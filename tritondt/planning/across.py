"""Plans between two meshes of one world: what moves, in which steps, and exactly how much.

Source and target may share all, some or no ranks. A rank takes part where it is in either mesh. Without Partial a plan
is one exchange, in which every rank receives exactly what it lacks. Terms of a Partial are reduced where that moves
least: at their receivers, in pieces among receivers that then gather, or on the source's mesh before they leave it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from tritondt.errors import LayoutError
from tritondt.planning.cost import CostTable
from tritondt.planning.exchange import Exchange, Message, Route, exchange_across
from tritondt.planning.flat_pieces import FlatPieces, Holding
from tritondt.planning.plan import Step
from tritondt.planning.planner import make_plan
from tritondt.planning.storage import Block, blocks, step_blocks
from tritondt.sharding.layout import Coordinate, Layout
from tritondt.sharding.placement import Partial, Placement, ReduceOp, Replicate, Shard

_MAX_COUNTED = 1024
_NOTHING = Exchange((), (), ())


@dataclass(frozen=True)
class StepAcross(Step):
    """A step between two sets of ranks, each a mesh in row-major order; within one mesh where these are equal."""

    source: Holding
    target: Holding
    source_ranks: tuple[int, ...]
    target_ranks: tuple[int, ...]

    @cached_property
    def route(self) -> Route:
        """Servers and receivers of this step."""
        if self.is_within:
            return Route(self.source, self.target)
        return Route(self.source, self.target, self.source_ranks, self.target_ranks)

    @cached_property
    def is_within(self) -> bool:
        """Whether the step goes from one layout of a mesh to another."""
        return self.source_ranks == self.target_ranks and self.source.mesh_shape == self.target.mesh_shape

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of either mesh, ascending."""
        return tuple(sorted({*self.source_ranks, *self.target_ranks}))

    @cached_property
    def moving_axes(self) -> tuple[int, ...]:
        """Source axes that ranks may talk along: between meshes all of them, or none where nobody lacks anything."""
        if self.is_within:
            return Step(self.kind, self.source, self.target).moving_axes
        if len(self.ranks) <= _MAX_COUNTED and not any(self.received_elements):
            return ()
        return tuple(range(len(self.source.mesh_shape)))

    @cached_property
    def received_elements(self) -> tuple[int, ...]:
        """Elements that each of `ranks` receives."""
        return tuple(_numel(self.exchange_of(rank).receives) for rank in self.ranks)

    def source_coordinate(self, rank: int) -> Coordinate | None:
        """Coordinate of a rank in the source's mesh, None outside of it."""
        return _coordinate(self.source, self.source_ranks, rank)

    def target_coordinate(self, rank: int) -> Coordinate | None:
        """Coordinate of a rank in the target's mesh, None outside of it."""
        return _coordinate(self.target, self.target_ranks, rank)

    def exchange_of(self, rank: int) -> Exchange:
        """Sends, receives and keeps of a rank of the world in this step; peers are ranks of the world."""
        if not self.is_within:
            return exchange_across(self.source, self.source_ranks, self.target, self.target_ranks, rank)
        coordinate = self.source_coordinate(rank)
        if coordinate is None:
            return _NOTHING
        found = self.exchange(coordinate)

        def named(messages: tuple[Message, ...]) -> tuple[Message, ...]:
            return tuple(Message(self.source_ranks[message.peer], message.parts) for message in messages)

        return replace(found, sends=named(found.sends), receives=named(found.receives))

    def blocks_of(
        self, rank: int, source_strides: Sequence[int] | None = None
    ) -> tuple[tuple[Block, ...], tuple[Block, ...]]:
        """Source and target blocks of a rank; none on a side that it is not in."""
        source, target = self.source_coordinate(rank), self.target_coordinate(rank)
        if self.is_within:
            return ((), ()) if source is None else step_blocks(self, source, source_strides)
        return (
            () if source is None else blocks(self.source, source, source_strides),
            () if target is None else blocks(self.target, target),
        )

    def fill_op_of(self, rank: int) -> ReduceOp | None:
        """Op whose identity fills the target of a rank that takes nothing, or not all; None for other ranks."""
        if self.is_within:
            return self.fill_op
        coordinate = self.target_coordinate(rank)
        if coordinate is None or not self.route.takes_nothing(coordinate):
            return None
        placements = self.route.target_layout.placements
        return next(placement.reduce_op for placement in placements if isinstance(placement, Partial))


@dataclass(frozen=True)
class PlanAcross:
    """Steps that take `source` on `source_ranks` to `target` on `target_ranks`; all run among the ranks of both."""

    source: Layout
    target: Layout
    source_ranks: tuple[int, ...]
    target_ranks: tuple[int, ...]
    steps: tuple[StepAcross, ...]

    def __str__(self) -> str:
        return f"{self.source} -> {self.target}: " + "; ".join(map(str, self.steps))


@lru_cache(maxsize=4096)
def make_plan_across(
    source: Layout,
    source_ranks: tuple[int, ...],
    target: Layout,
    target_ranks: tuple[int, ...],
    itemsize: int,
    costs: CostTable,
) -> PlanAcross:
    """Plan between two meshes, equal on every rank; LayoutError for different tensors.

    The fewest bytes that all ranks together receive come first, then the fewest on the way of one rank, then steps.
    Counted rank by rank up to 1,024 ranks; above, terms are reduced on the source's mesh.

    >>> source, target = Layout((2,), (Partial(),), (4,)), Layout((2,), (Replicate(),), (4,))
    >>> print(make_plan_across(source, (0, 1), target, (2, 3), 4, CostTable()))
    (P(sum)) -> (R): reduce (P(sum)) -> (R) in 2 pieces; gather (R) in 2 pieces -> (R)
    """
    if source.shape != target.shape:
        raise LayoutError(
            f"cannot go from {source} to {target}: the source has shape {source.shape}, the target {target.shape}; "
            "they must be equal"
        )
    found = list(_candidates(source, source_ranks, target, target_ranks, itemsize, costs))
    chosen = found[-1]
    if len(found) > 1 and len({*source_ranks, *target_ranks}) <= _MAX_COUNTED:
        chosen = min(found, key=_price)
    return PlanAcross(source, target, source_ranks, target_ranks, chosen)


def _price(steps: tuple[StepAcross, ...]) -> tuple[int, int, int]:
    received = [step.received_elements for step in steps]
    return sum(map(sum, received)), sum(max(elements, default=0) for elements in received), len(steps)


def _candidates(
    source: Layout,
    source_ranks: tuple[int, ...],
    target: Layout,
    target_ranks: tuple[int, ...],
    itemsize: int,
    costs: CostTable,
) -> Iterator[tuple[StepAcross, ...]]:
    """Forms worth pricing; the last is the one for meshes that are too large to be counted."""
    if not source.axes_where(Partial):
        yield (_crossing("exchange", source, source_ranks, target, target_ranks),)
        return
    yield (_crossing("reduce", source, source_ranks, target, target_ranks),)
    holders = target.axes_where(Replicate)
    if holders and not target.axes_where(Partial):
        pieces = FlatPieces(target, holders)
        yield (
            StepAcross("reduce", source, pieces, source_ranks, target_ranks),
            StepAcross("gather", pieces, target, target_ranks, target_ranks),
        )
    if {*source_ranks} & {*target_ranks}:
        yield from _onto_one_replica(source, source_ranks, target, target_ranks)
    for middle in _reduced_layouts(source):
        before = make_plan(source, middle, itemsize, costs)
        steps = [_on_one_mesh(step, source_ranks) for step in before.steps]
        yield (*steps, _crossing("exchange", middle, source_ranks, target, target_ranks))


def _on_one_mesh(step: Step, ranks: tuple[int, ...]) -> StepAcross:
    assert isinstance(step.source, Holding), f"{step} starts from {step.source}, which is of no mesh"
    assert isinstance(step.target, Holding), f"{step} ends in {step.target}, which is of no mesh"
    return StepAcross(step.kind, step.source, step.target, ranks, ranks)


def _onto_one_replica(
    source: Layout, source_ranks: tuple[int, ...], target: Layout, target_ranks: tuple[int, ...]
) -> Iterator[tuple[StepAcross, ...]]:
    """Forms that reduce at one replica of the target, whose ranks may hold terms already, and go on from there."""
    replicated = target.axes_where(Replicate)
    if not replicated or target.axes_where(Partial):
        return
    cut = [axis for axis in range(len(target.mesh_shape)) if axis not in replicated]
    one = Layout(
        [target.mesh_shape[axis] for axis in cut] or [1],
        [target.placements[axis] for axis in cut] or [Replicate()],
        target.shape,
        [cut.index(axis) for axis in target.order if axis in cut] or None,
    )
    ranks_of: dict[Coordinate, list[int]] = {}
    for rank, coordinate in zip(target_ranks, target.coordinates(), strict=True):
        ranks_of.setdefault(tuple(coordinate[axis] for axis in replicated), []).append(rank)
    most = max(len({*source_ranks}.intersection(ranks)) for ranks in ranks_of.values())
    for ranks in ranks_of.values():
        if len({*source_ranks}.intersection(ranks)) == most:
            first = _crossing("reduce", source, source_ranks, one, tuple(ranks))
            yield first, _crossing("exchange", one, tuple(ranks), target, target_ranks)


def _crossing(
    kind: str, source: Layout, source_ranks: tuple[int, ...], target: Layout, target_ranks: tuple[int, ...]
) -> StepAcross:
    step = StepAcross("reduce" if kind == "reduce" else "exchange", source, target, source_ranks, target_ranks)
    return step if step.moving_axes else replace(step, kind="local")


def _reduced_layouts(source: Layout) -> Iterator[Layout]:
    """Layouts of the source's mesh in which every element has one holder, or as few as cut dims allow, reduced."""
    for dim in sorted(range(len(source.shape)), key=lambda dim: source.max_local_shape[dim]):
        placements: list[Placement] = [
            placement if isinstance(placement, Shard) else Shard(dim) for placement in source.placements
        ]
        own_cuts = [axis for axis in source.order if isinstance(source.placements[axis], Shard)]
        order = own_cuts + [axis for axis in source.order if axis not in own_cuts]
        try:
            yield Layout(source.mesh_shape, placements, source.shape, order)
        except LayoutError:  # a dim whose cut is in units that these do not divide
            continue


def _coordinate(holding: Layout | FlatPieces, ranks: tuple[int, ...], rank: int) -> Coordinate | None:
    if rank not in ranks:
        return None
    layout = holding if isinstance(holding, Layout) else holding.layout
    return layout.coordinate(ranks.index(rank))


def _numel(messages: Sequence[Message]) -> int:
    return sum(message.numel for message in messages)
