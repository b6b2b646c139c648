"""Scales of boxes that become fp8: the least power of two with which the largest finite magnitude fits."""

import triton
import triton.language as tl

from tritondt.kernels.gpu import box_table
from tritondt.kernels.gpu.floats import scale_bits, to_float32
from tritondt.kernels.gpu.indexing import (
    SLOT_HEAD,
    address_at,
    elements_at,
    find_piece,
    first_slot,
    source_units,
    units_of_tile,
)

GROUPS = tl.constexpr(box_table.GROUPS)
TILES = tl.constexpr(box_table.TILES)


@triton.jit(do_not_specialize=("num_walks", "num_bisections", "num_tiles"))
def scale_kernel(
    table,
    pointers,
    num_walks,
    num_bisections,
    num_tiles,
    NUM_POINTERS: tl.constexpr,
    NUM_DIMS: tl.constexpr,
    MODES: tl.constexpr,
    BLOCK: tl.constexpr,
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
    READ: tl.constexpr,
):
    """Raises the scale of each piece's box to what tile after tile needs; a scale of zeros stays 0."""
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        piece, own_tile, mode = find_piece(table, num_walks, num_bisections, tile, NUM_DIMS)
        slot = first_slot(piece, NUM_DIMS)
        source = address_at(pointers, slot, NUM_POINTERS)
        scale = address_at(pointers, table + tl.load(piece + 7), NUM_POINTERS)
        for candidate in tl.static_range(TILES):
            if (MODES >> candidate) & 1:
                _scale_if(
                    *(mode, candidate, piece, slot + SLOT_HEAD, own_tile, source, scale),
                    *(NUM_DIMS, BLOCK, SOURCE, TARGET, READ),
                )


@triton.jit
def _scale_if(
    mode,
    MODE: tl.constexpr,
    piece,
    slot_strides,
    tile,
    source,
    scale,
    NUM_DIMS: tl.constexpr,
    BLOCK: tl.constexpr,
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
    READ: tl.constexpr,
):
    """Finds the largest finite magnitude of a tile, if it has the mode MODE, and raises the scale to what it needs."""
    if mode == MODE:
        IS_GROUPED: tl.constexpr = MODE >= GROUPS
        READ_BYTES: tl.constexpr = 2 ** (MODE - GROUPS if IS_GROUPED else MODE) * READ.primitive_bitwidth // 8
        indices, before, inside = units_of_tile(piece, tile, READ, READ_BYTES, IS_GROUPED, NUM_DIMS, BLOCK)
        units = source_units(slot_strides, indices, before, NUM_DIMS)
        sources = elements_at(source, units, READ, READ_BYTES, IS_GROUPED)
        values = to_float32(tl.load(sources, mask=inside, other=0), SOURCE)
        magnitudes = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        largest = tl.max(tl.where(magnitudes < 0x7F800000, magnitudes, 0))
        if largest > 0:
            tl.atomic_max(scale.to(tl.pointer_type(tl.int32)), scale_bits(largest, TARGET), sem="relaxed")
