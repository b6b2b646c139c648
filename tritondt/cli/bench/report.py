"""Report of the measurements: means, the worst case, the table and the JSON object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from tritondt.cli.bench.measure import Measured, Request
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


def summarise(found: Sequence[Measured]) -> Summary | None:
    """Summary of the comparison; None where there is nothing to compare to."""
    compared = [item for item in found if item.theirs is not None]
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
    return Summary(_mean_median(compared), _mean_fastest(compared), tuple(means), worst)


def _mean_median(found: Sequence[Measured]) -> float:
    return geometric_mean(item.ratio_median for item in found if item.ratio_median is not None)


def _mean_fastest(found: Sequence[Measured]) -> float:
    return geometric_mean(item.ratio_fastest for item in found if item.ratio_fastest is not None)


def line(item: Measured) -> str:
    """One case in one line, for progress."""
    text = f"{item.case}: {_ms(item.ours.median)} ms"
    if item.theirs is not None:
        text += f", torch {_ms(item.theirs.median)} ms, ratio {item.ratio_median:.2f}"
    return text


def print_report(found: Sequence[Measured], console: Console) -> None:
    """Prints the table of all cases, and the summary; plain text where the table fits no terminal."""
    _print_table(_header(found), [_row(item) for item in found], console)
    console.print(
        "times in ms, of the slowest rank; sent: bytes of all ranks; minimum: what the ranks lack, and for P "
        "an element's\np - 1 sends that add up p terms (p where no rank that wants the sum has a term), and "
        "k - 1 that take it to k ranks",
        highlight=False,
        soft_wrap=True,
    )
    summary = summarise(found)
    if summary is not None:
        _print_summary(summary, len(found), console)


def _header(found: Sequence[Measured]) -> list[str]:
    names = ["size", "from", "to", "rounds", "median", "fastest"]
    if any(item.theirs is not None for item in found):
        names += ["torch median", "torch fastest", "ratio", "ratio fastest"]
    else:
        names += ["GB/s"]
    names += ["messages", "sent", "minimum", "sent/min"]
    return [*names, "wire/sent"] if any(item.loopback is not None for item in found) else names


def _row(item: Measured) -> list[str]:
    case, theirs = item.case, item.theirs
    cells = [case.size, str(case.source), str(case.target), str(len(item.ours.seconds))]
    cells += [_ms(item.ours.median), _ms(item.ours.fastest)]
    if theirs is not None:
        cells += [_ms(theirs.median), _ms(theirs.fastest)]
        cells += [f"{item.ratio_median:.3f}", f"{item.ratio_fastest:.3f}"]
    else:
        cells += [f"{_gb_per_s(item, item.ours.median):.2f}"]
    cells += [str(item.num_messages), f"{item.sent_bytes:,}", f"{item.minimum_bytes:,}"]
    cells += [_ratio_text(item.sent_bytes, item.minimum_bytes)]
    if item.loopback is not None:
        cells += [_ratio_text(item.loopback.sent_bytes, item.loopback.num_calls * item.sent_bytes)]
    return cells


def _print_table(header: Sequence[str], rows: Sequence[Sequence[str]], console: Console) -> None:
    table = Table(box=box.SIMPLE)
    for number, name in enumerate(header):
        table.add_column(name, justify="left" if number < 3 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    # Where the table does not fit, rich would leave out parts of cells.
    if console.is_terminal and console.measure(table).maximum <= console.width:
        console.print(table)
        return
    padded = [[*row, *[""] * (len(header) - len(row))] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in padded) for column in range(len(header))]
    for row in padded:
        left = [cell.ljust(width) for cell, width in zip(row[:3], widths[:3], strict=True)]
        right = [cell.rjust(width) for cell, width in zip(row[3:], widths[3:], strict=True)]
        console.print("  ".join(left + right).rstrip(), highlight=False, markup=False, soft_wrap=True)


def _print_summary(summary: Summary, num_cases: int, console: Console) -> None:
    lines = [
        f"time / torch's, geometric mean of {num_cases} cases: {summary.ratio_median:.3f} by medians, "
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
        lines.append(f"no case in which torch takes {limit} or more")
    else:
        lines.append(
            f"worst by fastest where torch takes {limit} or more: {worst.ratio_fastest:.3f} in {worst.case} "
            f"({_ms(worst.ours.fastest)} ms, torch {_ms(worst.theirs.fastest)} ms, "
            f"{len(worst.ours.seconds)} rounds)"
        )
    for text in lines:
        console.print(text, highlight=False, markup=False, soft_wrap=True)


def as_json(request: Request, num_ranks: int, found: Sequence[Measured]) -> dict[str, Any]:
    """All measurements and their surroundings as plain values."""
    return {
        "benchmark": "redistribute",
        **surroundings(),
        "ranks": num_ranks,
        "threads": request.num_threads,
        "dtype": request.dtype,
        "against": "torch" if request.against_torch else None,
        "cases": [_case_json(item) for item in found],
        **_summary_json(summarise(found)),
    }


def _case_json(item: Measured) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "shape": item.case.shape,
        "mesh": item.case.mesh_shape,
        "source": str(item.case.source),
        "target": str(item.case.target),
        "rounds": len(item.ours.seconds),
        "median_s": item.ours.median,
        "fastest_s": item.ours.fastest,
        "gb_per_s": _gb_per_s(item, item.ours.median),
        "sent_bytes": item.sent_bytes,
        "minimum_bytes": item.minimum_bytes,
        "messages": item.num_messages,
        "received_over_limit": item.received_over_limit,
    }
    if item.theirs is not None:
        fields["torch_median_s"] = item.theirs.median
        fields["torch_fastest_s"] = item.theirs.fastest
        fields["ratio_median"] = item.ratio_median
        fields["ratio_fastest"] = item.ratio_fastest
    if item.loopback is not None:
        fields["loopback_calls"] = item.loopback.num_calls
        fields["loopback_bytes"] = item.loopback.sent_bytes
        fields["loopback_gap_bytes"] = item.loopback.gap_bytes
    return fields


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


def _gb_per_s(item: Measured, seconds: float) -> float:
    """Algorithm bandwidth: the whole tensor's bytes over the time."""
    return item.case.numel * item.itemsize / seconds / 1e9


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}" if seconds < 10e-3 else f"{seconds * 1e3:.1f}"


def _ratio_text(sent: int, least: int) -> str:
    if least == 0:
        return "-" if sent == 0 else "inf"
    return f"{sent / least:.3f}"
