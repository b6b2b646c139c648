"""Sums of what all ranks have in a window, in place and on all of them: one launch, by multimem or by peers' pointers.

Each rank adds a share, and writes the sums to everybody. By multimem (NVLink SHARP, sm_90 on) the switch adds and sends
on: a rank reads its share once and writes it once, where peers' pointers read and write it once for each rank.
"""

import triton
import triton.language as tl

from tritondt.kernels.gpu.reduce_slots import narrowed, widened
from tritondt.kernels.gpu.signals import await_all, publish

# Bytes that a thread adds at once.
UNIT_BYTES = 16
# The dtypes that multimem.ld_reduce adds in units of 16 bytes (PTX ISA 8.1, sm_90); those of 16 bits are added in fp32.
MULTIMEM_DTYPES = ("float32", "bfloat16", "float16")
# Without a bound the assembler holds to 64 registers, and spills 8 bytes of bfloat16 on sm_80.
OPTIONS = {"num_warps": 4, "maxnreg": 96}
# For the two waits of a launch: a rank in the second one may be overtaken in the first of the next, but no further.
NUM_TURNS = 2


@triton.jit(do_not_specialize=("rank", "num_units", "multimem"))
def window_sum_kernel(
    peers_at,
    words_at,
    counts,
    asked,
    met,
    rank,
    num_units,
    multimem,
    NUM_RANKS: tl.constexpr,
    LANES: tl.constexpr,
    ELEMENT: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
    BY_MULTIMEM: tl.constexpr,
    BY_STORE: tl.constexpr,
):
    """Adds this rank's share of `num_units` units, between two waits for the same program of all ranks.

    `peers_at` and `words_at` have the addresses of all ranks' windows; a rank's words are int64 (NUM_TURNS, programs,
    NUM_RANKS). Ranks launch as many programs. Before the first wait a rank's terms were written by earlier launches;
    behind the second one each program's sums are in all windows, and behind the launch all of them.
    """
    program = tl.program_id(0)
    count = tl.load(counts + program) + 1
    is_open = tl.load(met) == 0
    if is_open:
        missing = _meet(words_at, asked, rank, program, count, 0, NUM_RANKS, LANES, BY_STORE)
        if missing == 0:
            share = (num_units + NUM_RANKS - 1) // NUM_RANKS
            end = tl.minimum((rank + 1) * share, num_units)
            if BY_MULTIMEM:
                _fence_aliases(LANES)
            for start in range(rank * share + program * BLOCK, end, tl.num_programs(0) * BLOCK):
                units = start + tl.arange(0, BLOCK)
                if BY_MULTIMEM:
                    _add_by_multimem(multimem, units, units < end, DTYPE)
                else:
                    _add_by_pointers(peers_at, units, units < end, NUM_RANKS, ELEMENT, DTYPE)
            if BY_MULTIMEM:
                _fence_aliases(LANES)
            missing = _meet(words_at, asked, rank, program, count, 1, NUM_RANKS, LANES, BY_STORE)
        if missing == 0:
            tl.store(counts + program, count)
        else:
            tl.store(met, 1)


@triton.jit
def _meet(
    words_at,
    asked,
    rank,
    program,
    count,
    TURN: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    LANES: tl.constexpr,
    BY_STORE: tl.constexpr,
):
    """Tells this program of all ranks that this one is here, and waits for them; the number of those missing."""
    lanes = tl.arange(0, LANES)
    inside = lanes < NUM_RANKS
    first = (TURN * tl.num_programs(0) + program) * NUM_RANKS
    theirs = tl.load(words_at + lanes, mask=inside, other=0) + (first + rank) * 8
    publish(theirs.to(tl.pointer_type(tl.int64)), count + lanes * 0, inside, BY_STORE)
    words = tl.load(words_at + rank).to(tl.pointer_type(tl.int64)) + first + lanes
    return await_all(words, count + lanes * 0, inside, asked, BY_STORE)


@triton.jit
def _add_by_pointers(peers_at, units, inside, NUM_RANKS: tl.constexpr, ELEMENT: tl.constexpr, DTYPE: tl.constexpr):
    """Adds in the order of ranks, as `reduce_slots` does, and rounds once."""
    PARTS: tl.constexpr = 128 // ELEMENT.primitive_bitwidth
    elements = units[:, None] * PARTS + tl.arange(0, PARTS)[None, :]
    total = widened(_load_of(peers_at, 0, elements, inside, ELEMENT), DTYPE)
    for peer in range(1, NUM_RANKS):
        total += widened(_load_of(peers_at, peer, elements, inside, ELEMENT), DTYPE)
    result = narrowed(total, DTYPE).to(ELEMENT)
    for peer in range(NUM_RANKS):
        tl.store(_window_of(peers_at, peer, ELEMENT) + elements, result, mask=inside[:, None])


@triton.jit
def _window_of(peers_at, peer, ELEMENT: tl.constexpr):
    return tl.multiple_of(tl.load(peers_at + peer).to(tl.pointer_type(ELEMENT)), 16)


@triton.jit
def _load_of(peers_at, peer, elements, inside, ELEMENT: tl.constexpr):
    return tl.load(_window_of(peers_at, peer, ELEMENT) + elements, mask=inside[:, None])


@triton.jit
def _fence_aliases(LANES: tl.constexpr):
    """Orders accesses by multimem and by plain addresses, which are aliases of one memory, in every thread."""
    lanes = tl.arange(0, LANES)
    tl.inline_asm_elementwise(
        "fence.proxy.alias; mov.u32 $0, $1;", "=r,r", [lanes], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _add_by_multimem(multimem, units, inside, DTYPE: tl.constexpr):
    """Has the switch add a unit of all ranks, and write the sums to all: four registers of 32 bits, in between.

    The loads and stores are relaxed at system scope: the waits around them order them.
    """
    KIND: tl.constexpr = ".v4.f32" if DTYPE == "float32" else ".v4.bf16x2" if DTYPE == "bfloat16" else ".v4.f16x2"
    WIDE: tl.constexpr = "" if DTYPE == "float32" else ".acc::f32"
    tl.inline_asm_elementwise(
        "{ .reg .pred %inside; .reg .b32 %w<4>; setp.ne.s32 %inside, $2, 0;"
        " @%inside multimem.ld_reduce.relaxed.sys.global.add" + WIDE + KIND + " {%w0, %w1, %w2, %w3}, [$1];"
        " @%inside multimem.st.relaxed.sys.global" + KIND + " [$1], {%w0, %w1, %w2, %w3}; mov.u32 $0, 0; }",
        "=r,l,r",
        [multimem.to(tl.int64) + units.to(tl.int64) * 16, inside.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
