"""Report of measured redistributions as text: a line for each as it comes, tables, means and the worst case."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

from rich.console import Console

from tritondt.cli.bench import AVERAGES
from tritondt.cli.bench.breakdown import HEADER, TITLE
from tritondt.cli.bench.collective.record import label
from tritondt.cli.bench.harness import Times, ms_text, percentile
from tritondt.cli.bench.measure import Measured, Ratio


def line(item: Measured) -> str:
    """One case in one line, for progress."""
    text = f"{item.case}: {ms_text(item.ours.median)} ms"
    for name, theirs in item.others.items():
        text += f", {name} {ms_text(theirs.median)} ms, ratio {_ratio_texts(item, name)[0]}"
    return text


def print_report(found: Sequence[Measured], console: Console, average: int) -> None:
    """Prints the times and the bytes of all cases, in the terminal's columns or in 80, and the summaries."""
    _say(console, f"times in ms, of {AVERAGES[average]} of ranks; GB/s: the tensor's bytes over the median")
    for lines in _tables_of_times(found, console.width if console.is_terminal else _COLUMNS):
        for text in lines:
            _say(console, text)
    _say(console, "bytes that all ranks send; busbw: the busiest rank's over the median, GB/s")
    for text in _table(_BYTES, [(item.case.size, _bytes(item)) for item in found]):
        _say(console, text)
    _say(
        console,
        "minimum: what the ranks lack, and for P an element's p - 1 sends that add up p terms (p where no\n"
        "rank that wants the sum has a term), and k - 1 that take it to k ranks",
    )
    broken_down = [(i.case.size, [i.case.pair_text, *i.breakdown.cells()]) for i in found if i.breakdown is not None]
    if broken_down:
        _say(console, TITLE)
        for text in _table(("from->to", *HEADER), broken_down):
            _say(console, text)
    for summary in summarise(found):
        for text in summary_lines(summary, len(found)):
            _say(console, text)


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


# Where no terminal says how many.
_COLUMNS = 80
_TIMES = ("from->to", "rounds", "median", "p95", "fastest", "GB/s")
_BYTES = ("from->to", "messages", "sent", "minimum", "sent/min", "busbw", "wire/sent")


def _tables_of_times(found: Sequence[Measured], columns: int) -> list[list[str]]:
    """One table where there is one other and the terminal has room for it, else one for each other below our own."""
    others = list(found[0].others)
    if len(others) == 1:
        rows = [(item.case.size, _times(item, others)) for item in found]
        both = _table((*_TIMES, *_header_of(others[0])), rows)
        if max(map(len, both)) <= columns:
            return [both]
    tables = [_table(_TIMES, [(item.case.size, _times(item, ())) for item in found])]
    for name in others:
        rows = [(item.case.size, [item.case.pair_text, *_both(item.ours), *_cells_of(item, name)]) for item in found]
        header = ("from->to", "median", "fastest", *_header_of(name))
        tables.append([f"times in ms beside {name}", *_table(header, rows)])
    return tables


def _header_of(other: str) -> tuple[str, ...]:
    return label(other), "fastest", "ratio", "fastest"


def _times(item: Measured, beside: Sequence[str]) -> list[str]:
    ours = item.ours
    figures = [
        str(len(ours.seconds)),
        ms_text(ours.median),
        ms_text(percentile(ours.seconds, 95)),
        ms_text(ours.fastest),
    ]
    cells = [item.case.pair_text, *figures, f"{gb_per_s(item, ours):.2f}"]
    return [*cells, *(cell for name in beside for cell in _cells_of(item, name))]


def _both(times: Times) -> list[str]:
    return [ms_text(times.median), ms_text(times.fastest)]


def _cells_of(item: Measured, other: str) -> list[str]:
    return [*_both(item.others[other]), *_ratio_texts(item, other)]


def _ratio_texts(item: Measured, other: str) -> list[str]:
    ratio = item.ratios.get(other)
    return ["N/A", "N/A"] if ratio is None else [f"{ratio.median:.3f}", f"{ratio.fastest:.3f}"]


def _bytes(item: Measured) -> list[str]:
    cells = [item.case.pair_text, str(item.num_messages), f"{item.sent_bytes:,}", f"{item.minimum_bytes:,}"]
    cells += [_ratio_text(item.sent_bytes, item.minimum_bytes), f"{bus_gb_per_s(item, item.ours.median):.2f}"]
    if item.loopback is not None:
        cells += [_ratio_text(item.loopback.sent_bytes, item.loopback.num_calls * item.sent_bytes)]
    return cells


def _table(header: Sequence[str], rows: Sequence[tuple[str, list[str]]]) -> list[str]:
    """Rows below a line with their size, each column as wide as its widest cell."""
    longest = max(len(cells) for _, cells in rows)
    names = list(header[:longest])
    widths = [
        max(len(cells[column]) for cells in [names, *(c for _, c in rows)] if column < len(cells))
        for column in range(longest)
    ]
    lines, size = [], ""
    for row_size, cells in [("", names), *rows]:
        if row_size != size:
            size = row_size
            lines.append(f"{size}:")
        padded = [
            cells[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=False)),
        ]
        lines.append("  " + "  ".join(padded))
    return lines


def bus_gb_per_s(item: Measured, seconds: float) -> float:
    """Bus bandwidth: what the busiest rank sends or receives over the time.

    For a gather, a reduction or an exchange of even parts, nccl-tests' factor gives the same.
    """
    return item.busiest_bytes / seconds / 1e9


def gb_per_s(item: Measured, times: Times) -> float:
    """Algorithm bandwidth: the whole tensor's bytes over the median time."""
    return item.case.numel * item.itemsize / times.median / 1e9


def _ratio_text(sent: int, least: int) -> str:
    if least == 0:
        return "-" if sent == 0 else "inf"
    return f"{sent / least:.3f}"


# Single cases are judged only where the reference takes this long: below, the machine's noise alone
# makes torch differ from itself by 10 % in a third of the cases.
JUDGED_SECONDS = 5e-3


@dataclass(frozen=True)
class SizeMean:
    """Geometric means of our times over theirs, of all cases of one size.

    `ratio_median_up_to` takes in all smaller sizes as well.
    """

    size: str
    num_cases: int
    ratio: Ratio
    ratio_median_up_to: float


@dataclass(frozen=True)
class Summary:
    """Means over all cases, per size in ascending order, and the worst case that can be judged alone."""

    other: str
    ratio: Ratio
    sizes: tuple[SizeMean, ...]
    worst: Measured | None


def summarise(found: Sequence[Measured]) -> list[Summary]:
    """A summary for each other implementation, in the order in which they were asked for; none without a check."""
    others = dict.fromkeys(name for item in found for name in item.ratios)
    return [_summary(name, [item for item in found if name in item.ratios]) for name in others]


def _summary(other: str, compared: Sequence[Measured]) -> Summary:
    sizes = sorted({(item.case.numel, item.case.size) for item in compared})
    means = []
    for numel, size in sizes:
        own = [item for item in compared if item.case.size == size]
        up_to = [item for item in compared if item.case.numel <= numel]
        means.append(SizeMean(size, len(own), _mean(other, own), _mean(other, up_to).median))
    judged = [item for item in compared if item.others[other].fastest >= JUDGED_SECONDS]
    worst = max(judged, key=lambda item: item.ratios[other].fastest, default=None)
    return Summary(other, _mean(other, compared), tuple(means), worst)


def _mean(other: str, found: Sequence[Measured]) -> Ratio:
    ratios = [item.ratios[other] for item in found]
    return Ratio(geometric_mean(each.median for each in ratios), geometric_mean(each.fastest for each in ratios))


def summary_lines(summary: Summary, num_cases: int) -> list[str]:
    """A summary as text."""
    other, worst = summary.other, summary.worst
    lines = [
        f"time / {other}'s, geometric mean of {num_cases} cases: {summary.ratio.median:.3f} by medians, "
        f"{summary.ratio.fastest:.3f} by fastest"
    ]
    lines += [
        f"  {size.size}, {size.num_cases} cases: {size.ratio.median:.3f} by medians, "
        f"{size.ratio.fastest:.3f} by fastest; with all smaller sizes {size.ratio_median_up_to:.3f} by medians"
        for size in summary.sizes
    ]
    limit = f"{JUDGED_SECONDS * 1e3:.0f} ms"
    if worst is None:
        return [*lines, f"no case in which {other} takes {limit} or more"]
    return [
        *lines,
        f"worst by fastest where {other} takes {limit} or more: {worst.ratios[other].fastest:.3f} in {worst.case} "
        f"({ms_text(worst.ours.fastest)} ms, {other} {ms_text(worst.others[other].fastest)} ms, "
        f"{len(worst.ours.seconds)} rounds)",
    ]


def summary_fields(summary: Summary) -> dict[str, Any]:
    """A summary as fields of JSON, but for its worst case."""
    return {
        "ratio_median": summary.ratio.median,
        "ratio_fastest": summary.ratio.fastest,
        "sizes": {
            size.size: {
                "cases": size.num_cases,
                "ratio_median": size.ratio.median,
                "ratio_fastest": size.ratio.fastest,
                "ratio_median_up_to": size.ratio_median_up_to,
            }
            for size in summary.sizes
        },
    }
