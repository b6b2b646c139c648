"""Test doubles of Triton's kernels, which note in which forms they would be compiled, and run nothing.

With the maker of tables here, C++ moves the data, so that whole programs run and their kernels are counted.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch

from tests.harness.doubled import doubled
from tritondt.kernels.boxes import CastBox, CopyBox, ReduceBox
from tritondt.kernels.gpu import cast_boxes, copy_boxes, device_table, fp8_tables, reduce_slots
from tritondt.kernels.gpu.device_table import DeviceTable, Form, Kernel
from tritondt.kernels.scaled_tables import ScaledTable
from tritondt.kernels.signals import SlotTensors
from tritondt.kernels.tables import CppMaker, Table, TritonMaker

_PLACES = (
    (copy_boxes, "copy_kernel"),
    (copy_boxes, "slot_copy_kernel"),
    (reduce_slots, "reduce_kernel"),
    (reduce_slots, "slot_reduce_kernel"),
    (cast_boxes, "cast_kernel"),
    (fp8_tables, "scale_kernel"),
)


class _NoKernel:
    """A kernel by name that launches nothing."""

    __module__ = "no interpreter"  # tables take kernels of the interpreter for the CPU, and no others

    def __init__(self, name: str) -> None:
        self.name = name

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: None


class _CountedTable:
    """A table of C++, beside that of a device, which is made ready for each run's addresses."""

    def __init__(self, cpp: Table, counted: DeviceTable) -> None:
        self._cpp, self._counted = cpp, counted
        self.num_bytes, self.num_boxes = cpp.num_bytes, cpp.num_boxes

    def run(self, source_ptrs: list[int], target_ptrs: list[int], num_threads: int) -> None:
        self._counted.prepared(source_ptrs, target_ptrs)
        self._cpp.run(source_ptrs, target_ptrs, num_threads)


class CountingMaker(CppMaker):
    """Tables of C++, for each of which that of a device is made too."""

    def copy_table(self, boxes: Sequence[CopyBox], device: torch.device, slots: SlotTensors | None = None) -> Table:
        counted: Any = TritonMaker().copy_table(boxes, device, slots)
        return _CountedTable(super().copy_table(boxes, device, slots), counted)

    def cast_table(self, boxes: Sequence[CastBox], source_dtype: str, target_dtype: str, device: torch.device) -> Table:
        counted: Any = TritonMaker().cast_table(boxes, source_dtype, target_dtype, device)
        return _CountedTable(super().cast_table(boxes, source_dtype, target_dtype, device), counted)

    def quantize_table(
        self, boxes: Sequence[CastBox], source_dtype: str, target_dtype: str, device: torch.device
    ) -> ScaledTable:
        TritonMaker().quantize_table(boxes, source_dtype, target_dtype, device)
        return super().quantize_table(boxes, source_dtype, target_dtype, device)

    def dequantize_table(
        self, boxes: Sequence[CastBox], source_dtype: str, target_dtype: str, device: torch.device
    ) -> ScaledTable:
        TritonMaker().dequantize_table(boxes, source_dtype, target_dtype, device)
        return super().dequantize_table(boxes, source_dtype, target_dtype, device)

    def reduce_table(
        self,
        boxes: Sequence[ReduceBox],
        op: str,
        dtype: str,
        divisor: int,
        device: torch.device,
        slots: SlotTensors | None = None,
    ) -> Table:
        counted: Any = TritonMaker().reduce_table(boxes, op, dtype, divisor, device, slots)
        return _CountedTable(super().reduce_table(boxes, op, dtype, divisor, device, slots), counted)


@contextmanager
def counted() -> Iterator[set[tuple[Any, ...]]]:
    """Within, tables of the CPU come from CountingMaker; the set that is given has what kernels are compiled for."""
    found = set[tuple[Any, ...]]()

    def note(kernel: Kernel, form: Form, num_warps: int, *others: Any) -> None:
        options = kernel.compiled_with(form.num_dims, num_warps, 90)
        found.add((kernel.function.name, tuple(form.constants(kernel).items()), tuple(sorted(options.items()))))

    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for module, name in _PLACES:
            patch.setattr(module, name, _NoKernel(name))
        patch.setattr(device_table, "compile_form", note)
        stack.enter_context(doubled("cpu", table_maker=CountingMaker()))
        yield found
