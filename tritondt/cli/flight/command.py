"""The command `doctor flight`: reads files, examines them, prints findings."""

from __future__ import annotations

import json
from pathlib import Path

import click

from tritondt.cli.flight.findings import examine
from tritondt.cli.flight.reading import FlightFileError, read_flights
from tritondt.cli.flight.telling import as_json, tell
from tritondt.cli.foreign_files import printable


@click.command(short_help="Say who waits for whom, from the ranks' flight recorders.")
@click.argument("folder", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    *("--patience", "patience_s"),
    type=click.FloatRange(min=0.0),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="How long an operation may be under way without being told.",
)
@click.option("--json", "to_json", is_flag=True, help="Print one JSON object instead.")
def flight(folder: Path, patience_s: float, to_json: bool) -> None:
    """Say who waits for whom, and why, from the files that flight recorders left in DIR.

    Reads rank-0.json, rank-1.json and so on, one per rank. The first line is the verdict. Then
    come ranks without a file; the first operation that ranks issued differently; ranks that never
    issued what others wait for; failures; circles of waiting; and what was under way, since when
    and from which line.

    Ends with status 0 if nothing is wrong, 1 if something is, 2 if a file cannot be read.

    \b
    python -m tritondt doctor flight /tmp/flight
    """
    try:
        findings = examine(read_flights(folder), patience_s)
    except FlightFileError as error:
        raise click.UsageError(printable(str(error))) from error
    if to_json:
        click.echo(json.dumps(as_json(findings), indent=2))
    else:
        for line in tell(findings):
            click.echo(printable(line))
    if not findings.is_clean:
        raise click.exceptions.Exit(1)
