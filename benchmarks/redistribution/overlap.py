"""How much of the communication is hidden behind matmuls: on a delayed transport, on plain sockets and on Gloo.

python -m benchmarks.redistribution.overlap [--rounds N] [--json [FILE]]

Two ranks of one thread each. The delayed transport (tests/harness/delayed_transport.py) sleeps, so that communication
leaves the cores to the matmuls as a network card would; its bandwidth is set so that both take equally long, and the
cost table says so.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import click
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

import tritondt as T
from tests.harness.delayed_transport import Delay, slow_down
from tritondt.cli.bench.harness import Times, time_interleaved
from tritondt.cli.bench.json_result import is_printed, json_option, write_json
from tritondt.cli.launch import run_on_ranks
from tritondt.cli.surroundings import surroundings
from tritondt.parallel import all_gather_matmul, matmul_reduce_scatter

RANKS = 2
# Positions, and features on either side: of a product of 17 GFLOP each rank makes half.
_POSITIONS, _FEATURES, _HIDDEN = 2048, 1024, 4096
_LATENCY_S = 1e-4
_LIMITS = {"hidden": 0.80, "async": 1.05, "sockets": 1.05, "gloo": 1.05}
_PLAIN = ("sockets", "gloo")

Run = Callable[[], object]


@dataclass(frozen=True)
class Form:
    """One operation in all forms; `serial` is communication and compute, one after the other."""

    name: str
    serial: Run
    compute: Run
    communication: Run
    overlapped: Run

    @property
    def runs(self) -> tuple[Run, ...]:
        """In the order of `FORMS`."""
        return self.serial, self.compute, self.communication, self.overlapped


FORMS = ("serial", "compute", "communication", "overlapped")
_FIGURES: dict[str, Callable[[Times], float]] = {
    "median": lambda times: times.median,
    "fastest": lambda times: times.fastest,
}


def gather_form(mesh: T.Mesh) -> Form:
    """A column-parallel matmul whose input comes by position."""
    meta = T.TensorMeta.contiguous((_POSITIONS, _FEATURES))
    source, target = (T.DTensorSpec(mesh, (placement,), meta) for placement in (T.Shard(0), T.Replicate()))
    x, whole = torch.randn(source.local_shape), torch.randn(target.local_shape)
    weight = torch.randn(_HIDDEN // RANKS, _FEATURES)
    return Form(
        "all_gather_matmul",
        lambda: F.linear(T.redistribute(x, source, target), weight),
        lambda: F.linear(whole, weight),
        lambda: T.redistribute(x, source, target),
        lambda: all_gather_matmul(x, weight, source=source),
    )


def scatter_form(mesh: T.Mesh) -> Form:
    """A row-parallel matmul whose output goes out by position."""
    meta = T.TensorMeta.contiguous((_POSITIONS, _FEATURES))
    source, target = (T.DTensorSpec(mesh, (placement,), meta) for placement in (T.Partial(), T.Shard(0)))
    x, product = torch.randn(_POSITIONS, _HIDDEN // RANKS), torch.randn(_POSITIONS, _FEATURES)
    weight = torch.randn(_FEATURES, _HIDDEN // RANKS)
    return Form(
        "matmul_reduce_scatter",
        lambda: T.redistribute(F.linear(x, weight), source, target),
        lambda: F.linear(x, weight),
        lambda: T.redistribute(product, source, target),
        lambda: matmul_reduce_scatter(x, weight, target=target),
    )


def async_form(mesh: T.Mesh) -> Form:
    """A redistribution that is under way while something else is multiplied."""
    x: Any = T.DTensor.from_local(torch.randn(_POSITIONS // RANKS, _FEATURES), mesh, [T.Shard(0)])
    other, weight = torch.randn(_POSITIONS, _FEATURES), torch.randn(_HIDDEN // RANKS, _FEATURES)

    def move(async_op: bool) -> Any:
        return x.redistribute(placements=[T.Replicate()], async_op=async_op)

    def overlapped() -> None:
        moved = move(True)
        F.linear(other, weight)
        moved.wait()

    def serial() -> None:
        move(False)
        F.linear(other, weight)

    return Form("async redistribute", serial, lambda: F.linear(other, weight), lambda: move(False), overlapped)


def on_plain_transport(send: Callable[[object], None], rounds: int, transport: str) -> dict[str, dict[str, Times]]:
    """Times by operation and form on what carries messages between processes here."""
    os.environ["TRITONDT_TRANSPORT"] = transport
    torch.set_num_threads(1)
    mesh = T.Mesh((RANKS,))
    with torch.no_grad():
        return measured([gather_form(mesh), scatter_form(mesh)], rounds)


def on_delayed_transport(send: Callable[[object], None], rounds: int, delay: Delay) -> dict[str, dict[str, Times]]:
    """The same, and an asynchronous redistribution, on a slower network."""
    torch.set_num_threads(1)
    slow_down(delay)
    mesh = T.Mesh((RANKS,))
    with torch.no_grad():
        return measured([gather_form(mesh), scatter_form(mesh), async_form(mesh)], rounds)


def delay_like_compute(times: dict[str, dict[str, Times]]) -> Delay:
    """The delay that makes a communication take as long as a matmul took."""
    seconds = sum(found["compute"].median for found in times.values()) / len(times)
    return Delay(_LATENCY_S, _POSITIONS // RANKS * _FEATURES * 4 / seconds)


def measured(forms: list[Form], rounds: int) -> dict[str, dict[str, Times]]:
    """Times by operation and form, all in turns."""
    times = iter(time_interleaved([run for form in forms for run in form.runs], rounds, budget_s=600.0))
    return {form.name: {name: next(times) for name in FORMS} for form in forms}


def ratios(found: dict[str, Any], take: Callable[[Times], float]) -> dict[str, float]:
    """Ratios that are held against the limits, by name; `take` is the figure of all rounds, such as the fastest."""
    result = {}
    for name, times in found["delayed"].items():
        serial, compute, communication, overlapped = (take(times[form]) for form in FORMS)
        if name == "async redistribute":
            result["async"] = overlapped / max(communication, compute)
        else:
            result[f"hidden {name}"] = (serial - overlapped) / min(communication, compute)
    for transport in _PLAIN:
        for name, times in found[transport].items():
            result[f"{transport} {name}"] = take(times["overlapped"]) / take(times["serial"])
    return result


def table_of(found: dict[str, dict[str, dict[str, Times]]]) -> Table:
    """All times in milliseconds, two lines for each operation on each transport."""
    table = Table("ms", "operation", *FORMS)
    for transport, forms in found.items():
        for name, times in forms.items():
            for figure, take in _FIGURES.items():
                row = (f"{take(times[form]) * 1e3:.1f}" for form in FORMS)
                table.add_row(f"{transport}, {figure}", name, *row)
    return table


def keeps_limit(name: str, ratio: float) -> bool:
    """Whether a ratio is what is aimed at: hidden at least, the others at most."""
    kind = name.split()[0]
    return ratio >= _LIMITS[kind] if kind == "hidden" else ratio <= _LIMITS[kind]


@click.command(context_settings={"show_default": True})
@click.option("--rounds", type=click.IntRange(min=9), default=25, help="Rounds of every form.")
@json_option
def overlap(rounds: int, json_to: str | None) -> None:
    """Time matmuls one after the other with communication, and at once."""
    console = Console(stderr=is_printed(json_to))
    plain: dict[str, Any] = {
        transport: run_on_ranks(RANKS, on_plain_transport, rounds, transport, on_message=lambda message: None)[0]
        for transport in _PLAIN
    }
    delay = delay_like_compute(plain["sockets"])
    delayed: Any = run_on_ranks(RANKS, on_delayed_transport, rounds, delay, on_message=lambda message: None)[0]
    found = {"delayed": delayed, **plain}
    console.print(table_of(found))
    of_limits = {name: ratios(found, take) for name, take in _FIGURES.items()}
    for name, ratio in of_limits["median"].items():
        limit, verdict = _LIMITS[name.split()[0]], "kept" if keeps_limit(name, ratio) else "MISSED"
        console.print(f"{name}: {ratio:.3f} (limit {limit}, {verdict}); by fastest {of_limits['fastest'][name]:.3f}")
    seconds = {
        transport: {
            name: {f"{form}_{figure}_s": take(times[form]) for form in FORMS for figure, take in _FIGURES.items()}
            for name, times in forms.items()
        }
        for transport, forms in found.items()
    }
    settings = {"ranks": RANKS, "rounds": rounds, "delay": asdict(delay)}
    sizes = {"positions": _POSITIONS, "features": _FEATURES, "hidden_features": _HIDDEN}
    report = {"benchmark": "overlap", **surroundings(), **settings, **sizes, **seconds}
    write_json({**report, "ratios": of_limits, "limits_of_medians": _LIMITS}, json_to)
    if not all(keeps_limit(name, ratio) for name, ratio in of_limits["median"].items()):
        raise SystemExit(1)


# The ranks that the benchmark starts import this file again, under another name.
if __name__ == "__main__":
    overlap(prog_name="python -m benchmarks.redistribution.overlap")
