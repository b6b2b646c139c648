"""How many of torch's operators run on distributed tensors, where, and whether they are right.

    python -m benchmarks.ops.op_coverage [--ops PATTERN] [--trials N] [--fallback raise|replicate] [--against torch]
        [--json [FILE]]
    python -m benchmarks.ops.op_coverage --ops NAME --trial K    # that one trial again, in this process

Every operator of torch's own database (op_db) that takes a tensor and is neither random nor sparse, on 2 and 3 ranks in
turns (threads), with arguments laid out at random and unevenly: results and gradients must be those of one device, to
the last bit where elements only move.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.ops.op_coverage.gathered import GATHERED
from benchmarks.ops.op_coverage.measuring import Measured, random_trial
from benchmarks.ops.op_coverage.operators import matching, operators
from benchmarks.ops.op_coverage.sent_bytes import MORE_BYTES
from benchmarks.ops.op_coverage.trial import WRONG
from benchmarks.ops.op_coverage.workers import measure_all
from tritondt.cli.bench.json_result import is_printed, json_option, write_json
from tritondt.cli.launch import num_cores
from tritondt.cli.surroundings import surroundings
from tritondt.ops import set_fallback
from tritondt.ops.propagation.fallback import MODES, Mode

_ALWAYS = "right always"
_UNKNOWN = "no reason is known"
# What the benchmark is to show.
_TARGETS: dict[Mode, dict[str, int]] = {
    "raise": {"right always": 560, "sends_nothing": 480},
    "replicate": {"right always": 600},
}


def _tell(console: Console, found: Measured) -> None:
    """One line an operator, and its errors below."""
    if found.verdict == _ALWAYS:
        return
    console.print(f"{found.name}: {found.verdict} {found.counts}", highlight=False, markup=False)
    for trial, text in found.texts.items():
        console.print(f"    {trial}: {' '.join(text.split())}", highlight=False, markup=False, soft_wrap=True)


def _only_gathers(found: Measured) -> bool:
    """Whether an operator is right, but was never seen to run on shards that stay where they are."""
    return found.verdict == _ALWAYS and not found.sends_nothing and not found.moves_nothing


def _summary(found: Sequence[Measured]) -> dict[str, int]:
    """Operators by verdict, and of those that are always right what they send."""
    counts = Counter(item.verdict for item in found)
    right = [item for item in found if item.verdict == _ALWAYS]
    return {
        "operators": len(found),
        **{verdict: counts[verdict] for verdict in (_ALWAYS, "raises sometimes", "raises always", WRONG)},
        "not measured": counts["not measured"],
        "sends_nothing": sum(item.sends_nothing for item in right),
        "moves_nothing": sum(item.moves_nothing and not item.sends_nothing for item in right),
        "gathers": sum(map(_only_gathers, right)),
    }


def _findings(found: Sequence[Measured], fallback: Mode) -> dict[str, Any]:
    """The result's part about operators."""
    others = [item.other for item in found if item.other is not None]
    return {
        "counts": _summary(found),
        "torch_counts": _summary(others) if others else {},
        "targets": _TARGETS[fallback],
        "gathering": {item.name: GATHERED.get(item.name, _UNKNOWN) for item in found if _only_gathers(item)},
        "compared_trials": sum(item.num_compared for item in found),
        "terms_whole": sum(item.num_terms_whole for item in found),
        "more_bytes": {item.name: MORE_BYTES.get(item.name, _UNKNOWN) for item in found if item.more_bytes},
        "cases": [
            {**asdict(item), "verdict": item.verdict, "torch_verdict": item.other.verdict if item.other else None}
            for item in found
        ],
    }


def _print(console: Console, result: dict[str, Any]) -> None:
    """The table of counts, and what gathers or sends more than torch, with the reasons."""
    of_torch = result["torch_counts"]
    table = Table("of torch's operators", "count", "at least", *(["torch"] if of_torch else []))
    for name, number in result["counts"].items():
        of_other = [str(of_torch[name]) if "nothing" not in name and name != "gathers" else ""] if of_torch else []
        table.add_row(name, str(number), str(result["targets"].get(name, "")), *of_other)
    console.print(table)
    for key, does in (("gathering", "gathers"), ("more_bytes", "sends more than torch")):
        for name, reason in result[key].items():
            console.print(f"{name} {does}: {reason}", highlight=False, markup=False, soft_wrap=True)


def _again(names: Sequence[str], trial: int) -> None:
    """One trial of each operator in this process."""
    for name in names:
        operator = operators()[name]
        outcome, placements, case = random_trial(operator, operator.samples(), trial)
        click.echo(f"{name}, trial {trial}: {outcome.verdict} {outcome.text}")
        for tensor, placement in zip(case.tensors, placements, strict=True):
            click.echo(f"    {placement} of {tuple(tensor.shape)} {tensor.dtype}")
        click.echo(f"    {case.sample.summary()}")


@click.command(context_settings={"show_default": True})
@click.option("--ops", "pattern", default="*", help="Operators to measure, as patterns: 'linalg.*,einsum'.")
@click.option("--trials", type=click.IntRange(min=1), default=10, help="Random trials of each operator.")
@click.option("--fallback", type=click.Choice(MODES), default="raise", help="What runs without a strategy.")
@click.option("--against", type=click.Choice(["torch"]), default=None, help="Run torch's DTensor in the same trials.")
@click.option("--processes", type=click.IntRange(min=1), default=num_cores(), help="Processes that measure.")
@click.option("--limit", type=float, default=120, help="Seconds for one operator, after which it is given up.")
@click.option("--trial", type=int, default=None, help="Run this one trial again, in this process, and print it.")
@json_option
def main(
    pattern: str,
    trials: int,
    fallback: Mode,
    against: str | None,
    processes: int,
    limit: float,
    trial: int | None,
    json_to: str | None,
) -> None:
    """Run torch's operators on distributed tensors and hold them against one device."""
    torch.set_num_threads(1)
    names = matching(pattern)
    if not names:
        raise click.UsageError(f"--ops {pattern!r} names no operator")
    if trial is not None:
        set_fallback(fallback)
        _again(names, trial)
        return
    console, started = Console(stderr=is_printed(json_to)), time.monotonic()
    measured: list[Measured] = []

    def document(found: Sequence[Measured], *, is_complete: bool) -> dict[str, Any]:
        run = {"trials": trials, "fallback": fallback, "seconds": round(time.monotonic() - started, 1)}
        return {
            "benchmark": "op_coverage",
            **surroundings(),
            **run,
            **_findings(found, fallback),
            "complete": is_complete,
        }

    def note(item: Measured) -> None:
        measured.append(item)
        _tell(console, item)
        if json_to is not None and not is_printed(json_to):
            write_json(document(measured, is_complete=False), json_to)

    found = measure_all(
        names,
        trials,
        fallback,
        with_torch=against is not None,
        num_processes=processes,
        limit_s=limit,
        on_measured=note,
    )
    result = document(found, is_complete=True)
    _print(console, result)
    write_json(result, json_to)
    if any(item.counts[WRONG] for item in found):
        raise SystemExit(1)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.ops.op_coverage")
