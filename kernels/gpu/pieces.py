"""Division of boxes into pieces that a GPU moves well: of one unit width each, aligned by construction.

A unit is what one lane, or several of them together, loads at once: 1, 2, 4, 8 or 16 bytes; of a cast, elements. A
piece counts its lengths and strides in units; every address that it touches is a multiple of the width, provided that
each tensor starts at a multiple of 16 bytes. (Where one does not, its offset from there goes into the nest.)
"""

from collections.abc import Iterator, Sequence
from enum import Enum
from itertools import pairwise
from math import gcd, prod
from typing import NamedTuple

from tritondt.kernels.gpu.loop_nest import LoopNest, Operand, coalesce, cut, halves, span_bytes

WIDEST = 16
# A run is cut into an unaligned head, a wide body and a tail where the body has at least so many wide units.
_MIN_BODY_UNITS = 4
# Shorter sides leave most of a transposing tile empty.
_MIN_TILE_SIDE = 8
# Units of a run that are indexed together, and how full the last such group of a run may leave the others.
GROUP_UNITS = 64
_MIN_FILLED = 0.75
_MAX_WORDS = 2**31
# Units of more bytes are wide enough to be indexed one by one.
MAX_GROUPED_BYTES = 4
# A run that lies otherwise in the source than in the target is written in blocks of 16 bytes from this length on. By
# count of instructions, not timed: the ends of a run cost as many as 80 bytes of whole blocks.
_MIN_SHIFTED_BYTES = 96


class Kind(Enum):
    """Walk over the units of a piece."""

    GATHERED = "gathered"  # dense in the target: blocks of 16 bytes there, of rows that lie anywhere in the source
    JOINED = "joined"  # so too, where the rows of the target are made of those of several boxes
    RUNS = "runs"  # one by one in the order of the target
    GROUPS = "groups"  # so too, but narrow ones of long runs share the arithmetic of 64
    SHIFTED = "shifted"  # long runs of narrow ones, in blocks that are aligned in the target, whatever the source is
    TILES = "tiles"  # in squares, read along the source's dense loop and written along the target's
    WIDE_TILES = "wide tiles"  # squares whose both sides are read and written 16 bytes at a time


class Grain(NamedTuple):
    """Width of the units of a kernel: at most `widest` of what a nest counts in, indexed in words of `word` of them.

    `num_bytes` is the most that one of them takes in any tensor: 1 where a nest counts bytes. Where there is a
    `narrowest`, units are that or the widest, and nothing between. A kernel that `shifts` reads a block of the target
    from wherever it lies in the source.
    """

    widest: int = WIDEST
    word: int = 4
    num_bytes: int = 1
    narrowest: int | None = None
    shifts: bool = False

    def width(self, *numbers: int) -> int:
        """The widest unit whose length divides all these."""
        found = gcd(self.widest, *numbers)
        return found if found == self.widest or self.narrowest is None else self.narrowest


class Piece(NamedTuple):
    """Loops over units, innermost first, the first two of tiles being the target's and the source's dense ones.

    Offsets of operands are in bytes, strides in units. `ends` are of joined rows alone: the unit behind each source's
    part of a row.
    """

    kind: Kind
    width: int
    lengths: tuple[int, ...]
    operands: tuple[Operand, ...]
    ends: tuple[int, ...] = ()

    @property
    def num_units(self) -> int:
        """Units of one operand."""
        return prod(self.lengths)

    @property
    def num_bytes(self) -> int:
        """Bytes of one operand."""
        return self.num_units * self.width


def copy_pieces(nest: LoopNest) -> Iterator[Piece]:
    """Pieces of a copy: transposing tiles where the copy transposes, else runs as wide as they can be.

    Two rows of 19 floats between aligned places 128 bytes apart are 2 x 4 units of 16 bytes and 2 x 3 of 4. Longer
    rows of floats, behind each other in the target, are read and written where they lie, in blocks of 16 bytes.

    >>> from tritondt.kernels.boxes import CopyBox
    >>> from tritondt.kernels.gpu.loop_nest import copy_nest
    >>> rows = copy_nest(0, CopyBox(0, 0, 0, 0, 4, (2, 19), (32, 1), (64, 1)))
    >>> [(piece.width, piece.lengths) for piece in copy_pieces(rows)]
    [(16, (4, 2)), (4, (3, 2))]
    >>> rows = copy_nest(0, CopyBox(0, 0, 0, 0, 4, (2, 25), (32, 1), (25, 1)))
    >>> [(piece.kind.value, piece.width, piece.lengths) for piece in copy_pieces(rows)]
    [('shifted', 4, (25, 2))]
    """
    nest = coalesce(nest)
    tiles = _tiles(nest) if nest.num_bytes else None
    if tiles is None:
        yield from run_pieces(nest, Grain(shifts=True))
    elif _reaches_too_far(nest, Grain()):
        for half in halves(nest):
            yield from copy_pieces(half)
    else:
        yield tiles


def run_pieces(nest: LoopNest, grain: Grain) -> Iterator[Piece]:
    """Runs as wide as they can be in all operands at once."""
    nest = coalesce(nest)
    if nest.num_bytes == 0:
        return
    for part in _peeled(nest, grain):
        if _reaches_too_far(part, grain):
            for half in halves(part):
                yield from run_pieces(half, grain)
        else:
            yield _runs(part, grain)


def _outer_strides(nest: LoopNest) -> Iterator[int]:
    """Strides of the loops around the run."""
    end = -1 if nest.run_bytes > 1 else None
    for operand in nest.operands:
        yield from operand.strides[:end]


def _width(nest: LoopNest, grain: Grain) -> int:
    offsets = (operand.offset for operand in nest.operands)
    return grain.width(nest.run_bytes, *offsets, *_outer_strides(nest))


def _peeled(nest: LoopNest, grain: Grain) -> Sequence[LoopNest]:
    """Head, body and tail of the runs, where the body can be moved in wider units than the whole."""
    run, start = nest.run_bytes, nest.operands[0].offset
    apart = (operand.offset - start for operand in nest.operands)
    reach = grain.width(*apart, *_outer_strides(nest))
    if _is_shifted(nest, reach, grain):
        return [nest]
    head = -start % reach
    body = (run - head) // reach * reach
    if reach == _width(nest, grain) or body < _MIN_BODY_UNITS * reach:
        return [nest]
    ends = (0, head, head + body, run)
    dim = len(nest.lengths) - 1
    return [cut(nest, dim, start, stop) for start, stop in pairwise(ends) if start < stop]


def _is_shifted(nest: LoopNest, width: int, grain: Grain) -> bool:
    """Whether runs that could be moved in units of a width are moved in blocks of the target instead."""
    return grain.shifts and width <= MAX_GROUPED_BYTES and nest.run_bytes >= _MIN_SHIFTED_BYTES


def _runs(nest: LoopNest, grain: Grain) -> Piece:
    width, run = _width(nest, grain), nest.run_bytes
    loops = list(zip(nest.lengths, *(operand.strides for operand in nest.operands), strict=True))
    if run > 1:
        loops.pop()
    inner_to_outer = [(length, *(stride // width for stride in strides)) for length, *strides in reversed(loops)]
    if run > width or not inner_to_outer:
        inner_to_outer.insert(0, (run // width, *(1 for _ in nest.operands)))
    is_shifted = _is_shifted(nest, width, grain)
    kind = Kind.SHIFTED if is_shifted else _kind_of_runs(width * grain.num_bytes, run // width, grain)
    return _piece(kind, width, inner_to_outer, nest.operands)


def _kind_of_runs(unit_bytes: int, run_units: int, grain: Grain) -> Kind:
    if grain.shifts:  # what is long enough for groups is shifted, but for 48 to 95 single bytes
        return Kind.RUNS
    num_groups = -(-run_units // GROUP_UNITS)
    is_filled = run_units >= _MIN_FILLED * GROUP_UNITS * num_groups
    return Kind.GROUPS if unit_bytes <= MAX_GROUPED_BYTES and is_filled else Kind.RUNS


def _piece(kind: Kind, width: int, loops: Sequence[tuple[int, ...]], operands: Sequence[Operand]) -> Piece:
    lengths, *strides = zip(*loops, strict=True)
    walked = tuple(operand._replace(strides=own) for operand, own in zip(operands, strides, strict=True))
    return Piece(kind, width, lengths, walked)


def _tiles(nest: LoopNest) -> Piece | None:
    """Nest in transposing tiles; None where target and source are dense along one loop, or nearly so."""
    width = nest.run_bytes
    if width not in (1, 2, 4, 8) or width != _width(nest, Grain()):
        return None
    target, source = nest.operands
    loops = list(zip(nest.lengths, target.strides, source.strides, strict=True))
    if width > 1:
        loops.pop()
    loops = [(length, to // width, of // width) for length, to, of in reversed(loops)]
    columns = next((loop for loop in loops if loop[1] == 1 and loop[2] != 1), None)
    rows = next((loop for loop in loops if loop[2] == 1 and loop[1] != 1), None)
    if columns is None or rows is None or min(columns[0], rows[0]) < _MIN_TILE_SIDE:
        return None
    loops = [columns, rows, *(loop for loop in loops if loop is not columns and loop is not rows)]
    piece = _piece(Kind.TILES, width, loops, nest.operands)
    return piece._replace(kind=Kind.WIDE_TILES) if _has_wide_sides(piece) else piece


def _has_wide_sides(piece: Piece) -> bool:
    columns, rows, *_ = range(len(piece.lengths))
    target, source = piece.operands
    others = [stride for dim, stride in enumerate(target.strides) if dim != columns]
    others += [stride for dim, stride in enumerate(source.strides) if dim != rows]
    lanes = WIDEST // piece.width
    return (
        gcd(lanes, piece.lengths[columns], piece.lengths[rows], *others) == lanes
        and gcd(WIDEST, target.offset, source.offset) == WIDEST
    )


def _reaches_too_far(nest: LoopNest, grain: Grain) -> bool:
    """Whether an index of a word in the nest could need more than 31 bits; what is shifted is indexed by bytes."""
    width = _width(nest, grain)
    word = 1 if _is_shifted(nest, width, grain) else min(width, grain.word)
    reaches = (span_bytes(nest, operand) for operand in nest.operands)
    return max(nest.num_bytes, *reaches) > (_MAX_WORDS - WIDEST) * word
