"""Text of a trace's summary: a table of steps, and the redistributions that cost most with what could be done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tritondt.debug.tracing.summary import Cost, StepTimes, Summary

MOST_STEPS = 20
MOST_COSTS = 5


def summary_text(summary: Summary, num_ranks: int) -> str:
    """The summary as text of at most 100 columns, explanations aside."""
    lines = ["step  duration ms  communication ms  exposed ms  exposed  most exposed on"]
    lines += [_step_line(number, times) for number, times in enumerate(summary.steps[:MOST_STEPS], 1)]
    if len(summary.steps) > MOST_STEPS:
        lines.append(f"... and {len(summary.steps) - MOST_STEPS} steps more, which the file has")
    unmatched = f", {summary.num_unmatched:,} without" if summary.num_unmatched else ""
    lines.append(f"messages: {summary.num_matched:,} with both ends{unmatched}")
    for place, cost in enumerate(summary.costs[:MOST_COSTS], 1):
        lines += ["", *_cost_lines(place, cost, num_ranks)]
    return "\n".join(lines)


def _step_line(number: int, times: Sequence[StepTimes]) -> str:
    def mean(values: list[int]) -> float:
        return sum(values) / len(values) / 1e6

    duration = mean([found.duration_ns for found in times])
    moving = mean([found.communication_ns for found in times])
    exposed = mean([found.exposed_ns for found in times])
    most = max(times, key=lambda found: found.exposed_ns)
    share = exposed / duration if duration else 0.0
    where = f"rank {most.rank}: {most.exposed_ns / 1e6:.2f} ms"
    return f"{number:>4}  {duration:>11.2f}  {moving:>16.2f}  {exposed:>10.2f}  {share:>7.0%}  {where}"


def _cost_lines(place: int, cost: Cost, num_ranks: int) -> list[str]:
    times = (
        f"{cost.num_exchanges} exchanges on {num_ranks} ranks, {cost.sent_bytes:,} bytes; "
        f"{cost.total_ns / 1e6:.2f} ms, of which {cost.exposed_ns / 1e6:.2f} exposed and "
        f"{cost.late_ns / 1e6:.2f} for late ranks"
    )
    asked = f"asked for at {cost.known.site}" if cost.known.site else ""
    explained = [f"   {line}" for line in cost.known.explanation.splitlines()]
    told = [f"{place}. {cost.description}", f"   {times}", f"   {asked}", *explained, f"   -> {cost.suggestion}"]
    return [line for line in told if line.strip()]


def summary_fields(summary: Summary) -> dict[str, Any]:
    """The summary as fields of a JSON object; times in seconds."""
    return {
        "steps": [
            [
                {
                    "rank": found.rank,
                    "duration_s": found.duration_ns / 1e9,
                    "communication_s": found.communication_ns / 1e9,
                    "exposed_s": found.exposed_ns / 1e9,
                }
                for found in times
            ]
            for times in summary.steps
        ],
        "redistributions": [
            {
                "description": cost.description,
                "asked_for_at": cost.known.site,
                "exchanges": cost.num_exchanges,
                "sent_bytes": cost.sent_bytes,
                "total_s": cost.total_ns / 1e9,
                "exposed_s": cost.exposed_ns / 1e9,
                "late_s": cost.late_ns / 1e9,
                "explanation": cost.known.explanation,
                "suggestion": cost.suggestion,
            }
            for cost in summary.costs
        ],
        "messages": {"matched": summary.num_matched, "unmatched": summary.num_unmatched},
    }
