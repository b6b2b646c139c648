"""Tables of boxes for the memory they run on: C++ on the CPU, Triton on CUDA devices."""

import importlib
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from tritondt._C import CopyTable, ReduceTable
from tritondt.kernels.boxes import CopyBox, ReduceBox


class Table(Protocol):
    """Boxes prepared once and run many times."""

    def run(self, source_ptrs: list[int], target_ptrs: list[int], num_threads: int) -> None:
        """Runs every box on the tensors whose first elements lie at the given addresses.

        On a CUDA device that is a launch on its current stream, and `num_threads` is not used.
        """

    @property
    def num_bytes(self) -> int:
        """Bytes that are written, or of slots read."""

    @property
    def num_boxes(self) -> int:
        """Boxes that hold anything."""


def copy_table(boxes: Sequence[CopyBox], device: torch.device) -> Table:
    """A table of copies for tensors on `device`, cpu or cuda.

    >>> copy_table([CopyBox(0, 0, 0, 0, 4, (3,), (1,), (1,))], torch.device("cpu")).num_bytes
    12
    """
    if device.type == "cpu":
        return CopyTable(boxes)
    _check_device(device)
    table: Table = _triton_module("copy_boxes").DeviceCopyTable(boxes, device)
    return table


def reduce_table(boxes: Sequence[ReduceBox], op: str, dtype: str, divisor: int, device: torch.device) -> Table:
    """A table of reductions for tensors on `device`, cpu or cuda."""
    if device.type == "cpu":
        return ReduceTable(boxes, op, dtype, divisor)
    _check_device(device)
    table: Table = _triton_module("reduce_slots").DeviceReduceTable(boxes, op, dtype, divisor, device)
    return table


def _check_device(device: torch.device) -> None:
    if device.type != "cuda":
        raise ValueError(f"a table of boxes on {device}; there are tables for cpu and for cuda")


# Imported on first use: Triton takes 0.3 s, and the CPU never needs it.
def _triton_module(name: str) -> Any:
    return importlib.import_module(f"tritondt.kernels.{name}")
