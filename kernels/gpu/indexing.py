"""Index arithmetic that the kernels share: the piece that a tile belongs to, and the places of its units.

The pointers that are read here point into the cells that box_table.py describes. All indices have 32 bits.
"""

import triton
import triton.language as tl

from tritondt.kernels.gpu import box_table

HEAD = tl.constexpr(box_table.HEAD_CELLS)
LOOP = tl.constexpr(box_table.LOOP_CELLS)
SLOT_HEAD = tl.constexpr(box_table.SLOT_HEAD_CELLS)
GROUPS_PER_BLOCK = tl.constexpr(box_table.GROUPS_PER_BLOCK)
LANES_IN_GROUP = tl.constexpr(box_table.GROUP_LANES)
TABLE = tl.constexpr(box_table.TABLE_CELLS)
SEARCHED = tl.constexpr(box_table.SEARCHED)
MAX_PLACE = tl.constexpr(2**31 - 1)
STEPS_IN_GROUP = tl.constexpr(box_table.GROUP_STEPS)


@triton.jit
def quotient(number, cells):
    """A number divided by what box_table.division has made two cells of."""
    number = number.to(tl.uint32)
    factor = tl.load(cells).to(tl.uint32)
    shift = tl.load(cells + 1).to(tl.uint32)
    return ((tl.umulhi(number, factor) + number) >> shift).to(tl.int32)


@triton.jit
def find_piece(table, num_walks, num_bisections, tile, NUM_DIMS: tl.constexpr):
    """Row of the piece that a tile belongs to, number of the tile in the piece, and mode, -1 where there is nothing.

    32 walks are looked at together, each the first of as many as so many bisections tell apart.
    """
    CELLS: tl.constexpr = HEAD + NUM_DIMS * (LOOP + 1) + SLOT_HEAD
    firsts = table + TABLE
    numbers = tl.arange(0, SEARCHED) << num_bisections
    places = tl.load(firsts + numbers, mask=numbers < num_walks, other=MAX_PLACE).to(tl.int32)
    num_places = tl.load(table).to(tl.int32)
    band = quotient(tl.cast(tile, tl.int32), table + 1)  # interpreted, it is an integer of Python's
    place = tile - band * num_places
    is_before = places <= place
    low = (tl.sum(is_before.to(tl.int32)) - 1) << num_bisections
    first = tl.max(tl.where(is_before, places, -MAX_PLACE))
    for bisection in range(num_bisections):
        middle = low + (1 << (num_bisections - 1 - bisection))
        begins = tl.load(firsts + middle, mask=middle < num_walks, other=MAX_PLACE).to(tl.int32)
        low = tl.where(begins <= place, middle, low)
        first = tl.where(begins <= place, begins, first)
    piece = firsts + num_walks + low * CELLS
    num_tiles = tl.load(piece).to(tl.int32)
    own_tile = quotient(band * num_tiles, table + 3) + (place - first)
    end = quotient((band + 1) * num_tiles, table + 3)
    return piece, own_tile, tl.where(own_tile < end, tl.load(piece + 3).to(tl.int32), -1)


@triton.jit
def first_slot(piece, NUM_DIMS: tl.constexpr):
    """Row of a piece's first slot."""
    return piece + HEAD + NUM_DIMS * LOOP


@triton.jit
def address_at(pointers, cells, NUM_POINTERS: tl.constexpr):
    """Start of a walk: the pointer that the first cell numbers, and the bytes in the second from there."""
    number = tl.load(cells)
    address = pointers[0]
    for other in tl.static_range(1, NUM_POINTERS):
        address = tl.where(number == other, pointers[other], address)
    if len(pointers) > NUM_POINTERS:  # behind the pointers, where the bytes are to be added to those of slots
        added = tl.load(pointers[NUM_POINTERS] + number)
        address += tl.load(added.to(tl.pointer_type(tl.int64)), mask=added != 0, other=0)
    return address + tl.load(cells + 1)


@triton.jit
def split_rows(rows, loops, NUM_DIMS: tl.constexpr):
    """Indices of numbered rows, a tensor per loop, innermost first."""
    rest = rows.to(tl.uint32)
    indices = ()
    for dim in tl.static_range(NUM_DIMS - 1):
        factor = tl.load(loops + dim * LOOP + 1).to(tl.uint32)
        shift = tl.load(loops + dim * LOOP + 2).to(tl.uint32)
        quotient = (tl.umulhi(rest, factor) + rest) >> shift
        index = rest - quotient * tl.load(loops + dim * LOOP).to(tl.uint32)
        indices += (index.to(tl.int32),)  # type: ignore[assignment]  # a tuple that the compiler unrolls
        rest = quotient
    indices += (rest.to(tl.int32),)  # type: ignore[assignment]
    return indices


@triton.jit
def walk(indices, before, strides, STEP: tl.constexpr, NUM_DIMS: tl.constexpr):
    """Units from the start of a walk to given indices, and `before` more; strides lie STEP cells apart."""
    units = before
    for dim in tl.static_range(NUM_DIMS):
        units += indices[dim] * tl.load(strides + dim * STEP).to(tl.int32)
    return units


@triton.jit
def rows_of_tile(tile, IS_GROUPED: tl.constexpr, BLOCK: tl.constexpr):
    """Numbers of a tile's rows, each repeated for every step of a group, and the units before that step.

    A thread meets its rows again in all steps, and the compiler sees that what it computes from them is the same.
    """
    if IS_GROUPED:
        ROWS: tl.constexpr = BLOCK // GROUPS_PER_BLOCK
        numbers = tl.arange(0, ROWS * STEPS_IN_GROUP)
        rows = tile * ROWS + numbers % ROWS
        before = numbers // ROWS * LANES_IN_GROUP
    else:
        rows = tile * BLOCK + tl.arange(0, BLOCK)
        before = tl.zeros([BLOCK], tl.int32)
    return rows, before


@triton.jit
def units_of_tile(
    piece,
    tile,
    ELEMENT: tl.constexpr,
    WIDTH: tl.constexpr,
    IS_GROUPED: tl.constexpr,
    NUM_DIMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A tile's units in the order of the target, so that stores are contiguous.

    Their indices, a tensor per loop, and the units before a group's step, both for `walk`; and which elements exist.
    """
    rows, before = rows_of_tile(tile, IS_GROUPED, BLOCK)
    indices = split_rows(rows, piece + HEAD, NUM_DIMS)
    count = tl.load(piece + 4).to(tl.int32)
    run = tl.load(piece + 5).to(tl.int32)
    return indices, before, elements_inside(rows, count, indices[0], run, before, ELEMENT, WIDTH, IS_GROUPED)


@triton.jit
def source_units(strides, indices, before, NUM_DIMS: tl.constexpr):
    """Units between the start of a slot's walk and a tile's units; `strides` are the slot's."""
    return walk(indices, before, strides, 1, NUM_DIMS)


@triton.jit
def target_units(piece, indices, before, NUM_DIMS: tl.constexpr):
    """Units between the start of the target's walk and a tile's units."""
    return walk(indices, before, piece + HEAD + 3, LOOP, NUM_DIMS)


@triton.jit
def elements_at(address, units, ELEMENT: tl.constexpr, WIDTH: tl.constexpr, IS_GROUPED: tl.constexpr):
    """Pointers to the elements of rows, written so that wide loads and stores follow without a hint on strides."""
    # Tensors are known to start at multiples of 16 bytes, and no load is wider.
    pointer = tl.multiple_of(address.to(tl.pointer_type(ELEMENT)), WIDTH if WIDTH < 16 else 16)
    PARTS: tl.constexpr = WIDTH * 8 // ELEMENT.primitive_bitwidth
    LANES: tl.constexpr = PARTS * LANES_IN_GROUP if IS_GROUPED else PARTS
    if LANES > 1:
        units = units[:, None] * PARTS + tl.arange(0, LANES)[None, :]
    return pointer + units


@triton.jit
def elements_inside(
    rows, count, first_index, run, before, ELEMENT: tl.constexpr, WIDTH: tl.constexpr, IS_GROUPED: tl.constexpr
):
    """Mask of the elements that exist: those of the first `count` rows, in groups up to the end of the run."""
    inside = rows < count
    PARTS: tl.constexpr = WIDTH * 8 // ELEMENT.primitive_bitwidth
    if IS_GROUPED:
        left = (run - before - first_index * (STEPS_IN_GROUP * LANES_IN_GROUP)) * PARTS
        inside = inside[:, None] & (tl.arange(0, PARTS * LANES_IN_GROUP)[None, :] < left[:, None])
    elif PARTS > 1:
        inside = inside[:, None]
    return inside
