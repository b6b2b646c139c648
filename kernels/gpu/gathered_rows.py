"""Blocks of 16 bytes of rows that lie anywhere in the source: words are read once, shifted together, written whole.

A block has bytes of one row or of two that follow each other in the target. `first` and `second` are the addresses at
which it would begin if it lay whole in the one or the other, and `left` its bytes in the first, 16 or more where it is
all of them.
"""

import triton
import triton.language as tl

from tritondt.kernels.gpu.indexing import HEAD, SLOT_HEAD, address_at

# Blocks at a time: two for each of 128 threads. A tile has up to 1,024, and reads what it needs of a table once.
TOGETHER = tl.constexpr(256)


@triton.jit
def copy_rows(piece, slot_strides, tile, source, target, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Copies whole blocks of the target, of rows of one box."""
    stride = tl.load(slot_strides + 1).to(tl.int32)
    geometry = _geometry(piece)
    run = geometry[1]
    PARTS: tl.constexpr = BLOCK // TOGETHER if BLOCK > TOGETHER else 1
    for part in range(PARTS):
        block, inside, row, column = _rows(geometry, tile * PARTS + part, BLOCK // PARTS)
        before = row * stride + column
        first = source + before
        second = source + (before + (stride - run))
        _store(target, block, _gathered(first, second, run - column, inside, WIDTH), inside, BLOCK // PARTS)


@triton.jit
def copy_joined_rows(
    table,
    pointers,
    piece,
    slot_strides,
    tile,
    source,
    target,
    WIDTH: tl.constexpr,
    NUM_POINTERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copies whole blocks of the target, of rows that are made of those of several boxes in up to two sources."""
    slot = table + tl.load(piece + 7)
    other = address_at(pointers, slot, NUM_POINTERS)
    bits = tl.load(slot_strides).to(tl.int32)
    steps = slot + SLOT_HEAD
    parts = steps + tl.load(slot_strides + 1)
    geometry = _geometry(piece)
    PARTS: tl.constexpr = BLOCK // TOGETHER if BLOCK > TOGETHER else 1
    for part in range(PARTS):
        block, inside, row, column = _rows(geometry, tile * PARTS + part, BLOCK // PARTS)
        begins = tl.load(steps + (column >> bits), mask=inside, other=0)
        number = begins.to(tl.int32) + (column >= (begins >> 32).to(tl.int32)).to(tl.int32)
        cells = parts + number * 3
        befores = tl.load(cells, mask=inside)
        strides = tl.load(cells + 1, mask=inside)
        end = tl.load(cells + 2, mask=inside)
        first = befores.to(tl.int32) + row * strides.to(tl.int32) + column
        second = (befores >> 32).to(tl.int32) + row * (strides >> 32).to(tl.int32) + column
        number = end.to(tl.int32)
        first = tl.where((number & 1) != 0, other, source) + first
        second = tl.where((number & 2) != 0, other, source) + second
        left = (end >> 32).to(tl.int32) - column
        _store(target, block, _gathered(first, second, left, inside, WIDTH), inside, BLOCK // PARTS)


@triton.jit
def _geometry(piece):
    """Blocks of a walk; bytes in a row, the numbers that divide by them, and bytes before the first block."""
    return (
        tl.load(piece + 4).to(tl.int32),
        tl.load(piece + HEAD).to(tl.int32),
        tl.load(piece + HEAD + 1).to(tl.uint32),
        tl.load(piece + HEAD + 2).to(tl.uint32),
        tl.load(piece + HEAD + 3).to(tl.int32),
    )


@triton.jit
def _rows(geometry, part, BLOCK: tl.constexpr):
    """Blocks of a part of a tile and whether they are there; row and column of their first bytes."""
    count, run, factor, shift, before = geometry
    block = part * BLOCK + tl.arange(0, BLOCK)
    start = block * 16 + before
    row = ((tl.umulhi(start.to(tl.uint32), factor) + start.to(tl.uint32)) >> shift).to(tl.int32)
    return block, block < count, row, start - row * run


@triton.jit
def _word(address, number, mask):
    return tl.load(address.to(tl.pointer_type(tl.int32)) + number, mask=mask)


@triton.jit
def _gathered(first, second, left, inside, WIDTH: tl.constexpr):
    """The four words of blocks; addresses and `left` are multiples of WIDTH."""
    if WIDTH == 4:
        words = (
            _word(first, 0, inside),
            _word(tl.where(left > 4, first, second), 1, inside),
            _word(tl.where(left > 8, first, second), 2, inside),
            _word(tl.where(left > 12, first, second), 3, inside),
        )
    else:
        words = _shifted(first, second, left, inside, WIDTH)
    return words


@triton.jit
def _shifted(first, second, left, inside, WIDTH: tl.constexpr):
    """The words of blocks that begin anywhere in words of the source.

    A word of the source is read where one of its bytes is copied, so that it lies in the same allocation, whose ends
    are multiples of 4. Word `last` of the block is the first that has bytes of the second row.
    """
    bits = ((first & 3) * 8).to(tl.int32)
    second_bits = ((second & 3) * 8).to(tl.int32)
    first = first & -4
    second = second & -4
    last = left >> 2
    past = (left & 3) * 8
    # Words of the source up to this one are those of the first row.
    of_first = last - ((past + bits) == 0).to(tl.int32)
    one = _word(tl.where(of_first >= 0, first, second), 0, inside)
    two = _word(tl.where(of_first >= 1, first, second), 1, inside)
    three = _word(tl.where(of_first >= 2, first, second), 2, inside)
    four = _word(tl.where(of_first >= 3, first, second), 3, inside)
    is_whole = left >= 16
    fifth_bits = tl.where(is_whole, bits, second_bits)
    five = _word(tl.where(is_whole, first, second), 4, inside & (fifth_bits != 0))
    # The word of both rows: its lower bits from the one, the others from the other.
    is_both = inside & (last < 4)
    at_last = (last * 4).to(tl.int64)
    low_of_second = _word(second + at_last, 0, is_both & (second_bits + past < 32))
    high_of_second = tl.where(last == 0, two, tl.where(last == 1, three, tl.where(last == 2, four, five)))
    kept = (1 << past) - 1
    of_second = bits_from(low_of_second, high_of_second, second_bits) & ~kept
    next_of_first = five
    if WIDTH == 1:
        next_of_first = _word(first + at_last, 1, is_both & (bits + past > 32))
    return (
        _block_word(one, two, 0, last, of_first, bits, second_bits, next_of_first, kept, of_second, WIDTH),
        _block_word(two, three, 1, last, of_first, bits, second_bits, next_of_first, kept, of_second, WIDTH),
        _block_word(three, four, 2, last, of_first, bits, second_bits, next_of_first, kept, of_second, WIDTH),
        _block_word(four, five, 3, last, of_first, bits, second_bits, next_of_first, kept, of_second, WIDTH),
    )


@triton.jit
def _block_word(
    low,
    high,
    NUMBER: tl.constexpr,
    last,
    of_first,
    bits,
    second_bits,
    next_of_first,
    kept,
    of_second,
    WIDTH: tl.constexpr,
):
    """Word of a block: of the first row before the `last`, of the second behind it, and in it of both."""
    is_last = last == NUMBER
    if WIDTH == 1:
        high = tl.where(is_last, next_of_first, high)
    word = bits_from(low, high, tl.where(of_first >= NUMBER, bits, second_bits))
    return tl.where(is_last, (word & kept) | of_second, word)


@triton.jit
def bits_from(low, high, bits):
    """32 bits of two words, from a bit of the lower on."""
    both = (high.to(tl.uint64) << 32) | low.to(tl.uint32, bitcast=True).to(tl.uint64)
    return (both >> bits.to(tl.uint64)).to(tl.int32)


@triton.jit
def _store(target, block, words, inside, BLOCK: tl.constexpr):
    joined = tl.reshape(tl.join(tl.join(words[0], words[2]), tl.join(words[1], words[3])), (BLOCK, 4))
    targets = tl.multiple_of(target.to(tl.pointer_type(tl.int32)), 16)
    tl.store(targets + (block[:, None] * 4 + tl.arange(0, 4)[None, :]), joined, mask=inside[:, None])
