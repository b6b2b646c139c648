"""A step of fully sharded training, ours against torch's FSDP2, in turns on Gloo processes.

    python -m benchmarks.parallel.fully_sharded [--ranks 4] [--rounds 15] [--json [FILE]]

One GPT of plain modules is trained twice on the parts of one batch, each block and the model sharded by fully_shard:
ours, and torch's on its DTensor. Weights, data and optimizer (AdamW, foreach) are the same; so must be the losses.
Every round is a step of each, in alternating order, and takes as long as its slowest rank.
"""

from __future__ import annotations

import datetime
import logging
import platform
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import click
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

import tritondt as T
import tritondt.fsdp as our_fsdp
from benchmarks.parallel.traffic import Traffic, count_ours
from tritondt.cli.bench.harness import Times, time_interleaved
from tritondt.cli.bench.json_result import json_option, write_json
from tritondt.cli.demo.data import Batches
from tritondt.cli.demo.gpt import make_gpt
from tritondt.cli.demo.model import Model
from tritondt.cli.launch import num_cores, run_on_ranks
from tritondt.cli.surroundings import versions

_BATCHES = 8
# Ours sums in coordinate order, Gloo by rings.
_LOSS_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Request:
    """What the ranks are asked to measure."""

    sizes: Model
    batch: int
    rounds: int
    budget_s: float


@dataclass(frozen=True)
class Found:
    """Times of every round of both, what all ranks send in a step of ours, and by how much the losses differ."""

    ours: Times
    theirs: Times
    traffic: Traffic
    loss_max_abs_diff: float

    @property
    def time_ratio(self) -> float:
        """Our median step in units of theirs."""
        return self.ours.median / self.theirs.median


class Trainer:
    """A sharded model with its optimizer; `step` is one update."""

    def __init__(self, request: Request, mesh: T.DeviceMesh, fully_shard: Callable[..., Any]) -> None:
        self._model = make_gpt(request.sizes, seed=0)
        for block in self._model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self._model, mesh=mesh)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, foreach=True)
        self._batches = Batches(_BATCHES, request.batch, request.sizes.sequence, seed=0)
        self._positions = torch.arange(request.sizes.sequence)
        self.losses: list[float] = []

    def step(self) -> None:
        """Forward, backward and update; keeps this rank's loss before it."""
        tokens, following = self._batches.read(len(self.losses) % _BATCHES)
        tokens, following = (each.chunk(dist.get_world_size())[dist.get_rank()] for each in (tokens, following))
        self._optimizer.zero_grad()
        logits = self._model(tokens, self._positions)
        loss = F.cross_entropy(logits.flatten(0, 1), following.flatten())
        loss.backward()
        self._optimizer.step()
        self.losses.append(loss.item())


def measure_on_rank(send: Callable[[object], None], request: Request) -> None:
    """Both sides in turns; rank 0 passes what was found to `send`. A collective call of all ranks."""
    torch.set_num_threads(1)
    logging.getLogger("torch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    mesh = T.init_device_mesh("cpu", (dist.get_world_size(),))
    ours = Trainer(request, mesh, our_fsdp.fully_shard)
    theirs = Trainer(request, mesh, torch_fsdp.fully_shard)
    for trainer in (ours, theirs):  # the first steps connect the ranks, fill caches and learn the order of modules
        trainer.step()
        trainer.step()
    traffic = count_ours(ours.step).of_all_ranks()
    theirs.step()
    times = time_interleaved([ours.step, theirs.step], request.rounds, request.budget_s)
    differences = [abs(mine - other) for mine, other in zip(ours.losses, theirs.losses, strict=True)]
    if dist.get_rank() == 0:
        send(Found(*times, traffic, max(differences)))


@click.command(context_settings={"show_default": True})
@click.option("--ranks", type=click.IntRange(min=2), default=4, help="Processes to start.")
@click.option("--heads", type=click.IntRange(min=1), default=8, help="Attention heads.")
@click.option("--layers", type=click.IntRange(min=1), default=4, help="Transformer blocks.")
@click.option("--width", type=click.IntRange(min=1), default=256, help="Features, a multiple of --heads.")
@click.option("--seq", "sequence", type=click.IntRange(min=1), default=64, help="Positions.")
@click.option("--batch", type=click.IntRange(min=1), default=8, help="Sequences of a step, a multiple of --ranks.")
@click.option("--rounds", type=click.IntRange(min=1), default=25, help="Most rounds.")
@click.option("--seconds", type=float, default=60.0, help="Time for all rounds; 9 are made anyway.")
@json_option
def fully_sharded(
    ranks: int,
    heads: int,
    layers: int,
    width: int,
    sequence: int,
    batch: int,
    rounds: int,
    seconds: float,
    json_to: str | None,
) -> None:
    """Time a training step by our fully_shard and by torch's. Ends with status 1 where the losses differ."""
    if batch % ranks or width % heads:
        raise click.UsageError(f"--batch {batch} must be a multiple of --ranks {ranks}, --width {width} of --heads")
    request = Request(Model(heads, layers, width, sequence), batch, rounds, seconds)
    messages: list[Any] = []
    run_on_ranks(ranks, measure_on_rank, request, on_message=messages.append, preload=("torch._dynamo",))
    found: Found = messages[0]
    _print_table(found, Console())
    write_json(_as_json(request, ranks, found), json_to)
    if not found.loss_max_abs_diff <= _LOSS_TOLERANCE:
        raise click.ClickException(
            f"the losses differ by up to {found.loss_max_abs_diff:.2e}; allowed is {_LOSS_TOLERANCE:.0e}"
        )


def _print_table(found: Found, console: Console) -> None:
    table = Table("", "tritondt", "torch FSDP2", "ratio")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, ours, theirs in (
        ("step, median ms", found.ours.median, found.theirs.median),
        ("step, fastest ms", found.ours.fastest, found.theirs.fastest),
    ):
        table.add_row(name, f"{ours * 1e3:.1f}", f"{theirs * 1e3:.1f}", f"{ours / theirs:.3f}")
    table.add_row("bytes sent a step, all ranks", f"{found.traffic.sent_bytes:,d}", "", "")
    table.add_row("exchanges a step", f"{sum(found.traffic.calls.values()):d}", "", "")
    console.print(table)
    console.print(
        f"largest difference of a loss over {len(found.ours.seconds)} rounds: {found.loss_max_abs_diff:.2e}",
        highlight=False,
    )


def _as_json(request: Request, num_ranks: int, found: Found) -> dict[str, Any]:
    return {
        "time_ratio": found.time_ratio,
        "loss_max_abs_diff": found.loss_max_abs_diff,
        "ranks": num_ranks,
        **asdict(request.sizes),
        "batch": request.batch,
        "rounds": len(found.ours.seconds),
        "tritondt": {
            "median_s": found.ours.median,
            "fastest_s": found.ours.fastest,
            "sent_bytes_per_step": found.traffic.sent_bytes,
            "calls_per_step": found.traffic.calls,
        },
        "torch": {"median_s": found.theirs.median, "fastest_s": found.theirs.fastest},
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "versions": {**versions(), "machine": platform.platform(), "cores": num_cores()},
    }


# The ranks that the benchmark starts import this file again, under another name.
if __name__ == "__main__":
    fully_sharded(prog_name="python -m benchmarks.parallel.fully_sharded")
