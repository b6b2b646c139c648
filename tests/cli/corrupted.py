"""A collective of one's own, as `--impl tests.cli.corrupted:bind` names it: right but for one element on rank 1."""

from __future__ import annotations

from tritondt.cli.bench.collective import backends
from tritondt.cli.bench.collective.sides import Call, NotOfferedError, Run


def bind(call: Call) -> Run:
    right = backends.bind(call)

    def run() -> None:
        right()
        if call.rank == 1 and call.out.numel():
            call.out[-1] += 1

    return run


def of_rank_0_only(call: Call) -> Run:
    if call.rank == 0:
        raise NotOfferedError("rank 0 alone refuses")
    return backends.bind(call)


def broken_on_rank_1(call: Call) -> Run:
    right = backends.bind(call)

    def run() -> None:
        if call.rank == 1:
            call.out.view(3, -1)
        right()

    return run


not_callable = 3
