"""Copies of strided boxes of any dtype: packed and unpacked by one kernel, in one launch."""

from collections.abc import Iterable, Sequence

import torch
import triton
import triton.language as tl

from tritondt.kernels.arguments import check_tensors, common_device
from tritondt.kernels.boxes import CopyBox
from tritondt.kernels.gpu import box_table
from tritondt.kernels.gpu.device_table import DeviceTable, Kernel, Sides
from tritondt.kernels.gpu.indexing import (
    HEAD,
    LOOP,
    SLOT_HEAD,
    address_at,
    elements_at,
    find_piece,
    first_slot,
    source_units,
    target_units,
    units_of_tile,
)
from tritondt.kernels.gpu.loop_nest import LoopNest, coalesce, copy_nest
from tritondt.kernels.gpu.pieces import Piece, copy_pieces
from tritondt.kernels.gpu.specialization import ALL_RUNS, ALL_TILES, WIDE_RUNS
from tritondt.kernels.gpu.tuning import Choice

GROUPS = tl.constexpr(box_table.GROUPS)
TILES = tl.constexpr(box_table.TILES)
WIDE_TILES = tl.constexpr(box_table.WIDE_TILES)
NUM_MODES = tl.constexpr(box_table.NUM_MODES)


class DeviceCopyTable(DeviceTable):
    """Boxes to copy on a device, prepared once and run many times; the counterpart of `tritondt._C.CopyTable`.

    A box need not be aligned to its itemsize. With `is_aligned` every tensor is promised to start at a multiple of
    16 bytes, and one that does not is refused; without, each is taken as it is. `max_ctas` bounds how much of the
    device a copy takes; `choice` replaces what tuning.json says.
    """

    def __init__(
        self,
        boxes: Sequence[CopyBox],
        device: torch.device | str,
        *,
        is_aligned: bool = False,
        max_ctas: int | None = None,
        choice: Choice | None = None,
    ) -> None:
        nests = [copy_nest(position, box) for position, box in enumerate(boxes)]
        self._num_bytes = sum(nest.num_bytes for nest in nests)
        super().__init__(
            copies(),
            [coalesce(nest) for nest in nests if nest.num_bytes],
            torch.device(device),
            sides=Sides(),
            is_aligned=is_aligned,
            choice=choice,
            max_ctas=max_ctas,
        )

    @property
    def num_bytes(self) -> int:
        """Bytes that one run writes."""
        return self._num_bytes

    def pieces(self, nests: Iterable[LoopNest]) -> list[Piece]:
        """Transposing tiles, and runs as wide as they can be."""
        return [piece for nest in nests for piece in copy_pieces(nest)]


def copies() -> Kernel:
    """The kernel of all copies."""
    return Kernel(copy_kernel, "copy", (), {}, {}, (WIDE_RUNS, ALL_RUNS, ALL_TILES))


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


@triton.jit(do_not_specialize=("num_pieces", "num_bisections", "num_tiles"))
def copy_kernel(
    table,
    pointers,
    num_pieces,
    num_bisections,
    num_tiles,
    NUM_POINTERS: tl.constexpr,
    NUM_DIMS: tl.constexpr,
    MODES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copies tile after tile of the pieces in `table`; has a branch for every mode in MODES, and no other."""
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        piece, own_tile = find_piece(table, num_pieces, num_bisections, tile, NUM_DIMS)
        slot = first_slot(piece, NUM_DIMS)
        target = address_at(pointers, piece + 1, NUM_POINTERS)
        source = address_at(pointers, slot, NUM_POINTERS)
        mode = tl.load(piece + 3)
        for candidate in tl.static_range(NUM_MODES):
            if (MODES >> candidate) & 1:
                _copy_if(mode, candidate, piece, slot + SLOT_HEAD, own_tile, source, target, NUM_DIMS, BLOCK)


@triton.jit
def _copy_if(
    mode,
    MODE: tl.constexpr,
    piece,
    slot_strides,
    tile,
    source,
    target,
    NUM_DIMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copies a tile if it has the mode MODE."""
    if mode == MODE:
        if MODE < GROUPS:
            _copy_units(piece, slot_strides, tile, source, target, 2**MODE, False, NUM_DIMS, BLOCK)
        elif MODE < TILES:
            _copy_units(piece, slot_strides, tile, source, target, 2 ** (MODE - GROUPS), True, NUM_DIMS, BLOCK)
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
    IS_GROUPED: tl.constexpr,
    NUM_DIMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copies units in the order of the target."""
    ELEMENT: tl.constexpr = tl.int32 if WIDTH >= 4 else (tl.int16 if WIDTH == 2 else tl.int8)
    indices, before, inside = units_of_tile(piece, tile, ELEMENT, WIDTH, IS_GROUPED, NUM_DIMS, BLOCK)
    sources = elements_at(source, source_units(slot_strides, indices, before, NUM_DIMS), ELEMENT, WIDTH, IS_GROUPED)
    targets = elements_at(target, target_units(piece, indices, before, NUM_DIMS), ELEMENT, WIDTH, IS_GROUPED)
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
