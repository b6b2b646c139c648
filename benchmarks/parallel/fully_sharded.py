"""A step of fully sharded training, ours against torch's FSDP2, in turns on Gloo processes.

    python -m benchmarks.parallel.fully_sharded [--ranks 4] [--tensor 2] [--rounds 15] [--loopback] [--json [FILE]]

One GPT of plain modules is trained twice on the parts of one batch, each block and the model sharded by fully_shard:
ours, and torch's on its DTensor. With --tensor 2 both are first laid out tensor-parallel over pairs of ranks, by the
plan of benchmarks.parallel.tensor_parallel, and then sharded over the other axis. Weights, data and optimizer (AdamW,
foreach) are the same; so must be the losses. Every round is a step of each, in alternating order, and takes as long as
its slowest rank.
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
import torch.distributed.fsdp as torch_fsdp
import torch.distributed.tensor as torch_tensor
import torch.distributed.tensor.parallel as torch_parallel
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

import tritondt as T
import tritondt.fsdp as our_fsdp
import tritondt.parallel as our_parallel
from benchmarks.parallel.split_gpt import make_split_gpt
from benchmarks.parallel.tensor_parallel import make_plan
from benchmarks.parallel.traffic import Traffic, count_ours
from tritondt.cli.bench import loopback as loopback_counter
from tritondt.cli.bench.harness import Times, time_interleaved
from tritondt.cli.bench.json_result import json_option, write_json
from tritondt.cli.bench.loopback import Loopback, count_loopback
from tritondt.cli.bench.over_sockets import choose_sockets
from tritondt.cli.demo.data import Batches
from tritondt.cli.demo.model import Model, make_gpt
from tritondt.cli.launch import num_cores, run_on_ranks
from tritondt.cli.surroundings import versions

_BATCHES = 8
# Ours sums in coordinate order, Gloo by rings.
_LOSS_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Request:
    """The measurement that the ranks are asked for."""

    sizes: Model
    batch: int
    rounds: int
    budget_s: float
    num_tensor: int
    loopback: bool


@dataclass(frozen=True)
class Found:
    """Times of every round of both, what all ranks send in a step of ours, and by how much the losses differ.

    `loopbacks` are the bytes that the kernel counted for both, ours first, where that was asked for.
    """

    ours: Times
    theirs: Times
    traffic: Traffic
    loopbacks: tuple[Loopback, ...]
    loss_max_abs_diff: float

    @property
    def time_ratio(self) -> float:
        """Our median step in units of theirs."""
        return self.ours.median / self.theirs.median


class Trainer:
    """A sharded model with its optimizer; `step` is one update."""

    def __init__(
        self, request: Request, mesh: T.DeviceMesh, fully_shard: Callable[..., Any], styles: ModuleType, placements: Any
    ) -> None:
        is_tensor_parallel = request.num_tensor > 1
        self._model = (make_split_gpt if is_tensor_parallel else make_gpt)(request.sizes, seed=0)
        if is_tensor_parallel:
            styles.parallelize_module(self._model, mesh["tp"], make_plan(styles, placements))
        data_mesh = mesh["dp"]
        for block in self._model.blocks:
            fully_shard(block, mesh=data_mesh)
        fully_shard(self._model, mesh=data_mesh)
        self._part, self._num_parts = data_mesh.get_local_rank(), data_mesh.size()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, foreach=True)
        self._batches = Batches(_BATCHES, request.batch, request.sizes.sequence, seed=0)
        self._positions = torch.arange(request.sizes.sequence)
        self.losses: list[float] = []

    def step(self) -> None:
        """Forward, backward and update; keeps this rank's loss before it."""
        tokens, following = self._batches.read(len(self.losses) % _BATCHES)
        tokens, following = (each.chunk(self._num_parts)[self._part] for each in (tokens, following))
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
    shape = (dist.get_world_size() // request.num_tensor, request.num_tensor)
    mesh = T.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    ours = Trainer(request, mesh, our_fsdp.fully_shard, our_parallel, T)
    theirs = Trainer(request, mesh, torch_fsdp.fully_shard, torch_parallel, torch_tensor)
    for trainer in (ours, theirs):  # the first steps connect the ranks, fill caches and learn the order of modules
        trainer.step()
        trainer.step()
    traffic = count_ours(ours.step).of_all_ranks()
    theirs.step()
    loopbacks = tuple(count_loopback(trainer.step, 3) for trainer in (ours, theirs) if request.loopback)
    times_of_ours, times_of_theirs = time_interleaved([ours.step, theirs.step], request.rounds, request.budget_s)
    differences = [abs(mine - other) for mine, other in zip(ours.losses, theirs.losses, strict=True)]
    if dist.get_rank() == 0:
        send(Found(times_of_ours, times_of_theirs, traffic, loopbacks, max(differences)))


@click.command(context_settings={"show_default": True})
@click.option("--ranks", type=click.IntRange(min=2), default=4, help="Processes to start.")
@click.option("--tensor", "num_tensor", type=click.IntRange(min=1), default=1, help="Ranks that share each tensor.")
@click.option("--heads", type=click.IntRange(min=1), default=8, help="Attention heads.")
@click.option("--layers", type=click.IntRange(min=1), default=4, help="Transformer blocks.")
@click.option("--width", type=click.IntRange(min=1), default=256, help="Features, a multiple of --heads.")
@click.option("--seq", "sequence", type=click.IntRange(min=1), default=64, help="Positions.")
@click.option("--batch", type=click.IntRange(min=1), default=8, help="Sequences of a step, a multiple of --ranks.")
@click.option("--rounds", type=click.IntRange(min=1), default=25, help="Most rounds.")
@click.option("--seconds", type=float, default=60.0, help="Time for all rounds; 9 are made anyway.")
@click.option("--loopback", is_flag=True, help="Read the loopback interface's counter as well.")
@json_option
def fully_sharded(
    ranks: int,
    num_tensor: int,
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
    """Time a training step by our fully_shard and by torch's. Ends with status 1 where the losses differ."""
    if batch % ranks or width % heads:
        raise click.UsageError(f"--batch {batch} must be a multiple of --ranks {ranks}, --width {width} of --heads")
    if ranks % num_tensor or heads % num_tensor:
        raise click.UsageError(f"--ranks {ranks} and --heads {heads} must be multiples of --tensor {num_tensor}")
    if loopback and not loopback_counter.is_readable():
        raise click.UsageError("--loopback reads a counter of Linux, which this system does not have")
    if loopback:
        choose_sockets("--loopback")
    request = Request(Model(heads, layers, width, sequence), batch, rounds, seconds, num_tensor, loopback)
    messages: list[Any] = []
    run_on_ranks(ranks, measure_on_rank, request, on_message=messages.append, preload=("torch._dynamo",))
    found: Found = messages[0]
    _print_table(found, "torch FSDP2" if num_tensor == 1 else "torch FSDP2 + TP", Console())
    write_json(_as_json(request, ranks, found), json_to)
    if not found.loss_max_abs_diff <= _LOSS_TOLERANCE:
        raise click.ClickException(
            f"the losses differ by up to {found.loss_max_abs_diff:.2e}; allowed is {_LOSS_TOLERANCE:.0e}"
        )


def _print_table(found: Found, name_of_theirs: str, console: Console) -> None:
    table = Table("", "tritondt", name_of_theirs, "ratio")
    for column in table.columns[1:]:
        column.justify = "right"
    for figure, ours, theirs in (
        ("step, median ms", found.ours.median, found.theirs.median),
        ("step, fastest ms", found.ours.fastest, found.theirs.fastest),
    ):
        table.add_row(figure, f"{ours * 1e3:.1f}", f"{theirs * 1e3:.1f}", f"{ours / theirs:.3f}")
    table.add_row("bytes sent a step, all ranks", f"{found.traffic.sent_bytes:,d}", "", "")
    if found.loopbacks:
        ours, theirs = (it.sent_bytes / it.num_calls for it in found.loopbacks)
        table.add_row("on the loopback interface", f"{ours:,.0f}", f"{theirs:,.0f}", f"{ours / theirs:.3f}")
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
        "tensor": request.num_tensor,
        **asdict(request.sizes),
        "batch": request.batch,
        "rounds": len(found.ours.seconds),
        "loopback": [asdict(it) for it in found.loopbacks],
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
