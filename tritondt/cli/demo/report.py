"""Report of the two runs: progress, the verdict, the tables, summary.json and loss.png."""

from __future__ import annotations

import json
import math
import platform
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import tritondt as T
from tritondt.cli.demo.experiment import Experiment, Flow, RanksRun, Step
from tritondt.cli.demo.model import GPT, Model
from tritondt.cli.launch import num_cores
from tritondt.cli.surroundings import versions
from tritondt.parallel.context.sequence_cut import SequenceCut
from tritondt.parallel.feature_cut import evenly
from tritondt.redistribution.rows import ROWS_BY_SOURCE

# fp32 sums taken in another order: 60 steps on 4 ranks differ by a few 1e-6 from one process.
LOSS_TOLERANCE = 1e-4
_STEPS_PER_LINE = 10


class RunProgress:
    """Context manager to call with every finished step of the run named `title`."""

    def __init__(self, console: Console, title: str, experiment: Experiment) -> None:
        self._console, self._title, self._experiment = console, title, experiment
        self._bar = Progress(
            TextColumn(f"{title:>9}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(title, total=experiment.steps, state="starting")

    def __enter__(self) -> RunProgress:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def __call__(self, step: Step) -> None:
        tokens_per_s = self._experiment.tokens_per_step / step.seconds
        state = f"loss {step.loss:.4f}  {tokens_per_s:7,.0f} tokens/s"
        self._bar.update(self._task, advance=1, state=state)
        done = step.index + 1
        shown = done % _STEPS_PER_LINE == 0 or done in (1, self._experiment.steps)
        if shown and not self._console.is_terminal:
            self._console.print(f"{self._title:>9}  step {done:3}/{self._experiment.steps}  {state}", highlight=False)


@dataclass(frozen=True)
class Comparison:
    """One experiment in one style on `num_ranks` ranks and on one process.

    `num_tensor_ranks` of them share heads, hidden features and the sequence (default: all).
    """

    experiment: Experiment
    style: str
    num_ranks: int
    on_ranks: RanksRun
    single: tuple[Step, ...]
    parallel: str = "tp"
    num_tensor_ranks: int | None = None

    @property
    def differences(self) -> tuple[float, ...]:
        """Absolute difference of the two losses at every step."""
        pairs = zip(self.on_ranks.steps, self.single, strict=True)
        return tuple(abs(step.loss - single.loss) for step, single in pairs)

    @property
    def loss_max_abs_diff(self) -> float:
        """Largest of `differences`; nan if any of them is."""
        return float(torch.tensor(self.differences, dtype=torch.float64).max())

    @property
    def agrees(self) -> bool:
        """Whether the losses differ by no more than fp32 sums do; False where one of them is nan."""
        return self.loss_max_abs_diff <= LOSS_TOLERANCE

    def disagreement(self) -> str:
        """First step that is off, by how much, and what is allowed, as text."""
        index = next(index for index, found in enumerate(self.differences) if not found <= LOSS_TOLERANCE)
        return (
            f"{self.num_ranks} ranks and one process give different losses: at step {index} "
            f"{self.on_ranks.steps[index].loss:.6f} and {self.single[index].loss:.6f}, at most "
            f"{self.loss_max_abs_diff:.2e} apart over all steps; allowed is {LOSS_TOLERANCE:.0e}"
        )


def shares(model: Model, num_ranks: int, parallel: str = "tp") -> dict[str, tuple[int, ...]]:
    """Heads, hidden features and positions of the sequence that each rank holds, and experts where there are some.

    >>> shares(Model(heads=6, layers=4, width=192, sequence=127), 4)["heads"]
    (2, 2, 2, 0)
    >>> shares(Model(heads=6, layers=4, width=192, sequence=127, experts=6), 4, "ep")
    {'heads': (6,), 'positions': (127,), 'experts': (2, 2, 1, 1)}
    """
    if parallel == "ep":
        return {
            "heads": (model.heads,),
            "positions": (model.sequence,),
            "experts": evenly(model.experts, num_ranks),
        }
    if parallel == "cp":
        return {
            "heads": (model.heads,),
            "hidden": (model.hidden,),
            "positions": SequenceCut(model.sequence, num_ranks, balanced=True).sizes,
        }

    def lengths(placement: T.Shard, length: int) -> tuple[int, ...]:
        layout = T.Layout((num_ranks,), (placement,), (length,))
        return tuple(layout.local_shape((rank,))[0] for rank in range(num_ranks))

    widths = lengths(T.Shard(0, unit=model.head_width), model.width)
    return {
        "heads": tuple(width // model.head_width for width in widths),
        "hidden": lengths(T.Shard(0), model.hidden),
        "positions": lengths(T.Shard(0), model.sequence),
    }


def summarise(comparison: Comparison) -> dict[str, Any]:
    """Measurements as the plain values of summary.json; bytes and messages are of all ranks."""
    experiment, on_ranks = comparison.experiment, comparison.on_ranks
    model = experiment.model
    redistributions = [_flow_per_step(flow, experiment.steps) for flow in on_ranks.flows]
    with torch.device("meta"):
        num_parameters = sum(parameter.numel() for parameter in GPT(model).parameters())
    return {
        "style": comparison.style,
        "parallel": comparison.parallel,
        "ranks": comparison.num_ranks,
        **asdict(model),
        "hidden": model.hidden,
        "parameters": num_parameters,
        "steps": experiment.steps,
        "batch": experiment.batch,
        "seed": experiment.seed,
        "shares": shares(model, comparison.num_tensor_ranks or comparison.num_ranks, comparison.parallel),
        "first_loss": on_ranks.steps[0].loss,
        "final_loss": on_ranks.steps[-1].loss,
        "final_loss_single": comparison.single[-1].loss,
        "loss_max_abs_diff": comparison.loss_max_abs_diff,
        "loss_tolerance": LOSS_TOLERANCE,
        "tokens_per_s": _tokens_per_s(experiment, on_ranks.steps),
        "tokens_per_s_single": _tokens_per_s(experiment, comparison.single),
        "seconds": {
            "ranks": sum(step.seconds for step in on_ranks.steps),
            "compute": on_ranks.compute_seconds,
            "communication": on_ranks.communication_seconds,
            "single": sum(step.seconds for step in comparison.single),
        },
        "comm_bytes_per_step": sum(row["bytes_per_step"] for row in redistributions),
        "messages_per_step": sum(row["messages_per_step"] for row in redistributions),
        "redistributions": redistributions,
        "losses": [step.loss for step in on_ranks.steps],
        "losses_single": [step.loss for step in comparison.single],
        "versions": {**versions(), "machine": platform.platform(), "cores": num_cores()},
    }


def _tokens_per_s(experiment: Experiment, steps: tuple[Step, ...]) -> float:
    """Speed by the median step, so that the first one, which connects the ranks, does not count."""
    return experiment.tokens_per_step / statistics.median(step.seconds for step in steps)


def _flow_per_step(flow: Flow, steps: int) -> dict[str, Any]:
    # As many tokens go to an expert as choose it.
    varying = flow.kind.source == ROWS_BY_SOURCE
    for total in (flow.calls,) if varying else (flow.calls, flow.messages, flow.sent_bytes):
        assert total % steps == 0, f"every step moves the same, but {flow} is of {steps} steps"
    return {
        **asdict(flow.kind),
        "calls_per_step": flow.calls // steps,
        "messages_per_step": round(flow.messages / steps),
        "bytes_per_step": round(flow.sent_bytes / steps),
        "seconds_per_step": flow.seconds / steps,
    }


def write_results(comparison: Comparison, folder: Path, console: Console) -> dict[str, Any]:
    """Print the tables, write summary.json and loss.png; returns the summary."""
    summary = summarise(comparison)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    _draw_losses(comparison, folder / "loss.png")
    _print_tables(comparison, summary, console)
    console.print(f"wrote {folder / 'summary.json'} and {folder / 'loss.png'}", highlight=False)
    return summary


def _draw_losses(comparison: Comparison, path: Path) -> None:
    """Draws both losses over the steps, and their difference on a logarithmic axis of its own."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    steps = range(comparison.experiment.steps)
    axes.plot(steps, [step.loss for step in comparison.single], color="0.6", lw=4, label="1 process")
    losses = [step.loss for step in comparison.on_ranks.steps]
    axes.plot(steps, losses, color="C0", lw=1.5, label=f"{comparison.num_ranks} ranks")
    axes.set(xlabel="step", ylabel="loss, nats a byte")
    difference_axes = axes.twinx()
    # A difference of exactly 0 has no logarithm and no dot.
    visible = [difference or math.nan for difference in comparison.differences]
    difference_axes.plot(steps, visible, color="C3", ls="", marker=".", label="difference, where not 0")
    difference_axes.axhline(LOSS_TOLERANCE, color="C3", lw=1, ls=":", label="allowed")
    difference_axes.set(yscale="log", ylabel="absolute difference")
    figure.legend(loc="outside upper center", ncols=4)
    figure.savefig(path, dpi=120)


def _print_tables(comparison: Comparison, summary: dict[str, Any], console: Console) -> None:
    """Prints the runs side by side, the traffic of a step by kind of redistribution, and the largest difference."""
    console.print(_runs_table(summary))
    console.print(_redistributions_table(summary))
    sign = "<=" if comparison.agrees else ">"
    console.print(
        f"largest difference of a loss over {summary['steps']} steps: "
        f"{summary['loss_max_abs_diff']:.2e} {sign} {LOSS_TOLERANCE:.0e}"
    )


def _runs_table(summary: dict[str, Any]) -> Table:
    seconds = summary["seconds"]
    steps = summary["steps"]
    table = Table("", f"{summary['ranks']} ranks", "1 process")
    for column in table.columns[1:]:
        column.justify = "right"
    table.add_row("final loss", f"{summary['final_loss']:.6f}", f"{summary['final_loss_single']:.6f}")
    table.add_row("tokens/s", f"{summary['tokens_per_s']:,.0f}", f"{summary['tokens_per_s_single']:,.0f}")
    table.add_row("seconds", f"{seconds['ranks']:.1f}", f"{seconds['single']:.1f}")
    table.add_row("  compute, ms a step", f"{seconds['compute'] / steps * 1e3:.1f}", "")
    table.add_row("  communication, ms a step", f"{seconds['communication'] / steps * 1e3:.1f}", "")
    return table


def _redistributions_table(summary: dict[str, Any]) -> Table:
    table = Table("phase", "redistribution", "calls", "messages", "bytes", "ms", title="a step, all ranks")
    for column in table.columns[2:]:
        column.justify = "right"
    for row in summary["redistributions"]:
        table.add_row(
            row["phase"],
            f"{row['source']} -> {row['target']}",
            f"{row['calls_per_step']:,}",
            f"{row['messages_per_step']:,}",
            f"{row['bytes_per_step']:,}",
            f"{row['seconds_per_step'] * 1e3:.1f}",
        )
    table.add_section()
    table.add_row(
        "all",
        "",
        f"{sum(row['calls_per_step'] for row in summary['redistributions']):,}",
        f"{summary['messages_per_step']:,}",
        f"{summary['comm_bytes_per_step']:,}",
        f"{summary['seconds']['communication'] / summary['steps'] * 1e3:.1f}",
    )
    return table
