"""Reductions of slots into strided boxes: combined in their order, divided once, rounded once."""

from collections.abc import Iterable, Sequence

import torch
import triton
import triton.language as tl

from tritondt.kernels.arguments import check_tensors, common_device, common_dtype
from tritondt.kernels.boxes import ReduceBox
from tritondt.kernels.gpu import box_table
from tritondt.kernels.gpu.box_table import mode
from tritondt.kernels.gpu.device_table import DeviceTable, Kernel, Sides
from tritondt.kernels.gpu.floats import to_bfloat16_bits, to_float32
from tritondt.kernels.gpu.indexing import (
    SLOT_HEAD,
    address_at,
    elements_at,
    find_piece,
    first_slot,
    source_units,
    target_units,
    units_of_tile,
)
from tritondt.kernels.gpu.loop_nest import LoopNest, coalesce, reduce_nest
from tritondt.kernels.gpu.pieces import MAX_GROUPED_BYTES, WIDEST, Grain, Kind, Piece, run_pieces
from tritondt.kernels.gpu.signals import HEAD as SIGNALS_HEAD
from tritondt.kernels.gpu.signals import publish_slots, slots_are_ready
from tritondt.kernels.gpu.tuning import Choice
from tritondt.kernels.reduction_dtypes import DTYPES, find_dtype
from tritondt.kernels.signals import SlotTensors

# Slots whose loads are under way together; those that are not there are masked off.
_UNROLL = 4
# To take fewer than they need without a bound, 67 to 90, the assembler spills up to 112 bytes of reductions of bytes.
_BOUND = {"maxnreg": 64}
# Within 64, the assembler spills 8 bytes of sums of float32, bfloat16 and float16 on sm_120; within 72, 8 bytes of
# float32's on sm_100. Without a bound it spills 8 bytes of max and min of int8 on sm_120 to take 63, and of products of
# bytes, to take 64, 8 on sm_90 and 24 on sm_100.
_SM_120, _SM_90_AND_100 = {12: 72}, {9: 72, 10: 72}
_REGISTERS = {
    **{(dtype, "sum"): _SM_120 for dtype in ("float32", "bfloat16", "float16")},
    **{("int8", op): _SM_120 for op in ("max", "min")},
    **{(dtype, "product"): _SM_90_AND_100 for dtype in ("int8", "uint8")},
}
# A launch of slots has few programs. Of its own accord, and within 64, 80 or 96 registers, the assembler spills 8 to 16
# bytes of bfloat16 on sm_80 or sm_90; within 128, 16 bytes of sums of more than 8 pointers on sm_100.
_SLOTS_BOUND = {"maxnreg": 168}
# bfloat16 is read as bits: what Triton's interpreter makes of the dtype itself is cut, not rounded.
ELEMENTS = {
    "float32": tl.float32,
    "bfloat16": tl.uint16,
    "float16": tl.float16,
    "float64": tl.float64,
    "int8": tl.int8,
    "uint8": tl.uint8,
    "int16": tl.int16,
    "int32": tl.int32,
    "int64": tl.int64,
    "bool": tl.uint8,
    "complex64": tl.float32,
    "complex128": tl.float64,
}
GROUPS = tl.constexpr(box_table.GROUPS)
TILES = tl.constexpr(box_table.TILES)


class DeviceReduceTable(DeviceTable):
    """Boxes to reduce on a device, prepared once and run many times; the counterpart of `tritondt._C.ReduceTable`.

    Tensors must be aligned to their elements; `is_aligned`, `max_ctas`, `choice` and `slots` are those of
    DeviceCopyTable.
    """

    def __init__(
        self,
        boxes: Sequence[ReduceBox],
        op: str,
        dtype: str,
        divisor: int,
        device: torch.device | str,
        *,
        is_aligned: bool = False,
        max_ctas: int | None = None,
        choice: Choice | None = None,
        slots: SlotTensors | None = None,
    ) -> None:
        found = find_dtype(dtype, op, divisor)
        self._grain = Grain(word=found.element_bytes, narrowest=found.itemsize)
        nests = [reduce_nest(position, box, found.itemsize) for position, box in enumerate(boxes)]
        self._num_bytes = sum(nest.num_bytes * (len(nest.operands) - 1) for nest in nests)
        super().__init__(
            reductions(dtype, op, divisor, is_of_slots=slots is not None),
            [coalesce(nest) for nest in nests if nest.num_bytes],
            torch.device(device),
            sides=Sides(alignments=(found.itemsize, found.itemsize)),
            is_aligned=is_aligned,
            choice=choice,
            max_ctas=max_ctas,
            slots=slots,
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of slots that one run reads."""
        return self._num_bytes

    def pieces(self, nests: Iterable[LoopNest]) -> list[Piece]:
        """Runs of 16 bytes at a time, or of one element."""
        return [piece for nest in nests for piece in run_pieces(nest, self._grain)]


def reductions(dtype: str, op: str, divisor: int = 1, *, is_of_slots: bool = False) -> Kernel:
    """The kernel of all reductions of a dtype by an op, with the divisor of some; or of those of peers' slots."""
    found = DTYPES[dtype]
    constants = {
        "UNROLL": _UNROLL,
        "ELEMENT": ELEMENTS[dtype],
        "DTYPE": dtype,
        "OP": op,
        "DIVIDES": op == "sum" and found.divides,
    }
    # A fused multiply-add would round a complex product once less than the reference does.
    bound = _SLOTS_BOUND if is_of_slots else {} if found.itemsize == 1 else _BOUND
    options = {"enable_fp_fusion": False, **bound}
    modes = 1 << mode(Kind.RUNS, WIDEST) | 1 << mode(Kind.RUNS, found.itemsize)
    if found.itemsize <= MAX_GROUPED_BYTES:
        modes |= 1 << mode(Kind.GROUPS, found.itemsize)
    name = f"reduce {found.element_bytes}"
    if is_of_slots:
        return Kernel(slot_reduce_kernel, name, (divisor,), constants, options, (modes,))
    registers = _REGISTERS.get((dtype, op), {})
    return Kernel(reduce_kernel, name, (divisor,), constants, options, (modes,), registers=registers)


def reduce_slots(
    sources: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    boxes: Sequence[ReduceBox],
    op: str,
    divisor: int,
    *,
    max_ctas: int | None = None,
    choice: Choice | None = None,
) -> None:
    """Reduces the slots of every box in their order, to the bits that `tritondt.kernels.reference` gives.

    `sources` and `targets` are lists of tensors on one device, of any shapes and strides; `boxes` name them by number,
    with offsets and strides in elements from each tensor's first element. All tensors have one dtype; `op` is sum,
    product, max or min, and a sum is divided once by `divisor`. Runs on the device's current stream. `max_ctas` bounds
    the number of programs, `choice` replaces what tuning.json says. Raises ValueError as copy_boxes does, and where the
    dtype has no such reduction. To run the same boxes again, make a DeviceReduceTable.

    Example: the average of two slots that lie behind each other in one buffer, 3 elements each.

    >>> from tritondt.kernels.boxes import Slot
    >>> buffer = torch.tensor([1.0, 2.0, 3.0, 2.0, 2.0, 9.0])
    >>> target = torch.full((4,), -1.0)
    >>> slots = (Slot(0, 0, (1,)), Slot(0, 3, (1,)))
    >>> reduce_slots([buffer], [target], [ReduceBox(0, 1, (3,), (1,), slots)], "sum", 2)
    >>> target.tolist()
    [-1.0, 1.5, 2.0, 6.0]
    """
    device = common_device(sources, targets)
    dtype = common_dtype(sources, targets)
    if dtype is None:
        return
    name = str(dtype).removeprefix("torch.")
    itemsize = find_dtype(name, op, divisor).itemsize
    nests = [reduce_nest(position, box, itemsize) for position, box in enumerate(boxes)]
    check_tensors(sources, targets, boxes)
    if not any(nest.num_bytes for nest in nests):
        return
    table = DeviceReduceTable(boxes, op, name, divisor, device, max_ctas=max_ctas, choice=choice)
    table.run([tensor.data_ptr() for tensor in sources], [tensor.data_ptr() for tensor in targets])


@triton.jit(do_not_specialize=("divisor", "num_walks", "num_bisections", "num_tiles"))
def reduce_kernel(
    table,
    pointers,
    divisor,
    num_walks,
    num_bisections,
    num_tiles,
    NUM_POINTERS: tl.constexpr,
    NUM_DIMS: tl.constexpr,
    MODES: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
    ELEMENT: tl.constexpr,
    DTYPE: tl.constexpr,
    OP: tl.constexpr,
    DIVIDES: tl.constexpr,
):
    """Reduces tile after tile of the pieces in `table`, elements of DTYPE that are read as ELEMENT, one or two each."""
    _reduce_tiles(
        *(table, pointers, divisor, num_walks, num_bisections, num_tiles),
        *(NUM_POINTERS, NUM_DIMS, MODES, BLOCK, UNROLL, ELEMENT, DTYPE, OP, DIVIDES),
    )


@triton.jit(do_not_specialize=("num_cells", "divisor", "num_walks", "num_bisections", "num_tiles"))
def slot_reduce_kernel(
    table,
    pointers,
    num_cells,
    divisor,
    num_walks,
    num_bisections,
    num_tiles,
    NUM_POINTERS: tl.constexpr,
    NUM_DIMS: tl.constexpr,
    MODES: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
    ELEMENT: tl.constexpr,
    DTYPE: tl.constexpr,
    OP: tl.constexpr,
    DIVIDES: tl.constexpr,
    NUM_LANES: tl.constexpr,
    BY_STORE: tl.constexpr,
):
    """Awaits peers, does what `reduce_kernel` does, and publishes; `num_cells` of `table` are before the signals."""
    signals = table + num_cells
    if slots_are_ready(signals, NUM_POINTERS, NUM_LANES, BY_STORE):
        _reduce_tiles(
            # The compiler knows no starred tuples.
            *(table, pointers + (signals + SIGNALS_HEAD,), divisor, num_walks, num_bisections, num_tiles),  # noqa: RUF005
            *(NUM_POINTERS, NUM_DIMS, MODES, BLOCK, UNROLL, ELEMENT, DTYPE, OP, DIVIDES),
        )
    publish_slots(signals, NUM_POINTERS, NUM_LANES, BY_STORE)


@triton.jit
def _reduce_tiles(
    table,
    pointers,
    divisor,
    num_walks,
    num_bisections,
    num_tiles,
    NUM_POINTERS: tl.constexpr,
    NUM_DIMS: tl.constexpr,
    MODES: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
    ELEMENT: tl.constexpr,
    DTYPE: tl.constexpr,
    OP: tl.constexpr,
    DIVIDES: tl.constexpr,
):
    """Reduces tile after tile, each program every so many."""
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        piece, own_tile, mode = find_piece(table, num_walks, num_bisections, tile, NUM_DIMS)
        later_slots = table + tl.load(piece + 7)
        for candidate in tl.static_range(TILES):
            if (MODES >> candidate) & 1:
                _reduce_if(
                    *(mode, candidate, piece, later_slots, own_tile, pointers, divisor),
                    *(NUM_POINTERS, NUM_DIMS, BLOCK, UNROLL, ELEMENT, DTYPE, OP, DIVIDES),
                )


@triton.jit
def _reduce_if(
    mode,
    MODE: tl.constexpr,
    piece,
    later_slots,
    tile,
    pointers,
    divisor,
    NUM_POINTERS: tl.constexpr,
    NUM_DIMS: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
    ELEMENT: tl.constexpr,
    DTYPE: tl.constexpr,
    OP: tl.constexpr,
    DIVIDES: tl.constexpr,
):
    """Reduces a tile if it has the mode MODE. Slots are taken UNROLL at a time, so that as many loads are under way."""
    if mode == MODE:
        IS_GROUPED: tl.constexpr = MODE >= GROUPS
        WIDTH: tl.constexpr = 2 ** (MODE - GROUPS if IS_GROUPED else MODE)
        SLOT: tl.constexpr = SLOT_HEAD + NUM_DIMS
        indices, before, inside = units_of_tile(piece, tile, ELEMENT, WIDTH, IS_GROUPED, NUM_DIMS, BLOCK)
        num_later = tl.load(piece + 6).to(tl.int32) - 1
        first = first_slot(piece, NUM_DIMS)
        source = address_at(pointers, first, NUM_POINTERS)
        units = source_units(first + SLOT_HEAD, indices, before, NUM_DIMS)
        elements = elements_at(source, units, ELEMENT, WIDTH, IS_GROUPED)
        total = widened(tl.load(elements, mask=inside), DTYPE)
        for start in range(0, num_later, UNROLL):
            for step in tl.static_range(UNROLL):
                is_there = start + step < num_later
                slot = later_slots + tl.minimum(start + step, num_later - 1) * SLOT
                source = address_at(pointers, slot, NUM_POINTERS)
                units = source_units(slot + SLOT_HEAD, indices, before, NUM_DIMS)
                elements = elements_at(source, units, ELEMENT, WIDTH, IS_GROUPED)
                # The comparison is for the interpreter of Triton 3.9: of the rest it makes integers, which are no mask.
                value = widened(tl.load(elements, mask=(inside & is_there) != 0), DTYPE)
                total = tl.where(is_there, _combine(total, value, OP, DTYPE), total)
        if DIVIDES:  # noqa: SIM102  one is compiled, the other runs
            if divisor != 1:
                total = _divide(total, divisor, DTYPE)
        target = address_at(pointers, piece + 1, NUM_POINTERS)
        targets = elements_at(target, target_units(piece, indices, before, NUM_DIMS), ELEMENT, WIDTH, IS_GROUPED)
        tl.store(targets, narrowed(total, DTYPE), mask=inside)


@triton.jit
def widened(x, DTYPE: tl.constexpr):
    """Accumulated form of an element in memory: float32 of half types, 0 or 1 of bool."""
    if DTYPE == "bool":
        x = (x != 0).to(tl.uint8)
    elif DTYPE == "bfloat16":
        x = to_float32(x, DTYPE)
    elif DTYPE == "float16":
        x = x.to(tl.float32)
    return x


@triton.jit
def narrowed(x, DTYPE: tl.constexpr):
    """Element in memory of an accumulated one."""
    if DTYPE == "bfloat16":
        x = to_bfloat16_bits(x)
    elif DTYPE == "float16":
        x = x.to(tl.float16)
    return x


@triton.jit
def _combine(total, value, OP: tl.constexpr, DTYPE: tl.constexpr):
    """Reduction of two elements; of equal values max and min keep the first, and NaN wins."""
    if OP == "sum":
        total = total + value
    elif OP == "max":
        total = tl.where((value > total) | (value != value), value, total)
    elif OP == "min":
        total = tl.where((value < total) | (value != value), value, total)
    elif DTYPE == "complex64" or DTYPE == "complex128":
        total = _complex_product(total, value)
    else:
        total = total * value
    return total


@triton.jit
def _complex_product(total, value):
    """(a + bi)(c + di) by four real products; real and imaginary parts take turns along the lanes."""
    PAIRS: tl.constexpr = [total.shape[0], total.shape[1] // 2, 2]
    a, b = tl.split(tl.reshape(total, PAIRS))
    c, d = tl.split(tl.reshape(value, PAIRS))
    return tl.reshape(tl.join(a * c - b * d, a * d + b * c), total.shape)


@triton.jit
def _divide(total, divisor, DTYPE: tl.constexpr):
    """Quotient, correctly rounded once; Triton's `/` is only that in float64."""
    if DTYPE == "float64" or DTYPE == "complex128":
        total = total / divisor.to(tl.float64)
    else:
        total = tl.math.div_rn(total, divisor.to(tl.float32))
    return total
