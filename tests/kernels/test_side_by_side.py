"""Kernels that a program needs at once are compiled side by side, at their first use."""

import os
import threading
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import triton
from triton.runtime import _async_compile
from triton.runtime.driver import driver

import tritondt as T
from tests.harness.doubled import doubled
from tests.harness.nccl_on_host import ranks_on
from tests.kernels.recording_driver import RecordingDriver
from tritondt.kernels import tables
from tritondt.kernels.boxes import CopyBox, ReduceBox, Slot
from tritondt.kernels.gpu import copy_boxes, device_table, reduce_slots
from tritondt.kernels.gpu.copy_boxes import DeviceCopyTable
from tritondt.kernels.gpu.reduce_slots import DeviceReduceTable
from tritondt.kernels.gpu.side_by_side import compiling_side_by_side

CPU = torch.device("cpu")
KERNELS = (copy_boxes.copy_kernel, reduce_slots.reduce_kernel)
# Only a compilation that never comes to the others meets it.
LIMIT_S = 60.0


class Compiler:
    """A double of Triton's compiler, whose calls return when so many have begun; it notes which were launched."""

    def __init__(self, at_once: int) -> None:
        self.begun = threading.Barrier(at_once)
        self.num_compiled = 0
        self.launched: list[int] = []
        self._counting = threading.Lock()

    def compile(self, source: Any, **_: Any) -> Any:
        with self._counting:
            number = self.num_compiled
            self.num_compiled += 1
        self.begun.wait(LIMIT_S)

        def run(*_: Any, **__: Any) -> None:
            self.launched.append(number)

        compiled = SimpleNamespace(run=run, function=0, packed_metadata=())
        return type("Compiled", (SimpleNamespace,), {"__getitem__": lambda _, grid: run})(**vars(compiled))


@pytest.fixture
def triton_driver(monkeypatch):
    """Triton for a GPU that is not there, whose kernels are forgotten; tables take the CPU for one."""
    monkeypatch.setattr(device_table, "resolved", lambda device, function: device)
    monkeypatch.setattr(driver, "_active", RecordingDriver())
    for kernel in KERNELS:
        kernel.device_caches.clear()
    yield
    for kernel in KERNELS:
        kernel.device_caches.clear()


def use(monkeypatch, compile_kernel):
    """Lets Triton compile so; it looks its compiler up with the first kernel for a device."""
    monkeypatch.setattr(triton.compiler, "compile", compile_kernel)
    for kernel in KERNELS:
        kernel.device_caches.clear()


def tables_of_an_exchange():
    """A pack of aligned runs, a transposing unpack and a reduction: three kernels."""
    runs = DeviceCopyTable([CopyBox(0, 0, 0, 0, 16, (9,), (1,), (1,))], CPU)
    tiles = DeviceCopyTable([CopyBox(0, 0, 0, 0, 4, (64, 64), (1, 64), (64, 1))], CPU)
    slots = (Slot(0, 0, (1,)), Slot(0, 16, (1,)))
    sums = DeviceReduceTable([ReduceBox(0, 0, (16,), (1,), slots)], "sum", "float32", 1, CPU)
    return runs, tiles, sums


def test_the_kernels_of_several_tables_are_compiled_at_the_same_time(triton_driver, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 4)  # a thread for each
    compiler = Compiler(at_once=3)
    use(monkeypatch, compiler.compile)
    with compiling_side_by_side():
        made = tables_of_an_exchange()
    assert compiler.num_compiled == 3
    for _ in range(2):
        for table in made:
            table.run([1 << 40], [1 << 41])
    assert sorted(compiler.launched) == [0, 0, 1, 1, 2, 2]


def test_one_kernel_of_several_tables_is_compiled_once(triton_driver, monkeypatch):
    compiler = Compiler(at_once=1)
    use(monkeypatch, compiler.compile)
    box = CopyBox(0, 0, 0, 0, 16, (9,), (1,), (1,))
    with compiling_side_by_side(), compiling_side_by_side():
        first, second = DeviceCopyTable([box], CPU), DeviceCopyTable([box], CPU)
    third = DeviceCopyTable([box], CPU)
    for table in (first, second, third):
        table.run([1 << 40], [1 << 41])
    assert (compiler.num_compiled, compiler.launched) == (1, [0, 0, 0])


def test_the_error_of_a_compiler_is_raised_and_later_ones_are_compiled(triton_driver, monkeypatch):
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no such instruction")

    use(monkeypatch, fail)
    with pytest.raises(RuntimeError, match="no such instruction"), compiling_side_by_side():
        tables_of_an_exchange()
    assert _async_compile.active_mode.get() is None
    compiler = Compiler(at_once=1)
    use(monkeypatch, compiler.compile)
    tables_of_an_exchange()
    assert compiler.num_compiled == 3


class TogetherMaker(tables.CppMaker):
    """Tables of C++, counted by the outermost context in which they are made."""

    def __init__(self) -> None:
        self.made, self._depth = list[int](), 0

    @contextmanager
    def together(self):
        if self._depth == 0:
            self.made.append(0)
        self._depth += 1
        yield
        self._depth -= 1

    def copy_table(self, boxes, device, slots=None):
        self._count()
        return super().copy_table(boxes, device, slots)

    def reduce_table(self, boxes, op, dtype, divisor, device, slots=None):
        self._count()
        return super().reduce_table(boxes, op, dtype, divisor, device, slots)

    def _count(self) -> None:
        assert self._depth, "a table was made alone"
        self.made[-1] += 1


def tables_of_a_sum(rank: int) -> list[int]:
    """How many tables were made together, for a sum in two steps over the double of NCCL."""
    maker = TogetherMaker()
    mesh = T.Mesh((3,))
    x = T.DTensor.from_local(torch.full((600, 4), float(rank)), mesh, [T.Partial()], run_check=False)
    assert [step.kind for step in T.explain(x, [T.Replicate()]).steps] == ["reduce", "gather"]
    with doubled("cpu", table_maker=maker):
        found = x.redistribute(placements=[T.Replicate()], async_op=rank == 0)
        torch.testing.assert_close(found.to_local(), torch.full((600, 4), 3.0), rtol=0, atol=0)
    return maker.made


def test_all_steps_of_a_plan_are_compiled_together_before_the_first() -> None:
    with ranks_on("nccl", 3, TRITONDT_TIMEOUT="60") as started:
        for made in started.run(tables_of_a_sum):
            assert len(made) == 1
            assert made[0] >= 1
