"""Tables of boxes for the memory they run on: C++ on the CPU, Triton on CUDA devices."""

import importlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from tritondt._C import CastTable, CopyTable, DequantizeTable, QuantizeTable, ReduceTable
from tritondt.kernels.boxes import CastBox, CopyBox, ReduceBox
from tritondt.kernels.device_types import ByDeviceType
from tritondt.kernels.scaled_tables import (
    PlacedDequantizeTable,
    PlacedQuantizeTable,
    ScaledTable,
    ScalePlace,
    scale_copies,
)
from tritondt.kernels.signals import HostSlotTable, SlotTensors


class Table(Protocol):
    """Boxes prepared once and run many times."""

    def run(self, source_ptrs: list[int], target_ptrs: list[int], num_threads: int) -> None:
        """Runs every box on the tensors whose first elements lie at the given addresses.

        On a CUDA device that is a launch on its current stream, and `num_threads` is not used.
        """

    @property
    def num_bytes(self) -> int:
        """Bytes that one run writes; of a cast on the wider side, of a reduction those of the slots read."""

    @property
    def num_boxes(self) -> int:
        """Number of boxes that hold anything."""


class Maker(Protocol):
    """Maker of the tables of one type of device."""

    def together(self) -> AbstractContextManager[None]:
        """Context in which several tables are made, which can be run after it."""

    def copy_table(self, boxes: Sequence[CopyBox], device: torch.device, slots: SlotTensors | None = None) -> Table:
        """A table of copies, of which some tensors may be peers' slots."""

    def cast_table(self, boxes: Sequence[CastBox], source_dtype: str, target_dtype: str, device: torch.device) -> Table:
        """A table of casts."""

    def quantize_table(
        self, boxes: Sequence[CastBox], source_dtype: str, target_dtype: str, device: torch.device
    ) -> ScaledTable:
        """A table of casts to fp8."""

    def dequantize_table(
        self, boxes: Sequence[CastBox], source_dtype: str, target_dtype: str, device: torch.device
    ) -> ScaledTable:
        """A table of casts from fp8."""

    def reduce_table(
        self,
        boxes: Sequence[ReduceBox],
        op: str,
        dtype: str,
        divisor: int,
        device: torch.device,
        slots: SlotTensors | None = None,
    ) -> Table:
        """A table of reductions, of which some sources may be slots that peers have written to."""


class CppMaker:
    """Tables of the extension, for the CPU."""

    def together(self) -> AbstractContextManager[None]:
        """A context that does nothing: tables are made at once."""
        return nullcontext()

    def copy_table(self, boxes: Sequence[CopyBox], device: torch.device, slots: SlotTensors | None = None) -> Table:
        """A table of copies."""
        return CopyTable(boxes) if slots is None else HostSlotTable(CopyTable(boxes), slots)

    def cast_table(self, boxes: Sequence[CastBox], source_dtype: str, target_dtype: str, device: torch.device) -> Table:
        """A table of casts."""
        return CastTable(boxes, source_dtype, target_dtype)

    def quantize_table(
        self, boxes: Sequence[CastBox], source_dtype: str, target_dtype: str, device: torch.device
    ) -> ScaledTable:
        """A table of casts to fp8."""
        return QuantizeTable(boxes, source_dtype, target_dtype)

    def dequantize_table(
        self, boxes: Sequence[CastBox], source_dtype: str, target_dtype: str, device: torch.device
    ) -> ScaledTable:
        """A table of casts from fp8."""
        return DequantizeTable(boxes, source_dtype, target_dtype)

    def reduce_table(
        self,
        boxes: Sequence[ReduceBox],
        op: str,
        dtype: str,
        divisor: int,
        device: torch.device,
        slots: SlotTensors | None = None,
    ) -> Table:
        """A table of reductions."""
        table = ReduceTable(boxes, op, dtype, divisor)
        return table if slots is None else HostSlotTable(table, slots)


class TritonMaker:
    """Tables of Triton's kernels, for CUDA devices; for the CPU too, where Triton interprets.

    Triton is imported with the first table: it takes 0.3 s, and the CPU never needs it.
    """

    def together(self) -> AbstractContextManager[None]:
        """A context in which the tables' kernels are compiled side by side."""
        found: AbstractContextManager[None] = _triton_module("side_by_side").compiling_side_by_side()
        return found

    def copy_table(self, boxes: Sequence[CopyBox], device: torch.device, slots: SlotTensors | None = None) -> Table:
        """A table of copies."""
        table: Table = _triton_module("copy_boxes").DeviceCopyTable(boxes, device, slots=slots)
        return table

    def cast_table(self, boxes: Sequence[CastBox], source_dtype: str, target_dtype: str, device: torch.device) -> Table:
        """A table of casts."""
        table: Table = _triton_module("cast_boxes").DeviceCastTable(boxes, source_dtype, target_dtype, device)
        return table

    def quantize_table(
        self, boxes: Sequence[CastBox], source_dtype: str, target_dtype: str, device: torch.device
    ) -> ScaledTable:
        """A table of casts to fp8."""
        table: ScaledTable = _triton_module("fp8_tables").DeviceQuantizeTable(boxes, source_dtype, target_dtype, device)
        return table

    def dequantize_table(
        self, boxes: Sequence[CastBox], source_dtype: str, target_dtype: str, device: torch.device
    ) -> ScaledTable:
        """A table of casts from fp8."""
        table: ScaledTable = _triton_module("fp8_tables").DeviceDequantizeTable(
            boxes, source_dtype, target_dtype, device
        )
        return table

    def reduce_table(
        self,
        boxes: Sequence[ReduceBox],
        op: str,
        dtype: str,
        divisor: int,
        device: torch.device,
        slots: SlotTensors | None = None,
    ) -> Table:
        """A table of reductions."""
        table: Table = _triton_module("reduce_slots").DeviceReduceTable(boxes, op, dtype, divisor, device, slots=slots)
        return table


table_makers = ByDeviceType[Maker](cpu=CppMaker(), cuda=TritonMaker())


def made_together(device: torch.device) -> AbstractContextManager[None]:
    """Context in which tables for tensors on `device` are made whose kernels are compiled side by side, on a GPU.

    They can be run after it.

    >>> with made_together(torch.device("cpu")):
    ...     tables = [copy_table([], torch.device("cpu")) for _ in range(2)]
    >>> [table.num_boxes for table in tables]
    [0, 0]
    """
    found = table_makers.get(device.type)
    return nullcontext() if found is None else found.together()


def copy_table(boxes: Sequence[CopyBox], device: torch.device, slots: SlotTensors | None = None) -> Table:
    """Table of copies for tensors on `device`, cpu or cuda.

    Sizes of boxes are in words of `itemsize` bytes; addresses are given to each run. With `slots` some tensors are
    slots in memory that peers and this rank share, and a run awaits these peers and tells them, on a GPU within its
    launches. ValueError for any other device, and for slots that cannot be.

    >>> source, target = torch.arange(6, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    >>> table = copy_table([CopyBox(0, 0, 1, 0, 4, (3,), (2,), (1,))], torch.device("cpu"))
    >>> table.run([source.data_ptr()], [target.data_ptr()], 1)
    >>> target.tolist(), table.num_bytes
    ([1, 3, 5], 12)
    """
    return _maker(device).copy_table(boxes, device, slots)


def cast_table(boxes: Sequence[CastBox], source_dtype: str, target_dtype: str, device: torch.device) -> Table:
    """Table of casts between two of float32, float64, bfloat16 and float16, for tensors on `device`, cpu or cuda.

    >>> cast_table([CastBox(0, 0, 0, 0, (3,), (1,), (1,))], "float32", "bfloat16", torch.device("cpu")).num_bytes
    12
    """
    return _maker(device).cast_table(boxes, source_dtype, target_dtype, device)


def quantize_table(
    boxes: Sequence[CastBox],
    scales: Sequence[ScalePlace],
    source_dtype: str,
    target_dtype: str,
    device: torch.device,
) -> Table:
    """Table of casts to fp8 that writes the scale of each box to its place among the targets.

    From float32, bfloat16 or float16 to float8_e4m3fn or float8_e5m2.

    >>> box, place = CastBox(0, 0, 0, 4, (3,), (1,), (1,)), ScalePlace(0, 0)
    >>> quantize_table([box], [place], "float32", "float8_e4m3fn", torch.device("cpu")).num_bytes
    12
    """
    cast = _maker(device).quantize_table(boxes, source_dtype, target_dtype, device)
    return PlacedQuantizeTable(cast, copy_table(scale_copies(scales, to_places=True), device), len(boxes), device)


def dequantize_table(
    boxes: Sequence[CastBox],
    scales: Sequence[ScalePlace],
    source_dtype: str,
    target_dtype: str,
    device: torch.device,
) -> Table:
    """Table of casts from fp8 that takes the scale of each box from its place among the sources, as `quantize_table`
    wrote it.

    From float8_e4m3fn or float8_e5m2 to float32, bfloat16 or float16.

    >>> box, place = CastBox(0, 0, 4, 0, (3,), (1,), (1,)), ScalePlace(0, 0)
    >>> dequantize_table([box], [place], "float8_e4m3fn", "float32", torch.device("cpu")).num_bytes
    12
    """
    cast = _maker(device).dequantize_table(boxes, source_dtype, target_dtype, device)
    return PlacedDequantizeTable(cast, copy_table(scale_copies(scales, to_places=False), device), len(boxes), device)


def reduce_table(
    boxes: Sequence[ReduceBox],
    op: str,
    dtype: str,
    divisor: int,
    device: torch.device,
    slots: SlotTensors | None = None,
) -> Table:
    """Table of reductions for tensors of `dtype` on `device`, cpu or cuda; `op` is sum, product, max or min.

    A sum is divided once by `divisor`, which is 1 or more. `slots` are those of `copy_table`. ValueError where the
    dtype has no such reduction.

    >>> from tritondt.kernels.boxes import Slot
    >>> slots = (Slot(0, 0, (1,)), Slot(0, 3, (1,)))
    >>> reduce_table([ReduceBox(0, 0, (3,), (1,), slots)], "sum", "float32", 2, torch.device("cpu")).num_bytes
    24
    """
    return _maker(device).reduce_table(boxes, op, dtype, divisor, device, slots)


def _maker(device: torch.device) -> Maker:
    found = table_makers.get(device.type)
    if found is None:
        raise ValueError(f"a table of boxes on {device}; there are tables for cpu and for cuda")
    return found


def _triton_module(name: str) -> Any:
    return importlib.import_module(f"tritondt.kernels.gpu.{name}")
