"""The summary of a trace as one page by matplotlib: steps, ranks, and the redistributions that cost most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import click

from tritondt.cli.charts import COLOURS, matplotlib, new_figure

ENDINGS = (".png", ".svg", ".pdf")
# Landscape A4, in inches.
_PAGE = (11.7, 8.3)
_MOST_COSTS = 5
_MOST_STEPS = 60
# Longer lines are cut short: the page has no room for them, and the file has them whole.
_MOST_LETTERS = 150
_SECONDS = {"computing": "#c8d0d6", "communication that is hidden": COLOURS[0], "exposed communication": COLOURS[1]}


def check_ending(path: str) -> None:
    """BadParameter for a file that matplotlib would not know how to write, or where it is not installed at all."""
    if Path(path).suffix not in ENDINGS:
        raise click.BadParameter(f"{path} ends in none of {', '.join(ENDINGS)}, which say the format of the page")
    matplotlib()


def write_summary(path: Path, other: Mapping[str, Any]) -> None:
    """Writes the page of what a trace's file has as `otherData`; the format is that of the path's ending."""
    summary = other["summary"]
    steps = summary["steps"]
    with matplotlib().rc_context({"font.size": 8, "text.parse_math": False, "svg.hashsalt": "tritondt"}):
        figure = new_figure(_PAGE)
        figure.suptitle(f"{' '.join(other['program'])} on {other['ranks']} ranks, {other['date']}", fontsize=11)
        by_step, by_rank, costs = figure.subplot_mosaic([["steps", "ranks"], ["costs", "costs"]]).values()
        # The first has what is set up, beside which the others could not be seen.
        first = 1 if len(steps) > 1 else 0
        _draw_steps(by_step, steps[first:], first + 1)
        _draw_ranks(by_rank, steps[first:])
        _draw_costs(costs, summary["redistributions"][:_MOST_COSTS])
        figure.legend(*by_step.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
        figure.savefig(path, format=path.suffix[1:], dpi=120)


def _draw_steps(axes: Any, steps: Sequence[Sequence[Mapping[str, float]]], first: int) -> None:
    shown = steps[-_MOST_STEPS:]
    numbers = range(first + len(steps) - len(shown), first + len(steps))
    _stack(axes, list(numbers), [_parts(step) for step in shown])
    axes.set(title="mean of the ranks, each step" + (" after the first" if first > 1 else ""), xlabel="step")
    axes.set_ylabel("ms")
    axes.xaxis.set_major_locator(matplotlib("ticker").MaxNLocator(integer=True))


def _draw_ranks(axes: Any, steps: Sequence[Sequence[Mapping[str, float]]]) -> None:
    by_rank: dict[int, list[Mapping[str, float]]] = {}
    for step in steps:
        for found in step:
            by_rank.setdefault(int(found["rank"]), []).append(found)
    ranks = sorted(by_rank)
    _stack(axes, ranks, [_parts(by_rank[rank]) for rank in ranks])
    axes.set(title="mean of these steps, each rank", xlabel="rank", ylabel="ms")
    axes.xaxis.set_major_locator(matplotlib("ticker").MaxNLocator(integer=True))


def _parts(found: Sequence[Mapping[str, float]]) -> tuple[float, ...]:
    """Mean times in ms, in the order of their colours; what is exposed is also communication."""
    duration, moving, exposed = (
        1e3 * fmean(each[name] for each in found) for name in ("duration_s", "communication_s", "exposed_s")
    )
    return max(duration - max(moving, exposed), 0.0), max(moving - exposed, 0.0), exposed


def _stack(axes: Any, places: Sequence[int], parts: Sequence[tuple[float, ...]]) -> None:
    below = [0.0] * len(places)
    for number, (name, colour) in enumerate(_SECONDS.items()):
        heights = [each[number] for each in parts]
        axes.bar(places, heights, bottom=below, color=colour, label=name, width=0.8)
        below = [low + height for low, height in zip(below, heights, strict=True)]


def _draw_costs(axes: Any, costs: Sequence[Mapping[str, Any]]) -> None:
    """A bar for each redistribution, all ranks together, and above it what it is, who asked, and what could be done."""
    axes.set(title="redistributions with most exposed time, all ranks together", xlabel="ms", yticks=[])
    if not costs:
        axes.text(0.5, 0.5, "nothing was redistributed", ha="center", transform=axes.transAxes)
        return
    for place, cost in enumerate(costs):
        exposed, rest = cost["exposed_s"] * 1e3, max(cost["total_s"] - cost["exposed_s"], 0.0) * 1e3
        axes.barh(place, exposed, height=0.3, color=COLOURS[1])
        axes.barh(place, rest, left=exposed, height=0.3, color=COLOURS[0])
        asked = f", asked for at {cost['asked_for_at']}" if cost["asked_for_at"] else ""
        told = f"{cost['exchanges']} exchanges, {cost['sent_bytes']:,} bytes: {cost['suggestion']}"
        for line, height in ((f"{cost['description']}{asked}", 0.52), (told, 0.35)):
            short = line if len(line) <= _MOST_LETTERS else f"{line[: _MOST_LETTERS - 3]}..."
            axes.text(0.0, place - height + 0.1, f" {short}", va="center", fontsize=7)
    axes.set_ylim(len(costs) - 0.7, -0.65)
