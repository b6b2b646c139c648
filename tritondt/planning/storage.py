"""Places of a message's parts in a rank's storage: strided boxes, without any tensor."""

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

from tritondt.planning.flat_pieces import FlatPieces, Holding, Listed
from tritondt.planning.plan import Step, gathered_layouts
from tritondt.sharding import intervals as regions
from tritondt.sharding.intervals import Intervals, Region
from tritondt.sharding.layout import Coordinate, Layout
from tritondt.sharding.strides import dense_strides


class Block(NamedTuple):
    """A region and its place in storage, in elements; `lengths` are the lengths of the region, dim by dim."""

    region: Region
    lengths: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]

    @property
    def end(self) -> int:
        """The first element of the storage behind the block.

        >>> Block((), (2, 3), 1, (5, 1)).end, Block((), (2, 0), 1, (5, 1)).end
        (9, 0)
        """
        if 0 in self.lengths:
            return 0
        pairs = zip(self.lengths, self.strides, strict=True)
        return self.offset + 1 + sum((length - 1) * stride for length, stride in pairs)


class Joint(NamedTuple):
    """A box that several storages hold: its lengths, and per storage (offset, strides), in elements."""

    lengths: tuple[int, ...]
    places: tuple[tuple[int, tuple[int, ...]], ...]


def blocks(
    holding: Holding | Listed, coordinate: Coordinate, strides: Sequence[int] | None = None
) -> tuple[Block, ...]:
    """Blocks that a coordinate stores: a layout's local tensor with `strides` (default: dense), or flat pieces."""
    found, offset = [], 0
    for region in holding.regions(coordinate):
        lengths = tuple(regions.total(intervals) for intervals in region)
        own = dense_strides(lengths) if strides is None or not isinstance(holding, Layout) else tuple(strides)
        found.append(Block(region, lengths, offset, own))
        offset += prod(lengths)
    return tuple(found)


def rank_blocks(
    step: Step, rank: int, source_strides: Sequence[int] | None = None
) -> tuple[tuple[Block, ...], tuple[Block, ...]]:
    """Source and target blocks of a rank in a step; none on a side whose mesh it is not in.

    The blocks of a gather describe its target as flat.
    """
    source, target = step.source_coordinate(rank), step.target_coordinate(rank)
    if step.kind == "gather" and source is not None:
        assert isinstance(step.source, FlatPieces), f"a gather starts from flat pieces, not from {step.source}"
        flat, whole = gathered_layouts(step.source, source)
        part = (step.source.part(source),)
        return blocks(flat, part), blocks(whole, part)
    return (
        () if source is None else blocks(step.source, source, source_strides),
        () if target is None else blocks(step.target, target),
    )


def message_block(part: Region, offset: int = 0) -> Block:
    """Block of a part within its message: dense, row-major in global index order."""
    lengths = tuple(regions.total(intervals) for intervals in part)
    return Block(part, lengths, offset, dense_strides(lengths))


def joint_boxes(storages: Sequence[Sequence[Block]], part: Region) -> list[Joint]:
    """Fewest boxes that make up `part` and lie as one strided box in every storage."""
    holding = [_block_of(stored, part) for stored in storages]
    per_dim = [_joint_runs([block.region[dim] for block in holding], intervals) for dim, intervals in enumerate(part)]
    found = []
    for box in product(*per_dim):
        lengths = tuple(length for _, length in box)
        places = tuple(
            (
                block.offset
                + sum(starts[index] * stride for (starts, _), stride in zip(box, block.strides, strict=True)),
                block.strides,
            )
            for index, block in enumerate(holding)
        )
        found.append(Joint(lengths, places))
    return found


def _block_of(stored: Sequence[Block], part: Region) -> Block:
    for block in stored:
        if regions.intersect(block.region, part) == part:
            return block
    raise AssertionError(f"the part {part} lies in none of the blocks {stored}")


def _joint_runs(outers: Sequence[Intervals], inner: Intervals) -> list[tuple[list[int], int]]:
    """Runs of `inner` that are one run in every outer list: (position in each, length)."""
    runs: list[tuple[list[int], int]] = []
    for starts, length in _joint_positions(outers, inner):
        if runs and all(before + runs[-1][1] == start for before, start in zip(runs[-1][0], starts, strict=True)):
            runs[-1] = (runs[-1][0], runs[-1][1] + length)
        else:
            runs.append((starts, length))
    return runs


def _joint_positions(outers: Sequence[Intervals], inner: Intervals) -> Iterator[tuple[list[int], int]]:
    columns = [regions.positions(outer, inner) for outer in outers]
    for (start, stop), *starts in zip(inner, *columns, strict=True):
        yield list(starts), stop - start


def contiguous_offset(stored: Sequence[Block], part: Region) -> int | None:
    """Offset at which a part lies in storage as one run in message order, None where packing is needed."""
    block, step = _block_of(stored, part), 1
    offset = block.offset
    for outer, inner, stride in zip(reversed(block.region), reversed(part), reversed(block.strides), strict=True):
        run = _only_run(outer, inner)
        if run is None:
            return None
        start, length = run
        if length != 1 and stride != step:
            return None
        offset += start * stride
        step *= length
    return offset


def _only_run(outer: Intervals, inner: Intervals) -> tuple[int, int] | None:
    """Position and length of the one run that `inner` is in `outer`; None where it is several, or none."""
    if len(outer) == len(inner) == 1:
        return inner[0][0] - outer[0][0], inner[0][1] - inner[0][0]
    runs = _joint_runs([outer], inner)
    return (runs[0][0][0], runs[0][1]) if len(runs) == 1 else None
