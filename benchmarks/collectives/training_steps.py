"""Steps of torch's own parallelisms on the backend "tritondt" and on Gloo, in turns on the same ranks.

    python -m benchmarks.collectives.training_steps [--ranks N] [--rounds N] [--json [FILE]]

One GPT with DistributedDataParallel, and tensor-parallel by torch.distributed.tensor, both torch's from end to end: the
process group alone differs. The losses of both sides are compared when all steps are done. A third side moves nothing,
DDP within `no_sync` and tensor parallelism on torch's "fake" group: its values are wrong, and no transport takes less.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import click
import torch
import torch.distributed as dist
import torch.distributed.tensor as torch_tensor
import torch.distributed.tensor.parallel as torch_parallel
import torch.nn.functional as F
import torch.testing._internal.distributed.fake_pg  # registers "fake"
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from benchmarks.parallel.tensor_parallel import Request, Sizes, Trainer
from tritondt.cli.bench.harness import Times, time_interleaved
from tritondt.cli.bench.json_result import is_printed, json_option, write_json
from tritondt.cli.demo.data import Batches
from tritondt.cli.demo.experiment import ignore
from tritondt.cli.demo.model import make_gpt
from tritondt.cli.launch import run_on_ranks
from tritondt.cli.surroundings import surroundings

_SIZES = Sizes(heads=8, layers=4, width=192, sequence=128)
_BATCH = 4
_BACKENDS = ("tritondt", "gloo")


class DataParallel:
    """A GPT in DistributedDataParallel over a group, or as if it were the only rank; `step` is one update."""

    def __init__(self, group: Any, *, moves: bool = True) -> None:
        self._moves = moves
        self.model = DistributedDataParallel(make_gpt(_SIZES, seed=0), process_group=group)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=True)
        self._batches = Batches(8, _BATCH, _SIZES.sequence, seed=dist.get_rank())
        self._positions = torch.arange(_SIZES.sequence)
        self.losses: list[float] = []

    def step(self) -> None:
        """Forward, backward with the gradients' all_reduce, and update; keeps the loss before it."""
        tokens, following = self._batches.read(len(self.losses) % 8)
        self._optimizer.zero_grad()
        with nullcontext() if self._moves else self.model.no_sync():
            loss = F.cross_entropy(self.model(tokens, self._positions).flatten(0, 1), following.flatten())
            loss.backward()
        self._optimizer.step()
        self.losses.append(loss.item())


def _tensor_parallel(group: Any) -> Trainer:
    mesh = DeviceMesh.from_group(group, "cpu")
    request = Request(_SIZES, _BATCH, 0, 0.0, loopback=False)
    return Trainer(request, mesh, torch_parallel, torch_tensor)


def _alone(like: DataParallel, group: Any) -> DataParallel:
    return DataParallel(group, moves=False)


def _tensor_parallel_alone(like: Trainer, group: Any) -> Trainer:
    """On a group that moves nothing; its parameters would be whatever was in their memory."""
    made = _tensor_parallel(dist.new_group(backend="fake"))
    with torch.no_grad():
        for ours, theirs in zip(like.model.parameters(), made.model.parameters(), strict=True):
            _local(theirs).copy_(_local(ours))
    return made


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, torch_tensor.DTensor) else tensor


# What makes a trainer on a group, and one like it that moves nothing.
_TRAINERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    "ddp": (DataParallel, _alone),
    "tensor parallel": (_tensor_parallel, _tensor_parallel_alone),
}


def measure_on_rank(send: Callable[[object], None], rounds: int) -> dict[str, list[Times]]:
    """Times of a step of each parallelism, in the order of the backends; a collective call."""
    torch.set_num_threads(1)
    groups = [dist.new_group(backend=backend) for backend in _BACKENDS]
    found = {}
    for name, (make, make_alone) in _TRAINERS.items():
        trainers = [make(group) for group in groups]
        trainers.append(make_alone(trainers[0], groups[-1]))
        found[name] = time_interleaved([trainer.step for trainer in trainers], rounds, budget_s=300.0)
        # Sums of the two go in other orders, which a few hundred updates make 1e-4 of at most.
        torch.testing.assert_close(trainers[0].losses, trainers[1].losses, rtol=1e-4, atol=1e-4)
    return found


@click.command(context_settings={"show_default": True})
@click.option("--ranks", type=click.IntRange(min=2), default=4, help="Processes to start.")
@click.option("--rounds", type=click.IntRange(min=9), default=25, help="Steps of each.")
@json_option
def training_steps(ranks: int, rounds: int, json_to: str | None) -> None:
    """Time steps of DDP and of torch's tensor parallelism on both backends, in turns."""
    console = Console(stderr=is_printed(json_to))
    found: Any = run_on_ranks(ranks, measure_on_rank, rounds, on_message=ignore)[0]
    table = Table("step", "tritondt's ms", "Gloo's ms", "without messages", "medians, of Gloo's", "fastest", "without")
    rows = []
    for name, (own, gloo, fake) in found.items():
        medians, fastest, least = own.median / gloo.median, own.fastest / gloo.fastest, fake.median / gloo.median
        times = (f"{times.median * 1e3:.1f}" for times in (own, gloo, fake))
        table.add_row(name, *times, f"{medians:.3f}", f"{fastest:.3f}", f"{least:.3f}")
        rows.append({"step": name, "median_ms": own.median * 1e3, "gloo_median_ms": gloo.median * 1e3})
        rows[-1] |= {"without_messages_median_ms": fake.median * 1e3, "without_messages_to_gloo_median": least}
        rows[-1] |= {"to_gloo_median": medians, "to_gloo": fastest}
    console.print(table)
    write_json(
        {"benchmark": "training_steps", **surroundings(), "ranks": ranks, "rounds": rounds, "steps": rows}, json_to
    )


# The ranks that the benchmark starts import this file again, under another name.
if __name__ == "__main__":
    training_steps(prog_name="python -m benchmarks.collectives.training_steps")
