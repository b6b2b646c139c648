"""Pack kernels of one's own, by name: redistributions whose copies a user's function makes, beside the engine's.

`MODULE:FUNCTION` is given the boxes of a table, plain values that say what is copied from where to where, and returns
what runs them: a function of the addresses of sources and targets. Packs, unpacks and what stays all go through it, on
the CPU over the sockets and on GPUs over NCCL, in whose stream it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch

import tritondt as T
from tritondt.cli.bench.collective.engine import run_of
from tritondt.cli.bench.collective.sides import imported
from tritondt.cli.user_error import BenchmarkError
from tritondt.comm.packing.packed_transfer import packed_transfer
from tritondt.kernels.boxes import CopyBox
from tritondt.kernels.signals import HostSlotTable, SlotTensors
from tritondt.kernels.tables import CppMaker, Table, TritonMaker, table_makers
from tritondt.redistribution.compile import compile_plan
from tritondt.redistribution.compiled_step import CompiledStep

# What runs boxes: it is given the address of each source's first element, and of each target's.
Copy = Callable[[Sequence[int], Sequence[int]], object]


class _OwnTable:
    """A table of copies that a user's function has made."""

    def __init__(self, boxes: Sequence[CopyBox], copy: Copy) -> None:
        self._copy = copy
        self.num_boxes = sum(prod(box.lengths) > 0 for box in boxes)
        self.num_bytes = sum(prod(box.lengths) * box.itemsize for box in boxes)

    def run(self, source_ptrs: list[int], target_ptrs: list[int], num_threads: int) -> None:
        self._copy(source_ptrs, target_ptrs)


class _OwnCopies:
    """Tables of copies that a user's function makes."""

    def __init__(self, make: Callable[[Sequence[CopyBox]], Copy]) -> None:
        self._make = make

    def copy_table(self, boxes: Sequence[CopyBox], device: torch.device, slots: SlotTensors | None = None) -> Table:
        table = _OwnTable(boxes, self._make(boxes))
        if slots is None:
            return table
        if device.type != "cpu":
            raise BenchmarkError(
                "a pack kernel of one's own goes over NCCL, and TRITONDT_SLOTS asks for slots; unset it"
            )
        return HostSlotTable(table, slots)


class _OnCpu(_OwnCopies, CppMaker):
    """Tables of the extension, but for copies."""


class _OnGpu(_OwnCopies, TritonMaker):
    """Tables of Triton's kernels, but for copies."""


def bind(name: str, local: torch.Tensor, source: T.DTensorSpec, target: T.DTensorSpec) -> Callable[[], torch.Tensor]:
    """Redistribution whose copies the function `name` makes; a collective call, and so is what it returns.

    Ranks are processes: what makes tables is replaced meanwhile, for all threads. Raises BenchmarkError for a name
    that cannot be imported, and on GPUs where messages go through slots.
    """
    make: Any = imported(name)
    device_type = local.device.type
    maker = _OnGpu(make) if device_type == "cuda" else _OnCpu(make)
    plan = compile_plan(source, target, local.stride(), local.device, None)
    with table_makers.replaced(device_type, maker):
        run = run_of([_with_own_tables(step) for step in plan.steps], local)
        run()  # a communicator makes the tables of a transfer when it is first given one
    return run


def _with_own_tables(step: CompiledStep) -> CompiledStep:
    """A step with a transfer that no communicator has seen."""
    if step.transfer is None:
        return step
    transfer = replace(step.transfer)
    return step._replace(transfer=transfer, keep=packed_transfer(transfer).keep if step.communicator is None else None)
