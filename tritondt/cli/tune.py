"""`tune`: finds the fastest division of each kernel into programs on this GPU, and records it in tuning.json."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Iterator, Sequence
from math import prod
from pathlib import Path

import click
import torch

from tritondt.kernels.boxes import CastBox, CopyBox, ReduceBox, Slot
from tritondt.kernels.gpu.device_time import device_seconds
from tritondt.kernels.gpu.tuning import PATH, Choice, Entry, record

# What is tuned at 4 dims, the fewest that kernels are compiled for, holds for up to so many; copies of more take other
# choices, as they spill.
_TUNED_DIMS, _MAX_DIMS = 4, {"copy": 4}
_MOST_DIMS = 17
# Of all widths that are in one kernel, the widest is timed.
_WIDTHS = (16,)
_BLOCKS = (256, 512, 1024, 2048)
_NUM_WARPS = (4, 8)
_PROGRAMS_PER_PROCESSOR = (2, 4, 8, 16)
# A program for each tile, as copies were fastest on an H200.
_ALL_TILES = 1 << 24
_NUM_SLOTS = 8
# A model of 64 MiB takes minutes, one of a 64th of everything a second.
_MODEL_SCALE = 64
# The kernel of each name, and a dtype whose elements it reduces.
_DTYPES = {"reduce 1": "int8", "reduce 2": "bfloat16", "reduce 4": "float32", "reduce 8": "float64"}
# So too, and dtypes that it casts from and to.
_CASTS = {"cast": (torch.float32, torch.bfloat16), "cast to float64": (torch.bfloat16, torch.float64)}
_KERNELS = ("copy", *_CASTS, *_DTYPES)
# Elements at a time of such casts; 16, which only fp8 has, is not tuned.
_CAST_WIDTHS = (8, 4)

Timer = Callable[[Choice], float]


def tune(
    device: int,
    kernels: tuple[str, ...],
    mebibytes: int,
    output: Path | None,
    architecture: int | None,
    model: bool,
    jobs: int | None,
) -> None:
    """Times a GPU's kernels and records the fastest choices, or compiles or models them."""
    if (model or architecture is not None or torch.cuda.is_available()) and importlib.util.find_spec("triton") is None:
        raise click.ClickException("triton is missing, which tune compiles kernels with: pip install triton")
    if model:
        for line in modeled(architecture or 90):
            click.echo(line)
        return
    if architecture is not None:
        started = time.monotonic()
        count = importlib.import_module("tritondt.kernels.gpu.ahead_of_time").compile_all(
            architecture, jobs or os.cpu_count()
        )
        click.echo(f"{count} kernels compiled for sm_{architecture} in {time.monotonic() - started:.0f} s")
        return
    if not torch.cuda.is_available():
        raise click.ClickException(f"tune needs a CUDA device, and torch {torch.__version__} sees none")
    if not 0 <= device < torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise click.BadParameter(f"{device}; this machine has devices 0..{count - 1}", param_hint="--device")
    with torch.cuda.device(device):
        properties = torch.cuda.get_device_properties(device)
        candidates = [properties.multi_processor_count * count for count in _PROGRAMS_PER_PROCESSOR]
        candidates.append(_ALL_TILES)
        found: dict[str, list[Entry]] = {}
        for kernel in kernels or _KERNELS:
            found[kernel] = []
            for width, num_dims in cases(kernel):
                timer = _timer(kernel, width, num_dims, mebibytes << 20)
                choice, seconds = fastest(timer, candidates)
                found[kernel].append(Entry(width, _MAX_DIMS.get(kernel, _MOST_DIMS), choice))
                speed = (mebibytes << 20) * _passes(kernel) / seconds / 1e9
                unit = "elements" if kernel in _CASTS else "bytes"
                click.echo(f"{kernel}, {width} {unit}, {num_dims} dims: {speed:.0f} GB/s read and written, {choice}")
    path = PATH if output is None else output
    record(properties.name, found, path)
    click.echo(f"recorded for {properties.name} in {path}")


def modeled(architecture: int) -> Iterator[str]:
    """Costs of packs and unpacks without a GPU, a line for each."""
    costs = importlib.import_module("tritondt.kernels.gpu.modeled")
    for case in costs.cases():
        found = costs.modeled_traffic(case, _MODEL_SCALE)
        way = "pack" if case.packs else "unpack"
        rows = f"{way}, units of {case.itemsize} bytes, rows of {case.run_bytes}"
        yield f"{rows}: {found.over_least:.2f} of the least bytes"
    for kind, unit, count in costs.counted(architecture):
        yield (
            f"{kind.value} rows, units of {unit} bytes, sm_{architecture}: {count.per_byte:.1f} instructions a byte, "
            f"{count.per_tile} a tile"
        )


def cases(kernel: str) -> Iterator[tuple[int, int]]:
    """Widths and numbers of dims that a kernel is tuned for.

    >>> list(cases("reduce 8"))
    [(16, 4)]
    """
    for width in _CAST_WIDTHS if kernel in _CASTS else _WIDTHS:
        yield width, _TUNED_DIMS


def fastest(seconds_of: Timer, candidates: Sequence[int]) -> tuple[Choice, float]:
    """Fastest choice and its time: first block and warps, then the number of programs.

    >>> fastest(lambda choice: abs(choice.block - 512) + choice.num_warps + choice.max_ctas, [264, 528])
    (Choice(block=512, num_warps=4, max_ctas=264), 268)
    """
    first = [Choice(block, num_warps, candidates[-1]) for block in _BLOCKS for num_warps in _NUM_WARPS]
    best = min(first, key=seconds_of)
    times = {choice: seconds_of(choice) for choice in (best._replace(max_ctas=count) for count in candidates)}
    choice = min(times, key=lambda one: times[one])
    return choice, times[choice]


def copy_box(width: int, num_dims: int, num_bytes: int) -> CopyBox:
    """A box of so many dims, and about so many bytes, that is copied in units of exactly `width` bytes."""
    lengths, source_strides, target_strides = _shape(num_dims, num_bytes // width)
    # One side starts a unit later, so that nothing wider fits.
    return CopyBox(0, 0, 0 if width == 16 else 1, 0, width, lengths, source_strides, target_strides)


def shifted_box(num_bytes: int) -> CopyBox:
    """A box of about so many bytes that is copied by blocks: rows of 2731 elements of 2 bytes behind each other."""
    columns = 2731
    return CopyBox(0, 0, 0, 0, 2, (num_bytes // (2 * columns), columns), (7 * columns + 3, 1), (columns, 1))


def cast_box(width: int, num_dims: int, itemsize: int, num_bytes: int) -> CastBox:
    """A box of so many dims that becomes about so many bytes, exactly `width` elements of the target at a time."""
    lengths, source_strides, target_strides = _shape(num_dims, num_bytes // itemsize // width)
    lengths = (*lengths[:-1], lengths[-1] * width)
    steps, target_steps = ((*(n * width for n in strides[:-1]), 1) for strides in (source_strides, target_strides))
    return CastBox(0, 0, 0 if width == _CAST_WIDTHS[0] else width, 0, lengths, steps, target_steps)


def reduce_box(width: int, num_dims: int, itemsize: int, num_bytes: int) -> ReduceBox:
    """A box of so many dims, with slots of about so many bytes each, that is reduced in units of exactly `width`."""
    per_unit = width // itemsize
    lengths, source_strides, target_strides = _shape(num_dims, num_bytes // width)
    lengths = (*lengths[:-1], lengths[-1] * per_unit)
    steps, target_steps = ((*(n * per_unit for n in strides[:-1]), 1) for strides in (source_strides, target_strides))
    extent = -(-_extent(lengths, steps) // 16) * 16
    start = 0 if width == 16 else per_unit
    slots = tuple(Slot(0, start + number * extent, steps) for number in range(_NUM_SLOTS))
    return ReduceBox(0, 0, lengths, target_steps, slots)


def _shape(num_dims: int, num_units: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Lengths, source and target strides in units; all loops but the innermost have gaps in the source."""
    inner = (5, 3, 1000)[-(num_dims - 1) :] if num_dims > 1 else ()
    lengths = (max(num_units // prod(inner), 1), *inner)
    source_strides, target_strides = [1], [1]
    for length in reversed(lengths[1:]):
        source_strides.insert(0, source_strides[0] * length + 3)
        target_strides.insert(0, target_strides[0] * length)
    return lengths, tuple(source_strides), tuple(target_strides)


def _extent(lengths: Sequence[int], strides: Sequence[int]) -> int:
    return 1 + sum((length - 1) * stride for length, stride in zip(lengths, strides, strict=True))


def _passes(kernel: str) -> float:
    """Bytes read and written in units of `--mebibytes`; a reduction reads its slots, and copies are of two boxes."""
    if kernel in _CASTS:
        source, target = _CASTS[kernel]
        return 1 + source.itemsize / target.itemsize
    return 4 if kernel == "copy" else _NUM_SLOTS + 1


def _timer(kernel: str, width: int, num_dims: int, num_bytes: int) -> Timer:
    """Timer of tables of one box, made anew for every choice."""
    make = _copy_timer if kernel == "copy" else _cast_timer if kernel in _CASTS else _reduce_timer
    return make(kernel, width, num_dims, num_bytes)


def _copy_timer(_: str, width: int, num_dims: int, num_bytes: int) -> Timer:
    boxes = (copy_box(width, num_dims, num_bytes), shifted_box(num_bytes))
    operands = [
        [
            torch.empty((offset + _extent(box.lengths, strides)) * box.itemsize, dtype=torch.uint8, device="cuda")
            for offset, strides in ((box.source_offset, box.source_strides), (box.target_offset, box.target_strides))
        ]
        for box in boxes
    ]
    module = importlib.import_module("tritondt.kernels.gpu.copy_boxes")

    def seconds_of_one(box: CopyBox, tensors: Sequence[torch.Tensor], choice: Choice) -> float:
        table = module.DeviceCopyTable([box], "cuda", choice=choice)
        source, target = tensors
        return device_seconds(lambda: table.run([source.data_ptr()], [target.data_ptr()]))

    def seconds_of(choice: Choice) -> float:
        """Of an aligned box and a shifted one."""
        return sum(seconds_of_one(box, tensors, choice) for box, tensors in zip(boxes, operands, strict=True))

    return seconds_of


def _cast_timer(kernel: str, width: int, num_dims: int, num_bytes: int) -> Timer:
    dtypes = _CASTS[kernel]
    box = cast_box(width, num_dims, dtypes[1].itemsize, num_bytes)
    source = torch.ones(box.source_offset + _extent(box.lengths, box.source_strides), dtype=dtypes[0], device="cuda")
    target = torch.empty(_extent(box.lengths, box.target_strides), dtype=dtypes[1], device="cuda")
    names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    module = importlib.import_module("tritondt.kernels.gpu.cast_boxes")

    def seconds_of(choice: Choice) -> float:
        table = module.DeviceCastTable([box], *names, "cuda", choice=choice)
        return device_seconds(lambda: table.run([source.data_ptr()], [target.data_ptr()]))

    return seconds_of


def _reduce_timer(kernel: str, width: int, num_dims: int, num_bytes: int) -> Timer:
    name = _DTYPES[kernel]
    dtype = getattr(torch, name)
    box = reduce_box(width, num_dims, dtype.itemsize, num_bytes)
    last = box.slots[-1]
    source = torch.ones(last.offset + _extent(box.lengths, last.strides), dtype=dtype, device="cuda")
    target = torch.empty(_extent(box.lengths, box.target_strides), dtype=dtype, device="cuda")
    module = importlib.import_module("tritondt.kernels.gpu.reduce_slots")

    def seconds_of(choice: Choice) -> float:
        table = module.DeviceReduceTable([box], "sum", name, 1, "cuda", choice=choice)
        return device_seconds(lambda: table.run([source.data_ptr()], [target.data_ptr()]))

    return seconds_of
