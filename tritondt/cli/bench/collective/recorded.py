"""Collectives of a recording in their order: a file that `trace` wrote, or a rank's of a flight record.

Both have each collective of the backend "tritondt" as one sentence, such as "all_reduce (sum) of 1000 float32".
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tritondt.cli.bench.collective.case import Case, case_of_elements
from tritondt.cli.bench.collective.data import DTYPES, REDOPS
from tritondt.cli.bench.collective.kinds import KINDS
from tritondt.cli.flight import FlightFileError, parse_flight
from tritondt.cli.foreign_files import ForeignFileError, parse, printable, read_text
from tritondt.cli.user_error import BenchmarkError

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
