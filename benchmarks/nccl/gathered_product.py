"""A rank's part of benchmarks/nccl/own_kernel.py; imported when TRITON_INTERPRET is as it is to be."""

from __future__ import annotations

from typing import NamedTuple

import torch

from benchmarks.nccl.sides import Sides
from benchmarks.nccl.timing import seconds_in_turns
from examples.own_fused_kernel import GatheredProduct
from tests.nccl.devices import device_of
from tritondt import nccl

FUSED, APART = "one kernel", "gather, then product"


class Case(NamedTuple):
    """Sizes of the product, and of a program's tile of it: rows and inner are a rank's, columns everybody's."""

    rows: int
    inner: int
    columns: int
    tile: tuple[int, int, int] = (64, 64, 32)


def timed(rank: int, where: str, case: Case, rounds: int) -> dict[str, list[float]]:
    """This rank's seconds of a call, by side."""
    device = device_of(where)
    here = torch.device("cuda", torch.cuda.current_device()) if device.kind == "cuda" else torch.device("cpu")
    rows = (torch.arange(case.rows * case.inner) % (rank + 5) - 2).float().reshape(case.rows, case.inner).to(here)
    weight = (torch.arange(case.inner * case.columns) % 7 - 3).float().reshape(case.inner, case.columns).to(here)
    # The host's operators are in no stream: the double needs one, and a wait.
    stream = device.streams.make() if device.kind == "cpu" else None
    with nccl.bootstrap(library=device.library) as communicator:
        fused = GatheredProduct(communicator, case.rows, case.inner, here)
        every = torch.empty(communicator.num_ranks * case.rows, case.inner, device=here)

        def apart() -> torch.Tensor:
            communicator.all_gather(rows, every, stream=stream)
            if stream is not None:
                stream.synchronize()
            return every @ weight

        def in_one() -> torch.Tensor:
            return fused(rows, weight, case.tile)

        sides: Sides = {FUSED: in_one, APART: apart}
        found, expected = in_one(), apart()
        if not torch.equal(found, expected):  # whole numbers: no order of sums changes them
            raise AssertionError(f"{case}: {FUSED} gives something else than {APART}")
        seconds = seconds_in_turns(sides, rounds, 1, device.synchronize, to_the_end=True)
        fused.close()
    return seconds
