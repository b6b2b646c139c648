"""Measured redistributions as JSON and as CSV, a line for each case and implementation."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tritondt.cli.bench.breakdown import CSV_COLUMNS
from tritondt.cli.bench.harness import Times, percentile
from tritondt.cli.bench.measure import TORCH, TRITONDT, Measured, Request
from tritondt.cli.bench.report import bus_gb_per_s, gb_per_s, summarise, summary_fields
from tritondt.cli.surroundings import run_fields, surroundings


def per_iteration(seconds: Sequence[float]) -> dict[str, Any]:
    """Figures of an iteration's times, by nccl-tests' names."""
    in_us = [each * 1e6 for each in seconds]
    mean, deviation = statistics.fmean(in_us), statistics.pstdev(in_us)
    return {
        "skipped_iterations": 0,
        "min_us": min(in_us),
        "max_us": max(in_us),
        "avg_us": mean,
        **{f"p{percent}_us": percentile(in_us, percent) for percent in (50, 95, 99)},
        "stdev_us": deviation,
        "cv_pct": deviation / mean * 100,
    }


def csv_text(columns: Sequence[str], rows: Iterable[Mapping[str, Any]], around: Mapping[str, Any]) -> str:
    """A header and a line for each row, which has the date, machine and versions in `around` as well."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    common = {
        "date": around["date"],
        "processor": around["machine"]["processor"],
        "tritondt": around["versions"]["tritondt"],
        "torch": around["versions"]["torch"],
    }
    writer.writerows({**row, **common} for row in rows)
    return text.getvalue()


# nccl-tests' names.
_TYPES = {"float32": "float", "float64": "double", "float16": "half"}
_OPS = {"product": "prod"}


def as_json(
    request: Request,
    num_ranks: int,
    found: Sequence[Measured],
    before: Mapping[str, Any],
    errors: Sequence[str] = (),
) -> dict[str, Any]:
    """All measurements as plain values; `before` are the surroundings at the start, `errors` what ended the run early.

    `cases` have all that is known of a redistribution, `results` have nccl-tests' keys, a row for each implementation.
    """
    summaries = summarise(found)
    worst = summaries[0].worst if summaries else None
    results = [_result(request, item, name, times) for item in found for name, times in _sides(item).items()]
    ours = [result["out_of_place"]["bus_bw"] for result in results if result["implementation"] == TRITONDT]
    return {
        "benchmark": "redistribute",
        **run_fields(before),
        **before,
        "ranks": num_ranks,
        "device": request.device,
        "threads": request.num_threads,
        "dtype": request.dtype,
        "against": request.others[0] if request.others else None,
        "implementations": [TRITONDT, *request.others],
        "warmup_iters": request.warm_up_rounds,
        "validation": request.num_checks,
        "average": request.average,
        "cases": [_case(item) for item in found],
        "geometric_means": summary_fields(summaries[0]) if summaries else None,
        "worst": None if worst is None else _case(worst),
        "geometric_means_of": {summary.other: summary_fields(summary) for summary in summaries},
        "results": results,
        # A wrong result ends the run.
        "out_of_bounds": {"count": 0, "okay": True},
        "average_bus_bandwidth": {"bandwidth": statistics.fmean(ours) if ours else None, "okay": "unchecked"},
        "errors": list(errors),
        "complete": not errors,
    }


def _sides(item: Measured) -> dict[str, Times]:
    return {TRITONDT: item.ours, **item.others}


def _case(item: Measured) -> dict[str, Any]:
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
        "gb_per_s": gb_per_s(item, item.ours),
        "bus_gb_per_s": bus_gb_per_s(item, item.ours.median),
        "sent_bytes": item.sent_bytes,
        "minimum_bytes": item.minimum_bytes,
        "messages": item.num_messages,
        "received_over_limit": item.received_over_limit,
        "others": {name: _other(item, name) for name in item.others},
    }
    if TORCH in item.others:  # as files of older versions have it
        fields |= {f"{TORCH}_{key}": value for key, value in _times(item.others[TORCH]).items()}
    for ratio in list(item.ratios.values())[:1]:
        fields |= {"ratio_median": ratio.median, "ratio_fastest": ratio.fastest}
    if item.breakdown is not None:
        fields |= item.breakdown.fields()
    if item.loopback is not None:
        fields["loopback_calls"] = item.loopback.num_calls
        fields["loopback_bytes"] = item.loopback.sent_bytes
        fields["loopback_gap_bytes"] = item.loopback.gap_bytes
    return fields


def _times(times: Times) -> dict[str, Any]:
    return {"seconds": times.seconds, "median_s": times.median, "fastest_s": times.fastest}


def _other(item: Measured, name: str) -> dict[str, Any]:
    ratio = item.ratios.get(name)
    ratios = {} if ratio is None else {"ratio_median": ratio.median, "ratio_fastest": ratio.fastest}
    return _times(item.others[name]) | ratios


def _result(request: Request, item: Measured, name: str, times: Times) -> dict[str, Any]:
    """A row with nccl-tests' keys: the tensor's size, and the bytes of the busiest rank as bus bandwidth."""
    mean = statistics.fmean(times.seconds)
    size = item.case.numel * item.itemsize
    op = item.case.pair.reduce_op
    in_us = [seconds * 1e6 for seconds in times.seconds]
    return {
        "size": size,
        "count": item.case.numel,
        "type": _TYPES.get(request.dtype, request.dtype),
        "redop": "none" if op is None else _OPS.get(op, op),
        "root": -1,
        "implementation": name,
        "source": str(item.case.source),
        "target": str(item.case.target),
        "shape": item.case.shape,
        "mesh": item.case.mesh_shape,
        "out_of_place": {
            "time": mean * 1e6,
            "alg_bw": size / mean / 1e9,
            "bus_bw": item.busiest_bytes / mean / 1e9,
            "nwrong": 0 if item.is_checked else None,
        },
        "out_of_place_per_iter": {**per_iteration(times.seconds), "times_us": in_us},
        "in_place": None,
        "in_place_per_iter": None,
        "actual_iterations": len(times.seconds),
        "experiment_name": "redistribute",
    }


_CSV_COLUMNS = (
    *("collective", "implementation", "shape", "mesh", "source", "target", "type", "ranks", "rounds", "median_us"),
    *("fastest_us", "p95_us", "p99_us", "algbw_gbps", "busbw_gbps", "sent_bytes", "minimum_bytes", "date"),
    *("processor", "tritondt", "torch", *CSV_COLUMNS),
)


def as_csv(request: Request, num_ranks: int, found: Sequence[Measured]) -> str:
    """A header, and one line for each case and implementation."""
    rows = []
    for item in found:
        for side, times in _sides(item).items():
            is_ours = side == TRITONDT
            rows.append(
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
                    "algbw_gbps": gb_per_s(item, times),
                    # What torch sends is not counted.
                    "busbw_gbps": bus_gb_per_s(item, times.median) if is_ours else "",
                    "sent_bytes": item.sent_bytes if is_ours else "",
                    "minimum_bytes": item.minimum_bytes,
                    **(item.breakdown.columns() if is_ours and item.breakdown is not None else {}),
                }
            )
    return csv_text(_CSV_COLUMNS, rows, surroundings())
