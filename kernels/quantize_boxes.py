"""Copies of strided boxes to and from 8-bit floating point, each box with a scale of its own."""

from collections.abc import Iterable, Sequence

import torch
import triton
import triton.language as tl

from tritondt.kernels import box_table
from tritondt.kernels.boxes import CastBox, CopyBox
from tritondt.kernels.cast_boxes import DIVIDES, MULTIPLIES, READ_AS, DtypePair, cast_kernel
from tritondt.kernels.copy_boxes import DeviceCopyTable
from tritondt.kernels.device_table import SCALE_BYTES, SCALES, DeviceTable, Kernel, Launch, Shared, Sides
from tritondt.kernels.floats import scale_bits, to_float32
from tritondt.kernels.given_tensors import check_tensors, common_device, common_dtype
from tritondt.kernels.indexing import (
    HEAD,
    LOOP,
    SLOT_HEAD,
    address_at,
    elements_at,
    elements_inside,
    find_piece,
    rows_of_tile,
    split_rows,
    walk,
)
from tritondt.kernels.loop_nest import LoopNest, Operand, cast_nest, coalesce
from tritondt.kernels.pieces import Piece
from tritondt.kernels.tuning import Choice

GROUPS = tl.constexpr(box_table.GROUPS)
TILES = tl.constexpr(box_table.TILES)

_FP8 = ("float8_e4m3fn", "float8_e5m2")
_EXACT_IN_FLOAT32 = ("float32", "bfloat16", "float16")
_ONE_BITS = 0x3F800000


class _ScaledTable(DeviceTable):
    """Boxes and their scales, which lie behind each other in one more tensor."""

    def __init__(
        self,
        kernel: Kernel,
        dtypes: DtypePair,
        nests: Sequence[LoopNest],
        device: torch.device,
        *,
        is_aligned: bool,
        max_ctas: int | None,
        choice: Choice | None,
    ) -> None:
        self._dtypes = dtypes
        self._num_sources = 1 + max((nest.operands[1].tensor for nest in nests if nest.num_bytes), default=-1)
        element_bytes = dtypes.element_bytes
        super().__init__(
            kernel,
            [
                _with_scale(coalesce(nest), position * SCALE_BYTES)
                for position, nest in enumerate(nests)
                if nest.num_bytes
            ],
            device,
            sides=Sides(alignments=element_bytes, units=element_bytes),
            is_aligned=is_aligned,
            choice=choice,
            max_ctas=max_ctas,
        )

    def with_scales(
        self, source_ptrs: Sequence[int], target_ptrs: Sequence[int], scales_ptr: int
    ) -> tuple[tuple[Launch, ...], Sequence[int]]:
        """What `launch` takes; the scale of box i is number i of the float32 numbers at `scales_ptr`."""
        if len(source_ptrs) < self._num_sources:
            raise self._missing(source_ptrs, target_ptrs)
        return self.prepared([*source_ptrs, scales_ptr], target_ptrs)

    @property
    def num_dims(self) -> int:
        """The most loops around a run of elements."""
        nests = [_without_scale(nest) for nest in self.nests]
        return max((len(nest.lengths) - (nest.run_bytes > 1) for nest in nests), default=0)

    def pieces(self, nests: Iterable[LoopNest]) -> list[Piece]:
        """Runs as wide as they can be; the last operand of each is its scale."""
        return [
            piece._replace(
                operands=(*piece.operands, nest.operands[2]._replace(strides=tuple(0 for _ in piece.lengths)))
            )
            for nest in nests
            for piece in self._dtypes.pieces(_without_scale(nest))
        ]


class _Fp8Table:
    """What tables to and from fp8 share. Tensors must be aligned to their elements."""

    def __init__(
        self,
        boxes: Sequence[CastBox],
        dtypes: DtypePair,
        kernels: Sequence[Kernel],
        device: torch.device | str,
        *,
        is_aligned: bool,
        max_ctas: int | None,
        choice: Choice | None,
    ) -> None:
        nests = [cast_nest(position, box) for position, box in enumerate(boxes)]
        self._num_bytes = sum(nest.num_bytes for nest in nests) * max(dtypes.element_bytes)
        self._steps = [
            _ScaledTable(
                kernel, dtypes, nests, torch.device(device), is_aligned=is_aligned, max_ctas=max_ctas, choice=choice
            )
            for kernel in kernels
        ]
        self._device = self._steps[0].device

    @property
    def num_bytes(self) -> int:
        """Bytes that one run moves, of the wider side."""
        return self._num_bytes

    @property
    def num_boxes(self) -> int:
        """Boxes that hold anything."""
        return self._steps[0].num_boxes

    @property
    def num_dims(self) -> int:
        """The most loops around a run of elements."""
        return self._steps[0].num_dims


class DeviceQuantizeTable(_Fp8Table):
    """Boxes to cast to fp8 on a device, prepared once and run many times; the like of `tritondt._C.QuantizeTable`.

    A run launches three times: scales are set to the least, found, and used. `is_aligned`, `max_ctas` and `choice` are
    those of DeviceCopyTable.
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
        dtypes = DtypePair(source_dtype, target_dtype)
        _check_dtypes("quantize", dtypes)
        finding = {"SOURCE": source_dtype, "TARGET": target_dtype, "READ": READ_AS[source_dtype]}
        kernels = (
            Kernel(scale_kernel, "cast", (), finding, {}),
            Kernel(cast_kernel, "cast", (), dtypes.constants(DIVIDES), {"enable_fp_fusion": False}),
        )
        super().__init__(boxes, dtypes, kernels, device, is_aligned=is_aligned, max_ctas=max_ctas, choice=choice)
        # What no tile raises: the scale of an empty box.
        self._least = Shared([_ONE_BITS if 0 in box.lengths else 0 for box in boxes], torch.int32, self._device)
        self._start = DeviceCopyTable([CopyBox(0, 0, 0, 0, 4, (len(boxes),), (1,), (1,))], self._device)

    def run(
        self, source_ptrs: Sequence[int], target_ptrs: Sequence[int], scales_ptr: int, num_threads: int = 1
    ) -> None:
        """Writes every box, and its scale as number i of the float32 numbers at `scales_ptr`, on the current stream."""
        if self._start.num_boxes and (scales_ptr == 0 or scales_ptr % SCALE_BYTES):
            raise ValueError(
                f"a box uses scales, whose address is {scales_ptr}; it must be a multiple of {SCALE_BYTES} and not null"
            )
        prepared = [step.with_scales(source_ptrs, target_ptrs, scales_ptr) for step in self._steps]
        if self._device.type == "cuda":
            self._least.is_read_on(torch.cuda.current_stream(self._device))
        self._start.run([self._least.values.data_ptr()], [scales_ptr])
        for step, found in zip(self._steps, prepared, strict=True):
            step.launch(*found)


class DeviceDequantizeTable(_Fp8Table):
    """Boxes to cast from fp8 on a device, prepared once and run many times; the like of `tritondt._C.DequantizeTable`.

    `is_aligned`, `max_ctas` and `choice` are those of DeviceCopyTable.
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
        dtypes = DtypePair(source_dtype, target_dtype)
        _check_dtypes("dequantize", dtypes)
        kernel = Kernel(cast_kernel, "cast", (), dtypes.constants(MULTIPLIES), {"enable_fp_fusion": False})
        super().__init__(boxes, dtypes, [kernel], device, is_aligned=is_aligned, max_ctas=max_ctas, choice=choice)

    def run(
        self, source_ptrs: Sequence[int], target_ptrs: Sequence[int], scales_ptr: int, num_threads: int = 1
    ) -> None:
        """Multiplies every box by its scale, number i of the float32 numbers at `scales_ptr`, on the current stream."""
        step = self._steps[0]
        step.launch(*step.with_scales(source_ptrs, target_ptrs, scales_ptr))


def quantize_boxes(
    sources: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    scales: torch.Tensor,
    boxes: Sequence[CastBox],
    *,
    max_ctas: int | None = None,
    choice: Choice | None = None,
) -> None:
    """Casts every box to fp8 and writes its scale, to the bits that `tritondt.kernels.reference` gives.

    Refuses what cast_boxes refuses. To run the same boxes again, make a DeviceQuantizeTable.

    Example: 500 / 2 lies between 240 and 256, 0.3 / 2 between 0.140625 and 0.15625.

    >>> source = torch.tensor([1.0, -3.0, 500.0, 0.3, 0.0, 0.0])
    >>> target = torch.zeros(6).to(torch.float8_e4m3fn)
    >>> scales = torch.empty(2)
    >>> boxes = [CastBox(0, 0, 0, 0, (4,), (1,), (1,)), CastBox(0, 0, 4, 4, (2,), (1,), (1,))]
    >>> quantize_boxes([source], [target], scales, boxes)
    >>> target.float().tolist(), scales.tolist()
    ([0.5, -1.5, 256.0, 0.15625, 0.0, 0.0], [2.0, 1.0])
    """
    given = _checked("quantize", sources, targets, scales, boxes)
    if given is not None:
        table = DeviceQuantizeTable(boxes, *given, scales.device, max_ctas=max_ctas, choice=choice)
        table.run(_pointers(sources), _pointers(targets), scales.data_ptr())


def dequantize_boxes(
    sources: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    scales: torch.Tensor,
    boxes: Sequence[CastBox],
    *,
    max_ctas: int | None = None,
    choice: Choice | None = None,
) -> None:
    """Casts every box back from fp8, times its scale, to the bits that `tritondt.kernels.reference` gives.

    Refuses what cast_boxes refuses. To run the same boxes again, make a DeviceDequantizeTable.

    >>> source = torch.tensor([0.5, -1.5, 256.0]).to(torch.float8_e4m3fn)
    >>> target = torch.empty(3, dtype=torch.float16)
    >>> dequantize_boxes([source], [target], torch.tensor([2.0]), [CastBox(0, 0, 0, 0, (3,), (1,), (1,))])
    >>> target.tolist()
    [1.0, -3.0, 512.0]
    """
    given = _checked("dequantize", sources, targets, scales, boxes)
    if given is not None:
        table = DeviceDequantizeTable(boxes, *given, scales.device, max_ctas=max_ctas, choice=choice)
        table.run(_pointers(sources), _pointers(targets), scales.data_ptr())


def _checked(
    verb: str,
    sources: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    scales: torch.Tensor,
    boxes: Sequence[CastBox],
) -> tuple[str, str] | None:
    """The dtypes; None where there is no box."""
    device = common_device(sources, targets)
    if not boxes:
        return None
    if scales.dtype != torch.float32 or scales.shape != (len(boxes),) or not scales.is_contiguous():
        raise ValueError(
            f"scales are {scales.dtype} of shape {tuple(scales.shape)} for {len(boxes)} boxes; "
            f"they are torch.float32 of shape ({len(boxes)},), one per box"
        )
    if scales.device != device:
        raise ValueError(f"scales lie on {scales.device} and the tensors on {device}; all must lie on one device")
    source, target = (
        str(dtype).removeprefix("torch.") for dtype in (common_dtype(sources, []), common_dtype([], targets))
    )
    _check_dtypes(verb, DtypePair(source, target))
    for position, box in enumerate(boxes):
        cast_nest(position, box)
    check_tensors(sources, targets, boxes)
    return source, target


def _check_dtypes(verb: str, dtypes: DtypePair) -> None:
    allowed = (_EXACT_IN_FLOAT32, _FP8) if verb == "quantize" else (_FP8, _EXACT_IN_FLOAT32)
    if dtypes.source not in allowed[0] or dtypes.target not in allowed[1]:
        raise ValueError(
            f"{verb} from {dtypes.source} to {dtypes.target}; allowed are {', '.join(allowed[0])} to "
            f"{', '.join(allowed[1])}"
        )


def _pointers(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def _with_scale(nest: LoopNest, offset: int) -> LoopNest:
    """With one operand more, the scale that lies so many bytes behind the first."""
    return nest._replace(operands=(*nest.operands, Operand(SCALES, offset, tuple(0 for _ in nest.lengths))))


def _without_scale(nest: LoopNest) -> LoopNest:
    return nest._replace(operands=nest.operands[:2])


@triton.jit(do_not_specialize=("num_pieces", "num_bisections", "num_tiles"))
def scale_kernel(
    table,
    pointers,
    num_pieces,
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
        piece = find_piece(table, num_pieces, num_bisections, tile, NUM_DIMS)
        slot = piece + HEAD + NUM_DIMS * LOOP
        own_tile = tile - tl.load(piece).to(tl.int32)
        source = address_at(pointers, slot, NUM_POINTERS)
        scale = address_at(pointers, table + tl.load(piece + 7), NUM_POINTERS)
        mode = tl.load(piece + 3)
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
        rows, before = rows_of_tile(tile, IS_GROUPED, BLOCK)
        indices = split_rows(rows, piece + HEAD, NUM_DIMS)
        count = tl.load(piece + 4).to(tl.int32)
        run = tl.load(piece + 5).to(tl.int32)
        inside = elements_inside(rows, count, indices[0], run, before, READ, READ_BYTES, IS_GROUPED)
        source_units = walk(indices, before, slot_strides, 1, NUM_DIMS)
        sources = elements_at(source, source_units, READ, READ_BYTES, IS_GROUPED)
        values = to_float32(tl.load(sources, mask=inside, other=0), SOURCE)
        magnitudes = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        largest = tl.max(tl.where(magnitudes < 0x7F800000, magnitudes, 0))
        if largest > 0:
            tl.atomic_max(scale.to(tl.pointer_type(tl.int32)), scale_bits(largest, TARGET), sem="relaxed")
