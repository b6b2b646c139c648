"""The command `trace`: it runs a program on ranks, and writes their timeline and its summary."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import torch.distributed as dist

from tritondt import environment
from tritondt.cli.ranks import check_started_here
from tritondt.cli.surroundings import surroundings
from tritondt.cli.trace.on_rank import collect, trace_on_rank
from tritondt.cli.trace.picture import write_summary
from tritondt.cli.trace.starting import run_ranks
from tritondt.debug.tracing.clock import Alignment, Offset, aligned
from tritondt.debug.tracing.record import RankRecord
from tritondt.debug.tracing.summary import summarise
from tritondt.debug.tracing.summary_text import summary_fields, summary_text
from tritondt.debug.tracing.timeline import trace_events

# A rank runs the package that runs here: by -m it would be one in the current folder, as in a checkout not built.
_ROOT = str(Path(__file__).parents[3])
_RANK = "import sys; sys.path[: sys.path[0] == ''] = [sys.argv.pop(1)]; from tritondt.__main__ import run; run()"


def trace(ranks: int | None, out: str, summary: str | None, collected: bool, program: tuple[str, ...]) -> None:
    """Runs a program on ranks, writes their timeline, and ends with the program's status."""
    _check_program(program)
    if summary == out:
        raise click.UsageError(f"--summary and --out both go to {out}")
    found = environment.launched()
    if found is None:
        status, records = _start(2 if ranks is None else ranks, out, program)
        num_ranks = 2 if ranks is None else ranks
    else:
        if ranks not in (None, found.num_ranks):
            raise click.UsageError(f"--ranks {ranks} was asked for, but the launcher has started {found.num_ranks}")
        if not environment.has_agent_store():
            raise click.UsageError(
                f"{found.num_ranks} ranks were started by something else than torchrun, whose store the ranks of a "
                "trace meet in; allowed are torchrun -m tritondt trace, and --ranks for ranks of this machine"
            )
        num_ranks = found.num_ranks
        store = dist.PrefixStore("tritondt/trace", dist.TCPStore(found.address, found.port, is_master=False))
        status = trace_on_rank(store, found.rank, num_ranks, program)
        if collected or found.rank > 0:
            sys.exit(status)
        records = collect(store, num_ranks, waits=True)
    _write(records, num_ranks, (out, summary), program)
    sys.exit(status)


def _start(num_ranks: int, out: str, program: Sequence[str]) -> tuple[int, list[RankRecord]]:
    check_started_here(num_ranks, "torchrun")
    command = [sys.executable, "-c", _RANK, _ROOT, "trace", "--collected", "--out", out, "--", *program]
    status, store = run_ranks(num_ranks, command)
    return status, collect(dist.PrefixStore("tritondt/trace", store), num_ranks, waits=False)


def _check_program(program: Sequence[str]) -> None:
    """UsageError for a program that is not there: no rank is started for it."""
    if program[0] == "-m":
        if len(program) < 2:
            raise click.UsageError("-m is given without a module; allowed is -m MODULE [ARGS]")
        top = program[1].partition(".")[0]
        if importlib.util.find_spec(top) is None and not Path(top).exists() and not Path(f"{top}.py").exists():
            raise click.UsageError(f"there is no module {program[1]}")
    elif not Path(program[0]).is_file():
        raise click.UsageError(f"{program[0]} is no file; allowed is SCRIPT [ARGS], or -m MODULE [ARGS]")


def _write(records: list[RankRecord], num_ranks: int, paths: tuple[str, str | None], program: Sequence[str]) -> None:
    """Writes the file, and the page where one is asked for, and prints the summary; says on stderr what is missing."""
    out, picture = paths
    missing = sorted(set(range(num_ranks)) - {record.rank for record in records})
    if not records:
        raise click.ClickException(f"none of {num_ranks} ranks has left a record; {out} is not written")
    alignments = _alignments(records)
    summary = summarise(records, alignments)
    failures = {record.rank: record.failure for record in records if record.failure}
    document: dict[str, Any] = {
        "traceEvents": trace_events(records, alignments),
        "displayTimeUnit": "ms",
        "otherData": {
            "program": list(program),
            **surroundings(),
            "ranks": num_ranks,
            "missing_ranks": missing,
            "failures": failures,
            "dropped_spans": sum(record.dropped for record in records),
            "clocks": {rank: _clock_fields(found) for rank, found in alignments.items()},
            "summary": summary_fields(summary),
        },
    }
    Path(out).write_text(json.dumps(document), encoding="utf-8")
    told = f"{summary_text(summary, len(records))}\nclocks against rank 0: {_clocks_text(alignments)}"
    if picture is not None:
        write_summary(Path(picture), document["otherData"])
    click.echo(told)
    for rank, failure in failures.items():
        click.echo(f"partial: rank {rank} ended early: {failure}", err=True)
    if missing:
        click.echo(f"partial: no record of {'rank' if len(missing) == 1 else 'ranks'} {_listed(missing)}", err=True)
    dropped = document["otherData"]["dropped_spans"]
    if dropped:
        click.echo(f"partial: there was no room for {dropped:,} spans at the end", err=True)
    click.echo(f"timeline: {out} ({len(document['traceEvents']):,} events; open it in https://ui.perfetto.dev)")


def _alignments(records: Sequence[RankRecord]) -> dict[int, Alignment]:
    first = next((record.host for record in records if record.rank == 0), "")
    return {
        record.rank: aligned(tuple(Offset(*offset) for offset in record.offsets), record.host, first)
        for record in records
    }


def _clock_fields(found: Alignment) -> dict[str, Any]:
    return {
        "one_clock": found.is_one_clock,
        "error_s": found.error_ns / 1e9,
        "offsets_s": [offset.offset_ns / 1e9 for offset in found.offsets],
        "pings_error_s": [offset.error_ns / 1e9 for offset in found.offsets],
    }


def _clocks_text(alignments: dict[int, Alignment]) -> str:
    others = {rank: found for rank, found in alignments.items() if rank > 0}
    if all(found.is_one_clock for found in others.values()):
        measured = max((o.error_ns for found in others.values() for o in found.offsets), default=0)
        return f"one machine's clock, offset 0 (pings agree within {measured / 1e3:,.0f} us)"
    return "; ".join(f"rank {rank} {found}" for rank, found in others.items())


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
