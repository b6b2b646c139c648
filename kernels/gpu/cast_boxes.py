"""Copies of strided boxes from one floating-point dtype to another, packed or unpacked in one launch."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tritondt.kernels.arguments import check_tensors, common_device, common_dtype
from tritondt.kernels.boxes import CastBox
from tritondt.kernels.gpu import box_table
from tritondt.kernels.gpu.device_table import DeviceTable, Kernel, Sides
from tritondt.kernels.gpu.floats import scaled, to_bits, to_float32
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
from tritondt.kernels.gpu.loop_nest import LoopNest, cast_nest, coalesce
from tritondt.kernels.gpu.pieces import MAX_GROUPED_BYTES, WIDEST, Grain, Piece, run_pieces
from tritondt.kernels.gpu.specialization import run_modes
from tritondt.kernels.gpu.tuning import Choice

GROUPS = tl.constexpr(box_table.GROUPS)
TILES = tl.constexpr(box_table.TILES)

FLOATS = ("float32", "float64", "bfloat16", "float16")
_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
_BITS = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint64}
# How an element is read, and the bits that are written.
WRITTEN_AS = {dtype: _BITS[num_bytes] for dtype, num_bytes in _BYTES.items()}
READ_AS = {**WRITTEN_AS, "float32": tl.float32, "float64": tl.float64}
# What a kernel does with scales: 0 nothing, 1 multiplies by them, 2 divides by them.
NO_SCALES, MULTIPLIES, DIVIDES = 0, 1, 2
_DIVIDES = tl.constexpr(DIVIDES)
# Without a bound, the assembler spills 8 bytes to stay at 32 registers, or 40 or 48, of some casts (sm_100).
_OPTIONS = {"enable_fp_fusion": False, "maxnreg": 64}
# Within 64 registers it spills 16 bytes of casts from two bytes to eight on sm_120, within 72 those of bfloat16.
_TWO_TO_EIGHT_BYTES = {12: 80}


class DtypePair(NamedTuple):
    """Dtypes of sources and of targets of a cast."""

    source: str
    target: str

    @property
    def element_bytes(self) -> tuple[int, int]:
        """Bytes of an element of the targets and of the sources."""
        return _BYTES[self.target], _BYTES[self.source]

    def kernel(self, scales: int) -> Kernel:
        """Kernel that casts so; `scales` says what becomes of scales: NO_SCALES, MULTIPLIES or DIVIDES."""
        constants = {
            "SOURCE": self.source,
            "TARGET": self.target,
            "READ": READ_AS[self.source],
            "WRITTEN": WRITTEN_AS[self.target],
            "SCALES": scales,
        }
        name = "cast to float64" if self.target == "float64" else "cast"
        registers = _TWO_TO_EIGHT_BYTES if self.element_bytes == (8, 2) else {}
        return Kernel(cast_kernel, name, (), constants, _OPTIONS, self.modes, self.lanes, registers)

    @property
    def lanes(self) -> int:
        """Elements of the widest units: they fill 16 bytes on the narrower side."""
        return WIDEST // min(self.element_bytes)

    @property
    def modes(self) -> tuple[int]:
        """The class of modes of a kernel that casts so; its widths count elements."""
        return (run_modes(self.lanes, MAX_GROUPED_BYTES // max(self.element_bytes)),)

    def pieces(self, nest: LoopNest) -> Iterator[Piece]:
        """Runs of as many elements at a time as fill 16 bytes on the narrower side, with offsets in bytes."""
        target_bytes, source_bytes = self.element_bytes
        for piece in run_pieces(nest, Grain(widest=self.lanes, word=1, num_bytes=max(self.element_bytes))):
            target, source = piece.operands
            in_bytes = (
                target._replace(offset=target.offset * target_bytes),
                source._replace(offset=source.offset * source_bytes),
            )
            yield piece._replace(operands=in_bytes)


class DeviceCastTable(DeviceTable):
    """Boxes to cast on a device, prepared once and run many times.

    Tensors must be aligned to their elements; `is_aligned`, `max_ctas` and `choice` are those of DeviceCopyTable.
    """

    def __init__(
        self,
        boxes: Sequence[CastBox],
        source_dtype: str,
        target_dtype: str,
        device: torch.device | str,
        *,
        is_aligned: bool = False,
        max_ctas: int | None = None,
        choice: Choice | None = None,
    ) -> None:
        _check_dtypes(source_dtype, target_dtype)
        self._dtypes = DtypePair(source_dtype, target_dtype)
        element_bytes = self._dtypes.element_bytes
        nests = [cast_nest(position, box) for position, box in enumerate(boxes)]
        self._num_bytes = sum(nest.num_bytes for nest in nests) * max(element_bytes)
        super().__init__(
            self._dtypes.kernel(NO_SCALES),
            [coalesce(nest) for nest in nests if nest.num_bytes],
            torch.device(device),
            sides=Sides(alignments=element_bytes, units=element_bytes),
            is_aligned=is_aligned,
            choice=choice,
            max_ctas=max_ctas,
        )

    @property
    def num_bytes(self) -> int:
        """Bytes that one run moves on the wider side."""
        return self._num_bytes

    def pieces(self, nests: Iterable[LoopNest]) -> list[Piece]:
        """Runs as wide as they can be."""
        return [piece for nest in nests for piece in self._dtypes.pieces(nest)]


def cast_boxes(
    sources: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    boxes: Sequence[CastBox],
    *,
    max_ctas: int | None = None,
    choice: Choice | None = None,
) -> None:
    """Casts every box from the dtype of the sources to that of the targets, to the bits of
    `tritondt.kernels.reference`.

    `sources` and `targets` are lists of tensors on one device, of any shapes and strides; `boxes` name them by number,
    with offsets and strides in elements from each tensor's first element. All sources have one dtype and all targets
    another, of float32, float64, bfloat16 and float16. Runs on the device's current stream. `max_ctas` bounds the
    number of programs, `choice` replaces what tuning.json says. Raises ValueError as copy_boxes does, and for other
    dtypes. To run the same boxes again, make a DeviceCastTable.

    Example: 2 rows of a 2x3 tensor to bfloat16, transposed.

    >>> source = torch.tensor([[1.0, 1.00390625, 65535.0], [float("nan"), 1.01171875, 3.4e38]])
    >>> target = torch.full((7,), -1.0, dtype=torch.bfloat16)
    >>> cast_boxes([source], [target], [CastBox(0, 0, 0, 1, (2, 3), (3, 1), (1, 2))])
    >>> target.tolist()
    [-1.0, 1.0, nan, 1.0, 1.015625, 65536.0, inf]
    """
    device = common_device(sources, targets)
    dtypes = [common_dtype(sources, []), common_dtype([], targets)]
    nests = [cast_nest(position, box) for position, box in enumerate(boxes)]
    check_tensors(sources, targets, boxes)
    if not any(nest.num_bytes for nest in nests):
        return
    source_dtype, target_dtype = (str(dtype).removeprefix("torch.") for dtype in dtypes)
    table = DeviceCastTable(boxes, source_dtype, target_dtype, device, max_ctas=max_ctas, choice=choice)
    table.run([tensor.data_ptr() for tensor in sources], [tensor.data_ptr() for tensor in targets])


def _check_dtypes(source: str, target: str) -> None:
    if source not in FLOATS or target not in FLOATS or source == target:
        allowed = ", ".join(FLOATS)
        raise ValueError(f"cast from {source} to {target}; allowed are two different ones of {allowed}")


@triton.jit(do_not_specialize=("num_walks", "num_bisections", "num_tiles"))
def cast_kernel(
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
    WRITTEN: tl.constexpr,
    SCALES: tl.constexpr,
):
    """Casts tile after tile of the pieces in `table`, whose widths count elements; a second slot is the scale of a
    box.
    """
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        piece, own_tile, mode = find_piece(table, num_walks, num_bisections, tile, NUM_DIMS)
        slot = first_slot(piece, NUM_DIMS)
        target = address_at(pointers, piece + 1, NUM_POINTERS)
        source = address_at(pointers, slot, NUM_POINTERS)
        factor = 1.0
        if SCALES:
            factor = _factor(address_at(pointers, table + tl.load(piece + 7), NUM_POINTERS), SCALES)
        for candidate in tl.static_range(TILES):
            if (MODES >> candidate) & 1:
                _cast_if(
                    *(mode, candidate, piece, slot + SLOT_HEAD, own_tile, source, target, factor),
                    *(NUM_DIMS, BLOCK, SOURCE, TARGET, READ, WRITTEN, SCALES),
                )


@triton.jit
def _cast_if(
    mode,
    MODE: tl.constexpr,
    piece,
    slot_strides,
    tile,
    source,
    target,
    factor,
    NUM_DIMS: tl.constexpr,
    BLOCK: tl.constexpr,
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
    READ: tl.constexpr,
    WRITTEN: tl.constexpr,
    SCALES: tl.constexpr,
):
    """Casts a tile if it has the mode MODE, units in the order of the target."""
    if mode == MODE:
        IS_GROUPED: tl.constexpr = MODE >= GROUPS
        LANES: tl.constexpr = 2 ** (MODE - GROUPS if IS_GROUPED else MODE)
        READ_BYTES: tl.constexpr = LANES * READ.primitive_bitwidth // 8
        WRITTEN_BYTES: tl.constexpr = LANES * WRITTEN.primitive_bitwidth // 8
        indices, before, inside = units_of_tile(piece, tile, READ, READ_BYTES, IS_GROUPED, NUM_DIMS, BLOCK)
        from_units = source_units(slot_strides, indices, before, NUM_DIMS)
        to_units = target_units(piece, indices, before, NUM_DIMS)
        sources = elements_at(source, from_units, READ, READ_BYTES, IS_GROUPED)
        targets = elements_at(target, to_units, WRITTEN, WRITTEN_BYTES, IS_GROUPED)
        values = to_float32(tl.load(sources, mask=inside), SOURCE)
        if SCALES:
            values = scaled(values, factor, SCALES == _DIVIDES)
        tl.store(targets, to_bits(values, TARGET), mask=inside)


@triton.jit
def _factor(address, SCALES: tl.constexpr):
    """Scale of a box, or its reciprocal, which is exact for powers of two; a scale of 0 stands for 1 and becomes 1."""
    scale = address.to(tl.pointer_type(tl.int32))
    bits = tl.load(scale)
    if SCALES == _DIVIDES:
        if bits == 0:
            # All programs of the box may write it, and none reads anything but 0 and 1.
            tl.store(scale, 0x3F800000)
        bits = tl.where(bits == 0, 0x3F800000, (254 << 23) - bits)
    return bits.to(tl.float32, bitcast=True)
