"""Copies of strided boxes of any dtype: packed and unpacked by one kernel, in one launch."""

from collections.abc import Iterable, Sequence

import torch
import triton
import triton.language as tl

from tritondt.kernels.arguments import check_tensors, common_device
from tritondt.kernels.boxes import CopyBox
from tritondt.kernels.gpu import box_table
from tritondt.kernels.gpu.device_table import DeviceTable, Kernel, Sides
from tritondt.kernels.gpu.gathered_rows import bits_from, copy_joined_rows, copy_rows
from tritondt.kernels.gpu.gathers import gathers
from tritondt.kernels.gpu.indexing import (
    HEAD,
    LOOP,
    SLOT_HEAD,
    address_at,
    elements_at,
    find_piece,
    first_slot,
    source_units,
    split_rows,
    target_units,
    units_of_tile,
)
from tritondt.kernels.gpu.loop_nest import LoopNest, coalesce, copy_nest
from tritondt.kernels.gpu.pieces import Piece, copy_pieces
from tritondt.kernels.gpu.signals import HEAD as SIGNALS_HEAD
from tritondt.kernels.gpu.signals import publish_slots, slots_are_ready
from tritondt.kernels.gpu.specialization import ALL_TILES, COPY_RUNS, SHORT_ROWS, WIDE_RUNS
from tritondt.kernels.gpu.tuning import Choice
from tritondt.kernels.signals import SlotTensors

TILES_BIT = tl.constexpr(1 << box_table.TILES)
WIDE = tl.constexpr(WIDE_RUNS)
SHIFTED = tl.constexpr(box_table.SHIFTED)
EDGES = tl.constexpr(box_table.EDGES)
TILES = tl.constexpr(box_table.TILES)
WIDE_TILES = tl.constexpr(box_table.WIDE_TILES)
NUM_MODES = tl.constexpr(box_table.NUM_MODES)
GATHERED = tl.constexpr(box_table.GATHERED)
JOINED = tl.constexpr(box_table.JOINED)
SHIFTED_SHARE = tl.constexpr(box_table.SHIFTED_SHARE)


class DeviceCopyTable(DeviceTable):
    """Boxes to copy on a device, prepared once and run many times; the counterpart of `tritondt._C.CopyTable`.

    A box need not be aligned to its itemsize. With `is_aligned` every tensor is promised to start at a multiple of
    16 bytes, and one that does not is refused; without, each is taken as it is. `max_ctas` bounds how much of the
    device a copy takes; `choice` replaces what tuning.json says. `slots` are tensors that are peers' slots.
    """

    def __init__(
        self,
        boxes: Sequence[CopyBox],
        device: torch.device | str,
        *,
        is_aligned: bool = False,
        max_ctas: int | None = None,
        choice: Choice | None = None,
        slots: SlotTensors | None = None,
    ) -> None:
        nests = [copy_nest(position, box) for position, box in enumerate(boxes)]
        self._num_bytes = sum(nest.num_bytes for nest in nests)
        super().__init__(
            copies() if slots is None else slot_copies(),
            [coalesce(nest) for nest in nests if nest.num_bytes],
            torch.device(device),
            sides=Sides(),
            is_aligned=is_aligned,
            choice=choice,
            max_ctas=max_ctas,
            slots=slots,
        )

    @property
    def num_bytes(self) -> int:
        """Bytes that one run writes."""
        return self._num_bytes

    def pieces(self, nests: Iterable[LoopNest]) -> list[Piece]:
        """Transposing tiles, and runs as wide as they can be."""
        return [piece for nest in nests for piece in copy_pieces(nest)]

    def all_pieces(self, nests: Iterable[LoopNest]) -> list[Piece]:
        """Short rows that fill their target together, and the pieces of each nest that is left."""
        gathered, left = gathers(nests)
        return [*gathered, *super().all_pieces(left)]


_CLASSES = (WIDE_RUNS, SHORT_ROWS, COPY_RUNS, ALL_TILES)


def copies() -> Kernel:
    """The kernel of all copies."""
    return Kernel(copy_kernel, "copy", (), {"IS_BOUNDED": True}, {}, _CLASSES)


def slot_copies() -> Kernel:
    """The kernel of copies to peers' slots and from them."""
    return Kernel(slot_copy_kernel, "copy", (), {}, {}, _CLASSES)


def copy_boxes(
    sources: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    boxes: Sequence[CopyBox],
    *,
    max_ctas: int | None = None,
    choice: Choice | None = None,
) -> None:
    """Copies every box from its source to its target, byte for byte, as `tritondt.kernels.reference` does.

    `sources` and `targets` are lists of tensors on one device, of any shapes and strides; `boxes` name them by number,
    with offsets and strides in elements from each tensor's first element, counted in words of the box's `itemsize`
    bytes. Runs on the device's current stream. `max_ctas` bounds the number of programs, `choice` replaces what
    tuning.json says. Raises ValueError for tensors on different devices, a box that leaves its tensor and target boxes
    that overlap. To run the same boxes again, make a DeviceCopyTable, which checks none of it.

    Example: columns 1 and 2 of a 2x3 tensor, packed behind one word that nobody writes.

    >>> source = torch.tensor([[0, 1, 2], [3, 4, 5]], dtype=torch.int32)
    >>> target = torch.full((5,), -1, dtype=torch.int32)
    >>> copy_boxes([source], [target], [CopyBox(0, 0, 1, 1, 4, (2, 2), (3, 1), (2, 1))])
    >>> target.tolist()
    [-1, 1, 2, 4, 5]
    """
    device = common_device(sources, targets)
    nests = [copy_nest(position, box) for position, box in enumerate(boxes)]
    check_tensors(sources, targets, boxes)
    if not any(nest.num_bytes for nest in nests):
        return
    table = DeviceCopyTable(boxes, device, max_ctas=max_ctas, choice=choice)
    table.run([tensor.data_ptr() for tensor in sources], [tensor.data_ptr() for tensor in targets])


@triton.jit(do_not_specialize=("num_walks", "num_bisections", "num_tiles"))
def copy_kernel(
    table,
    pointers,
    num_walks,
    num_bisections,
    num_tiles,
    NUM_POINTERS: tl.constexpr,
    NUM_DIMS: tl.constexpr,
    MODES: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_BOUNDED: tl.constexpr,
):
    """Copies tile after tile of the pieces in `table`; has a branch for every mode in MODES, and no other."""
    _copy_tiles(
        *(table, pointers, num_walks, num_bisections, num_tiles),
        *(NUM_POINTERS, NUM_DIMS, MODES, BLOCK, IS_BOUNDED),
    )


@triton.jit(do_not_specialize=("num_cells", "num_walks", "num_bisections", "num_tiles"))
def slot_copy_kernel(
    table,
    pointers,
    num_cells,
    num_walks,
    num_bisections,
    num_tiles,
    NUM_POINTERS: tl.constexpr,
    NUM_DIMS: tl.constexpr,
    MODES: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_LANES: tl.constexpr,
    BY_STORE: tl.constexpr,
):
    """Awaits peers, does what `copy_kernel` does, and publishes; `num_cells` of `table` are before the signals."""
    signals = table + num_cells
    if slots_are_ready(signals, NUM_POINTERS, NUM_LANES, BY_STORE):
        _copy_tiles(
            # The compiler knows no starred tuples.
            *(table, pointers + (signals + SIGNALS_HEAD,), num_walks, num_bisections, num_tiles),  # noqa: RUF005
            *(NUM_POINTERS, NUM_DIMS, MODES, BLOCK, True),
        )
    publish_slots(signals, NUM_POINTERS, NUM_LANES, BY_STORE)


@triton.jit
def _copy_tiles(
    table,
    pointers,
    num_walks,
    num_bisections,
    num_tiles,
    NUM_POINTERS: tl.constexpr,
    NUM_DIMS: tl.constexpr,
    MODES: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_BOUNDED: tl.constexpr,
):
    """Copies tile after tile, each program every so many; one each where there are as many programs as tiles.

    A loop keeps ten registers.
    """
    if IS_BOUNDED:
        for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
            _copy_one(table, pointers, num_walks, num_bisections, tile, NUM_POINTERS, NUM_DIMS, MODES, BLOCK)
    else:
        tile = tl.program_id(0)
        _copy_one(table, pointers, num_walks, num_bisections, tile, NUM_POINTERS, NUM_DIMS, MODES, BLOCK)


@triton.jit
def _copy_one(
    table,
    pointers,
    num_walks,
    num_bisections,
    tile,
    NUM_POINTERS: tl.constexpr,
    NUM_DIMS: tl.constexpr,
    MODES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copies a tile, if it has a mode of those in MODES."""
    piece, own_tile, mode = find_piece(table, num_walks, num_bisections, tile, NUM_DIMS)
    slot = first_slot(piece, NUM_DIMS)
    target = address_at(pointers, piece + 1, NUM_POINTERS)
    source = address_at(pointers, slot, NUM_POINTERS)
    # Half a tile at a time where there are many modes: what they all read of a piece takes registers. Tables of many
    # dims have smaller tiles.
    PARTS: tl.constexpr = 1 if MODES == WIDE or MODES >= TILES_BIT or NUM_DIMS > 4 else 2
    for candidate in tl.static_range(NUM_MODES):
        if (MODES >> candidate) & 1:
            _copy_if(
                *(mode, candidate, table, pointers, piece, slot + SLOT_HEAD, own_tile, source, target),
                *(NUM_POINTERS, NUM_DIMS, BLOCK, PARTS),
            )


@triton.jit
def _copy_if(
    mode,
    MODE: tl.constexpr,
    table,
    pointers,
    piece,
    slot_strides,
    tile,
    source,
    target,
    NUM_POINTERS: tl.constexpr,
    NUM_DIMS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Copies a tile if it has the mode MODE."""
    if mode == MODE:
        if MODE < SHIFTED:
            _copy_units(piece, slot_strides, tile, source, target, 2**MODE, NUM_DIMS, BLOCK, PARTS)
        elif MODE < EDGES:
            _copy_blocks(
                *(piece, slot_strides, tile, source, target, MODE == SHIFTED, NUM_DIMS, BLOCK // SHIFTED_SHARE, PARTS)
            )
        elif MODE < GATHERED:
            _copy_edges(piece, slot_strides, tile, source, target, 2 ** (MODE - EDGES), NUM_DIMS, BLOCK, PARTS)
        elif MODE < JOINED:
            copy_rows(piece, slot_strides, tile, source, target, 2 ** (MODE - GATHERED), BLOCK)
        elif MODE < TILES:
            copy_joined_rows(
                *(table, pointers, piece, slot_strides, tile, source, target),
                *(2 ** (MODE - JOINED), NUM_POINTERS, BLOCK),
            )
        elif MODE < WIDE_TILES:
            _copy_tile(piece + HEAD, slot_strides, tile, source, target, 2 ** (MODE - TILES), False, NUM_DIMS)
        else:
            _copy_tile(piece + HEAD, slot_strides, tile, source, target, 2 ** (MODE - WIDE_TILES), True, NUM_DIMS)


@triton.jit
def _copy_units(
    piece,
    slot_strides,
    tile,
    source,
    target,
    WIDTH: tl.constexpr,
    NUM_DIMS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Copies units in the order of the target."""
    ELEMENT: tl.constexpr = tl.int32 if WIDTH >= 4 else (tl.int16 if WIDTH == 2 else tl.int8)
    for part in range(tile * PARTS, tile * PARTS + PARTS):
        indices, before, inside = units_of_tile(piece, part, ELEMENT, WIDTH, False, NUM_DIMS, BLOCK // PARTS)
        sources = elements_at(source, source_units(slot_strides, indices, before, NUM_DIMS), ELEMENT, WIDTH, False)
        targets = elements_at(target, target_units(piece, indices, before, NUM_DIMS), ELEMENT, WIDTH, False)
        tl.store(targets, tl.load(sources, mask=inside), mask=inside)


@triton.jit
def _run_starts(piece, slot_strides, numbers, source, target, NUM_DIMS: tl.constexpr):
    """Starts of runs in bytes from `source` and `target`, each taken back to a multiple of 16; and inner indices."""
    indices = split_rows(numbers, piece + HEAD, NUM_DIMS)
    sources = source_units(slot_strides, indices, (source & 15).to(tl.int32), NUM_DIMS)
    targets = target_units(piece, indices, (target & 15).to(tl.int32), NUM_DIMS)
    return sources, targets, indices[0]


@triton.jit
def _copy_blocks(
    piece,
    slot_strides,
    tile,
    source,
    target,
    IS_SHIFTED: tl.constexpr,
    NUM_DIMS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Copies blocks of 16 bytes that are aligned in the target, and lie whole in their runs, by words of the source.

    Where the words of the source lie otherwise, each of the target's is made of two. A word that is read has a byte in
    it that is copied, so that it lies in the same allocation, whose ends are multiples of 4.
    """
    ROWS: tl.constexpr = BLOCK // PARTS
    for part in range(tile * PARTS, tile * PARTS + PARTS):
        numbers = part * ROWS + tl.arange(0, ROWS)
        from_byte, to_byte, index = _run_starts(piece, slot_strides, numbers, source, target, NUM_DIMS)
        block = (to_byte >> 4) + index
        past = block * 16 - to_byte
        run = tl.load(piece + 5).to(tl.int32)
        inside = (numbers < tl.load(piece + 4).to(tl.int32)) & (past >= 0) & (past <= run - 16)
        start = from_byte + past
        words = (source & -16).to(tl.pointer_type(tl.int32)) + (start >> 2)
        one = tl.load(words, mask=inside)
        two = tl.load(words + 1, mask=inside)
        three = tl.load(words + 2, mask=inside)
        four = tl.load(words + 3, mask=inside)
        if IS_SHIFTED:
            bits = (start & 3) * 8
            five = tl.load(words + 4, mask=inside & (bits != 0), other=0)
            one = bits_from(one, two, bits)
            two = bits_from(two, three, bits)
            three = bits_from(three, four, bits)
            four = bits_from(four, five, bits)
        block_words = tl.reshape(tl.join(tl.join(one, three), tl.join(two, four)), (ROWS, 4))
        targets = tl.multiple_of((target & -16).to(tl.pointer_type(tl.int32)), 16)
        tl.store(targets + (block[:, None] * 4 + tl.arange(0, 4)[None, :]), block_words, mask=inside[:, None])


@triton.jit
def _copy_edges(
    piece,
    slot_strides,
    tile,
    source,
    target,
    WIDTH: tl.constexpr,
    NUM_DIMS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Copies what of runs lies before their first and behind their last whole block of the target.

    The first half of the inner indices count from a run's start, the others from its end; most of them are of whole
    blocks, and nothing is done.
    """
    WORD: tl.constexpr = tl.int32 if WIDTH == 4 else (tl.int16 if WIDTH == 2 else tl.int8)
    PLACES: tl.constexpr = 16 // WIDTH
    BITS: tl.constexpr = WIDTH // 2  # of the width, as a power of 2
    ROWS: tl.constexpr = BLOCK // PARTS
    for part in range(tile * PARTS, tile * PARTS + PARTS):
        numbers = part * ROWS + tl.arange(0, ROWS)
        from_byte, to_byte, index = _run_starts(piece, slot_strides, numbers, source, target, NUM_DIMS)
        run = tl.load(piece + 5).to(tl.int32)
        first_block = tl.minimum(-to_byte & 15, run)
        end_of_last = tl.maximum(((to_byte + run) & -16) - to_byte, first_block)
        is_first = index < PLACES
        position = tl.where(is_first, index * WIDTH, run - (index - PLACES + 1) * WIDTH)
        inside = numbers < tl.load(piece + 4).to(tl.int32)
        inside &= tl.where(is_first, position < first_block, position >= end_of_last)
        sources = (source & -16).to(tl.pointer_type(WORD)) + ((from_byte + position) >> BITS)
        targets = (target & -16).to(tl.pointer_type(WORD)) + ((to_byte + position) >> BITS)
        tl.store(targets, tl.load(sources, mask=inside), mask=inside)


@triton.jit
def _copy_tile(
    loops, slot_strides, tile, source, target, WIDTH: tl.constexpr, IS_WIDE: tl.constexpr, NUM_DIMS: tl.constexpr
):
    """Copies a square of units, dense along its rows in the source and along its columns in the target."""
    WORD: tl.constexpr = tl.int64 if WIDTH == 8 else (tl.int32 if WIDTH == 4 else (tl.int16 if WIDTH == 2 else tl.int8))
    SIDE: tl.constexpr = 64 if WIDTH == 2 and IS_WIDE else 32
    LANES: tl.constexpr = 16 // WIDTH if IS_WIDE else 1
    num_columns = tl.multiple_of(tl.load(loops).to(tl.int32), LANES)
    num_rows = tl.multiple_of(tl.load(loops + LOOP).to(tl.int32), LANES)
    target_step = tl.multiple_of(tl.load(loops + LOOP + 3).to(tl.int32), LANES)
    source_step = tl.multiple_of(tl.load(slot_strides).to(tl.int32), LANES)
    tiles_across = tl.cdiv(num_columns, SIDE)
    tiles_down = tl.cdiv(num_rows, SIDE)
    columns = (tile % tiles_across) * SIDE + tl.arange(0, SIDE)[None, :]
    rows = (tile // tiles_across % tiles_down) * SIDE + tl.arange(0, SIDE)[:, None]
    rest = tile // tiles_across // tiles_down
    source_start = rest * 0
    target_start = rest * 0
    for dim in tl.static_range(2, NUM_DIMS):
        length = tl.load(loops + dim * LOOP).to(tl.int32)
        index = rest % length
        rest = rest // length
        target_start += index * tl.load(loops + dim * LOOP + 3).to(tl.int32)
        source_start += index * tl.load(slot_strides + dim).to(tl.int32)
    source += source_start.to(tl.int64) * WIDTH
    target += target_start.to(tl.int64) * WIDTH
    inside = (columns < num_columns) & (rows < num_rows)
    sources = tl.multiple_of(source.to(tl.pointer_type(WORD)), LANES * WIDTH) + (rows + columns * source_step)
    targets = tl.multiple_of(target.to(tl.pointer_type(WORD)), LANES * WIDTH) + (rows * target_step + columns)
    tl.store(targets, tl.load(sources, mask=inside), mask=inside)
