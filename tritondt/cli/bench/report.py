"""Report of the measurements: means, the worst case, the table and the JSON object."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

from rich.console import Console

from tritondt.cli.bench import breakdown_report
from tritondt.cli.bench.collective.record import AVERAGES
from tritondt.cli.bench.harness import ms_text, percentile
from tritondt.cli.bench.measure import TORCH, Measured, Request
from tritondt.cli.surroundings import surroundings

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
    ratio_median: float
    ratio_fastest: float
    ratio_median_up_to: float


@dataclass(frozen=True)
class Summary:
    """Means over all cases, per size in ascending order, and the worst case that can be judged alone."""

    ratio_median: float
    ratio_fastest: float
    sizes: tuple[SizeMean, ...]
    worst: Measured | None
    other: str


def summarise(found: Sequence[Measured]) -> Summary | None:
    """Summary of the comparison; None where there is nothing to compare to."""
    compared = [item for item in found if item.ratio_median is not None]
    if not compared:
        return None
    sizes = sorted({(item.case.numel, item.case.size) for item in compared})
    means = []
    for numel, size in sizes:
        own = [item for item in compared if item.case.size == size]
        up_to = [item for item in compared if item.case.numel <= numel]
        means.append(SizeMean(size, len(own), _mean_median(own), _mean_fastest(own), _mean_median(up_to)))
    judged = [item for item in compared if item.theirs is not None and item.theirs.fastest >= JUDGED_SECONDS]
    worst = max(judged, key=lambda item: item.ratio_fastest or 0.0, default=None)
    return Summary(_mean_median(compared), _mean_fastest(compared), tuple(means), worst, compared[0].other)


def _mean_median(found: Sequence[Measured]) -> float:
    return geometric_mean(item.ratio_median for item in found if item.ratio_median is not None)


def _mean_fastest(found: Sequence[Measured]) -> float:
    return geometric_mean(item.ratio_fastest for item in found if item.ratio_fastest is not None)


def line(item: Measured) -> str:
    """One case in one line, for progress."""
    text = f"{item.case}: {ms_text(item.ours.median)} ms"
    if item.theirs is not None:
        text += f", {item.other} {ms_text(item.theirs.median)} ms, ratio {_ratio_of(item.ratio_median)}"
    return text


def print_report(found: Sequence[Measured], console: Console, average: int) -> None:
    """Prints the times and the bytes of all cases, in at most 80 columns, and the summary."""
    for title, header, cells in (
        (
            f"times in ms, of {AVERAGES[average]} of ranks; GB/s: the tensor's bytes over the median",
            (*_TIMES, found[0].other, "fastest", "ratio", "fastest"),
            _times,
        ),
        ("bytes that all ranks send; busbw: the busiest rank's over the median, GB/s", _BYTES, _bytes),
    ):
        _say(console, title)
        _print_table(header, [(item.case.size, cells(item)) for item in found], console)
    _say(
        console,
        "minimum: what the ranks lack, and for P an element's p - 1 sends that add up p terms (p where no\n"
        "rank that wants the sum has a term), and k - 1 that take it to k ranks",
    )
    broken_down = [(item.case.size, breakdown_report.cells(item)) for item in found if item.breakdown is not None]
    if broken_down:
        _say(console, breakdown_report.TITLE)
        _print_table(breakdown_report.HEADER, broken_down, console)
    summary = summarise(found)
    if summary is not None:
        _print_summary(summary, len(found), console)


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


_TIMES = ("from->to", "rounds", "median", "p95", "fastest", "GB/s")
_BYTES = ("from->to", "messages", "sent", "minimum", "sent/min", "busbw", "wire/sent")


def _times(item: Measured) -> list[str]:
    ours, theirs = item.ours, item.theirs
    figures = [
        str(len(ours.seconds)),
        ms_text(ours.median),
        ms_text(percentile(ours.seconds, 95)),
        ms_text(ours.fastest),
    ]
    cells = [item.case.pair_text, *figures, f"{_gb_per_s(item, ours.median):.2f}"]
    if theirs is not None:
        cells += [
            ms_text(theirs.median),
            ms_text(theirs.fastest),
            _ratio_of(item.ratio_median),
            _ratio_of(item.ratio_fastest),
        ]
    return cells


def _ratio_of(ratio: float | None) -> str:
    return "N/A" if ratio is None else f"{ratio:.3f}"


def _bytes(item: Measured) -> list[str]:
    cells = [item.case.pair_text, str(item.num_messages), f"{item.sent_bytes:,}", f"{item.minimum_bytes:,}"]
    cells += [_ratio_text(item.sent_bytes, item.minimum_bytes), f"{bus_gb_per_s(item, item.ours.median):.2f}"]
    if item.loopback is not None:
        cells += [_ratio_text(item.loopback.sent_bytes, item.loopback.num_calls * item.sent_bytes)]
    return cells


def _print_table(header: Sequence[str], rows: Sequence[tuple[str, list[str]]], console: Console) -> None:
    """Prints rows below a line with their size, each column as wide as its widest cell."""
    longest = max(len(cells) for _, cells in rows)
    names = list(header[:longest])
    widths = [
        max(len(cells[column]) for cells in [names, *(c for _, c in rows)] if column < len(cells))
        for column in range(longest)
    ]
    size = ""
    for row_size, cells in [("", names), *rows]:
        if row_size != size:
            size = row_size
            _say(console, f"{size}:")
        padded = [
            cells[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=False)),
        ]
        _say(console, "  " + "  ".join(padded))


def _print_summary(summary: Summary, num_cases: int, console: Console) -> None:
    lines = [
        f"time / {summary.other}'s, geometric mean of {num_cases} cases: {summary.ratio_median:.3f} by medians, "
        f"{summary.ratio_fastest:.3f} by fastest"
    ]
    lines += [
        f"  {size.size}, {size.num_cases} cases: {size.ratio_median:.3f} by medians, "
        f"{size.ratio_fastest:.3f} by fastest; with all smaller sizes {size.ratio_median_up_to:.3f} by medians"
        for size in summary.sizes
    ]
    worst = summary.worst
    limit = f"{JUDGED_SECONDS * 1e3:.0f} ms"
    if worst is None or worst.theirs is None:
        lines.append(f"no case in which {summary.other} takes {limit} or more")
    else:
        lines.append(
            f"worst by fastest where {summary.other} takes {limit} or more: {worst.ratio_fastest:.3f} in {worst.case} "
            f"({ms_text(worst.ours.fastest)} ms, {summary.other} {ms_text(worst.theirs.fastest)} ms, "
            f"{len(worst.ours.seconds)} rounds)"
        )
    for text in lines:
        _say(console, text)


def as_json(request: Request, num_ranks: int, found: Sequence[Measured], errors: Sequence[str] = ()) -> dict[str, Any]:
    """All measurements and their surroundings as plain values; `errors` are what ended the run early."""
    return {
        "benchmark": "redistribute",
        **surroundings(),
        "ranks": num_ranks,
        "threads": request.num_threads,
        "dtype": request.dtype,
        "against": request.against,
        "warmup_iterations": request.warm_up_rounds,
        "validation": request.num_checks,
        "average": request.average,
        "cases": [_case_json(item) for item in found],
        **_summary_json(summarise(found)),
        "errors": list(errors),
        "complete": not errors,
    }


def _case_json(item: Measured) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "shape": item.case.shape,
        "mesh": item.case.mesh_shape,
        "source": str(item.case.source),
        "target": str(item.case.target),
        "rounds": len(item.ours.seconds),
        "seconds": item.ours.seconds,
        **{f"p{percent}_s": percentile(item.ours.seconds, percent) for percent in (50, 95, 99)},
        "median_s": item.ours.median,
        "fastest_s": item.ours.fastest,
        "gb_per_s": _gb_per_s(item, item.ours.median),
        "bus_gb_per_s": bus_gb_per_s(item, item.ours.median),
        "sent_bytes": item.sent_bytes,
        "minimum_bytes": item.minimum_bytes,
        "messages": item.num_messages,
        "received_over_limit": item.received_over_limit,
    }
    if item.theirs is not None:
        name = TORCH if item.other == TORCH else "other"
        fields[f"{name}_seconds"] = item.theirs.seconds
        fields[f"{name}_median_s"] = item.theirs.median
        fields[f"{name}_fastest_s"] = item.theirs.fastest
        fields["ratio_median"] = item.ratio_median
        fields["ratio_fastest"] = item.ratio_fastest
    fields |= breakdown_report.as_fields(item)
    if item.loopback is not None:
        fields["loopback_calls"] = item.loopback.num_calls
        fields["loopback_bytes"] = item.loopback.sent_bytes
        fields["loopback_gap_bytes"] = item.loopback.gap_bytes
    return fields


_CSV_COLUMNS = (
    *("collective", "implementation", "shape", "mesh", "source", "target", "type", "ranks", "rounds", "median_us"),
    *("fastest_us", "p95_us", "p99_us", "algbw_gbps", "busbw_gbps", "sent_bytes", "minimum_bytes", "date"),
    *("processor", "tritondt", "torch", *breakdown_report.CSV_COLUMNS),
)


def as_csv(request: Request, num_ranks: int, found: Sequence[Measured]) -> str:
    """A header, and one line for each case and implementation."""
    text = io.StringIO()
    writer = csv.DictWriter(text, _CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    around = surroundings()
    for item in found:
        for side, times in (("tritondt", item.ours), (item.other, item.theirs)):
            if times is None:
                continue
            writer.writerow(
                {
                    "collective": "redistribute",
                    "implementation": side,
                    "shape": item.case.size,
                    "mesh": "x".join(map(str, item.case.mesh_shape)),
                    "source": str(item.case.source),
                    "target": str(item.case.target),
                    "type": request.dtype,
                    "ranks": num_ranks,
                    "rounds": len(times.seconds),
                    "median_us": times.median * 1e6,
                    "fastest_us": times.fastest * 1e6,
                    **{f"p{percent}_us": percentile(times.seconds, percent) * 1e6 for percent in (95, 99)},
                    "algbw_gbps": _gb_per_s(item, times.median),
                    # What torch sends is not counted.
                    "busbw_gbps": bus_gb_per_s(item, times.median) if side == "tritondt" else "",
                    "sent_bytes": item.sent_bytes if side == "tritondt" else "",
                    "minimum_bytes": item.minimum_bytes,
                    "date": around["date"],
                    "processor": around["machine"]["processor"],
                    "tritondt": around["versions"]["tritondt"],
                    "torch": around["versions"]["torch"],
                    **(breakdown_report.as_columns(item) if side == "tritondt" else {}),
                }
            )
    return text.getvalue()


def _summary_json(summary: Summary | None) -> dict[str, Any]:
    if summary is None:
        return {"geometric_means": None, "worst": None}
    return {
        "geometric_means": {
            "ratio_median": summary.ratio_median,
            "ratio_fastest": summary.ratio_fastest,
            "sizes": {
                size.size: {
                    "cases": size.num_cases,
                    "ratio_median": size.ratio_median,
                    "ratio_fastest": size.ratio_fastest,
                    "ratio_median_up_to": size.ratio_median_up_to,
                }
                for size in summary.sizes
            },
        },
        "worst": None if summary.worst is None else _case_json(summary.worst),
    }


def bus_gb_per_s(item: Measured, seconds: float) -> float:
    """Bus bandwidth: what the busiest rank sends or receives over the time.

    For a gather, a reduction or an exchange of even parts, nccl-tests' factor gives the same.
    """
    return item.busiest_bytes / seconds / 1e9


def _gb_per_s(item: Measured, seconds: float) -> float:
    """Algorithm bandwidth: the whole tensor's bytes over the time."""
    return item.case.numel * item.itemsize / seconds / 1e9


def _ratio_text(sent: int, least: int) -> str:
    if least == 0:
        return "-" if sent == 0 else "inf"
    return f"{sent / least:.3f}"
