"""A rank's part of benchmarks/nccl/window_sum.py; imported when TRITON_INTERPRET is as it is to be."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import torch

from benchmarks.nccl.sides import Sides
from benchmarks.nccl.timing import seconds_in_turns
from tests.nccl.devices import device_of
from tritondt import nccl

NCCL, POINTERS, MULTIMEM = "all_reduce", "peers' pointers", "multimem"


def timed(rank: int, where: str, num_elements: int, rounds: int) -> dict[str, list[float]]:
    """This rank's seconds of a call, by side; multimem is left out where the GPUs have none."""
    device = device_of(where)
    here = torch.device("cuda", torch.cuda.current_device()) if device.kind == "cuda" else torch.device("cpu")
    # Small whole numbers: no order of sums changes them, and none is rounded.
    term = (torch.arange(num_elements) % 5 + rank % 3).to(torch.bfloat16).to(here)
    # The host's operators are in no stream: the double needs one, and a wait.
    stream = device.streams.make() if device.kind == "cpu" else None
    with nccl.bootstrap(library=device.library) as communicator, ExitStack() as windows:
        total = term.clone()

        def by_nccl() -> torch.Tensor:
            total.copy_(term)
            communicator.all_reduce(total, stream=stream)
            if stream is not None:
                stream.synchronize()
            return total

        sides: Sides = {NCCL: by_nccl}
        for name, by_multimem in ((POINTERS, False), (MULTIMEM, None)):
            programs = 32 if here.type == "cuda" else 2
            options = {"by_multimem": by_multimem, "num_programs": programs}
            summed = nccl.WindowSum(communicator, term.shape, term.dtype, here, **options)
            windows.enter_context(summed)
            if by_multimem is False or summed.multimem:
                sides[name] = _side(summed, term)
        expected = by_nccl().clone()
        for name, side in sides.items():
            if not torch.equal(side(), expected):
                raise AssertionError(f"{num_elements} bfloat16: {name} gives something else than {NCCL}")
        return seconds_in_turns(sides, rounds, 1, device.synchronize, to_the_end=True)


def _side(summed: nccl.WindowSum, term: torch.Tensor) -> Callable[[], torch.Tensor]:
    def run() -> torch.Tensor:
        summed.tensor.copy_(term)
        summed.run()
        return summed.tensor

    return run
