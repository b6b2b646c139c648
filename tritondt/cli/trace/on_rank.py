"""A rank of a trace: the user's program, run as Python would run it, its clock, and the record that it leaves."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

from tritondt.cli.outputs import INTERRUPTED
from tritondt.debug.tracing.clock import Offset, answer_pings, ping
from tritondt.debug.tracing.record import RankRecord
from tritondt.debug.tracing.recording import Recording


def run_program(program: Sequence[str]) -> tuple[int, str]:
    """Exit status of `SCRIPT ARGS` or `-m MODULE ARGS`, and what ended it early; its own exceptions are printed."""
    is_module = program[0] == "-m"
    name, arguments = (program[1], program[2:]) if is_module else (program[0], program[1:])
    sys.argv = [name, *arguments]
    sys.path[0] = str(Path.cwd() if is_module else Path(name).resolve().parent)
    try:
        if is_module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(name, run_name="__main__")
    except SystemExit as ending:
        return _status_of(ending.code)
    except KeyboardInterrupt:
        return INTERRUPTED, "interrupted"
    except BaseException as error:  # noqa: BLE001  it ends the program, not the trace
        error.with_traceback(_own_frames(error.__traceback__))
        sys.excepthook(type(error), error, error.__traceback__)
        return 1, f"{type(error).__name__}: {error}"
    return 0, ""


def _status_of(code: object) -> tuple[int, str]:
    """Status that Python ends with for sys.exit(code), which prints a text."""
    if code is None or code == 0:
        return 0, ""
    if isinstance(code, int):
        return code, f"exited with {code}"
    sys.stderr.write(f"{code}\n")
    return 1, str(code)


def _own_frames(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the program's first frame on."""
    found = trace
    while found is not None and (
        found.tb_frame.f_code.co_filename == __file__ or "runpy" in found.tb_frame.f_code.co_filename
    ):
        found = found.tb_next
    return found or trace


# For ranks to start, and to end after one that has ended.
_START_PATIENCE, _END_PATIENCE = timedelta(minutes=5), timedelta(minutes=1)
# A store takes values of up to 8 MiB.
_CHUNK_BYTES = 4 << 20


def trace_on_rank(store: Any, rank: int, num_ranks: int, program: Sequence[str]) -> int:
    """Runs the program with a recording, and leaves the record in the store; returns the program's exit status.

    Clocks are held against rank 0's before the program and, where it ends well, after it.
    """
    offsets = _compare_clocks(store, "before", rank, range(num_ranks), _START_PATIENCE)
    recording = Recording()
    recording.begin()
    try:
        status, failure = run_program(program)
    finally:
        recording.end()
    store.set(f"ended/{rank}", failure)
    if not failure:
        offsets += _compare_clocks(store, "after", rank, _ended_well(store, rank, num_ranks), _END_PATIENCE)
    record = recording.record(rank, num_ranks, failure)
    record.offsets = [(found.at_ns, found.offset_ns, found.error_ns) for found in offsets]
    _leave(store, record)
    return status


def _ended_well(store: Any, rank: int, num_ranks: int) -> list[int]:
    """Ranks that rank 0 compares clocks with when all have ended; others need know of rank 0 alone."""
    found = []
    for other in range(num_ranks) if rank == 0 else (0,):
        try:
            store.wait([f"ended/{other}"], _END_PATIENCE)
        except RuntimeError:  # killed: the offset from before the program is what there is
            continue
        if not store.get(f"ended/{other}"):
            found.append(other)
    return found if rank == 0 else [0, rank] * bool(found)


def _compare_clocks(store: Any, name: str, rank: int, ranks: Sequence[int], patience: timedelta) -> list[Offset]:
    """Offset of this rank's clock from rank 0's, where both are among the ranks and answer; none on rank 0."""
    try:
        if rank > 0:
            return [ping(store, name, rank, patience)] if rank in ranks else []
        for other in ranks:
            if other > 0:
                answer_pings(store, name, other, patience)
    except RuntimeError:  # one that does not answer is not aligned by these pings, which the trace says
        pass
    return []


def _leave(store: Any, record: RankRecord) -> None:
    content = record.to_bytes()
    chunks = [content[start : start + _CHUNK_BYTES] for start in range(0, len(content), _CHUNK_BYTES)]
    for number, chunk in enumerate(chunks):
        store.set(f"record/{record.rank}/{number}", chunk)
    store.set(f"record/{record.rank}", str(len(chunks)))


def collect(store: Any, num_ranks: int, *, waits: bool) -> list[RankRecord]:
    """Records of the ranks that have left one; with `waits`, of those too that do so within a minute."""
    records = []
    for rank in range(num_ranks):
        key = f"record/{rank}"
        try:
            if waits:
                store.wait([key], _END_PATIENCE)
            elif not store.check([key]):
                continue
        except RuntimeError:
            continue
        chunks = [store.get(f"{key}/{number}") for number in range(int(store.get(key)))]
        records.append(RankRecord.from_bytes(b"".join(chunks)))
    return records
