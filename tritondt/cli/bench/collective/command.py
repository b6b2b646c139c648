"""The commands `bench all_reduce`, `bench all_gather` and so on: their output, their files and their status."""

from __future__ import annotations

from typing import Any

import click

from tritondt.cli import ranks as joined_ranks
from tritondt.cli.bench import nccl_tests
from tritondt.cli.bench.collective.documents import as_csv, as_json
from tritondt.cli.bench.collective.kinds import Kind
from tritondt.cli.bench.collective.on_rank import Devices, Starting, measure_on_rank
from tritondt.cli.bench.collective.options import Choice, make_request
from tritondt.cli.bench.collective.record import Row, average_bus_bandwidth, num_wrong
from tritondt.cli.bench.collective.request import Request
from tritondt.cli.bench.collective.table import Table, reaches
from tritondt.cli.bench.json_result import is_printed, write_json, write_text
from tritondt.cli.launch import num_cores
from tritondt.cli.outputs import columns, is_first
from tritondt.cli.progress import ProgressLine
from tritondt.cli.surroundings import surroundings

_FEWEST_RANKS, _MOST_RANKS = 2, 4


class _Printed:
    """The output that is printed while rows come, with the rows and devices that have come."""

    def __init__(self, request: Request, notes: list[str], to_stderr: bool, progress: ProgressLine) -> None:
        self.rows: list[Row] = []
        self.devices: Devices | None = None
        self._request, self._notes, self._to_stderr, self._progress = request, notes, to_stderr, progress
        self.table = Table(request, columns(to_stderr))
        self._num_started = 0

    def take(self, message: object) -> None:
        """Takes a message of rank 0."""
        if isinstance(message, Devices):
            self.devices = message
            self.lines(self.table.title(message, surroundings()["versions"], self._notes))
        elif isinstance(message, Starting):
            self._num_started += 1
            self._progress.tell(f"{self._num_started}/{len(self._request.cases)}  {message.case}")
        else:
            assert isinstance(message, Row), f"ranks send rows, not {message!r}"
            self.rows.append(message)
            self.lines(self.table.row(message))

    def lines(self, lines: list[str]) -> None:
        """Prints lines above what is said of the progress."""
        self._progress.erase()
        for line in lines:
            click.echo(line, err=self._to_stderr)


def collective(
    kind: Kind,
    ranks: int | None,
    ngpus: int | None,
    min_bw: float | None,
    json_to: str | None,
    csv_to: str | None,
    **values: Any,
) -> None:
    """Times a collective; ends with status 1 if an element is wrong, a rank fails, or --min-bw is not reached."""
    if json_to is not None and json_to == csv_to:
        raise click.UsageError(f"--json and --csv both go to {'stdout' if is_printed(json_to) else json_to}")
    num_ranks = joined_ranks.join(
        nccl_tests.ranks_asked(ranks, ngpus), max(_FEWEST_RANKS, min(_MOST_RANKS, num_cores()))
    )
    request, notes = make_request(kind, num_ranks, Choice(**values))
    status = _measure(request, notes, min_bw, json_to, csv_to)
    if status:
        raise click.exceptions.Exit(status)


def _measure(
    request: Request, notes: list[str], least_bandwidth: float | None, json_to: str | None, csv_to: str | None
) -> int:
    """Exit status of a run; what was measured before it failed or was interrupted is printed and written, too."""
    found = surroundings()
    with ProgressLine() as progress:
        progress.tell(f"starting {request.num_ranks} ranks")
        printed = _Printed(request, notes, is_printed(json_to, csv_to), progress)
        status, errors = joined_ranks.run(request.num_ranks, measure_on_rank, request, printed.take)
    if is_first():
        _conclude(printed, errors, least_bandwidth)
        write_json(as_json(request, printed.rows, printed.devices, found, least_bandwidth, errors), json_to)
        write_text(as_csv(request, printed.rows, found), csv_to)
        status = status or int(_has_failed(request, printed.rows, least_bandwidth))
    elif errors:
        click.echo(f"Error: {errors[0]}", err=True)
    if not errors:
        joined_ranks.leave()
    return status


def _conclude(printed: _Printed, errors: list[str], least_bandwidth: float | None) -> None:
    request = printed._request
    if printed.rows:
        printed.lines(printed.table.iterations(printed.rows))
        printed.lines(printed.table.parts(printed.rows))
        printed.lines(printed.table.overlaps(printed.rows))
        printed.lines(printed.table.footer(printed.rows, least_bandwidth))
    for error in errors:
        num_done = len({row.case for row in printed.rows})
        click.echo(f"Error: partial, {num_done} of {len(request.cases)} cases were measured: {error}", err=True)


def _has_failed(request: Request, rows: list[Row], least_bandwidth: float | None) -> bool:
    mean = average_bus_bandwidth(rows, request.sides[0], request.average)
    too_slow = least_bandwidth is not None and (mean is None or not reaches(mean, least_bandwidth))
    return num_wrong(rows) > 0 or mean is None or too_slow
