"""Tables of casts to and from 8-bit floating point on a device, each box with a scale of its own."""

from collections.abc import Iterable, Sequence

import torch

from tritondt.kernels.boxes import SCALE_BYTES, CastBox, CopyBox
from tritondt.kernels.gpu.cast_boxes import DIVIDES, MULTIPLIES, READ_AS, DtypePair
from tritondt.kernels.gpu.copy_boxes import DeviceCopyTable
from tritondt.kernels.gpu.device_table import SCALES, DeviceTable, Kernel, Launch, Shared, Sides
from tritondt.kernels.gpu.loop_nest import LoopNest, Operand, cast_nest, coalesce
from tritondt.kernels.gpu.pieces import Piece
from tritondt.kernels.gpu.scales import scale_kernel
from tritondt.kernels.gpu.tuning import Choice

FP8 = ("float8_e4m3fn", "float8_e5m2")
EXACT_IN_FLOAT32 = ("float32", "bfloat16", "float16")
_ONE_BITS = 0x3F800000
# Without a bound, the assembler spills 8 bytes to stay at 48 registers (sm_120).
_FROM_FLOAT32 = {12: 72}


def scale_finding(dtypes: DtypePair) -> Kernel:
    """The kernel that finds the scales of boxes that become fp8."""
    constants = {"SOURCE": dtypes.source, "TARGET": dtypes.target, "READ": READ_AS[dtypes.source]}
    registers = _FROM_FLOAT32 if dtypes.source == "float32" else {}
    return Kernel(scale_kernel, "cast", (), constants, {}, dtypes.modes, dtypes.lanes, registers)


class _ScaledTable(DeviceTable):
    """Boxes and their scales, which lie one behind the other in one more tensor."""

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
    ) -> tuple[tuple[Launch, ...], tuple[int, ...]]:
        """Arguments of `launch`; the scale of box i is number i of the float32 numbers at `scales_ptr`."""
        if len(source_ptrs) < self._num_sources:
            raise self._missing(source_ptrs, target_ptrs)
        return self.prepared([*source_ptrs, scales_ptr], target_ptrs)

    @property
    def num_dims(self) -> int:
        """Greatest number of loops around a run of elements."""
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
    """Common part of tables to and from fp8, whose tensors must be aligned to their elements."""

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
        """Bytes that one run moves on the wider side."""
        return self._num_bytes

    @property
    def num_boxes(self) -> int:
        """Number of boxes that hold anything."""
        return self._steps[0].num_boxes

    @property
    def num_dims(self) -> int:
        """Greatest number of loops around a run of elements."""
        return self._steps[0].num_dims


class DeviceQuantizeTable(_Fp8Table):
    """Boxes to cast to fp8 on a device, prepared once and run many times; the counterpart of
    `tritondt._C.QuantizeTable`.

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
        check_dtypes("quantize", dtypes)
        kernels = (scale_finding(dtypes), dtypes.kernel(DIVIDES))
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
            self._least.read_by_current_stream()
        self._start.run([self._least.values.data_ptr()], [scales_ptr])
        for step, found in zip(self._steps, prepared, strict=True):
            step.launch(*found)


class DeviceDequantizeTable(_Fp8Table):
    """Boxes to cast from fp8 on a device, prepared once and run many times; the counterpart of
    `tritondt._C.DequantizeTable`.

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
        check_dtypes("dequantize", dtypes)
        kernels = [dtypes.kernel(MULTIPLIES)]
        super().__init__(boxes, dtypes, kernels, device, is_aligned=is_aligned, max_ctas=max_ctas, choice=choice)

    def run(
        self, source_ptrs: Sequence[int], target_ptrs: Sequence[int], scales_ptr: int, num_threads: int = 1
    ) -> None:
        """Multiplies every box by its scale, number i of the float32 numbers at `scales_ptr`, on the current stream."""
        step = self._steps[0]
        step.launch(*step.with_scales(source_ptrs, target_ptrs, scales_ptr))


def check_dtypes(verb: str, dtypes: DtypePair) -> None:
    """Raises ValueError where the verb, quantize or dequantize, does not go from the one dtype to the other."""
    allowed = (EXACT_IN_FLOAT32, FP8) if verb == "quantize" else (FP8, EXACT_IN_FLOAT32)
    if dtypes.source not in allowed[0] or dtypes.target not in allowed[1]:
        raise ValueError(
            f"{verb} from {dtypes.source} to {dtypes.target}; allowed are {', '.join(allowed[0])} to "
            f"{', '.join(allowed[1])}"
        )


def _with_scale(nest: LoopNest, offset: int) -> LoopNest:
    """Nest with one operand more, the scale that lies `offset` bytes behind the first."""
    return nest._replace(operands=(*nest.operands, Operand(SCALES, offset, tuple(0 for _ in nest.lengths))))


def _without_scale(nest: LoopNest) -> LoopNest:
    return nest._replace(operands=nest.operands[:2])
