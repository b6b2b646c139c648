"""Two ranks that train, move, save and make worlds anew for a number of seconds: nothing of theirs may grow.

    python -m tests.tools.flat 600

Memory, descriptors and threads of each rank are taken a hundred times. The exit status is 1 where the trend of any,
after the first third of the time, is more than ALLOWED: a sentence says how much.
"""

import argparse
import ctypes
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import tritondt as T
from tritondt.cli.launch import run_on_ranks
from tritondt.interop.checkpoint_folder import CheckpointFolder
from tritondt.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

NUM_RANKS = 2
_NUM_SAMPLES = 100
_WARM_UP = 1 / 3
_MIB = 2**20
# How often a world is made anew, and a group, and a checkpoint saved: the last two write files, or meet in the store.
_ANEW_EVERY, _SAVE_EVERY = 50, 200
_LENGTHS = range(1, 33)


class Sample(NamedTuple):
    """What a process holds at a time, when Python and the allocator have given back what they can."""

    seconds: float
    memory_bytes: int
    descriptors: int
    threads: int


# What the trend may come to over the time that is looked at. The allocator's own noise is some 2 MiB.
ALLOWED = {"memory_bytes": 16 * _MIB, "descriptors": 2, "threads": 2}


def take() -> Sample:
    """What this process holds now."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Sample(
        time.monotonic(),
        resident_pages * os.sysconf("SC_PAGE_SIZE"),
        len(list(Path("/proc/self/fd").iterdir())),
        len(list(Path("/proc/self/task").iterdir())),
    )


def growth(samples: Sequence[Sample]) -> list[str]:
    """A sentence for each thing that grows: by the median slope of all pairs, which single samples do not move.

    >>> growth([Sample(second, 5 * 2**20 * second, 7, 1) for second in range(9)])
    ['memory grew by 30.0 MiB in 6 s, from 10.0 MiB on; allowed is 16.0 MiB']
    """
    looked_at = samples[int(len(samples) * _WARM_UP) - 1 :] if len(samples) * _WARM_UP >= 1 else samples
    duration = looked_at[-1].seconds - looked_at[0].seconds
    found = []
    for name, allowed in ALLOWED.items():
        slopes = [
            (getattr(later, name) - getattr(earlier, name)) / (later.seconds - earlier.seconds)
            for earlier, later in combinations(looked_at, 2)
            if later.seconds > earlier.seconds
        ]
        grown, first = statistics.median(slopes) * duration, getattr(looked_at[0], name)
        if grown > allowed:
            texts = [
                f"{value / _MIB:.1f} MiB" if name == "memory_bytes" else f"{value:.0f}"
                for value in (grown, first, allowed)
            ]
            what = name.partition("_")[0]
            found.append(f"{what} grew by {texts[0]} in {duration:.0f} s, from {texts[1]} on; allowed is {texts[2]}")
    return found


def watched(seconds: float, step: Callable[[int], bool], num_samples: int = _NUM_SAMPLES) -> list[Sample]:
    """Samples between steps, evenly over the time; `step(number)` says whether it was not the last."""
    samples, begun, number, goes_on = [take()], time.monotonic(), 0, True
    while goes_on:
        goes_on, number = step(number), number + 1
        if not goes_on or time.monotonic() - begun > len(samples) * seconds / num_samples:
            samples.append(take())
    return samples


class Training:
    """Steps of one rank: a model in parts, moved tensors, collectives of a group, checkpoints, worlds made anew."""

    def __init__(self, folder: str) -> None:
        self._rank, self._checkpoints = dist.get_rank(), CheckpointFolder(folder, keep=2)
        self._mesh = T.Mesh((NUM_RANKS,))
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        self._model = parallelize_module(plain, self._mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3)

    def step(self, number: int) -> None:
        """One step, of which some make what others use."""
        length = _LENGTHS[number % len(_LENGTHS)]
        self._train(length)
        self._move(length)
        if number % _SAVE_EVERY == 0:
            self._checkpoints.async_save({"model": self._model.state_dict()}, number)
        if number % _ANEW_EVERY == 0:
            self._make_anew()

    def _train(self, length: int) -> None:
        loss: Any = self._model(torch.ones(length, 64)).square().mean()
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()

    def _move(self, length: int) -> None:
        whole = torch.arange(8.0 * length).view(length, 8)
        rows = T.distribute_tensor(whole, self._mesh, [T.Shard(0)])
        columns = rows.redistribute(placements=[T.Shard(1)], async_op=True)
        T.prefetch(rows, [T.Replicate()])
        torch.testing.assert_close(columns.full_tensor(), whole, rtol=0, atol=0)
        torch.testing.assert_close(rows.full_tensor(), whole, rtol=0, atol=0)
        try:
            rows.view(3, 7, 11)
        except (T.TritondtError, RuntimeError):
            return
        raise AssertionError("a view of another number of elements was made")

    def _make_anew(self) -> None:
        group = dist.new_group(backend="tritondt")
        found = torch.ones(5)
        dist.all_reduce(found, group=group)
        assert found.tolist() == [NUM_RANKS] * 5
        dist.destroy_process_group(group)
        T.close()

    def end(self) -> None:
        """Waits for the last checkpoint."""
        self._checkpoints.wait()


def run(send: Callable[[object], None], seconds: float, folder: str, leak: bool) -> list[Sample]:
    """One rank's samples; with `leak`, of a rank that keeps what it has made."""
    training, until, kept = Training(folder), time.monotonic() + seconds, []

    def step(number: int) -> bool:
        training.step(number)
        if leak:
            kept.append(torch.ones(2**21))
        # Rank 0's clock says for both when the last step was.
        goes_on = torch.tensor(float(time.monotonic() < until))
        dist.broadcast(goes_on, 0)
        return bool(goes_on)

    samples = watched(seconds, step)
    training.end()
    return samples


def main() -> int:
    """The exit status: 1 where a rank's memory, descriptors or threads have grown."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.flat", description=__doc__)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--leak", action="store_true", help="keep a tensor of 8 MiB a step: this is to be found")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found: list[Any] = run_on_ranks(
            NUM_RANKS, run, asked.seconds, folder, asked.leak, on_message=lambda _: None, preload=(__name__,)
        )
    told = [f"rank {rank}: {sentence}" for rank, samples in enumerate(found) for sentence in growth(samples)]
    for rank, samples in enumerate(found):
        first, last = samples[len(samples) // 3], samples[-1]
        sys.stdout.write(
            f"rank {rank}: {first.memory_bytes / _MIB:.1f} MiB, {first.descriptors} descriptors, {first.threads} "
            f"threads after a third; {last.memory_bytes / _MIB:.1f}, {last.descriptors} and {last.threads} at the end\n"
        )
    sys.stdout.write("".join(f"{sentence}\n" for sentence in told))
    return int(bool(told))


if __name__ == "__main__":
    sys.exit(main())
