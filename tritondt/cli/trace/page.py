"""A trace as one self-contained HTML page: a row for each thread's operators, exchanges and phases, and the summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import floor, log10
from typing import Any

from tritondt.cli.html_page import legend, page

COLOURS = {
    "op": "#7890a0",
    "collective": "#5b7bd0",
    "redistribution": "#9a66c4",
    "exchange": "#b08420",
    "pack": "#4a8a38",
    "keep": "#719f50",
    "send": "#1f86b8",
    "wait": "#d2611f",
    "unpack": "#3a9080",
}
_LANES = {"op": 0, "collective": 0, "redistribution": 0, "exchange": 1}  # phases of exchanges are below these
_LEFT, _WIDTH, _ROW, _GAP = 90, 1500, 16, 14
_NUM_LANES = 3
# Narrower spans are left out, and so are more of them than a browser draws at once.
_NARROWEST, _MOST_SPANS, _MOST_FLOWS = 0.15, 20_000, 1_000


def trace_page(document: Mapping[str, Any], summary: str) -> str:
    """The page of a trace, from the second step on where there are several: the first has what is set up."""
    events = document["traceEvents"]
    start, stop = _window(events)
    rows = sorted({(event["pid"], event["tid"]) for event in events if event["ph"] == "X"})
    tops = {row: 24 + place * (_NUM_LANES * _ROW + _GAP) for place, row in enumerate(rows)}
    scale = _WIDTH / max(stop - start, 1e-3)
    spans = [event for event in events if event["ph"] == "X" and _is_drawn(event, start, stop, scale)]
    spans.sort(key=lambda event: -event["dur"])
    left_out = sum(event["ph"] == "X" for event in events) - len(spans[:_MOST_SPANS])
    drawing = [_axis(start, stop, scale), *(_label(row, top, events) for row, top in tops.items())]
    drawing += [_span(event, tops[event["pid"], event["tid"]], start, scale) for event in spans[:_MOST_SPANS]]
    drawing += _flows(events, tops, (start, stop), scale)
    height = 30 + len(rows) * (_NUM_LANES * _ROW + _GAP)
    other = document["otherData"]
    body = [
        f"<p>{escape(' '.join(other['program']))} on {other['ranks']} ranks, {escape(other['date'])}</p>",
        legend(COLOURS),
        f'<div class="scroll"><svg style="min-width:{_WIDTH + _LEFT}px" viewBox="0 0 {_WIDTH + _LEFT + 10} {height}" '
        f'role="img" aria-label="timeline">{"".join(drawing)}</svg></div>',
        f"<p>{(stop - start) / 1e3:.3f} ms; {left_out:,} spans are outside, or too narrow to be seen; the file for "
        "Perfetto has them all. Lines go from the sending of a message to its arrival.</p>",
        f"<h2>Summary</h2><pre>{escape(summary)}</pre>",
    ]
    return page("tritondt trace", body)


def _window(events: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Time that is drawn: after the first step, up to the end of the last; all of it where there are no two steps."""
    marks = [event["ts"] for event in events if event["ph"] == "i"]
    first = [event["ts"] for event in events if event["ph"] == "i" and event["name"] == "end of step 1"]
    spans = [(event["ts"], event["ts"] + event["dur"]) for event in events if event["ph"] == "X"]
    if first and max(marks) > max(first):
        return min(first), max(marks)
    return min((start for start, _ in spans), default=0.0), max((stop for _, stop in spans), default=1.0)


def _is_drawn(event: Mapping[str, Any], start: float, stop: float, scale: float) -> bool:
    is_inside = event["ts"] < stop and event["ts"] + event["dur"] > start
    return bool(is_inside and event["dur"] * scale >= _NARROWEST)


def _axis(start: float, stop: float, scale: float) -> str:
    lines = []
    step = round_step((stop - start) / 10)
    for number in range(int((stop - start) / step) + 1):
        time = number * step
        place = _LEFT + time * scale
        lines.append(f'<line x1="{place:.1f}" x2="{place:.1f}" y1="16" y2="100%" class="grid"/>')
        lines.append(f'<text x="{place:.1f}" y="12" text-anchor="middle">{time / 1e3:g} ms</text>')
    return "".join(lines)


def round_step(least: float) -> float:
    """Smallest of 1, 2, 5, 10, 20, ... and of 0.5, 0.2, 0.1, ... that is not below `least`, which is above 0.

    >>> round_step(24.007), round_step(5), round_step(0.13)
    (50.0, 5.0, 0.2)
    """
    power = 10.0 ** floor(log10(least))
    return next(times * power for times in (1, 2, 5, 10) if times * power >= least)


def _label(row: tuple[int, int], top: int, events: Sequence[Mapping[str, Any]]) -> str:
    name = next(
        event["args"]["name"]
        for event in events
        if event["name"] == "thread_name" and (event["pid"], event["tid"]) == row
    )
    short = name.partition(" ")[0]
    return f'<text x="0" y="{top + 12}">rank {row[0]}</text><text x="0" y="{top + 26}">{escape(short)}</text>'


def _span(event: Mapping[str, Any], top: int, start: float, scale: float) -> str:
    left = max(event["ts"] - start, 0.0)
    width = (event["ts"] + event["dur"] - start - left) * scale
    lane = _LANES.get(event["cat"], 2)
    site = event.get("args", {}).get("asked for at", "")
    told = f"{event['cat']}: {event['name']}, {event['dur']:,.1f} us" + (f", asked for at {site}" if site else "")
    return (
        f'<rect x="{_LEFT + left * scale:.2f}" y="{top + lane * _ROW}" width="{width:.2f}" height="{_ROW - 2}" '
        f'fill="{COLOURS[event["cat"]]}"><title>{escape(told)}</title></rect>'
    )


def _flows(
    events: Sequence[Mapping[str, Any]],
    tops: Mapping[tuple[int, int], int],
    window: tuple[float, float],
    scale: float,
) -> list[str]:
    ends: dict[int, dict[str, Mapping[str, Any]]] = {}
    for event in events:
        if event["ph"] in ("s", "f") and window[0] <= event["ts"] <= window[1]:
            ends.setdefault(event["id"], {})[event["ph"]] = event
    whole = [found for found in ends.values() if len(found) == 2][:_MOST_FLOWS]
    lines = []
    for found in whole:
        (x1, y1), (x2, y2) = (
            (_LEFT + (event["ts"] - window[0]) * scale, tops[event["pid"], event["tid"]] + 2.4 * _ROW)
            for event in (found["s"], found["f"])
        )
        lines.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="currentColor" stroke-width="0.6" '
            f'stroke-opacity="0.55"><title>{escape(found["s"]["name"])}</title></line>'
        )
    return lines
