"""Charts as inline SVG: lines over a logarithmic axis, and histograms; no font, script or style from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

# Seen on white and on the dark paper of pages alike: at least three times as light or as dark.
COLOURS = ("#1f86b8", "#d2611f", "#4f9440", "#9a66c4", "#a07c1c", "#cf4a78", "#5b7bd0", "#808080")
_WIDTH, _HEIGHT = 380, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 26, 40
_NUM_BINS = 24
# Pixels of a histogram in which more than the largest of its figures can be read.
_LEAST_WITH_TICKS = 60
# Values that are further apart than this are drawn over a logarithmic axis.
_WIDE = 8


@dataclass(frozen=True)
class Series:
    """Points of one line, in ascending order of x; `style` is its place among the colours."""

    name: str
    points: Sequence[tuple[float, float]]
    style: int
    dashed: bool = False


@dataclass(frozen=True)
class Axis:
    """Values from `low` to `high`, logarithmic or linear, at pixels from `start` to `stop`."""

    low: float
    high: float
    start: float
    stop: float
    is_log: bool

    def at(self, value: float) -> float:
        """Pixel of a value.

        >>> Axis(1, 100, 0, 10, True).at(10), Axis(0, 4, 10, 0, False).at(1)
        (5.0, 7.5)
        """
        low, high, value = map(math.log, (self.low, self.high, value)) if self.is_log else (self.low, self.high, value)
        return self.start + (value - low) / ((high - low) or 1) * (self.stop - self.start)

    def ticks(self) -> list[float]:
        """Values that are marked: round ones, and powers of 4 or more on a logarithmic axis."""
        if self.is_log:
            first, last = math.ceil(math.log2(self.low) - 1e-9), math.floor(math.log2(self.high) + 1e-9)
            step = max(1, math.ceil((last - first + 1) / 5))
            return [2.0**power for power in range(first, last + 1, step)] or [self.low]
        width = _round_step((self.high - self.low) / 4)
        first, last = math.ceil(self.low / width - 1e-9), math.floor(self.high / width + 1e-9)
        return [number * width for number in range(first, last + 1)]


def _round_step(step: float) -> float:
    """The least of 1, 2 and 5 times a power of ten that is not below `step`."""
    power = 10.0 ** math.floor(math.log10(step)) if step > 0 else 1.0
    return next((factor * power for factor in (1, 2, 5) if factor * power >= step - 1e-12), 10 * power)


def line_chart(
    title: str,
    y_label: str,
    series: Sequence[Series],
    x_text: Callable[[float], str],
    reference: float | None = None,
    x_label: str = "bytes",
) -> str:
    """Chart of lines over a logarithmic axis, from 0 up, with a dashed line at `reference`."""
    points = [point for each in series for point in each.points]
    xs = [x for x, _ in points] or [1.0]
    top = max([y for _, y in points] + ([] if reference is None else [reference]), default=1.0) or 1.0
    low, high = min(xs), max(xs)
    if low == high:
        low, high = low / 2, high * 2
    across = Axis(low, high, _LEFT, _WIDTH - _RIGHT, True)
    up = Axis(0, top * 1.08, _HEIGHT - _BOTTOM, _TOP, False)
    body = [*_around(title, y_label), *_across(across, x_text), _x_name(x_label), *_up(up, up.ticks())]
    if reference is not None:
        height = up.at(reference)
        body.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{height:.1f}" y2="{height:.1f}" class="reference"/>'
        )
    for each in series:
        colour = COLOURS[each.style % len(COLOURS)]
        path = " ".join(f"{across.at(x):.1f},{up.at(y):.1f}" for x, y in each.points)
        dash = ' stroke-dasharray="5 3"' if each.dashed else ""
        body.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        body += [
            f'<circle cx="{across.at(x):.1f}" cy="{up.at(y):.1f}" r="3" fill="{colour}">'
            f"<title>{escape(each.name)}: {y:.4g} at {escape(x_text(x))}</title></circle>"
            for x, y in each.points
        ]
    return _svg(title, body)


def histogram(title: str, x_label: str, values: Mapping[str, Sequence[float]], styles: Mapping[str, int]) -> str:
    """Histograms of several sets of values, one below the other over one axis.

    Values beyond the 99th percentile are in the last bin.
    """
    pooled = sorted(value for each in values.values() for value in each)
    low, high = pooled[0], pooled[max(math.ceil(0.99 * len(pooled)) - 1, 0)]
    if high <= low:
        low, high = low * 0.9, low * 1.1 or 1.0
    across = Axis(low, high, _LEFT, _WIDTH - _RIGHT, low > 0 and high > _WIDE * low)
    counts = {name: _binned(each, across) for name, each in values.items()}
    most, lane = max(map(max, counts.values())), (_HEIGHT - _BOTTOM - _TOP) / len(counts)
    body = [*_around(title, "iterations"), *_across(across, lambda value: f"{value:.4g}")]
    body.append(_x_name(x_label))
    for place, (name, bins) in enumerate(counts.items()):
        bottom = _TOP + (place + 1) * lane
        up = Axis(0, most * 1.08, bottom, bottom - lane, False)
        body += _up(up, up.ticks() if lane >= _LEAST_WITH_TICKS else [0, most])
        body += _bars(name, bins, across, up, COLOURS[styles[name] % len(COLOURS)])
        if len(counts) > 1:
            body.append(f'<text x="{_WIDTH - _RIGHT}" y="{up.stop + 13:.1f}" class="lane">{escape(name)}</text>')
    return _svg(title, body)


def _bars(name: str, bins: Sequence[int], across: Axis, up: Axis, colour: str) -> list[str]:
    width = (across.stop - across.start) / _NUM_BINS
    return [
        f'<rect x="{across.start + number * width:.1f}" y="{up.at(count):.1f}" width="{width:.1f}" '
        f'height="{up.start - up.at(count):.1f}" fill="{colour}"><title>{escape(name)}: {count}</title></rect>'
        for number, count in enumerate(bins)
        if count
    ]


def _binned(values: Sequence[float], across: Axis) -> list[int]:
    bins = [0] * _NUM_BINS
    for value in values:
        place = (across.at(value) - across.start) / (across.stop - across.start)
        bins[min(int(place * _NUM_BINS), _NUM_BINS - 1)] += 1
    return bins


def _around(title: str, y_label: str) -> list[str]:
    """Title and name of the vertical axis."""
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    return [
        f'<text x="{_LEFT}" y="14" class="title">{escape(title)}</text>',
        f'<text x="12" y="{middle:.0f}" text-anchor="middle" transform="rotate(-90 12 {middle:.0f})">'
        f"{escape(y_label)}</text>",
    ]


def _x_name(text: str) -> str:
    return f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 6}" text-anchor="end">{escape(text)}</text>'


def _across(axis: Axis, text: Callable[[float], str]) -> list[str]:
    """The horizontal axis with its ticks."""
    bottom = _HEIGHT - _BOTTOM
    body = [f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{bottom}" y2="{bottom}" class="axis"/>']
    for value in axis.ticks():
        place = axis.at(value)
        body.append(f'<line x1="{place:.1f}" x2="{place:.1f}" y1="{bottom}" y2="{bottom + 4}" class="axis"/>')
        body.append(f'<text x="{place:.1f}" y="{bottom + 16}" text-anchor="middle">{escape(text(value))}</text>')
    return body


def _up(axis: Axis, ticks: Sequence[float]) -> list[str]:
    """Marked values of a vertical axis, with a line across at each."""
    body = []
    for value in ticks:
        height = axis.at(value)
        body.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{height:.1f}" y2="{height:.1f}" class="grid"/>')
        if value or axis.start == _HEIGHT - _BOTTOM:  # the 0 of other lanes has the figures of the lane below
            body.append(f'<text x="{_LEFT - 6}" y="{height + 4:.1f}" text-anchor="end">{value:.4g}</text>')
    return body


def _svg(title: str, body: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">' + "".join(body) + "</svg>"
