"""Findings in words: one sentence that names what to look at first, then all findings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from tritondt.cli.flight.entry import Entry
from tritondt.cli.flight.findings import Behind, Divergence, Failure, Findings, Wait


def verdict(findings: Findings) -> str:
    """Likeliest cause in one sentence; causes come before their consequences."""
    own = [failure for failure in findings.failures if failure.entry.peer < 0]
    wanted = [wait for wait in findings.waits if wait.peer in findings.missing]
    if findings.divergence is not None:
        return _emit_divergence(findings.divergence)
    if wanted:
        waiting = [wait.rank for wait in wanted if wait.peer == wanted[0].peer]
        return (
            f"{_ranks([wanted[0].entry.peer])} left no file, and {_ranks(waiting)} {_verb(waiting, 'wait')} for it "
            f"in {_operation(wanted[0].entry)}"
        )
    if own:
        return _emit_failure(own[0])
    if findings.behind:
        return _emit_behind(findings.behind[0])
    if findings.cycles:
        return _emit_cycle(findings.cycles[0])
    if findings.failures:
        return _emit_failure(findings.failures[0])
    if findings.waits:
        return _emit_wait(max(findings.waits, key=lambda wait: wait.seconds))
    if findings.missing:
        return f"{_ranks(findings.missing)} left no file; the others ended all they began"
    return f"nothing is wrong: {findings.world_size} ranks ended all of {findings.num_entries} recorded operations"


def tell(findings: Findings) -> Iterator[str]:
    """Lines of the report: the verdict, and a line for each finding."""
    yield verdict(findings)
    if findings.missing:
        yield from ("", "no file:", f"  {_ranks(findings.missing)} of {findings.world_size}")
    if findings.divergence is not None:
        yield from ("", f"ranks diverge at {_exchange(findings.divergence.exchange)}:")
        for ranks, entry in findings.divergence.sides:
            yield f"  {_ranks(ranks)}: {_what(entry)}"
    for title, lines in (
        ("behind:", map(_emit_behind, findings.behind)),
        ("failed, the first one first:", map(_emit_failure, findings.failures)),
        ("wait for each other:", map(_emit_cycle, findings.cycles)),
        ("under way:", map(_emit_wait, findings.waits)),
    ):
        texts = [f"  {line}" for line in lines]
        if texts:
            yield from ("", title, *texts)


def as_json(findings: Findings) -> dict[str, Any]:
    """Findings as plain values, for programs."""
    divergence = findings.divergence
    return {
        "verdict": verdict(findings),
        "ok": findings.is_clean,
        "world_size": findings.world_size,
        "num_entries": findings.num_entries,
        "missing": list(findings.missing),
        "divergence": None
        if divergence is None
        else {
            "communicator": divergence.exchange[0],
            "sequence": divergence.exchange[1],
            "sides": [{"ranks": list(ranks), "entry": asdict(entry)} for ranks, entry in divergence.sides],
        },
        "behind": [
            {
                "rank": found.rank,
                "communicator": found.exchange[0],
                "sequence": found.exchange[1],
                "waiting": list(found.waiting),
                "last": None if found.last is None else asdict(found.last),
            }
            for found in findings.behind
        ],
        "failures": [{"rank": found.rank, "entry": asdict(found.entry)} for found in findings.failures],
        "cycles": [[wait.rank for wait in circle] for circle in findings.cycles],
        "waits": [
            {"rank": wait.rank, "peer": wait.peer, "seconds": wait.seconds, "entry": asdict(wait.entry)}
            for wait in findings.waits
        ],
    }


def _emit_divergence(found: Divergence) -> str:
    (ranks, entry), (others, other) = found.sides[:2]
    return (
        f"ranks diverge at {_exchange(found.exchange)}: {_ranks(ranks)} issued {_what(entry)}, "
        f"{_ranks(others)} {_what(other)}"
    )


def _emit_behind(found: Behind) -> str:
    last = "it issued nothing" if found.last is None else f"its last was {_operation(found.last)}"
    return (
        f"rank {found.rank} never issued {_exchange(found.exchange)} that {_ranks(found.waiting)} "
        f"{_verb(found.waiting, 'wait')} for; {last}"
    )


def _emit_failure(found: Failure) -> str:
    return f"rank {found.rank} failed in {_operation(found.entry)}: {found.entry.error or 'no error was recorded'}"


def _emit_cycle(found: Sequence[Wait]) -> str:
    parts = [f"rank {wait.rank} for rank {wait.peer} in {_operation(wait.entry)}" for wait in found]
    return f"{_ranks([wait.rank for wait in found])} wait for each other in a circle: {', '.join(parts)}"


def _emit_wait(found: Wait) -> str:
    if found.peer is None:
        doing = {"issued": "has not begun", "exchanging": "waits in"}.get(
            found.entry.state, f"is {found.entry.state} in"
        )
    else:
        doing = f"waits for rank {found.peer} in"
    return f"rank {found.rank} {doing} {_operation(found.entry)}, since {found.seconds:.1f} s"


def _operation(entry: Entry) -> str:
    return f"{_exchange(entry.exchange)}, {_what(entry)}"


def _what(entry: Entry) -> str:
    operation = entry.operation or "an operation without a description"
    return operation if entry.site is None else f"{operation} at {entry.site}"


def _exchange(exchange: tuple[str | None, int]) -> str:
    communicator, sequence = exchange
    return f"exchange {sequence}" + ("" if communicator is None else f" of {communicator}")


def _ranks(ranks: Iterable[int]) -> str:
    """Ranks as text: `rank 2`, `ranks 0, 1, 3`, and runs of four and more as `ranks 0-6`."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 3 else ", ".join(map(str, run)) for run in runs]
    return ("rank " if len(runs) == 1 and len(runs[0]) == 1 else "ranks ") + ", ".join(parts)


def _verb(ranks: Sequence[int], verb: str) -> str:
    return verb if len(set(ranks)) > 1 else f"{verb}s"
