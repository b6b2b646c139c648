"""Results as JSON, with nccl-tests' keys, and as CSV, a line for each tuple of what was varied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tritondt.cli.bench.breakdown import CSV_COLUMNS
from tritondt.cli.bench.collective.on_rank import Devices
from tritondt.cli.bench.collective.overlap import Overlap
from tritondt.cli.bench.collective.record import Request, Row, Timing, average_bus_bandwidth, num_wrong
from tritondt.cli.bench.collective.table import comparisons, reaches
from tritondt.cli.bench.documents import csv_text, per_iteration
from tritondt.cli.surroundings import run_fields

_US = 1e6
_NUM_DIGITS = 3


def as_json(
    request: Request,
    rows: Sequence[Row],
    devices: Devices | None,
    surroundings: dict[str, Any],
    least_bandwidth: float | None,
    errors: Sequence[str],
) -> dict[str, Any]:
    """All measurements as plain values; `complete` is False where `errors` ended the run early.

    Keys are those of nccl-tests' -J, and more; see run_fields for what is not there.
    """
    mean = average_bus_bandwidth(rows, request.sides[0], request.average)
    wrong = num_wrong(rows)
    is_enough = mean is not None and least_bandwidth is not None and reaches(mean, least_bandwidth)
    okay: bool | str = "unchecked" if least_bandwidth is None else is_enough
    return {
        "benchmark": request.collective,
        **run_fields(surroundings),
        **surroundings,
        "config": _config(request, devices),
        "results": [_result(row, request) for row in rows],
        "out_of_bounds": {"count": wrong, "okay": wrong == 0},
        "average_bus_bandwidth": {"bandwidth": mean, "okay": okay},
        "comparisons": comparisons(request, rows),
        "errors": list(errors),
        "complete": not errors,
    }


def _config(request: Request, devices: Devices | None) -> dict[str, Any]:
    return {
        "ranks": request.num_ranks,
        # One rank in each process, on one device; a call is not queued behind others, and each is timed.
        "nthreads": 1,
        "ngpus": 1,
        "aggregated_iterations": 1,
        "graph": 0,
        "blocking_collectives": True,
        "per_iter_timing": True,
        "per_iter_skip": 0,
        "parallel_init": False,
        "minimum_bytes": min(case.size for case in request.cases),
        "maximum_bytes": max(case.size for case in request.cases),
        **_step(request.step),
        "warmup_iters": request.warmup,
        "iterations": request.iterations,
        "validation": request.check,
        "average": request.average,
        "implementations": list(request.sides),
        "device": request.device,
        "threads": request.num_threads,
        "compute_overlap_ms": request.compute_ms or None,
        "devices": [
            {
                "rank": one.rank,
                "group": 0,
                "pid": one.pid,
                "hostname": one.hostname,
                "device": one.device,
                "device_hex": one.pci_bus_id,
                "device_info": one.name,
            }
            for one in (devices.of_ranks if devices is not None else ())
        ],
    }


def _step(step: float | int | None) -> dict[str, float | int]:
    if step is None:
        return {}
    return {"step_bytes": step} if isinstance(step, int) else {"step_factor": step}


def _result(row: Row, request: Request) -> dict[str, Any]:
    case = row.case
    found: dict[str, Any] = {
        "size": case.size,
        "count": case.count,
        "type": case.type,
        "redop": case.redop,
        "root": case.root,
        "implementation": row.side,
        "parts": case.matrix if case.is_all_to_all else case.matrix[0],
        "note": row.note,
        "actual_iterations": request.iterations if row.timings else 0,
        "experiment_name": request.collective,
    }
    for name, timing in (("out_of_place", row.out_of_place), ("in_place", row.in_place)):
        found[name] = None if timing is None else _timing(row, timing, request)
        found[f"{name}_per_iter"] = None if timing is None else _per_iteration(timing)
    if row.overlap is not None:
        found["overlap"] = _overlap(row.overlap)
    if row.parts is not None:
        found["breakdown"] = row.parts.fields()
    return found


def _overlap(found: Overlap) -> dict[str, float | None]:
    times = {"alone_us": found.alone_s * _US, "compute_us": found.compute_s * _US, "both_us": found.both_s * _US}
    return {**times, "noise_us": None if found.noise_s is None else found.noise_s * _US, "share": found.share}


def _timing(row: Row, timing: Timing, request: Request) -> dict[str, Any]:
    seconds = timing.time_s(request.average)
    algorithm, bus = row.case.kind.bandwidths(row.case.size, row.case.num_ranks, seconds)
    return {"time": seconds * _US, "alg_bw": algorithm, "bus_bw": bus, "nwrong": timing.num_wrong}


def _per_iteration(timing: Timing) -> dict[str, Any]:
    return {
        **per_iteration(timing.slowest_s),
        "rank_spread_pct": timing.rank_spread * 100,
        "times_us": [round(seconds * _US, _NUM_DIGITS) for seconds in timing.slowest_s],
        "per_process_max_times_us": [
            [round(seconds * _US, _NUM_DIGITS) for seconds in of_rank] for of_rank in timing.seconds
        ],
    }


COLUMNS = (
    *("collective", "implementation", "place", "size", "count", "type", "redop", "root", "ranks", "time_us"),
    *("algbw_gbps", "busbw_gbps", "nwrong", "iterations", "min_us", "p50_us", "p95_us", "p99_us", "max_us", "cv_pct"),
    *("rank_spread_pct", "date", "processor", "tritondt", "torch", *CSV_COLUMNS),
)


def as_csv(request: Request, rows: Sequence[Row], surroundings: dict[str, Any]) -> str:
    """A header and one line for each implementation, place, size, type and reduction that was measured."""
    lines = []
    for row in rows:
        for place, timing in row.timings.items():
            figures = _timing(row, timing, request)
            lines.append(
                {
                    **_per_iteration(timing),
                    **_result(row, request),
                    **(row.parts.columns() if place == "out" and row.parts is not None else {}),
                    "collective": request.collective,
                    "place": place,
                    "ranks": request.num_ranks,
                    "time_us": figures["time"],
                    "algbw_gbps": figures["alg_bw"],
                    "busbw_gbps": figures["bus_bw"],
                    "nwrong": "" if timing.num_wrong is None else timing.num_wrong,
                    "iterations": len(timing.slowest_s),
                }
            )
    return csv_text(COLUMNS, lines, surroundings)
