"""Bytes that a table's tiles move between a GPU's cache and its memory, by a model of the cache; in plain Python.

Tiles run one after the other in the order of their numbers. The cache holds granules of 64 bytes, and drops one at
random for each that is new to a full one. A granule that was written in part only is read before it is dropped. The
model knows no sectors, no partitions of a cache, no tiles that run side by side, and no time: what takes instructions
rather than bytes costs it nothing.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import prod
from random import Random
from typing import NamedTuple

from tritondt.kernels.gpu.box_table import EDGES, SHIFTED, Walk, bands, walks
from tritondt.kernels.gpu.loop_nest import Operand
from tritondt.kernels.gpu.pieces import WIDEST, Kind, Piece

GRANULE_BYTES = 64
# Tensors lie so far apart.
_APART = 1 << 48


class Cache(NamedTuple):
    """Bytes of a cache that data has."""

    num_bytes: int


# What was found for an H200, of 50 MB, by the bytes that a profiler counted there: see docs/performance.md.
H200 = Cache(32 << 20)


class Move(NamedTuple):
    """Bytes that lie behind each other in the source and in the target."""

    source: int
    target: int
    num_bytes: int


class Traffic(NamedTuple):
    """Bytes read from memory and written to it, and the least that could be: each byte once."""

    read: int
    written: int
    least: int

    @property
    def over_least(self) -> float:
        """All bytes over the least."""
        return (self.read + self.written) / self.least


class _Memory:
    """A cache in front of a memory, whose traffic it counts."""

    def __init__(self, num_granules: int) -> None:
        self._room, self._draw = num_granules, Random(1)
        self._place: dict[int, int] = {}
        self._held: list[int] = []
        # Bytes written of a granule, and whether the others were read.
        self._written: dict[int, int] = {}
        self._is_whole: set[int] = set()
        self.read = self.written = 0

    def load(self, start: int, num_bytes: int) -> None:
        for granule in range(start // GRANULE_BYTES, (start + num_bytes - 1) // GRANULE_BYTES + 1):
            if granule not in self._is_whole and self._written.get(granule, 0) < GRANULE_BYTES:
                self.read += GRANULE_BYTES
                self._is_whole.add(granule)
            self._keep(granule)

    def store(self, start: int, num_bytes: int) -> None:
        end = start + num_bytes
        for granule in range(start // GRANULE_BYTES, (end - 1) // GRANULE_BYTES + 1):
            part = min(end, (granule + 1) * GRANULE_BYTES) - max(start, granule * GRANULE_BYTES)
            self._written[granule] = self._written.get(granule, 0) + part
            self._keep(granule)

    def flush(self) -> None:
        while self._held:
            self._drop(len(self._held) - 1)

    def _keep(self, granule: int) -> None:
        if granule in self._place:
            return
        if len(self._held) == self._room:
            self._drop(self._draw.randrange(self._room))
        self._place[granule] = len(self._held)
        self._held.append(granule)

    def _drop(self, place: int) -> None:
        granule, last = self._held[place], self._held.pop()
        if last != granule:
            self._held[place], self._place[last] = last, place
        del self._place[granule]
        written = self._written.pop(granule, 0)
        if written:
            self.read += GRANULE_BYTES if written < GRANULE_BYTES and granule not in self._is_whole else 0
            self.written += GRANULE_BYTES
        self._is_whole.discard(granule)


def traffic(
    pieces: Sequence[Piece], block: int, cache: Cache, *, num_bands: int | None = None, scale: int = 1
) -> Traffic:
    """Traffic of the pieces of a copy with tiles of `block` units, in as many bands as a table has, or in so many.

    In a model of everything a `scale`th as large there are as many as of what it stands for.
    """
    walked = [(piece, walk) for piece in pieces for walk in walks(piece, block)]
    memory = _Memory(cache.num_bytes // GRANULE_BYTES)
    for number, tile in tiles(walked, bands(walked, scale) if num_bands is None else num_bands):
        piece, walk = walked[number]
        for move in moves(piece, walk, tile, block):
            memory.load(move.source, move.num_bytes)
            memory.store(move.target, move.num_bytes)
    memory.flush()
    return Traffic(memory.read, memory.written, 2 * sum(piece.num_bytes for piece in pieces))


def tiles(walked: Sequence[tuple[Piece, Walk]], num_bands: int) -> Iterator[tuple[int, int]]:
    """Number of a walk and number of its tile, in the order in which `find_piece` of a kernel takes them.

    >>> walk = Walk(4, (64,), 1, 1, 64, 4)
    >>> piece = Piece(Kind.RUNS, 16, (64,), ())
    >>> list(tiles([(piece, walk), (piece, walk)], 2))
    [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)]
    """
    for band in range(num_bands):
        for number, (_, walk) in enumerate(walked):
            start, end = (turn * walk.num_tiles // num_bands for turn in (band, band + 1))
            yield from ((number, tile) for tile in range(start, end))


def moves(piece: Piece, walk: Walk, tile: int, block: int) -> Iterator[Move]:
    """The bytes that a tile of a copy moves; TILES are not modeled."""
    if piece.kind in (Kind.GATHERED, Kind.JOINED):
        return _gathered_moves(piece, tile, block)
    if piece.kind is Kind.SHIFTED:
        return _shifted_moves(piece, walk, tile, block)
    if piece.kind is Kind.RUNS:
        return _run_moves(piece, tile * block, min((tile + 1) * block, prod(walk.lengths)))
    raise ValueError(f"a piece of {piece.kind.value}; the model has runs, shifted and gathered ones")


def _address(operand: Operand, is_target: bool) -> int:
    return (2 * operand.tensor + is_target + 1) * _APART + operand.offset


def _outer(piece: Piece, row: int) -> tuple[int, int]:
    """Source and target of the beginning of a row, by the number of all loops but the first."""
    target, source = piece.operands
    to, of = _address(target, True), _address(source, False)
    for length, to_step, of_step in zip(piece.lengths[1:], target.strides[1:], source.strides[1:], strict=True):
        row, index = divmod(row, length)
        to += index * to_step * piece.width
        of += index * of_step * piece.width
    return of, to


def _run_moves(piece: Piece, start: int, end: int) -> Iterator[Move]:
    """Units from one number to another."""
    target, source = piece.operands
    is_run, width, run = target.strides[0] == source.strides[0] == 1, piece.width, piece.lengths[0]
    while start < end:
        row, index = divmod(start, run)
        count = min(run - index, end - start) if is_run else 1
        of, to = _outer(piece, row)
        yield Move(of + index * source.strides[0] * width, to + index * target.strides[0] * width, count * width)
        start += count


def _shifted_moves(piece: Piece, walk: Walk, tile: int, block: int) -> Iterator[Move]:
    """Whole blocks of runs, or what lies before and behind them."""
    is_edge = walk.mode >= EDGES
    per_tile = block if is_edge else block // 2
    per_run = walk.lengths[0]
    assert walk.mode >= SHIFTED
    for row in range(tile * per_tile // per_run, -(-min((tile + 1) * per_tile, prod(walk.lengths)) // per_run)):
        of, to = _outer(piece, row)
        first, last = -to % WIDEST, (walk.run - (to + walk.run) % WIDEST)
        if is_edge:
            yield from (
                Move(of + at, to + at, count) for at, count in ((0, first), (last, walk.run - last)) if count > 0
            )
            continue
        index = tile * per_tile - row * per_run
        start = max(first, (to & -WIDEST) + max(index, 0) * WIDEST - to)
        end = min(last, (to & -WIDEST) + min(index + per_tile, per_run) * WIDEST - to)
        if start < end:
            yield Move(of + start, to + start, end - start)


def _gathered_moves(piece: Piece, tile: int, block: int) -> Iterator[Move]:
    """Blocks of dense rows, by the parts that come from one source each."""
    target, *sources = piece.operands
    width = piece.width * piece.lengths[0]
    head = -target.offset % WIDEST
    whole = (piece.num_bytes - head) // WIDEST * WIDEST
    start, end = (head + min(turn * block * WIDEST, whole) for turn in (tile, tile + 1))
    parts = list(accumulate((end_of * piece.width for end_of in piece.ends), lambda _, end_of: end_of, initial=0))
    while start < end:
        row, column = divmod(start, width)
        part = next(number for number in range(len(sources)) if column < parts[number + 1])
        count = min(parts[part + 1] - column, end - start)
        source = sources[part]
        of = _address(source, False) + row * source.strides[1] * piece.width + column - parts[part]
        yield Move(of, _address(target, True) + start, count)
        start += count
