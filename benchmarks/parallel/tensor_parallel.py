"""A step of tensor-parallel training, ours against torch.distributed.tensor.parallel's, in turns on Gloo processes.

    python -m benchmarks.parallel.tensor_parallel [--ranks 4] [--rounds 15] [--loopback] [--json [FILE]]

One GPT of plain modules, whose heads, features and positions all divide, is trained twice by one plan: with torch's
styles on its DTensor, and with ours. Weights, data and optimizer (AdamW, foreach) are the same; so must be the losses.
Every round is a step of each, in alternating order, and takes as long as its slowest rank.
"""

from __future__ import annotations

import datetime
import logging
import platform
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any

import click
import torch
import torch.distributed as dist
import torch.distributed.tensor as torch_tensor
import torch.distributed.tensor.parallel as torch_parallel
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

import tritondt as T
import tritondt.parallel as our_parallel
from benchmarks.parallel.split_gpt import make_split_gpt
from benchmarks.parallel.traffic import Traffic, count_ours, count_theirs
from tritondt.cli.bench import loopback as loopback_counter
from tritondt.cli.bench.harness import Times, time_interleaved
from tritondt.cli.bench.json_result import json_option, write_json
from tritondt.cli.bench.loopback import Loopback, count_loopback
from tritondt.cli.bench.over_sockets import choose_sockets
from tritondt.cli.demo.data import Batches
from tritondt.cli.demo.model import Model
from tritondt.cli.launch import num_cores, run_on_ranks
from tritondt.cli.surroundings import versions

_BATCHES = 8
# Ours sums in coordinate order, Gloo by rings; over 30 steps the losses of the two differ by a few 1e-6.
_LOSS_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Sizes(Model):
    """A model of which everything divides."""

    @property
    def hidden(self) -> int:
        """Features inside the MLP."""
        return 4 * self.width


@dataclass(frozen=True)
class Request:
    """The measurement that the ranks are asked for."""

    sizes: Sizes
    batch: int
    rounds: int
    budget_s: float
    loopback: bool


@dataclass(frozen=True)
class Side:
    """One of the two: times of every round, what all ranks send in a step."""

    times: Times
    traffic: Traffic
    loopback: Loopback | None


@dataclass(frozen=True)
class Found:
    """Both sides, and by how much their losses differ."""

    ours: Side
    theirs: Side
    loss_max_abs_diff: float

    @property
    def time_ratio(self) -> float:
        """Our median step in units of theirs."""
        return self.ours.times.median / self.theirs.times.median

    @property
    def bytes_ratio(self) -> float:
        """Our bytes in units of theirs."""
        return self.ours.traffic.sent_bytes / self.theirs.traffic.sent_bytes


def make_plan(styles: ModuleType, placements: Any) -> dict[str, Any]:
    """The plan that torch's tutorials give, in the styles and placements of either library.

    Activations are cut by the sequence between the layers; the table by its rows, the head by its scores.
    """
    sequence, whole = placements.Shard(1), placements.Replicate()
    columns, rows = styles.ColwiseParallel, styles.RowwiseParallel
    prepared = {"input_layouts": (sequence,), "desired_input_layouts": (whole,)}
    return {
        "token_embedding": rows(input_layouts=whole, output_layouts=sequence, use_local_output=False),
        "position_embedding": rows(input_layouts=whole, output_layouts=placements.Shard(0), use_local_output=False),
        "blocks.*.*_norm": styles.SequenceParallel(),
        "blocks.*.attention": styles.PrepareModuleInput(**prepared),
        "blocks.*.attention.w[qkv]": columns(),
        "blocks.*.attention.wo": rows(output_layouts=sequence, use_local_output=False),
        "blocks.*.mlp": styles.PrepareModuleInput(**prepared),
        "blocks.*.mlp.up": columns(),
        "blocks.*.mlp.down": rows(output_layouts=sequence, use_local_output=False),
        "norm": styles.SequenceParallel(),
        "head": columns(input_layouts=sequence, output_layouts=whole),
    }


class Trainer:
    """A parallelized model with its optimizer; `step` is one update."""

    def __init__(self, request: Request, mesh: T.DeviceMesh, styles: ModuleType, placements: Any) -> None:
        sizes = request.sizes
        self.model = make_split_gpt(sizes, seed=0)
        styles.parallelize_module(self.model, mesh, make_plan(styles, placements))
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=True)
        self._batches = Batches(_BATCHES, request.batch, sizes.sequence, seed=0)
        self._positions = torch.arange(sizes.sequence)
        self.losses: list[float] = []

    def step(self) -> None:
        """Forward, backward and update; keeps the loss before it."""
        tokens, following = self._batches.read(len(self.losses) % _BATCHES)
        self._optimizer.zero_grad()
        logits = self.model(tokens, self._positions)
        loss = F.cross_entropy(logits.flatten(0, 1), following.flatten())
        loss.backward()
        self._optimizer.step()
        self.losses.append(loss.item())


def measure_on_rank(send: Callable[[object], None], request: Request) -> None:
    """Both sides in turns; rank 0 passes what was found to `send`. A collective call of all ranks."""
    torch.set_num_threads(1)
    logging.getLogger("torch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")  # DTensor's advice about its own speed
    mesh = T.init_device_mesh("cpu", (dist.get_world_size(),))
    ours = Trainer(request, mesh, our_parallel, T)
    theirs = Trainer(request, mesh, torch_parallel, torch_tensor)
    for trainer in (ours, theirs):  # the first step connects the ranks and fills caches
        trainer.step()
    traffic = [found.of_all_ranks() for found in (count_ours(ours.step), count_theirs(theirs.step))]
    loopbacks = [count_loopback(trainer.step, 3) if request.loopback else None for trainer in (ours, theirs)]
    times = time_interleaved([ours.step, theirs.step], request.rounds, request.budget_s)
    differences = [abs(mine - other) for mine, other in zip(ours.losses, theirs.losses, strict=True)]
    if dist.get_rank() == 0:
        side_of_ours, side_of_theirs = map(Side, times, traffic, loopbacks)
        send(Found(side_of_ours, side_of_theirs, max(differences)))


@click.command(context_settings={"show_default": True})
@click.option("--ranks", type=click.IntRange(min=2), default=4, help="Processes to start.")
@click.option("--heads", type=click.IntRange(min=1), default=8, help="Attention heads, a multiple of --ranks.")
@click.option("--layers", type=click.IntRange(min=1), default=4, help="Transformer blocks.")
@click.option("--width", type=click.IntRange(min=1), default=256, help="Features, a multiple of --heads.")
@click.option("--seq", "sequence", type=click.IntRange(min=1), default=128, help="Positions, a multiple of --ranks.")
@click.option("--batch", type=click.IntRange(min=1), default=8, help="Sequences of a step.")
@click.option("--rounds", type=click.IntRange(min=1), default=25, help="Most rounds.")
@click.option("--seconds", type=float, default=60.0, help="Time for all rounds; 9 are made anyway.")
@click.option("--loopback", is_flag=True, help="Read the loopback interface's counter as well.")
@json_option
def tensor_parallel(
    ranks: int,
    heads: int,
    layers: int,
    width: int,
    sequence: int,
    batch: int,
    rounds: int,
    seconds: float,
    loopback: bool,
    json_to: str | None,
) -> None:
    """Time a training step by our styles and by torch's. Ends with status 1 where the losses differ."""
    if heads % ranks or width % heads or sequence % ranks:
        raise click.UsageError(
            f"--heads {heads} and --seq {sequence} must be multiples of --ranks {ranks}, --width {width} of --heads"
        )
    if loopback and not loopback_counter.is_readable():
        raise click.UsageError("--loopback reads a counter of Linux, which this system does not have")
    if loopback:
        choose_sockets("--loopback")
    request = Request(Sizes(heads, layers, width, sequence), batch, rounds, seconds, loopback)
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
    table = Table("", "tritondt", "torch", "ratio")
    for column in table.columns[1:]:
        column.justify = "right"

    def row(name: str, ours: float, theirs: float, form: str) -> None:
        table.add_row(name, format(ours, form), format(theirs, form), f"{ours / theirs:.3f}")

    ours, theirs = found.ours, found.theirs
    row("step, median ms", ours.times.median * 1e3, theirs.times.median * 1e3, ".1f")
    row("step, fastest ms", ours.times.fastest * 1e3, theirs.times.fastest * 1e3, ".1f")
    row("bytes sent a step, all ranks", ours.traffic.sent_bytes, theirs.traffic.sent_bytes, ",d")
    if ours.loopback is not None and theirs.loopback is not None:
        row("on the loopback interface", _per_step(ours.loopback), _per_step(theirs.loopback), ",.0f")
    row("exchanges or collectives a step", sum(ours.traffic.calls.values()), sum(theirs.traffic.calls.values()), "d")
    console.print(table)
    console.print(
        "bytes: ours as the transport counts them; torch's as rings would send its collectives, the fewest possible\n"
        f"largest difference of a loss over {len(ours.times.seconds)} rounds: {found.loss_max_abs_diff:.2e}",
        highlight=False,
    )


def _per_step(counted: Loopback) -> float:
    return counted.sent_bytes / counted.num_calls


def _as_json(request: Request, num_ranks: int, found: Found) -> dict[str, Any]:
    def side(of: Side) -> dict[str, Any]:
        return {
            "median_s": of.times.median,
            "fastest_s": of.times.fastest,
            "sent_bytes_per_step": of.traffic.sent_bytes,
            "calls_per_step": of.traffic.calls,
            "loopback": None if of.loopback is None else asdict(of.loopback),
        }

    return {
        "time_ratio": found.time_ratio,
        "bytes_ratio": found.bytes_ratio,
        "bytes_of": {"tritondt": "counted by the transport", "torch": "its collectives as rings send them"},
        "loss_max_abs_diff": found.loss_max_abs_diff,
        "ranks": num_ranks,
        **asdict(request.sizes),
        "batch": request.batch,
        "rounds": len(found.ours.times.seconds),
        "tritondt": side(found.ours),
        "torch": side(found.theirs),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "versions": {**versions(), "machine": platform.platform(), "cores": num_cores()},
    }


# The ranks that the benchmark starts import this file again, under another name.
if __name__ == "__main__":
    tensor_parallel(prog_name="python -m benchmarks.parallel.tensor_parallel")
