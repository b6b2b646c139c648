"""Report of what the parts of redistributions take: cells of a table, fields of JSON, columns of CSV."""

from __future__ import annotations

from typing import Any

from tritondt.cli.bench.breakdown import Breakdown
from tritondt.cli.bench.harness import Times, ms_text
from tritondt.cli.bench.measure import Measured

TITLE = (
    "parts in ms, by fastest rounds: all; pack, keep, unpack, reduce alone (local);\n"
    "messages alone; the share of the shorter of these that runs beside the other\n"
    "(hidden); busbw in % of the peak, which is messages among all ranks, GB/s"
)
HEADER = ("from->to", "all", "local", "messages", "hidden", "% of peak", "peak")
CSV_COLUMNS = ("local_us", "messages_us", "hidden_share", "share_of_peak", "peak_gbps")


def cells(item: Measured) -> list[str]:
    """Row of a case that was broken down."""
    assert item.breakdown is not None, f"{item.case} was not broken down"
    return [item.case.pair_text, *figures(item.breakdown, item.ours, item.busiest_bytes)]


def figures(found: Breakdown, whole: Times, busiest_bytes: int) -> list[str]:
    """Cells of a row behind its first."""
    hidden = found.hidden_share(whole)
    return [
        *(ms_text(times.fastest) for times in (whole, found.local, found.messages)),
        "-" if hidden is None else f"{100 * hidden:.0f}%",
        f"{100 * found.share_of_peak(busiest_bytes, whole):.0f}",
        f"{found.peak_bytes_per_s / 1e9:.2f}",
    ]


def as_fields(item: Measured) -> dict[str, Any]:
    """Fields of a case in JSON; none where it was not broken down."""
    return {} if item.breakdown is None else fields_of(item.breakdown, item.ours, item.busiest_bytes)


def fields_of(found: Breakdown, whole: Times, busiest_bytes: int) -> dict[str, Any]:
    """Fields of what was broken down, in JSON."""
    return {
        "local_seconds": found.local.seconds,
        "local_fastest_s": found.local.fastest,
        "messages_seconds": found.messages.seconds,
        "messages_fastest_s": found.messages.fastest,
        "hidden_share": found.hidden_share(whole),
        "share_of_peak": found.share_of_peak(busiest_bytes, whole),
        "peak_gb_per_s": found.peak_bytes_per_s / 1e9,
    }


def as_columns(item: Measured) -> dict[str, Any]:
    """Columns of a case in CSV; none where it was not broken down."""
    return columns_of(as_fields(item))


def columns_of(fields: dict[str, Any]) -> dict[str, Any]:
    """Columns of such fields; none without any."""
    if not fields:
        return {}
    return {
        "local_us": fields["local_fastest_s"] * 1e6,
        "messages_us": fields["messages_fastest_s"] * 1e6,
        "hidden_share": fields["hidden_share"],
        "share_of_peak": fields["share_of_peak"],
        "peak_gbps": fields["peak_gb_per_s"],
    }
