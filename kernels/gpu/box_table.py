"""Tables of pieces: the numbers that a kernel reads, one table per launch.

A table is int64: how its tiles are divided into bands, a row per walk over a piece, then a row per slot but the first
of every one. A tile is what one program moves at a time. A row is padded to the most loops of any piece.

    bands   places in a band; two numbers that divide by them, two that divide by the number of bands; then the
            first place of every walk
    walk    tiles; tensor and offset of the target; mode; rows; units in a run; slots, and the
            cell of the second; then per loop: length, two numbers that divide by it, target stride; then the first slot
    slot    tensor and offset; then its stride per loop

The source of a copy is its only slot. Tensors are positions among the pointers of the launch. A row of units is a
unit, or a group of units of one run; the groups of a run are its innermost loop. Shifted pieces have two walks, one
over blocks of 16 bytes, one over the places of what lies before the first and behind the last whole block of a run;
everything in them counts bytes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

from tritondt.kernels.gpu.loop_nest import Operand
from tritondt.kernels.gpu.pieces import GROUP_UNITS, WIDEST, Kind, Piece

# What a kernel takes by value; a program selects among them, which costs it two instructions each.
MAX_POINTERS = 32
HEAD_CELLS = 8
LOOP_CELLS = 4
SLOT_HEAD_CELLS = 2
# A group is what 16 threads take from a run in 4 steps, and a block of BLOCK units is as many groups / 16.
GROUP_LANES = 16
GROUP_STEPS = GROUP_UNITS // GROUP_LANES
GROUPS_PER_BLOCK = 16
# Cells before the first places of the walks.
TABLE_CELLS = 5
# Walks that are looked at together.
SEARCHED = 32
_KINDS = list(Kind)
# A tile of shifted runs has BLOCK / 2 blocks of 16 bytes, each of which takes five registers.
SHIFTED_SHARE = 2
# One of gathered rows has BLOCK.
# The mode of a walk numbers its kind and the power of 2 that is its width; these are the first numbers. Blocks of
# shifted runs come from any byte, or from words.
RUNS, GROUPS, SHIFTED, EDGES, GATHERED, JOINED, TILES, WIDE_TILES, NUM_MODES = 0, 5, 8, 10, 13, 16, 19, 23, 27
_TILES = (Kind.TILES, Kind.WIDE_TILES)
_GATHERS = (Kind.GATHERED, Kind.JOINED)
_FIRST_MODES = {
    Kind.GATHERED: GATHERED,
    Kind.JOINED: JOINED,
    Kind.RUNS: RUNS,
    Kind.GROUPS: GROUPS,
    Kind.TILES: TILES,
    Kind.WIDE_TILES: WIDE_TILES,
}


class Pointer(NamedTuple):
    """One pointer of a launch: tensor number `tensor` of the targets or of the sources."""

    is_target: bool
    tensor: int


class Walk(NamedTuple):
    """Rows of a piece as a kernel takes them, by loops of `lengths`; `num_tiles` programs take one tile each.

    Strides are `scale` times the piece's; that of the innermost loop is `step` times as long.
    """

    mode: int
    lengths: tuple[int, ...]
    step: int
    scale: int
    run: int
    num_tiles: int


class BoxTable(NamedTuple):
    """Table of one launch: its cells, and the constants that the kernel is compiled for.

    `modes` has a bit for the mode of every walk; there are `num_walks`.
    """

    pointers: tuple[Pointer, ...]
    cells: tuple[int, ...]
    num_walks: int
    num_tiles: int
    num_dims: int
    max_slots: int
    modes: int

    @property
    def num_bisections(self) -> int:
        """Bisections to one walk among as many as one in 32 stands for.

        >>> [BoxTable((), (), num_walks, 0, 0, 0, 0).num_bisections for num_walks in (1, 32, 33, 65)]
        [0, 0, 1, 2]
        """
        return (_ceiling(self.num_walks, SEARCHED) - 1).bit_length()


def chooser(used: Sequence[Pointer]) -> Callable[[Sequence[int], Sequence[int]], tuple[int, ...]]:
    """Function from the addresses of all sources and all targets to those of the pointers in use, in their order.

    IndexError where one is missing.

    >>> chooser([Pointer(True, 0), Pointer(False, 1), Pointer(True, 1)])([10, 20], [30, 40])
    (30, 20, 40)
    """
    # Two or three, as most tables have, without a comprehension, which takes 0.3 us more.
    if [pointer.is_target for pointer in used] == [True, False]:
        (_, target), (_, source) = used
        return lambda source_ptrs, target_ptrs: (target_ptrs[target], source_ptrs[source])
    if len(used) == 3:
        (is_target_0, number_0), (is_target_1, number_1), (is_target_2, number_2) = used
        return lambda source_ptrs, target_ptrs: (
            (target_ptrs if is_target_0 else source_ptrs)[number_0],
            (target_ptrs if is_target_1 else source_ptrs)[number_1],
            (target_ptrs if is_target_2 else source_ptrs)[number_2],
        )
    return lambda source_ptrs, target_ptrs: tuple(
        [(target_ptrs if is_target else source_ptrs)[tensor] for is_target, tensor in used]
    )


def mode(kind: Kind, width: int) -> int:
    """Number of a kind and a width in a kernel.

    >>> mode(Kind.RUNS, 16), mode(Kind.TILES, 1), mode(Kind.WIDE_TILES, 8)
    (4, 19, 26)
    """
    return _FIRST_MODES[kind] + width.bit_length() - 1


def tile_side(kind: Kind, width: int) -> int:
    """Units along each side of a transposing tile."""
    return 64 if kind is Kind.WIDE_TILES and width == 2 else 32


def walks(piece: Piece, block: int) -> tuple[Walk, ...]:
    """A piece as a kernel takes it that moves `block` units at a time.

    Two runs of 25 floats touch up to 7 blocks of 16 bytes each, and have 4 places before the first whole one and 4
    behind.

    >>> from tritondt.kernels.gpu.loop_nest import Operand
    >>> operands = (Operand(0, 0, (1, 25)), Operand(0, 0, (1, 32)))
    >>> [walk.lengths for walk in walks(Piece(Kind.SHIFTED, 4, (25, 2), operands), 1024)]
    [(7, 2), (8, 2)]
    """
    kind, width, lengths, *_ = piece
    run, *outer = lengths
    if kind is Kind.SHIFTED:
        # The first byte of a run is the last of its block that is a multiple of the width, at worst.
        blocks = (_ceiling((WIDEST - width) + run * width, WIDEST), *outer)
        places = (2 * WIDEST // width, *outer)
        whole = Walk(SHIFTED + (width == 4), blocks, 0, width, run * width, _tiles_of(blocks, block // SHIFTED_SHARE))
        edges = Walk(EDGES + width.bit_length() - 1, places, 0, width, run * width, _tiles_of(places, block))
        return whole, edges
    if kind in _GATHERS:
        start = piece.operands[0].offset
        blocks = ((start + piece.num_bytes) // WIDEST - _ceiling(start, WIDEST),)
        num_tiles = _tiles_of(blocks, block)
        return (Walk(mode(kind, width), blocks, 0, width, run * width, num_tiles),)
    if kind is Kind.GROUPS:
        groups = (_ceiling(run, GROUP_UNITS), *outer)
        num_tiles = _tiles_of(groups, block // GROUPS_PER_BLOCK)
        return (Walk(mode(kind, width), groups, GROUP_UNITS, 1, run, num_tiles),)
    if kind is Kind.RUNS:
        return (Walk(mode(kind, width), lengths, 1, 1, run, _tiles_of(lengths, block)),)
    side = tile_side(kind, width)
    num_tiles = _ceiling(run, side) * _ceiling(outer[0], side) * prod(outer[1:])
    return (Walk(mode(kind, width), lengths, 1, 1, run, num_tiles),)


def _tiles_of(lengths: Sequence[int], rows: int) -> int:
    return _ceiling(prod(lengths), rows)


def division(divisor: int) -> tuple[int, int]:
    """`factor` and `shift` with n // divisor == ((n * factor >> 32) + n) >> shift for 0 <= n < 2^31.

    A GPU has no integer division; this is three instructions in place of some twenty (Granlund and
    Montgomery, Division by Invariant Integers using Multiplication, 1994).

    >>> factor, shift = division(7)
    >>> ((1_000_000 * factor >> 32) + 1_000_000) >> shift == 1_000_000 // 7
    True
    """
    shift = (divisor - 1).bit_length()
    return (2**32 * (2**shift - divisor)) // divisor + 1, shift


def by_pointers(pieces: Iterable[Piece]) -> list[tuple[tuple[Pointer, ...], list[Piece]]]:
    """Groups of pieces, widest runs first, each of which touches no more tensors than a kernel takes.

    Tiles are apart from runs: one kernel for both would take the registers of both.
    """
    ordered = sorted(pieces, key=lambda piece: (_KINDS.index(piece.kind), -piece.width))
    groups: list[tuple[dict[Pointer, None], list[Piece]]] = []
    for piece in ordered:
        touched = dict.fromkeys(_pointers(piece))
        if len(touched) > MAX_POINTERS:
            raise ValueError(
                f"a box touches {len(touched)} tensors; a kernel takes up to {MAX_POINTERS}, the target included"
            )
        is_apart = groups and (piece.kind in _TILES) != (groups[-1][1][-1].kind in _TILES)
        if not groups or is_apart or len(groups[-1][0] | touched) > MAX_POINTERS:
            groups.append(({}, []))
        groups[-1][0].update(touched)
        groups[-1][1].append(piece)
    return [(tuple(pointers), members) for pointers, members in groups]


def box_table(
    pointers: Sequence[Pointer], pieces: Sequence[Piece], block: int, num_dims: int | None = None
) -> BoxTable:
    """Table of a group of pieces, for a kernel that moves `block` units at a time.

    Rows have room for `num_dims` loops, or for as many as any piece has.
    """
    place = {pointer: number for number, pointer in enumerate(pointers)}
    num_dims = num_dims or max(len(piece.lengths) for piece in pieces)
    walked = [(piece, walk) for piece in pieces for walk in walks(piece, block)]
    num_bands = bands(walked)
    ends = list(accumulate(_ceiling(walk.num_tiles, num_bands) for _, walk in walked))
    start = TABLE_CELLS + len(walked)
    walk_cells = HEAD_CELLS + LOOP_CELLS * num_dims + SLOT_HEAD_CELLS + num_dims
    cells = [ends[-1], *division(ends[-1]), *division(num_bands), 0, *ends[:-1]]
    later: list[int] = []
    for piece, walk in walked:
        target = piece.operands[0]
        behind = start + len(walked) * walk_cells + len(later)
        cells += [walk.num_tiles, place[Pointer(True, target.tensor)], _start(piece), walk.mode]
        cells += [prod(walk.lengths), walk.run, len(piece.operands) - 1, behind]
        fill = _gathered_cells if piece.kind in _GATHERS else _walked_cells
        loops_and_slot, others = fill(piece, walk, num_dims, place)
        cells += loops_and_slot
        later += others
    return BoxTable(
        tuple(pointers),
        (*cells, *later),
        len(walked),
        ends[-1] * num_bands,
        num_dims,
        max(len(piece.operands) - 1 for piece in pieces),
        _union(1 << walk.mode for _, walk in walked),
    )


# What all walks together move of a band lies in the device's cache until the last of them comes to it.
_BAND_BYTES = 4 << 20
# Of longer rows few bytes are in lines that another walk touches too.
_MAX_BANDED_BYTES = 2048
# Places in all bands for each tile, at most: a walk has as many in every band.
_MAX_PLACES = 1.25
_MAX_PRODUCT = 2**30


def bands(walked: Sequence[tuple[Piece, Walk]], scale: int = 1) -> int:
    """Number of bands, in each of which all walks take their turns for as great a part of their tiles.

    Columns of one tensor share its lines: where one walk came behind the whole of the other, each line would go to
    memory and back for both. `scale` is how many times larger than what is walked a model takes it to be.
    """
    pieces = list(dict.fromkeys(piece for piece, _ in walked))
    short = sum(_moved_bytes(piece) for piece in pieces if _row_bytes(piece) <= _MAX_BANDED_BYTES)
    total = sum(map(_moved_bytes, pieces))
    if len(walked) == 1 or 2 * short < total or any(piece.kind in _TILES for piece in pieces):
        return 1
    num_tiles = sum(walk.num_tiles for _, walk in walked)
    # A kernel multiplies both in 31 bits.
    num_bands = max(min(total * scale // _BAND_BYTES, _MAX_PRODUCT // num_tiles), 1)
    while sum(_ceiling(walk.num_tiles, num_bands) for _, walk in walked) * num_bands > _MAX_PLACES * num_tiles:
        num_bands //= 2
    return num_bands


def _moved_bytes(piece: Piece) -> int:
    return piece.num_bytes * (2 if piece.kind is Kind.JOINED else len(piece.operands))


def _row_bytes(piece: Piece) -> int:
    """Bytes that are adjacent on both sides."""
    is_run = all(operand.strides[0] == 1 for operand in piece.operands)
    return piece.width * piece.lengths[0] if is_run else piece.width


def _start(piece: Piece) -> int:
    """Byte at which the walks of a piece start in the target."""
    start = piece.operands[0].offset
    return _ceiling(start, WIDEST) * WIDEST if piece.kind in _GATHERS else start


def _walked_cells(piece: Piece, walk: Walk, num_dims: int, place: Mapping[Pointer, int]) -> tuple[list[int], list[int]]:
    """Loops of a walk and its first slot, and its later slots."""
    target, *sources = piece.operands
    padding = num_dims - len(walk.lengths)
    cells, later = list[int](), list[int]()
    for length, stride in zip(walk.lengths, _strides(walk, target), strict=True):
        cells += [length, *division(length), stride]
    cells += [1, *division(1), 0] * padding
    for number, source in enumerate(sources):
        row = (place[Pointer(False, source.tensor)], source.offset, *_strides(walk, source), *[0] * padding)
        (later if number else cells).extend(row)
    return cells, later


def _gathered_cells(
    piece: Piece, walk: Walk, num_dims: int, place: Mapping[Pointer, int]
) -> tuple[list[int], list[int]]:
    """Bytes in a row, the numbers that divide by them, and bytes of the target before the first whole block.

    The slot of rows of one box has their stride. Joined rows have in its place the power of 2 that is the length of a
    step, and the number of steps in a row; behind the slots lie a cell for each step and three for each part of a row.
    """
    target, *sources = piece.operands
    padding = [0] * (num_dims - 2)
    cells = [walk.run, *division(walk.run), -target.offset % WIDEST, *[0] * (LOOP_CELLS * (num_dims - 1))]
    if piece.kind is Kind.GATHERED:
        (source,) = sources
        cells += [place[Pointer(False, source.tensor)], source.offset, 0, source.strides[1] * walk.scale, *padding]
        return cells, []
    starts: dict[int, int] = {}
    for source in sources:
        starts[source.tensor] = min(source.offset, starts.get(source.tensor, source.offset))
    slots = [(place[Pointer(False, tensor)], start) for tensor, start in starts.items()]
    ends = [end * walk.scale for end in piece.ends]
    bits = min(end - start for start, end in zip([0, *ends], ends, strict=False)).bit_length() - 1
    steps = _steps(ends, 1 << bits)
    cells += [*slots[0], bits, len(steps), *padding]
    parts = _parts(piece, walk, [source.offset - starts[source.tensor] for source in sources], list(starts))
    return cells, [*slots[-1], *steps, *parts]


def _steps(ends: Sequence[int], step: int) -> list[int]:
    """For each step of a row the part in which it begins, behind the byte at which that ends."""
    found, part = list[int](), 0
    for start in range(0, ends[-1], step):
        while ends[part] <= start:
            part += 1
        found.append(ends[part] << 32 | part)
    return found


def _parts(piece: Piece, walk: Walk, offsets: Sequence[int], tensors: Sequence[int]) -> list[int]:
    """For each part of a row, and for what follows it, the byte before its first row, its stride, and its tensor."""
    ends = [end * walk.scale for end in piece.ends]
    strides = [source.strides[1] * walk.scale for source in piece.operands[1:]]
    numbers = [tensors.index(source.tensor) for source in piece.operands[1:]]
    befores = [offset - start for offset, start in zip(offsets, [0, *ends], strict=False)]
    cells = list[int]()
    for part, end in enumerate(ends):
        later = (part + 1) % len(ends)
        # Behind the last part comes the first one of the next row.
        before = befores[later] + (strides[0] - walk.run if later == 0 else 0)
        cells += [_halves(before, befores[part]), _halves(strides[later], strides[part])]
        cells.append(_halves(end, numbers[later] << 1 | numbers[part]))
    return cells


def _halves(high: int, low: int) -> int:
    """Two numbers of 32 bits in one of 64."""
    return (high << 32) + (low & 0xFFFFFFFF)


def _strides(walk: Walk, operand: Operand) -> tuple[int, ...]:
    first, *others = (stride * walk.scale for stride in operand.strides)
    return (first * walk.step, *others)


def _pointers(piece: Piece) -> Iterator[Pointer]:
    target, *sources = piece.operands
    yield Pointer(True, target.tensor)
    yield from (Pointer(False, source.tensor) for source in sources)


def _union(bits: Iterable[int]) -> int:
    found = 0
    for bit in bits:
        found |= bit
    return found


def _ceiling(count: int, size: int) -> int:
    return -(-count // size)
