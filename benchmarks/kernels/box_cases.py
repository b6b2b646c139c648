"""Boxes that are copied and reduced, and torch's ways to the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from benchmarks.kernels.box_case import (
    MEMCPY,
    OURS,
    TORCH,
    Case,
    Recipe,
    Run,
    dtype_name,
    memcpy_run,
    ours_run,
    random_values,
    starts_of,
)
from tritondt._C import CopyTable, ReduceTable
from tritondt.kernels.boxes import CopyBox, ReduceBox, Slot
from tritondt.kernels.memory import allocate

CHUNK_CAT = "torch chunk + cat"
_PEERS = 8
_SLOTS = 8


def box_cases(num_bytes: int, num_threads: int) -> Iterator[Recipe]:
    """All cases, each of about `num_bytes`."""
    size = (num_bytes, num_threads)

    def recipe(make: Callable[..., Case], title: str, *arguments: object) -> Recipe:
        return Recipe(title, make, (title, *size, *arguments))

    yield recipe(_whole_copy, "pack, contiguous")
    for run_bytes in (16, 64, 512, 1024, 4096, 65536):
        yield recipe(_pack, f"pack, runs of {run_bytes} bytes", [run_bytes // 4] * _PEERS, torch.float32)
    for dtype, columns in ((torch.float32, 4097), (torch.bfloat16, 4099)):
        for make, verb in ((_pack, "pack"), (_unpack, "unpack")):
            yield recipe(make, f"{verb}, uneven Shard(1), {dtype_name(dtype)}", chunk_widths(columns), dtype)
    for run_bytes in (512, 4096):
        yield recipe(_half_of_the_columns, f"pack, every second run of {run_bytes} bytes", run_bytes // 4)
    yield recipe(_transpose, "transpose, float32")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        yield recipe(_sum, f"sum of {dtype_name(dtype)}", dtype)


def _whole_copy(title: str, num_bytes: int, num_threads: int) -> Case:
    source, target = random_values(num_bytes // 4), allocate((num_bytes // 4,), torch.float32)
    table = CopyTable([CopyBox(0, 0, 0, 0, 4, tuple(source.shape), (1,), (1,))])
    sides = {
        OURS: ours_run(table, [source], [target], num_threads),
        MEMCPY: memcpy_run(source, target, num_threads),
        "torch copy_": lambda: target.copy_(source),
    }
    return Case(title, num_bytes, sides, {MEMCPY: 0.8, TORCH: 0.95}, target)


def _pack(title: str, num_bytes: int, num_threads: int, widths: Sequence[int], dtype: torch.dtype) -> Case:
    """Every peer's columns of a matrix, one peer's behind the other's."""
    columns = sum(widths)
    rows = num_bytes // (columns * dtype.itemsize)
    source, target = random_values(rows * columns, dtype).view(rows, columns), allocate((rows * columns,), dtype)
    starts = starts_of(widths)
    boxes = [
        CopyBox(0, 0, start, rows * start, dtype.itemsize, (rows, width), (columns, 1), (width, 1))
        for start, width in zip(starts, widths, strict=True)
    ]
    indices = [torch.arange(start, start + width) for start, width in zip(starts, widths, strict=True)]

    def parts() -> list[torch.Tensor]:
        return [part.view(rows, -1) for part in target.split([rows * width for width in widths])]

    def narrow_copy() -> None:
        for part, start, width in zip(parts(), starts, widths, strict=True):
            part.copy_(source.narrow(1, start, width))

    def index_select() -> None:
        for part, index in zip(parts(), indices, strict=True):
            torch.index_select(source, 1, index, out=part)

    def chunk_cat() -> None:
        torch.cat([part.reshape(-1) for part in source.split(list(widths), 1)], out=target)

    sides: dict[str, Run] = {
        OURS: ours_run(CopyTable(boxes), [source], [target], num_threads),
        MEMCPY: memcpy_run(source, target, num_threads),
        "torch narrow + copy_": narrow_copy,
        CHUNK_CAT: chunk_cat,
        "torch index_select": index_select,
    }
    limits = {TORCH: 0.95}
    if min(widths) * dtype.itemsize >= 512:
        limits[MEMCPY] = 0.8
    if len(set(widths)) > 1:
        limits[CHUNK_CAT] = 1.5
    return Case(title, rows * columns * dtype.itemsize, sides, limits, target)


def _unpack(title: str, num_bytes: int, num_threads: int, widths: Sequence[int], dtype: torch.dtype) -> Case:
    """The way back: what peers sent, into the columns of a matrix."""
    columns = sum(widths)
    rows = num_bytes // (columns * dtype.itemsize)
    # On huge pages, as messages are received.
    source, target = allocate((rows * columns,), dtype), allocate((rows, columns), dtype)
    source.copy_(random_values(rows * columns, dtype))
    starts = starts_of(widths)
    boxes = [
        CopyBox(0, 0, rows * start, start, dtype.itemsize, (rows, width), (width, 1), (columns, 1))
        for start, width in zip(starts, widths, strict=True)
    ]
    parts = [part.view(rows, -1) for part in source.split([rows * width for width in widths])]

    def narrow_copy() -> None:
        for part, start, width in zip(parts, starts, widths, strict=True):
            target.narrow(1, start, width).copy_(part)

    sides: dict[str, Run] = {
        OURS: ours_run(CopyTable(boxes), [source], [target], num_threads),
        MEMCPY: memcpy_run(source, target, num_threads),
        "torch narrow + copy_": narrow_copy,
        "torch cat": lambda: torch.cat(parts, dim=1, out=target),
    }
    num_bytes = rows * columns * dtype.itemsize
    return Case(title, num_bytes, sides, {TORCH: 0.95, MEMCPY: 0.8}, target)


def _half_of_the_columns(title: str, num_bytes: int, num_threads: int, width: int) -> Case:
    """A single box with gaps between its runs: every second run of a matrix."""
    rows = num_bytes // (width * 4)
    source, target = random_values(2 * rows * width).view(rows, 2 * width), allocate((rows, width), torch.float32)
    index = torch.arange(width)
    table = CopyTable([CopyBox(0, 0, 0, 0, 4, (rows, width), (2 * width, 1), (width, 1))])
    sides: dict[str, Run] = {
        OURS: ours_run(table, [source], [target], num_threads),
        MEMCPY: memcpy_run(source, target, num_threads),
        "torch narrow + copy_": lambda: target.copy_(source.narrow(1, 0, width)),
        "torch index_select": lambda: torch.index_select(source, 1, index, out=target),
    }
    return Case(title, rows * width * 4, sides, {TORCH: 0.95, MEMCPY: 0.8}, target)


def _transpose(title: str, num_bytes: int, num_threads: int) -> Case:
    side = int((num_bytes // 4) ** 0.5)
    source, target = random_values(side * side).view(side, side), allocate((side, side), torch.float32)
    table = CopyTable([CopyBox(0, 0, 0, 0, 4, (side, side), (1, side), (side, 1))])
    sides: dict[str, Run] = {
        OURS: ours_run(table, [source], [target], num_threads),
        "torch copy_": lambda: target.copy_(source.t()),
    }
    return Case(title, side * side * 4, sides, {TORCH: 0.95}, target)


def _sum(title: str, num_bytes: int, num_threads: int, dtype: torch.dtype) -> Case:
    """Slots that lie one behind the other, as peers' terms do; half types are added in float32 and rounded once."""
    length = num_bytes // (_SLOTS * dtype.itemsize)
    # Small whole numbers: every order of addition gives the same sum.
    slots = torch.randint(-8, 8, (_SLOTS, length)).to(dtype)
    target = allocate((length,), dtype)
    places = tuple(Slot(0, k * length, (1,)) for k in range(_SLOTS))
    table = ReduceTable([ReduceBox(0, 0, (length,), (1,), places)], "sum", dtype_name(dtype), 1)
    sides: dict[str, Run] = {
        OURS: ours_run(table, [slots], [target], num_threads),
        "torch sum": lambda: torch.sum(slots, 0, out=target),
    }
    if dtype != torch.float32:
        sides["torch float, sum, round"] = lambda: target.copy_(slots.float().sum(0))
    limit = 1.5 if dtype == torch.bfloat16 else 0.95
    return Case(title, num_bytes, sides, {TORCH: limit}, target)


def chunk_widths(columns: int) -> list[int]:
    """As torch.chunk cuts for 8 peers: all pieces but the last are equally long."""
    return [len(piece) for piece in torch.arange(columns).chunk(_PEERS)]
