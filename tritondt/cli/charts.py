"""Charts by matplotlib, which is imported when one is drawn: lines over logarithmic axes, and histograms.

Pages have them as SVG that names no other file and asks no network.
"""

from __future__ import annotations

import importlib
import io
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from tritondt.cli.foreign_files import printable

# On white each has a contrast of 3 and more.
COLOURS = ("#1f86b8", "#d2611f", "#4f9440", "#9a66c4", "#a07c1c", "#cf4a78", "#5b7bd0", "#808080")
_NUM_BINS = 24
_SIZE = (4.3, 2.9)
# Letters stay letters, which browsers find and draw; names have no formulas; the same chart is the same text.
_STYLE = {"svg.fonttype": "none", "svg.hashsalt": "tritondt", "text.parse_math": False, "font.size": 8.5}
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
# Values that are further apart than this are drawn over a logarithmic axis.
_WIDE = 8


@dataclass(frozen=True)
class Series:
    """Points of one line, in ascending order of x, all above 0; `style` is its place among the colours.

    With `tops`, the space from each point up to its top is tinted.
    """

    name: str
    points: Sequence[tuple[float, float]]
    style: int
    tops: Sequence[float] = ()


def matplotlib(part: str = "") -> Any:
    """The package matplotlib, or a module in it; ModuleNotFoundError where it is not installed."""
    return importlib.import_module(f"matplotlib.{part}" if part else "matplotlib")


def new_figure(size: tuple[float, float]) -> Any:
    """A figure without a display, of so many inches."""
    return matplotlib("figure").Figure(figsize=size, layout="constrained")


def _small_figure() -> Any:
    """A chart among others, whose margins are fixed: to find them takes as long again as to draw it."""
    figure = matplotlib("figure").Figure(figsize=_SIZE)
    figure.subplots_adjust(left=0.18, right=0.97, bottom=0.15, top=0.9, hspace=0.15)
    return figure


def as_svg(figure: Any, told: str) -> str:
    """The figure as an element of a page, with a text for those who do not see it."""
    found = io.StringIO()
    with matplotlib().rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)  # the browser's own fonts have more
        figure.savefig(found, format="svg", metadata=_NO_METADATA)
    # Within a page an element's namespaces follow from its name; as attributes they would look like addresses.
    start, _, rest = found.getvalue().partition("<svg")[2].partition(">")
    start = re.sub(r'\s(xmlns(:\w+)?|width|height|version)="[^"]*"', "", start)
    return f'<svg{start} role="img" aria-label="{escape(printable(told))}">{rest.strip()}'


def line_chart(
    title: str, y_label: str, series: Sequence[Series], x_text: Callable[[float], str], reference: float | None = None
) -> str:
    """Chart of lines over bytes, both axes logarithmic, with a dotted line at `reference`; empty without a point."""
    drawn = [each for each in series if each.points]
    if not drawn:
        return ""
    with matplotlib().rc_context(_STYLE):
        figure = _small_figure()
        axes = figure.subplots()
        for each in drawn:
            xs, ys = zip(*each.points, strict=True)
            colour = COLOURS[each.style % len(COLOURS)]
            axes.plot(xs, ys, color=colour, marker="o", markersize=3, linewidth=1.5)
            if each.tops:
                axes.fill_between(xs, ys, each.tops, color=colour, alpha=0.15, linewidth=0)
        if reference is not None:
            axes.axhline(reference, color="black", linestyle=":", linewidth=1)
        ticks = matplotlib("ticker")
        values = [y for each in drawn for y in (*(y for _, y in each.points), *each.tops)]
        values += [] if reference is None else [reference]
        sizes = [x for each in drawn for x, _ in each.points]
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set(xlim=(min(sizes) / 1.5, max(sizes) * 1.5), ylim=(min(values) / 1.6, max(values) * 1.6))
        axes.xaxis.set_major_locator(ticks.LogLocator(base=2, numticks=7))
        axes.xaxis.set_major_formatter(ticks.FuncFormatter(lambda size, _: x_text(size)))
        _number_ticks(axes.yaxis, max(values) / min(values))
        axes.xaxis.set_minor_locator(ticks.NullLocator())
        axes.grid(color="#ddd", linewidth=0.6)
        axes.set_title(printable(title), fontsize=9, loc="left")
        axes.set(xlabel="bytes", ylabel=y_label)
    return as_svg(figure, f"{title}: {y_label} over bytes")


def _number_ticks(axis: Any, span: float) -> None:
    """Ticks of a logarithmic axis as plain numbers: powers of ten, or 1, 2 and 5 times them for a span below 1000."""
    ticks = matplotlib("ticker")
    axis.set_major_locator(ticks.LogLocator(base=10, subs=(1.0,) if span > 1e3 else (1.0, 2.0, 5.0), numticks=8))
    axis.set_major_formatter(ticks.FuncFormatter(lambda value, _: f"{value:,.12g}"))
    axis.set_minor_locator(ticks.NullLocator())


def histogram(title: str, x_label: str, values: Mapping[str, Sequence[float]], styles: Mapping[str, int]) -> str:
    """Histograms of several sets of values, one below the other over one axis.

    Values beyond the 99th percentile are in the last bin.
    """
    pooled = sorted(value for each in values.values() for value in each)
    low, high = pooled[0], pooled[max(math.ceil(0.99 * len(pooled)) - 1, 0)]
    if high <= low:
        low, high = low * 0.9, low * 1.1 or 1.0
    is_log = low > 0 and high > _WIDE * low
    places = [number / _NUM_BINS for number in range(_NUM_BINS + 1)]
    edges = [low * (high / low) ** place if is_log else low + (high - low) * place for place in places]
    edges[-1] = high
    with matplotlib().rc_context(_STYLE):
        figure = _small_figure()
        lanes = figure.subplots(len(values), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
        for axes, (name, each) in zip(lanes, values.items(), strict=True):
            clipped = [min(value, high) for value in each]
            axes.hist(clipped, bins=edges, color=COLOURS[styles[name] % len(COLOURS)], label=printable(name))
            axes.legend(loc="upper right", frameon=False, handlelength=1)
            axes.set_ylabel("iterations")
            axes.yaxis.set_major_locator(matplotlib("ticker").MaxNLocator(4, integer=True))
        if is_log:
            lanes[-1].set_xscale("log")
            _number_ticks(lanes[-1].xaxis, high / low)
        lanes[-1].set_xlabel(x_label)
        lanes[0].set_title(printable(title), fontsize=9, loc="left")
    return as_svg(figure, f"{title}: iterations over {x_label}")
