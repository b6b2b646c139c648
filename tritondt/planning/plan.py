"""Plans: redistributions as tuples of steps, each a plain value that says what moves and how.

A plan depends on the two layouts, the element kind and the agreed costs, never on a rank, so that every rank
makes the same one. `Step.exchange(coordinate)` gives one rank's part in a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Literal

from tritondt.planning.collectives import Collective
from tritondt.planning.exchange import Exchange, Message, Route, exchange, exchange_across, with_peers
from tritondt.planning.flat_pieces import FlatPieces, Holding, Listed
from tritondt.sharding.coordinates import coordinate_at
from tritondt.sharding.layout import Coordinate, Layout
from tritondt.sharding.placement import Partial, ReduceOp, Replicate, Shard

# Ranks of steps between meshes whose messages are listed to know what moves.
MAX_COUNTED = 1024
StepKind = Literal["exchange", "reduce", "gather", "local", "scale"]


@dataclass(frozen=True)
class Step:
    """One step of a plan, of kind exchange, reduce, gather, local or scale.

    exchange: every rank receives what it lacks. reduce: terms of a Partial are added on arrival. gather: flat
    pieces come together in the target. local: nobody sends anything. scale: terms of a sum become terms of a
    mean, or the reverse. Where there is a `collective`, NCCL does what the step says, and not messages of our own.
    Source and target lie on ranks of the world in row-major order of their meshes, or, without ranks, both at the
    positions of one mesh.
    """

    kind: StepKind
    source: Holding | Listed
    target: Holding | Listed
    collective: Collective | None = field(default=None, kw_only=True)
    source_ranks: tuple[int, ...] | None = field(default=None, kw_only=True)
    target_ranks: tuple[int, ...] | None = field(default=None, kw_only=True)

    @cached_property
    def crosses(self) -> bool:
        """Whether source and target are on different meshes."""
        return self.source_ranks != self.target_ranks or self.source.mesh_shape != self.target.mesh_shape

    @cached_property
    def route(self) -> Route:
        """Servers and receivers of this step; a gather has a route of its own."""
        source, target = self.holdings
        if self.crosses:
            return Route(source, target, self.source_ranks, self.target_ranks)
        return Route(source, target)

    @property
    def holdings(self) -> tuple[Holding, Holding]:
        """Source and target of a step that knows no hosts."""
        assert isinstance(self.source, Holding), f"{self} starts from {self.source}, which has no route"
        assert isinstance(self.target, Holding), f"{self} ends in {self.target}, which has no route"
        return self.source, self.target

    @cached_property
    def ranks(self) -> Sequence[int]:
        """Ranks of either mesh, ascending."""
        return _either(self.source_ranks, self.target_ranks, self.source.mesh_shape)

    def source_coordinate(self, rank: int) -> Coordinate | None:
        """Coordinate of a rank in the source's mesh, None outside of it."""
        return _coordinate(self.source, self.source_ranks, rank)

    def target_coordinate(self, rank: int) -> Coordinate | None:
        """Coordinate of a rank in the target's mesh, None outside of it."""
        return _coordinate(self.target, self.target_ranks, rank)

    @property
    def target_layout(self) -> Layout:
        """Target of the step, or the layout that its flat pieces are cut from."""
        if isinstance(self.target, FlatPieces):
            return self.target.layout
        assert isinstance(self.target, Layout), f"{self} ends in {self.target}, which is cut from no layout"
        return self.target

    def local_shape(self, coordinate: Coordinate) -> tuple[int, ...]:
        """Shape of the tensor that the step writes at a coordinate, around flat pieces where it ends in such."""
        return self.target_layout.local_shape(coordinate)

    @cached_property
    def reduce_op(self) -> ReduceOp | None:
        """Operation of a reduce step on its terms, None for other steps; avg is a sum with a divisor."""
        if self.kind != "reduce":
            return None
        op = self._partial_op(self.route.reduced_axes[0])
        return "sum" if op == "avg" else op

    @cached_property
    def divisor(self) -> int:
        """Divisor of the reduced sum, applied once."""
        if self.kind != "reduce":
            return 1
        layout = self.route.source_layout
        return prod(layout.mesh_shape[axis] for axis in self.route.reduced_axes if self._partial_op(axis) == "avg")

    def divisor_of(self, is_of_float16: bool) -> int:
        """Divisor of the sums of this step, whose messages are of float16 or of another dtype."""
        return self.divisor

    @cached_property
    def scale(self) -> tuple[int, int]:
        """Factor and divisor of a scale step: a term of a mean of n is n times that of a sum."""
        layout, target = self.route.source_layout, self.route.target_layout
        changed = [axis for axis in layout.axes_where(Partial) if layout.placements[axis] != target.placements[axis]]
        factor = prod(layout.mesh_shape[axis] for axis in changed if self._partial_op(axis) == "sum")
        divisor = prod(layout.mesh_shape[axis] for axis in changed if self._partial_op(axis) == "avg")
        return factor, divisor

    @cached_property
    def fill_op(self) -> ReduceOp | None:
        """Op whose identity fills the elements that no rank writes; set where an axis becomes Partial."""
        if self.kind not in ("exchange", "local") or not isinstance(self.target, Layout):
            return None
        source, target = self.route.source_layout, self.target
        for axis, placement in enumerate(target.placements):
            new = isinstance(placement, Partial) and not isinstance(source.placements[axis], Partial)
            if new and (axis in self.route.single_axes or axis in self.route.kept_axes):
                assert isinstance(placement, Partial), f"axis {axis} of {target} is no longer Partial"
                return placement.reduce_op
        return None

    @cached_property
    def moving_axes(self) -> tuple[int, ...]:
        """Source axes along which ranks may talk; between meshes all of them, or none where nobody lacks anything."""
        if self.kind in ("local", "scale"):
            return ()
        if self.crosses:
            is_counted = len(self.ranks) <= MAX_COUNTED
            return () if is_counted and not any(self.received_elements) else tuple(range(len(self.source.mesh_shape)))
        if isinstance(self.source, FlatPieces):
            return self.source.axes
        route = self.route
        fixed = {*route.replica_axes, *route.kept_axes}
        for dim in range(len(route.source_layout.shape)):
            fixed.update(common_cuts(route.source_layout, route.target_layout, dim))
        if isinstance(self.target, FlatPieces):
            fixed -= {axis for axis in self.target.axes if axis in route.reduced_axes}
        return tuple(axis for axis in range(len(route.source_layout.mesh_shape)) if axis not in fixed)

    @cached_property
    def received_elements(self) -> tuple[int, ...]:
        """Elements that each of `ranks` receives, from a list of all messages."""
        return tuple(sum(message.numel for message in self.exchange_of(rank).receives) for rank in self.ranks)

    def exchange_of(self, rank: int) -> Exchange:
        """Sends, receives and keeps of a rank in this step; peers are ranks as well."""
        if self.crosses:
            assert self.source_ranks is not None, f"{self} is between meshes without ranks"
            assert self.target_ranks is not None, f"{self} is between meshes without ranks"
            source, target = self.holdings
            return exchange_across(source, self.source_ranks, target, self.target_ranks, rank)
        coordinate = self.source_coordinate(rank)
        if coordinate is None:
            return Exchange((), (), ())
        found = self.exchange(coordinate)
        return found if self.source_ranks is None else with_peers(found, self.source_ranks)

    def fill_op_of(self, rank: int) -> ReduceOp | None:
        """Op whose identity fills the target of a rank; between meshes of those alone that take nothing."""
        if not self.crosses:
            return self.fill_op
        coordinate = self.target_coordinate(rank)
        if coordinate is None or not self.route.takes_nothing(coordinate):
            return None
        placements = self.route.target_layout.placements
        return next(placement.reduce_op for placement in placements if isinstance(placement, Partial))

    def exchange(self, coordinate: Coordinate) -> Exchange:
        """Sends, receives and keeps of the rank at `coordinate` on one mesh; peers are mesh positions."""
        if self.kind == "scale":
            return Exchange((), (), ())
        if self.kind != "gather":
            return exchange(self.route.source, self.route.target, coordinate)
        assert isinstance(self.source, FlatPieces), f"a gather starts from flat pieces, not from {self.source}"
        flat, whole = gathered_layouts(self.source, coordinate)
        found = exchange(flat, whole, (self.source.part(coordinate),))
        return Exchange(
            tuple(self._at_position(message, coordinate) for message in found.sends),
            tuple(self._at_position(message, coordinate) for message in found.receives),
            found.keeps,
        )

    def _at_position(self, message: Message, coordinate: Coordinate) -> Message:
        assert isinstance(self.source, FlatPieces), f"a gather starts from flat pieces, not from {self.source}"
        peer = self.source.coordinate_of_part(coordinate, message.peer)
        return Message(self.source.layout.position(peer), message.parts)

    def _partial_op(self, axis: int) -> ReduceOp:
        placement = self.route.source_layout.placements[axis]
        assert isinstance(placement, Partial), f"axis {axis} of {self.source} is not Partial"
        return placement.reduce_op

    def __str__(self) -> str:
        kind = self.kind if self.collective is None else self.collective.kind
        return f"{kind} {self.source} -> {self.target}"


def _either(
    source_ranks: tuple[int, ...] | None, target_ranks: tuple[int, ...] | None, mesh_shape: tuple[int, ...]
) -> Sequence[int]:
    """Ranks of either side, ascending; without ranks the positions of the mesh."""
    if source_ranks is None or target_ranks is None:
        return range(prod(mesh_shape))
    return sorted({*source_ranks, *target_ranks})


def _coordinate(holding: Holding | Listed, ranks: tuple[int, ...] | None, rank: int) -> Coordinate | None:
    if ranks is None:
        return coordinate_at(rank, holding.mesh_shape)
    return coordinate_at(ranks.index(rank), holding.mesh_shape) if rank in ranks else None


def gathered_layouts(pieces: FlatPieces, coordinate: Coordinate) -> tuple[Layout, Layout]:
    """Layouts of the flat local tensor that a gather completes: cut among its holders, and whole at each."""
    length = (prod(pieces.layout.local_shape(coordinate)),)
    mesh_shape = (pieces.parts,)
    return Layout(mesh_shape, (Shard(0),), length), Layout(mesh_shape, (Replicate(),), length)


def common_cuts(source: Layout, target: Layout, dim: int) -> list[int]:
    """Leading axes that cut `dim` alike before and after, so that their pieces stay where they are."""
    found = []
    for axis, target_axis in zip(source.axes_of_dim[dim], target.axes_of_dim[dim], strict=False):
        if axis != target_axis or source.placements[axis] != target.placements[axis]:
            break
        found.append(axis)
    return found


def moves_nothing(source: Layout, target: Layout) -> bool:
    """Whether every rank, whatever its coordinate, holds all that it needs already."""
    route = Route(source, target)
    if route.reduced_axes:
        return False
    for dim, axes in enumerate(source.axes_of_dim):
        rest = axes[len(common_cuts(source, target, dim)) :]
        if any(axis not in route.kept_axes for axis in rest):
            return False
    return True


@dataclass(frozen=True)
class Plan:
    """Steps that take `source` to `target`, on one mesh or from some ranks to others; none where nothing changes."""

    source: Layout
    target: Layout
    steps: tuple[Step, ...]
    source_ranks: tuple[int, ...] | None = None
    target_ranks: tuple[int, ...] | None = None

    @property
    def ranks(self) -> Sequence[int]:
        """Ranks of either mesh, ascending, or the positions of the one."""
        return _either(self.source_ranks, self.target_ranks, self.source.mesh_shape)

    def coordinate(self, rank: int) -> Coordinate:
        """Coordinate of a rank in the target's mesh, or in the source's, or () outside of both."""
        sides = (self.target, self.target_ranks), (self.source, self.source_ranks)
        return next(filter(None, (_coordinate(*side, rank) for side in sides)), ())

    def __str__(self) -> str:
        return f"{self.source} -> {self.target}: " + ("; ".join(map(str, self.steps)) or "nothing to do")
