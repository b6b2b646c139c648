"""Times the cases, in a rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from fnmatch import fnmatch
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.nccl.host_overhead.breakdown import breakdown_of
from benchmarks.nccl.host_overhead.cases import FLOOR, MOST_WITH_COSTS_US, REDISTRIBUTION, Case, cases
from benchmarks.nccl.host_overhead.timing import profile_of, times_in_turns
from benchmarks.nccl.no_op_nccl import carried_by_nothing
from benchmarks.nccl.stub_cuda import carry_by_stub
from benchmarks.nccl.stub_cuda.costs import COSTS_NS, NO_COSTS

_OURS = "ours"
_TIMED = "nccl_host_overhead/timed"


def on_rank(
    send: Callable[[object], None], rounds: int, only: tuple[str, ...], is_profiled: bool, has_costs: bool
) -> list[dict[str, Any]]:
    """The times of the cases, of rank 0; the others are only there."""
    torch.set_num_threads(1)
    store: Any = dist.distributed_c10d._get_default_store()
    found = []
    with nullcontext(carry_by_stub(COSTS_NS)) if has_costs else carried_by_nothing() as cuda:
        made = [case for case in cases() if any(fnmatch(case.name, pattern) for pattern in only)]
        if dist.get_rank() == 0:
            for case in made if is_profiled else ():
                send(f"{case.name}\n{profile_of(case.issue)}")
            sides = {(case.name, _OURS): case.issue for case in made}
            sides |= {(case.name, FLOOR): case.floor for case in made if case.floor is not None}
            times = {side: each._asdict() for side, each in times_in_turns(sides, rounds).items()}
            for case in made:
                most_us = MOST_WITH_COSTS_US if has_costs and case.most_us else case.most_us
                row = {"kind": case.kind, "case": case.name, **times[case.name, _OURS], "most_us": most_us}
                row["fake"] = times.get((case.name, FLOOR))
                found.append(row | {"device": _device(cuda, case, rounds)})
            store.set(_TIMED, "")
        store.wait([_TIMED])  # asleep: whoever waits in Gloo takes part of a core from the one that is timed
    return found


def _device(cuda: Any, case: Case, rounds: int) -> dict[str, Any] | None:
    """A case over the stub of CUDA: calls of it until the case returns, what they take, and the host's time without."""
    if cuda is None or case.kind != REDISTRIBUTION:
        return None
    cuda.take_counts()
    work = case.issue()
    counts = {name: count for name, count in cuda.take_counts().items() if count}
    work.wait()
    cuda.set_costs(NO_COSTS)
    without = times_in_turns({_OURS: case.issue}, rounds)[_OURS]
    cuda.set_costs(COSTS_NS)
    calls_us = sum(count * COSTS_NS[name] for name, count in counts.items()) / 1000
    parts = breakdown_of(case.issue)
    return {"calls": counts, "calls_us": calls_us, "without_us": without.issued_us, "parts_us": parts}
