"""Boxes that are cast on their way, and torch's ways to the same bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from benchmarks.kernels.box_case import (
    OURS,
    TORCH,
    Case,
    Recipe,
    Run,
    dtype_name,
    ours_run,
    random_values,
    starts_of,
)
from benchmarks.kernels.box_cases import chunk_widths
from tritondt._C import CastTable, DequantizeTable, QuantizeTable
from tritondt.kernels.boxes import CastBox
from tritondt.kernels.memory import allocate

_LIMITS = {TORCH: 0.95}
_COLUMNS = 4097


def cast_cases(num_bytes: int, num_threads: int) -> Iterator[Recipe]:
    """All cases, each of about `num_bytes` on its wider side."""
    size = (num_bytes, num_threads)

    def recipe(make: Callable[..., Case], title: str, *arguments: object) -> Recipe:
        return Recipe(title, make, (title, *size, *arguments))

    half = (torch.bfloat16, torch.float16)
    pairs = [(torch.float32, dtype) for dtype in half] + [(dtype, torch.float32) for dtype in half]
    for source, target in (*pairs, (torch.float32, torch.float64), (torch.float64, torch.float32)):
        yield recipe(_whole_cast, f"cast, {dtype_name(source)} to {dtype_name(target)}", source, target)
    for dtype in half:
        yield recipe(_packed_cast, f"cast, uneven Shard(1), float32 to {dtype_name(dtype)}", dtype)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        yield recipe(_quantization, f"quantize, uneven Shard(1), float32 to {dtype_name(dtype)}", dtype)
        yield recipe(_dequantization, f"dequantize, uneven Shard(1), {dtype_name(dtype)} to float32", dtype)


def _whole_cast(title: str, num_bytes: int, num_threads: int, source: torch.dtype, target: torch.dtype) -> Case:
    numel = num_bytes // max(source.itemsize, target.itemsize)
    x, into = random_values(numel, source), allocate((numel,), target)
    table = CastTable([CastBox(0, 0, 0, 0, (numel,), (1,), (1,))], dtype_name(source), dtype_name(target))
    sides: dict[str, Run] = {
        OURS: ours_run(table, [x], [into], num_threads),
        "torch to": lambda: x.to(target),
        "torch copy_": lambda: into.copy_(x),
    }
    return Case(title, num_bytes, sides, _LIMITS, into)


def _columns(rows: int) -> tuple[list[CastBox], list[int]]:
    """Every peer's columns of a matrix, one peer's behind the other's."""
    widths = chunk_widths(_COLUMNS)
    boxes = [
        CastBox(0, 0, start, rows * start, (rows, width), (_COLUMNS, 1), (width, 1))
        for start, width in zip(starts_of(widths), widths, strict=True)
    ]
    return boxes, widths


def _parts(packed: torch.Tensor, rows: int, widths: Sequence[int]) -> list[torch.Tensor]:
    return [part.view(rows, -1) for part in packed.split([rows * width for width in widths])]


def _packed_cast(title: str, num_bytes: int, num_threads: int, target: torch.dtype) -> Case:
    rows = num_bytes // (_COLUMNS * 4)
    boxes, widths = _columns(rows)
    x, packed = random_values(rows * _COLUMNS).view(rows, _COLUMNS), allocate((rows * _COLUMNS,), target)
    parts = _parts(packed, rows, widths)

    def narrow_copy() -> None:
        for part, piece in zip(parts, x.split(widths, 1), strict=True):
            part.copy_(piece)

    sides: dict[str, Run] = {
        OURS: ours_run(CastTable(boxes, "float32", dtype_name(target)), [x], [packed], num_threads),
        "torch narrow + copy_": narrow_copy,
        "torch to, chunk + cat": lambda: torch.cat(
            [piece.reshape(-1) for piece in x.to(target).split(widths, 1)], out=packed
        ),
    }
    return Case(title, rows * _COLUMNS * 4, sides, _LIMITS, packed)


def _quantization(title: str, num_bytes: int, num_threads: int, target: torch.dtype) -> Case:
    rows = num_bytes // (_COLUMNS * 4)
    boxes, widths = _columns(rows)
    x, packed = random_values(rows * _COLUMNS).view(rows, _COLUMNS), allocate((rows * _COLUMNS,), target)
    scales = torch.empty(len(boxes))
    table = QuantizeTable(boxes, "float32", dtype_name(target))
    parts = _parts(packed, rows, widths)
    largest = torch.finfo(target).max

    def amax_divide_copy() -> None:
        for part, piece in zip(parts, x.split(widths, 1), strict=True):
            scale = 2.0 ** math.ceil(math.log2(float(piece.abs().amax()) / largest))
            part.copy_(piece / scale)

    ours = partial(table.run, [x.data_ptr()], [packed.data_ptr()], scales.data_ptr(), num_threads)
    # The table does not keep the scales alive.
    sides: dict[str, Run] = {OURS: lambda: (ours(), scales), "torch amax, divide, copy_": amax_divide_copy}
    return Case(title, rows * _COLUMNS * 4, sides, _LIMITS, packed)


def _dequantization(title: str, num_bytes: int, num_threads: int, source: torch.dtype) -> Case:
    rows = num_bytes // (_COLUMNS * 4)
    boxes, widths = _columns(rows)
    boxes = [
        CastBox(0, 0, box.target_offset, box.source_offset, box.lengths, box.target_strides, box.source_strides)
        for box in boxes
    ]
    packed = random_values(rows * _COLUMNS).to(source)
    x = allocate((rows, _COLUMNS), torch.float32)
    scales = 2.0 ** torch.arange(float(len(boxes)))
    table = DequantizeTable(boxes, dtype_name(source), "float32")
    parts = _parts(packed, rows, widths)

    def to_multiply_copy() -> None:
        for part, piece, scale in zip(parts, x.split(widths, 1), scales.tolist(), strict=True):
            torch.mul(part.float(), scale, out=piece)

    ours = partial(table.run, [packed.data_ptr()], [x.data_ptr()], scales.data_ptr(), num_threads)
    sides: dict[str, Run] = {OURS: lambda: (ours(), scales), "torch to, multiply": to_multiply_copy}
    return Case(title, rows * _COLUMNS * 4, sides, _LIMITS, x)
