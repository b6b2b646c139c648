"""Times the cases, in a rank."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatch
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.nccl.host_overhead.cases import FLOOR, cases
from benchmarks.nccl.host_overhead.timing import profile_of, times_in_turns
from benchmarks.nccl.no_op_nccl import carried_by_nothing

_OURS = "ours"
_TIMED = "nccl_host_overhead/timed"


def on_rank(
    send: Callable[[object], None], rounds: int, only: tuple[str, ...], is_profiled: bool
) -> list[dict[str, Any]]:
    """The times of the cases, of rank 0; the others are only there."""
    torch.set_num_threads(1)
    store: Any = dist.distributed_c10d._get_default_store()
    found = []
    with carried_by_nothing():
        made = [case for case in cases() if any(fnmatch(case.name, pattern) for pattern in only)]
        if dist.get_rank() == 0:
            for case in made:
                if is_profiled:
                    send(f"{case.name}\n{profile_of(case.issue)}")
                sides = {_OURS: case.issue} | ({FLOOR: case.floor} if case.floor is not None else {})
                times = {name: each._asdict() for name, each in times_in_turns(sides, rounds).items()}
                floor = times.get(FLOOR)
                found.append(
                    {"kind": case.kind, "case": case.name, **times[_OURS], "most_us": case.most_us, "fake": floor}
                )
            store.set(_TIMED, "")
        store.wait([_TIMED])  # asleep: whoever waits in Gloo takes part of a core from the one that is timed
    return found
