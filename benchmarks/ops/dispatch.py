"""Host time of an operator on distributed tensors, ours against torch.distributed.tensor's, in one process.

    python -m benchmarks.ops.dispatch [--rounds N] [--json [FILE]]

The process is rank 0 of 4 on torch's fake process group, so that only the host's work is timed; nothing is sent. Ours,
torch's and plain tensors take turns in every round; a time is the median of the rounds' means.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from functools import partial
from math import prod
from typing import Any

import click
import torch
import torch.distributed as dist
import torch.distributed.tensor as torch_tensor
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: F401 - registers the backend

import tritondt as T
from tritondt.cli.bench.json_result import is_printed, json_option, write_json
from tritondt.cli.surroundings import surroundings

Run = Callable[[], object]

_WORLD_SIZE = 4
_LOCAL = (16, 64)
_NUM_PARAMETERS = 300
_FILE_COLUMNS = 110


@dataclass(frozen=True)
class Case:
    """One operation three ways; `limit` is the most that ours may take of torch's."""

    name: str
    ours: Run
    torch: Run
    plain: Run | None
    calls: int
    limit: float = 1.10
    plain_limit: float | None = None
    grad: bool = False


@dataclass(frozen=True)
class Measured:
    """Microseconds a call."""

    name: str
    ours_us: float
    torch_us: float
    plain_us: float | None
    ratio: float
    limit: float
    plain_ratio: float | None
    plain_limit: float | None


class Side:
    """One of the two packages, with tensors of the same local sizes."""

    def __init__(self, package: Any, mesh: Any) -> None:
        self.package, self.mesh = package, mesh

    def sharded(self, local: torch.Tensor, dim: int = 0) -> Any:
        """A tensor whose local part is `local`, sharded on a dim."""
        return self.package.DTensor.from_local(local, self.mesh, [self.package.Shard(dim)])

    def replicated(self, local: torch.Tensor) -> Any:
        """A tensor that is whole on every rank."""
        return self.package.DTensor.from_local(local, self.mesh, [self.package.Replicate()])


def _operators(side: Side | None) -> dict[str, Run]:
    """The operations on a side's tensors, or on plain ones."""
    local, weight_local = torch.randn(_LOCAL), torch.randn(_LOCAL[1], 32)
    x = local if side is None else side.sharded(local)
    weight = weight_local if side is None else side.replicated(weight_local)
    found: dict[str, Run] = {
        "add": lambda: x + x,
        "add of a scalar": lambda: x + 1.0,
        "mm": lambda: x @ weight,
        "sum": lambda: x.sum(),
        "softmax": lambda: x.softmax(-1),
        "transpose": lambda: x.transpose(0, 1),
        "view": lambda: x.view(-1, 8, 8),
        "mul_": lambda: x.mul_(1.0),
    }
    if side is not None:
        whole = side.replicated(torch.randn(64, 64))
        package, mesh = side.package, side.mesh
        shard_0, shard_1 = [package.Shard(0)], [package.Shard(1)]
        found["from_local"] = lambda: package.DTensor.from_local(local, mesh, shard_0, run_check=False)
        found["to_local"] = lambda: x.to_local()
        found["redistribute, no-op"] = lambda: x.redistribute(mesh, shard_0)
        found["redistribute, R -> S"] = lambda: whole.redistribute(mesh, shard_1)
    return found


def _linear(side: Side | None) -> Run:
    x, weight, bias = torch.randn(_LOCAL), torch.randn(32, _LOCAL[1]), torch.randn(32)
    if side is not None:
        x, weight, bias = side.sharded(x), side.replicated(weight), side.replicated(bias)
    for tensor in (x, weight, bias):
        tensor.requires_grad_()
    seed = torch.ones(16, 32)
    seed = seed if side is None else side.sharded(seed)

    def run() -> object:
        x.grad = weight.grad = bias.grad = None
        return F.linear(x, weight, bias).backward(seed)

    return run


def _adamw(side: Side | None) -> Run:
    parameters = []
    for _ in range(_NUM_PARAMETERS):
        local, grad = torch.randn(8, 8), torch.randn(8, 8)
        parameter = torch.nn.Parameter(local if side is None else side.sharded(local))
        parameter.grad = grad if side is None else side.sharded(grad)
        parameters.append(parameter)
    optimizer = torch.optim.AdamW(parameters, foreach=True)
    return lambda: optimizer.step()


def cases(ours: Side, theirs: Side) -> Iterator[Case]:
    """Everything that is timed."""
    plain = _operators(None)
    for (name, run), other in zip(_operators(ours).items(), _operators(theirs).values(), strict=True):
        yield Case(name, run, other, plain.get(name), calls=300)
    yield Case("linear, forward + backward", _linear(ours), _linear(theirs), _linear(None), calls=50, grad=True)
    yield Case(
        f"AdamW(foreach), {_NUM_PARAMETERS} parameters",
        *(_adamw(side) for side in (ours, theirs, None)),
        calls=2,
        limit=0.85,
        plain_limit=1.75,
    )


def measure(case: Case, rounds: int) -> Measured:
    """Times a case's three ways in turns."""
    runs = [case.ours, case.torch, *([] if case.plain is None else [case.plain])]
    seconds: list[list[float]] = [[] for _ in runs]
    mode: AbstractContextManager[object] = nullcontext() if case.grad else torch.no_grad()
    gc.collect()
    gc.disable()
    with mode:
        for run in runs:
            _seconds(run, case.calls)
        for number in range(rounds):
            for which in range(len(runs)) if number % 2 else reversed(range(len(runs))):
                seconds[which].append(_seconds(runs[which], case.calls))
    gc.enable()
    ours, theirs, *plain = (statistics.median(times) * 1e6 for times in seconds)
    return Measured(
        case.name,
        ours,
        theirs,
        plain[0] if plain else None,
        ours / theirs,
        case.limit,
        ours / plain[0] if plain else None,
        case.plain_limit,
    )


def _seconds(run: Run, calls: int) -> float:
    started = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - started) / calls


_COLD_OPERATORS: dict[str, Callable[[Any, Any], object]] = {
    "add": lambda x, weight: x + x,
    "mm": lambda x, weight: x @ weight,
    "sum": lambda x, weight: x.sum(),
    "softmax": lambda x, weight: x.softmax(-1),
    "view": lambda x, weight: x.view(-1, 1, x.shape[1]),
}


def cold_ms(rounds: int) -> dict[int, dict[str, float]]:
    """Milliseconds of the first call with a new shape, by axes of the mesh, which take turns; medians over rounds."""
    meshes = {num_axes: T.Mesh((2,) * num_axes) for num_axes in (1, 2, 3)}
    times: dict[int, dict[str, list[float]]] = {axes: {name: [] for name in _COLD_OPERATORS} for axes in meshes}
    for length in range(64, 64 + rounds + 1):
        for num_axes, mesh in meshes.items():
            replicated = [T.Replicate()] * num_axes
            x = T.DTensor.from_local(torch.randn(8, length), mesh, [T.Shard(0), *replicated[1:]])
            weight = T.DTensor.from_local(torch.randn(length, 4), mesh, replicated)
            for name, operator in _COLD_OPERATORS.items():
                times[num_axes][name].append(_seconds(partial(operator, x, weight), 1))
    # The first round also meets every operator for the first time.
    return {
        axes: {name: statistics.median(found[1:]) * 1e3 for name, found in of_mesh.items()}
        for axes, of_mesh in times.items()
    }


def _report(console: Console, found: list[Measured], cold: dict[int, dict[str, float]]) -> None:
    table = Table("operation", "plain us", "torch us", "ours us", "ours / torch", "at most", "ours / plain")
    for item in found:
        bad = item.ratio > item.limit
        table.add_row(
            item.name,
            "" if item.plain_us is None else f"{item.plain_us:.2f}",
            f"{item.torch_us:.2f}",
            f"{item.ours_us:.2f}",
            f"[red]{item.ratio:.2f}[/red]" if bad else f"{item.ratio:.2f}",
            f"{item.limit:.2f}",
            "" if item.plain_ratio is None else f"{item.plain_ratio:.2f}",
        )
    console.print(table)
    if not cold:
        return
    table = Table("first call with a new shape, ms", *(f"{axes}-D mesh" for axes in cold))
    for name in next(iter(cold.values())):
        table.add_row(name, *(f"{times[name]:.2f}" for times in cold.values()))
    console.print(table)


@click.command(context_settings={"show_default": True})
@click.option("--rounds", type=click.IntRange(min=3), default=25, help="Rounds of a case.")
@click.option("--only", default="*", help="Cases to time, as a pattern such as 'redistribute*'.")
@json_option
def main(rounds: int, only: str, json_to: str | None) -> None:
    """Time operators on distributed tensors against torch.distributed.tensor, without communication."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2 * _WORLD_SIZE)
    mesh = T.init_device_mesh("cpu", (_WORLD_SIZE,))
    console = Console(stderr=is_printed(json_to))
    if not console.is_terminal:  # a file or a pipe has no width
        console = Console(stderr=is_printed(json_to), width=_FILE_COLUMNS)
    found = []
    for case in cases(Side(T, mesh), Side(torch_tensor, mesh)):
        if not fnmatch(case.name, only):
            continue
        found.append(measure(case, rounds))
        console.print(f"{case.name}: {found[-1].ours_us:.2f} us, torch {found[-1].torch_us:.2f} us", highlight=False)
    if not found:
        raise click.UsageError(f"--only {only!r} names no case")
    cold = cold_ms(rounds) if only == "*" else {}
    _report(console, found, cold)
    operators = [item for item in found if item.plain_limit is None]
    mean = prod(item.ratio for item in operators) ** (1 / max(1, len(operators)))
    console.print(f"geometric mean without the optimizer: {mean:.2f} of torch's")
    result = {
        "benchmark": "dispatch",
        **surroundings(),
        "rounds": rounds,
        "cases": [asdict(item) for item in found],
        "geometric_mean": mean,
        "worst_ratio": max((item.ratio for item in operators), default=None),
        "cold_ms": cold,
        "worst_cold_ms": max(value for times in cold.values() for value in times.values()) if cold else None,
    }
    write_json(result, json_to)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
