"""Packs and unpacks on a GPU: against the device's own copy, torch's split and cat, and what FSDP2 uses.

python -m benchmarks.kernels.copy_boxes_gpu [--mebibytes N ...] [--rounds N] [--only GLOB ...] [--json FILE] [--dry]

A matrix is packed into one message per rank, cut by columns into parts that do not divide, and unpacked again. Every
case is checked against torch before it is timed; then all sides run in turns, timed by the device's events. The file
is written anew after each case. A dry run, with TRITON_INTERPRET=1, shows on the CPU that it runs, and misses no limit.

`--only "columns float32 64" "gathered *"` runs what these match: columns, of a dtype and rows of about so many bytes,
and scattered, gathered and transposed, of a dtype.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tritondt.cli.surroundings import surroundings
from tritondt.kernels.boxes import CopyBox
from tritondt.kernels.gpu.device_time import device_seconds
from tritondt.kernels.tables import Table, TritonMaker, copy_table, table_makers

# A dry run (`make gpu-dry`) has no other device than the CPU.
_IS_DRY = "--dry" in sys.argv
_DEVICE = "cpu" if _IS_DRY else "cuda"
_NUM_RANKS = 7
_DTYPES = (torch.float32, torch.bfloat16)
_RUN_BYTES = (16, 64, 256, 2731 * 2, 2731 * 4)
_CALLS = 2000

# Limits: of the bandwidth of a copy on the device where runs are at least so long; over torch for columns that do not
# divide, and once its speed everywhere else; host time of a call.
_LEAST_BANDWIDTH, _LEAST_RUN_BYTES = 0.85, 64
_LEAST_SPEEDUP = 2.0
_MOST_LAUNCH_US = 10.0

Run = Callable[[], object]


class Case(NamedTuple):
    """Ways to move the same bytes: ours and others', and the fastest that memory allows."""

    name: str
    num_bytes: int
    run_bytes: int
    ours: Run
    others: dict[str, Run]
    copy: Run
    least_speedup: float = 1.0


class Result(NamedTuple):
    """Seconds of the median round."""

    case: str
    num_bytes: int
    run_bytes: int
    seconds: float
    copy_seconds: float
    other_seconds: dict[str, float]
    least_speedup: float

    @property
    def bandwidth(self) -> float:
        """Of a copy's."""
        return self.copy_seconds / self.seconds

    @property
    def speedup(self) -> float:
        """Over the fastest of the others."""
        return min(self.other_seconds.values()) / self.seconds


def uneven(length: int, parts: int) -> list[int]:
    """Parts of a length that differ, by one at most, and do not all start at a multiple of anything."""
    return [length // parts + (number < length % parts) for number in range(parts)]


def column_boxes(rows: int, sizes: Sequence[int], itemsize: int, *, packs: bool) -> list[CopyBox]:
    """Columns of a matrix to, or from, messages that lie behind each other."""
    boxes, start, columns = [], 0, sum(sizes)
    for size in sizes:
        matrix, message = (start, (columns, 1)), (start * rows, (size, 1))
        source, target = (matrix, message) if packs else (message, matrix)
        boxes.append(CopyBox(0, 0, source[0], target[0], itemsize, (rows, size), source[1], target[1]))
        start += size
    return boxes


def bound(table: Table, source: torch.Tensor, target: torch.Tensor) -> Run:
    """A run of a table on two tensors."""
    return lambda: table.run([source.data_ptr()], [target.data_ptr()], 1)


def same_bits(one: torch.Tensor, other: torch.Tensor, name: str) -> None:
    """Stops the benchmark where two results differ."""
    if not torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)):
        raise SystemExit(f"{name}: the result is not torch's")


def column_cases(num_bytes: int, dtype: torch.dtype, run_bytes: int) -> Iterator[Case]:
    """Pack and unpack of a matrix whose parts have rows of about `run_bytes`."""
    columns = run_bytes // dtype.itemsize * _NUM_RANKS + 3
    rows, sizes = num_bytes // (columns * dtype.itemsize), uneven(columns, _NUM_RANKS)
    matrix = torch.randn(rows, columns, device=_DEVICE).to(dtype)
    buffer, back, copied = (torch.empty(matrix.shape, dtype=dtype, device=_DEVICE) for _ in range(3))
    flat = buffer.view(-1)
    messages = [part.view(rows, size) for part, size in zip(flat.split([rows * n for n in sizes]), sizes, strict=True)]
    pack, unpack = (
        bound(copy_table(column_boxes(rows, sizes, dtype.itemsize, packs=packs), matrix.device), *sides)
        for packs, sides in ((True, (matrix, buffer)), (False, (buffer, back)))
    )
    shortest = sizes[-1] * dtype.itemsize
    name = f"{_mebibytes(matrix)}, rows of {shortest} bytes"

    def split_cat() -> torch.Tensor:
        return torch.cat([part.reshape(-1) for part in matrix.split(sizes, dim=1)], out=flat)

    def split_copy() -> None:
        torch.split_with_sizes_copy(matrix, sizes, dim=1, out=messages)

    def copy() -> torch.Tensor:
        return copied.copy_(matrix)

    pack()
    same_bits(buffer, torch.cat([part.reshape(-1) for part in matrix.split(sizes, dim=1)]), f"pack {name}")
    others: dict[str, Run] = {"split + cat": split_cat, "split_with_sizes_copy": split_copy}
    yield Case(f"pack {name}", _num_bytes(matrix), shortest, pack, others, copy, _LEAST_SPEEDUP)
    pack()
    unpack()
    same_bits(back, matrix, f"unpack {name}")
    others = {"cat": lambda: torch.cat(messages, dim=1, out=back)}
    yield Case(f"unpack {name}", _num_bytes(matrix), shortest, unpack, others, copy, _LEAST_SPEEDUP)


def scattered_case(num_bytes: int, dtype: torch.dtype) -> Case:
    """The pack of FSDP2 before it reduce-scatters a gradient cut by columns, which have to divide there."""
    size = 1171
    rows, columns = num_bytes // (size * _NUM_RANKS * dtype.itemsize), size * _NUM_RANKS
    matrix = torch.randn(rows, columns, device=_DEVICE).to(dtype)
    buffer, theirs, copied = (torch.empty(matrix.numel(), dtype=dtype, device=_DEVICE) for _ in range(3))
    boxes = column_boxes(rows, [size] * _NUM_RANKS, dtype.itemsize, packs=True)
    pack = bound(copy_table(boxes, matrix.device), matrix, buffer)

    def chunk_cat() -> torch.Tensor:
        stacked = torch.cat(matrix.chunk(_NUM_RANKS, dim=1), dim=0)
        return torch._chunk_cat([stacked], dim=0, num_chunks=_NUM_RANKS, out=theirs.view(_NUM_RANKS, -1))

    pack()
    same_bits(buffer, chunk_cat(), "scattered columns")
    name = f"pack {_mebibytes(matrix)} as FSDP2 scatters columns, rows of {size * dtype.itemsize} bytes"
    others: dict[str, Run] = {"cat + _chunk_cat": chunk_cat}
    return Case(name, _num_bytes(matrix), size * dtype.itemsize, pack, others, lambda: copied.copy_(matrix.view(-1)))


def gathered_case(num_bytes: int, dtype: torch.dtype) -> Case:
    """The unpack of FSDP2 after it has gathered several parameters in one buffer."""
    per_rank = num_bytes // dtype.itemsize // _NUM_RANKS
    sizes = uneven(per_rank, 12)
    gathered = torch.randn(_NUM_RANKS, per_rank, device=_DEVICE).to(dtype)
    ours, theirs = ([torch.empty(_NUM_RANKS, size, dtype=dtype, device=_DEVICE) for size in sizes] for _ in range(2))
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    boxes = [
        CopyBox(0, number, start, 0, dtype.itemsize, (_NUM_RANKS, size), (per_rank, 1), (size, 1))
        for number, (start, size) in enumerate(zip(starts, sizes, strict=True))
    ]
    table, copied = copy_table(boxes, gathered.device), torch.empty_like(gathered)

    def unpack() -> None:
        table.run([gathered.data_ptr()], [tensor.data_ptr() for tensor in ours], 1)

    def split_copy() -> None:
        torch.split_with_sizes_copy(gathered, sizes, dim=1, out=theirs)

    unpack()
    split_copy()
    for one, other in zip(ours, theirs, strict=True):
        same_bits(one, other, "gathered parameters")
    name = f"unpack {_mebibytes(gathered)} of 12 parameters as FSDP2 gathers them"
    others: dict[str, Run] = {"split_with_sizes_copy": split_copy}
    return Case(name, _num_bytes(gathered), sizes[-1] * dtype.itemsize, unpack, others, lambda: copied.copy_(gathered))


def transposed_case(num_bytes: int, dtype: torch.dtype) -> Case:
    """A matrix from column-major to row-major order."""
    side = int((num_bytes / dtype.itemsize) ** 0.5) // 8 * 8
    matrix = torch.randn(side, side, device=_DEVICE).to(dtype)
    target, copied = torch.empty_like(matrix), torch.empty_like(matrix)
    box = CopyBox(0, 0, 0, 0, dtype.itemsize, (side, side), (1, side), (side, 1))
    run = bound(copy_table([box], matrix.device), matrix, target)
    run()
    same_bits(target, matrix.t().contiguous(), "transposition")
    others: dict[str, Run] = {"copy_": lambda: target.copy_(matrix.t())}
    name = f"transpose {_mebibytes(matrix)}"
    return Case(name, _num_bytes(matrix), dtype.itemsize, run, others, lambda: copied.copy_(matrix))


_CASES: dict[str, Callable[[int, torch.dtype], Case]] = {
    "scattered": scattered_case,
    "gathered": gathered_case,
    "transposed": transposed_case,
}


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _mebibytes(tensor: torch.Tensor) -> str:
    return f"{_num_bytes(tensor) / 2**20:.0f} MiB of {str(tensor.dtype).removeprefix('torch.')}"


def measure(case: Case, rounds: int) -> Result:
    """All sides in turns."""
    sides = {"": case.ours, "copy": case.copy, **{f"other {name}": run for name, run in case.others.items()}}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name, run in sides.items():
            seconds = _host_seconds if _IS_DRY else device_seconds
            times[name].append(seconds(run, repeats=1, warmups=2 if number == 0 and not _IS_DRY else 0))
    median = {name: statistics.median(found) for name, found in times.items()}
    others = {name: median[f"other {name}"] for name in case.others}
    return Result(case.name, case.num_bytes, case.run_bytes, median[""], median["copy"], others, case.least_speedup)


def _host_seconds(run: Run, *, repeats: int, warmups: int) -> float:
    """Seconds by the host's clock, of a dry run."""
    start = time.perf_counter()
    for _ in range(repeats + warmups):
        run()
    return (time.perf_counter() - start) / (repeats + warmups)


def launch_us(calls: int) -> float:
    """Host time of a call of a table that has run before, while the device keeps up."""
    synchronize = torch.cuda.synchronize if not _IS_DRY else lambda: None
    source, target = torch.randn(4096, device=_DEVICE), torch.empty(4096, device=_DEVICE)
    boxes = [CopyBox(0, 0, 512 * k, 512 * k, 4, (16, 31), (32, 1), (32, 1)) for k in range(4)]
    run = bound(copy_table(boxes, source.device), source, target)
    batches = []
    for _ in range(20):
        synchronize()
        start = time.perf_counter()
        for _ in range(calls // 20):
            run()
        batches.append((time.perf_counter() - start) / (calls // 20) * 1e6)
    return statistics.median(batches)


def cases(mebibytes: Sequence[float], only: Sequence[str] = ("*",)) -> Iterator[Case]:
    """Every case whose name is matched, made when its turn comes, so that only its own memory is held."""

    def is_chosen(name: str) -> bool:
        return any(fnmatch(name, pattern) for pattern in only)

    for number in mebibytes:
        for dtype in _DTYPES:
            name, num_bytes = str(dtype).removeprefix("torch."), int(number * 2**20)
            for run_bytes in _RUN_BYTES if not _IS_DRY else (256,):
                if is_chosen(f"columns {name} {run_bytes}"):
                    yield from column_cases(num_bytes, dtype, run_bytes)
            for kind, make in _CASES.items():
                if is_chosen(f"{kind} {name}"):
                    yield make(num_bytes, dtype)


def report(result: Result) -> str:
    """One line of the table."""
    gigabytes = 2 * result.num_bytes / result.seconds / 1e9
    others = ", ".join(f"{name} {seconds / result.seconds:.2f}" for name, seconds in result.other_seconds.items())
    return f"{result.case}: {gigabytes:.0f} GB/s, {result.bandwidth:.2f} of a copy; time of others: {others}"


def missed(results: Sequence[Result]) -> tuple[list[str], list[str]]:
    """Cases below the least bandwidth, and those below the least speed against others."""
    long_runs = [found for found in results if found.run_bytes >= _LEAST_RUN_BYTES]
    slow = [found.case for found in long_runs if found.bandwidth < _LEAST_BANDWIDTH]
    return slow, [found.case for found in results if found.speedup < found.least_speedup]


def written(results: Sequence[Result], rounds: int, call_us: float | None) -> dict[str, Any]:
    """The JSON object of what has been measured so far."""
    slow, close = missed(results)
    return {
        "benchmark": "copy_boxes_gpu",
        **surroundings(),
        "device": "a dry run" if _IS_DRY else torch.cuda.get_device_name(),
        "rounds": rounds,
        "launch_us": call_us,
        "launch_us_limit": _MOST_LAUNCH_US,
        "bandwidth_limit": _LEAST_BANDWIDTH,
        "speedup_limit": _LEAST_SPEEDUP,
        "below_bandwidth": slow,
        "below_speedup": close,
        "cases": [{**found._asdict(), "bandwidth": found.bandwidth, "speedup": found.speedup} for found in results],
    }


def main() -> None:
    """Print a line per case and how many missed a limit; write JSON where asked; fail where one did."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels.copy_boxes_gpu")
    parser.add_argument("--mebibytes", type=float, nargs="+", default=[64, 256])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--only", nargs="+", default=["*"], metavar="GLOB")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args()
    if not (_IS_DRY or torch.cuda.is_available()):
        raise SystemExit(f"this benchmark needs a CUDA device, and torch {torch.__version__} sees none")
    with table_makers.replaced("cpu", TritonMaker()):
        measure_all(options)


def measure_all(options: argparse.Namespace) -> None:
    """The time of a call first, then each case."""
    call_us = launch_us(20 if _IS_DRY else _CALLS)
    print(f"a call: {call_us:.1f} us (at most {_MOST_LAUNCH_US:.0f})", flush=True)
    results: list[Result] = []
    for case in cases(options.mebibytes, options.only):
        results.append(measure(case, options.rounds))
        print(report(results[-1]), flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(written(results, options.rounds, call_us)) + "\n", encoding="utf-8")
    slow, close = missed(results)
    if not results:
        raise SystemExit(f"no case is named as {', '.join(options.only)}")
    print(f"below {_LEAST_BANDWIDTH} of a copy: {len(slow)} (of rows from {_LEAST_RUN_BYTES} bytes)")
    print(f"below {_LEAST_SPEEDUP} (columns) or 1.0 of the fastest other's speed: {len(close)} of {len(results)}")
    told = "of a copy: " + "; ".join(f"{found.case} {found.bandwidth:.2f}" for found in results)
    if (slow or close or call_us > _MOST_LAUNCH_US) and not _IS_DRY:
        raise SystemExit(f"{told}; limits missed by {', '.join((*slow, *close)) or 'the time of a call'}")
    print(told)


if __name__ == "__main__":
    main()
