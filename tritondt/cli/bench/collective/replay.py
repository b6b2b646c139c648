"""`bench replay FILE`: the collectives of a recording in their order, by several implementations in turns.

A recording is a file that `trace` wrote, or a rank's of a flight record. Both have each collective of the backend
"tritondt" as one sentence, such as "all_reduce (sum) of 1000 float32"."""

from __future__ import annotations

import re
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist

from tritondt.cli import ranks as joined_ranks
from tritondt.cli.bench import nccl_tests
from tritondt.cli.bench.collective.case import Case, case_of_elements
from tritondt.cli.bench.collective.command import check_memory, implementations
from tritondt.cli.bench.collective.data import DTYPES, REDOPS
from tritondt.cli.bench.collective.kinds import KINDS
from tritondt.cli.bench.collective.on_rank import checked_calls, open_sides
from tritondt.cli.bench.collective.record import Request, label
from tritondt.cli.bench.collective.sides import Run, told_errors
from tritondt.cli.bench.harness import own_seconds, ratio_of
from tritondt.cli.bench.json_result import is_printed, write_json
from tritondt.cli.bench.sizes import bytes_text
from tritondt.cli.flight import FlightFileError, parse_flight
from tritondt.cli.foreign_files import ForeignFileError, parse, printable, read_text
from tritondt.cli.outputs import ProgressLine, columns, fitted, is_first
from tritondt.cli.surroundings import run_fields, surroundings
from tritondt.cli.user_error import BenchmarkError
from tritondt.comm.objects import gather_objects

_SENTENCE = re.compile(r"(\w+?)(?: \((\w+)\))? of (\d{1,15}(?: \+ \d{1,15})*) (\w+)(?:, root (\d{1,6}))?")
# Names of torch.distributed: the benchmark's name.
_KINDS = {
    "all_reduce": "all_reduce",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "all_gather": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}
_OPS = {"product": "prod"}
# Of an all-to-all the sentence has no number, which may differ between ranks; a flight record has the bytes sent.
_ALL_TO_ALL = re.compile(r"all_to_all_single of (\w+)")


@dataclass(frozen=True)
class Recording:
    """Collectives of one rank, in their order, and how many of which others are left out."""

    num_ranks: int
    cases: tuple[Case, ...]
    left_out: dict[str, int]


def read_recording(path: Path, num_ranks: int | None) -> Recording:
    """The collectives in a file, of so many ranks, or of those that were recorded; BenchmarkError for any other file.

    Collectives of all groups are taken as of all ranks; what is no collective, or of unknown sizes, is left out.
    """
    try:
        text = read_text(path)
        recorded, sentences = _of_trace(parse(text)) or _of_flight(text)
    except (ForeignFileError, FlightFileError) as error:
        why = printable(
            f"cannot read {path}: {error}; allowed are a file of `trace --out` and a rank-*.json of flights"
        )
        raise BenchmarkError(why) from error
    ranks = recorded if num_ranks is None else num_ranks
    cases, left_out = list[Case](), Counter[str]()
    for sentence, sent_bytes in sentences:
        found = _case(sentence, sent_bytes, recorded, ranks)
        if found is None:
            left_out[sentence.partition(" ")[0] if _is_collective(sentence) else "other exchanges"] += 1
        else:
            cases.append(found)
    if not cases:
        raise BenchmarkError(
            printable(f"{path} has no collective of the backend tritondt among {len(sentences)} exchanges to replay")
        )
    return Recording(ranks, tuple(cases), dict(left_out))


def _of_trace(found: Any) -> tuple[int, list[tuple[str, int]]] | None:
    """Ranks, and the exchanges of the lowest one, of a trace; None where the object is none."""
    if not isinstance(found, dict) or "traceEvents" not in found:
        return None
    try:
        num_ranks = found["otherData"]["ranks"]
        exchanges = [event for event in found["traceEvents"] if event["ph"] == "X" and event["cat"] == "exchange"]
        first = min((event["pid"] for event in exchanges), default=0)
        mine = sorted((event["ts"], str(event["name"])) for event in exchanges if event["pid"] == first)
    except (KeyError, TypeError) as error:
        raise ForeignFileError(f"it is no trace of `trace`: {error!r:.100}") from error
    if type(num_ranks) is not int or num_ranks < 1:
        raise ForeignFileError(f"its otherData has ranks {num_ranks!r:.100}")
    return num_ranks, [(name, -1) for _, name in mine]


def _of_flight(text: str) -> tuple[int, list[tuple[str, int]]]:
    found = parse_flight(text)
    return found.world_size, [(entry.operation, entry.sent_bytes) for entry in found.entries if entry.operation]


def _is_collective(sentence: str) -> bool:
    return sentence.partition(" ")[0] in (*_KINDS, "barrier", "all_to_all")


def _case(sentence: str, sent_bytes: int, recorded: int, num_ranks: int) -> Case | None:
    """The case that a sentence says; None for what is no collective, or has no sizes, or none for so many ranks."""
    exchanged = _ALL_TO_ALL.fullmatch(sentence)
    if exchanged is not None and sent_bytes > 0 and recorded > 1:
        typed = _typed(exchanged[1])
        # Each rank keeps a part, and sends as many more as there are other ranks.
        part = 0 if typed is None else sent_bytes // (recorded - 1) // typed[1]
        parts = (part,) * num_ranks
        return case_of_elements("all_to_all", num_ranks, typed, "none", 0, parts) if typed and part else None
    found = _SENTENCE.fullmatch(sentence)
    if found is None or found[1] not in _KINDS:
        return None
    name, typed, root = _KINDS[found[1]], _typed(found[4]), int(found[5] or 0)
    redop = _OPS.get(found[2], found[2]) or "none"
    sizes = tuple(map(int, found[3].split(" + ")))
    parts = sizes if len(sizes) > 1 else sizes * (num_ranks if KINDS[name].divides else 1)
    fits = (len(parts) == num_ranks or not KINDS[name].divides) and any(parts) and root < num_ranks
    if typed is None or not fits or (KINDS[name].reduces and redop not in REDOPS):
        return None
    is_uneven = len(set(parts)) > 1
    return case_of_elements(f"{name}_v" if is_uneven else name, num_ranks, typed, redop, root, parts)


def _typed(name: str) -> tuple[str, int] | None:
    """The benchmark's name of torch's dtype, and bytes of an element."""
    return next(((ours, dtype.itemsize) for ours, dtype in DTYPES.items() if str(dtype) == f"torch.{name}"), None)


_MS, _US = 1e3, 1e6


@dataclass(frozen=True)
class Replayed:
    """A side's seconds of the whole on each rank in each iteration, and the mean of each case's calls on rank 0.

    `refusal` says why a side cannot replay this recording; it then has no times.
    """

    side: str
    seconds: tuple[tuple[float, ...], ...] = ()
    of_case_s: tuple[float, ...] = ()
    num_wrong: int | None = None
    refusal: str | None = None

    @property
    def slowest_s(self) -> tuple[float, ...]:
        """Time of each iteration on the rank that took longest in it."""
        return tuple(map(max, zip(*self.seconds, strict=True)))


def replay_on_rank(send: Callable[[object], None], request: Request) -> None:
    """Replays on all sides and passes a Replayed for each to `send` on rank 0; a collective call of all ranks."""
    torch.set_num_threads(request.num_threads)
    distinct = tuple(Counter(request.cases))
    order = [distinct.index(case) for case in request.cases]
    runs: dict[str, Callable[[], None]] = {}
    spent: dict[str, list[float]] = {}
    wrong: dict[str, int | None] = {}
    with torch.no_grad():
        for side in open_sides(request):
            calls, found, refusal = checked_calls(side, distinct, request)
            if refusal is not None:
                if dist.get_rank() == 0:
                    send(Replayed(side.name, refusal=refusal))
                continue
            spent[side.name] = [0.0] * len(distinct)
            runs[side.name], wrong[side.name] = _sequence(calls, order, spent[side.name]), found
        if not runs:
            return
        with told_errors(list(runs), "the recording"):
            own_seconds(list(runs.values()), max(request.warmup, 1))
            for times in spent.values():
                times[:] = [0.0] * len(times)
            own = own_seconds(list(runs.values()), request.iterations)
    of_ranks = gather_objects(own.tolist())
    if dist.get_rank() == 0:
        counts = Counter(order)
        for number, name in enumerate(runs):
            seconds = tuple(tuple(of_rank[number]) for of_rank in of_ranks)
            means = tuple(total / request.iterations / counts[case] for case, total in enumerate(spent[name]))
            send(Replayed(name, seconds, means, wrong[name]))


def _sequence(calls: list[Run], order: list[int], spent: list[float]) -> Callable[[], None]:
    """All calls in their order; what each takes is added to its place in `spent`."""

    def run() -> None:
        before = time.perf_counter()
        for place in order:
            calls[place]()
            after = time.perf_counter()
            spent[place] += after - before
            before = after

    return run


def replay(
    file: Path,
    ranks: int | None,
    impl: str,
    iters: int,
    warmup_iters: int,
    check: int,
    device: str,
    threads: int,
    json_to: str | None,
    ngpus: int | None,
) -> None:
    """Times the collectives of a recording; ends with status 1 if a result is wrong or a rank fails."""
    asked = nccl_tests.ranks_asked(ranks, ngpus)
    launched = joined_ranks.num_launched()
    found = read_recording(file, asked if launched is None else launched)
    if found.num_ranks < 2:
        raise BenchmarkError(f"{printable(str(file))} was recorded on {found.num_ranks} rank; write --ranks 2, or more")
    sides, notes = implementations(impl, device)
    num_ranks = joined_ranks.join(asked if launched is None else None, found.num_ranks)
    request = Request("replay", found.cases, tuple(sides), iters, warmup_iters, check, 3, device, threads)
    check_memory(sum(Request("replay", (case,), ()).buffer_bytes for case in set(found.cases)), num_ranks, "its sizes")
    status = _measure(request, found, (str(file), notes), num_ranks, json_to)
    if status:
        raise click.exceptions.Exit(status)


def _measure(
    request: Request, recording: Recording, said: tuple[str, list[str]], num_ranks: int, json_to: str | None
) -> int:
    replayed: list[Replayed] = []

    def add(message: object) -> None:
        assert isinstance(message, Replayed), f"ranks send what they replayed, not {message!r}"
        replayed.append(message)

    before = surroundings()
    with ProgressLine() as progress:
        progress.tell(f"replaying {len(request.cases)} collectives on {num_ranks} ranks")
        status, errors = joined_ranks.run(num_ranks, replay_on_rank, request, add)
    timed = [each for each in replayed if each.refusal is None]
    wrong = sum(each.num_wrong or 0 for each in timed)
    if is_first():
        to_stderr = is_printed(json_to)
        width = columns(to_stderr)
        for line in _lines(request, recording, said, replayed):
            for part in fitted(printable(line), width, "#   "):
                click.echo(part, err=to_stderr)
        write_json(_as_json(request, recording, replayed, before, errors), json_to)
    for error in errors:
        click.echo(f"Error: {error}", err=True)
    if not errors:
        joined_ranks.leave()
        if is_first() and not timed:
            raise click.ClickException("no implementation can replay this recording")
    return status or int(wrong > 0)


def _lines(request: Request, recording: Recording, said: tuple[str, list[str]], replayed: list[Replayed]) -> list[str]:
    """The report: a row for each different collective with mean times on rank 0, and the time of the whole."""
    file, notes = said
    counts = Counter(request.cases)
    timed = [each for each in replayed if each.refusal is None]
    lines = [
        f"# replay of {file}",
        f"# {len(request.cases)} collectives, {len(counts)} different, on {recording.num_ranks} ranks",
        *(f"# {note}" for note in notes),
        *(f"# left out: {number} {name}" for name, number in recording.left_out.items()),
        *(f"# {label(each.side)}: not run: {each.refusal}" for each in replayed if each.refusal is not None),
    ]
    if not timed:
        return lines
    lines.append("# mean time of a call on rank 0, in us")
    names = "".join(f" {label(each.side):>10}" for each in timed)
    lines.append(f"# {'collective':<14} {'calls':>6} {'size':>8} {'type':>8} {'redop':>5} {'root':>4}{names}")
    for place, (case, number) in enumerate(counts.items()):
        cells = "".join(f" {each.of_case_s[place] * _US:>10.1f}" for each in timed)
        what = f"{bytes_text(case.size):>8} {case.type:>8} {case.redop:>5} {case.root:>4}"
        lines.append(f"{case.kind.name:<16} {number:>6} {what}{cells}")
    lines.append("# all of them, one after the other: median of the slowest rank's time, in ms")
    lines += [f"# {label(each.side):>14}: {statistics.median(each.slowest_s) * _MS:.3f}" for each in timed]
    wrong = sum(each.num_wrong or 0 for each in timed)
    lines.append(f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}")
    for other in timed[1:]:
        if all(each.num_wrong == 0 for each in (timed[0], other)):
            ratio = ratio_of([(timed[0].slowest_s, other.slowest_s)], in_turns=True)
            lines.append(f"# time of {label(timed[0].side)} / {label(other.side)}: {ratio}")
    return lines


def _as_json(
    request: Request, recording: Recording, replayed: list[Replayed], before: dict[str, Any], errors: list[str]
) -> dict[str, Any]:
    counts = Counter(request.cases)
    return {
        "benchmark": "replay",
        **run_fields(before),
        **before,
        "config": {"ranks": recording.num_ranks, "iterations": request.iterations, "implementations": request.sides},
        "collectives": [
            {"name": c.kind.name, "size": c.size, "type": c.type, "redop": c.redop, "root": c.root, "calls": number}
            for c, number in counts.items()
        ],
        "order": [list(counts).index(case) for case in request.cases],
        "left_out": recording.left_out,
        "replayed": [
            {
                "implementation": each.side,
                "refusal": each.refusal,
                "nwrong": each.num_wrong,
                "times_us": [round(seconds * _US, 3) for seconds in each.slowest_s] if each.seconds else [],
                "mean_call_us": [round(seconds * _US, 3) for seconds in each.of_case_s],
            }
            for each in replayed
        ],
        "errors": list(errors),
        "complete": not errors,
    }
