"""Copies of strided boxes to and from 8-bit floating point, each box with a scale of its own."""

from collections.abc import Sequence

import torch

from tritondt.kernels.arguments import check_tensors, common_device, common_dtype
from tritondt.kernels.boxes import CastBox
from tritondt.kernels.gpu.cast_boxes import DtypePair
from tritondt.kernels.gpu.fp8_tables import DeviceDequantizeTable, DeviceQuantizeTable, check_dtypes
from tritondt.kernels.gpu.loop_nest import cast_nest
from tritondt.kernels.gpu.tuning import Choice


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

    `sources` and `targets` are lists of tensors on one device, of any shapes and strides; `boxes` name them by number,
    with offsets and strides in elements from each tensor's first element. Sources are float32, bfloat16 or float16,
    targets float8_e4m3fn or float8_e5m2; `scales` (float32, one per box) is written. Runs on the device's current
    stream. `max_ctas` bounds the number of programs, `choice` replaces what tuning.json says. Raises ValueError as
    cast_boxes does. To run the same boxes again, make a DeviceQuantizeTable.

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

    `sources` and `targets` are lists of tensors on one device, of any shapes and strides; `boxes` name them by number,
    with offsets and strides in elements from each tensor's first element. Sources are float8_e4m3fn or float8_e5m2,
    targets float32, bfloat16 or float16; `scales` (float32, one per box) is read. Runs on the device's current stream.
    `max_ctas` bounds the number of programs, `choice` replaces what tuning.json says. Raises ValueError as cast_boxes
    does. To run the same boxes again, make a DeviceDequantizeTable.

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
    """Dtypes of sources and targets; None where there is no box."""
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
    check_dtypes(verb, DtypePair(source, target))
    for position, box in enumerate(boxes):
        cast_nest(position, box)
    check_tensors(sources, targets, boxes)
    return source, target


def _pointers(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]
