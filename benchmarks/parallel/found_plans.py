"""Training steps under plans that are found and plans by hand, in turns, and the order that predictions give them.

    python -m benchmarks.parallel.found_plans [--ranks 4] [--rounds 15] [--json [FILE]]

The demo's GPT, whose heads and features no number of ranks divides, is trained by the best plan of `find_mesh` and by
hand: Megatron's styles, with whole sequences and with cut ones; Megatron's over half of the ranks beside sharded
parameters; `fully_shard` of each block, and of the whole model; and torch's DistributedDataParallel. Weights, optimizer
(AdamW) and the batch of all ranks are the same; so must be the losses, and the bytes that a step receives must be those
predicted. Every round is a step of each, in alternating order, and takes as long as its slowest rank. Beside it stands
the processor's time of all ranks in a step, the least of the rounds, over the cores that they share, which other
processes of a busy machine change little. Predictions are by the ranks' prices, best those of `bench calibrate` in
TRITONDT_COSTS; without one by built-in prices and the matmuls that the ranks measure.
"""

from __future__ import annotations

import datetime
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import click
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tritondt as T
from tritondt.cli.bench.harness import Times, time_interleaved
from tritondt.cli.bench.json_result import json_option, write_json
from tritondt.cli.demo.data import Batches
from tritondt.cli.demo.model import Model, make_gpt
from tritondt.cli.launch import num_cores, run_on_ranks
from tritondt.cli.surroundings import surroundings
from tritondt.comm import world
from tritondt.debug import CommDebugMode
from tritondt.found_plan import find_mesh
from tritondt.found_plan.found_plan import FoundPlan
from tritondt.found_plan.mesh_axes import MeshAxes, mesh_axes
from tritondt.found_plan.predict import LaidOut, predicted_step
from tritondt.found_plan.prices import Prices
from tritondt.found_plan.style_choice import WHOLE, StyleChoice, style

_LOSS_TOLERANCE = 1e-4
_DDP = "DistributedDataParallel"
# Rows of a matmul whose rate stands for the model's.
_ROWS = 512


@dataclass(frozen=True)
class Request:
    """The measurement that the ranks are asked for."""

    sizes: Model
    batch: int
    rounds: int
    budget_s: float


@dataclass(frozen=True)
class Side:
    """One plan: its mesh, times of every round, seconds of the processors, predicted seconds, bytes received as
    predicted and as counted (None for none), and losses."""

    name: str
    mesh: str
    times: Times
    processors_s: float
    predicted_s: float | None
    received_bytes: int | None
    counted_bytes: int | None
    losses: tuple[float, ...]


class WithLoss(nn.Module):
    """A model that gives its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        """Mean loss of the tokens that follow; shapes (batch, sequence)."""
        scores = self.model(tokens, torch.arange(tokens.shape[1]))
        return F.cross_entropy(scores.flatten(0, 1), following.flatten())


def by_hand(sizes: Model, num_ranks: int) -> dict[str, tuple[MeshAxes, LaidOut]]:
    """Plans that people write, by name: the mesh of each, and what it does."""
    head, last = sizes.head_width, sizes.layers - 1
    blocks, rows = "model.blocks.*", style("RowwiseParallel", balanced=True)
    gathered = style("ColwiseParallel", balanced=True, output_layouts="R")
    outside = {"model.token_embedding": rows, "model.position_embedding": WHOLE, "model.norm": WHOLE}
    cut = {
        f"{blocks}.attention.qkv": style("ColwiseParallel", unit=head, repeats=3, balanced=True),
        f"{blocks}.attention.wo": style("RowwiseParallel", unit=head, balanced=True),
        f"{blocks}.mlp.up": style("ColwiseParallel", balanced=True),
        f"{blocks}.mlp.down": rows,
    }
    norms = {f"{blocks}.attention_norm": WHOLE, f"{blocks}.mlp_norm": WHOLE}
    megatron = {**outside, **cut, **norms, "model.head": gathered}
    positions = {"output_layouts": "S1", "use_local_output": False}
    whole_to_positions = {"input_layouts": "R", "desired_input_layouts": "S1"}
    sequences = {
        **megatron,
        **{name: choice.with_options(**positions) for name, choice in cut.items() if choice.kind == "RowwiseParallel"},
        **dict.fromkeys(norms, style("SequenceParallel", output_layouts="R")),
        "model.blocks.0": style("PrepareModuleInput", **whole_to_positions),
        f"model.blocks.{last}": style("PrepareModuleOutput", output_layouts="S1", desired_output_layouts="R"),
    }
    tensor, data = mesh_axes({"dp": 1, "tp": num_ranks}), mesh_axes({"dp": num_ranks, "tp": 1})
    found = {
        "Megatron": (tensor, _laid_out(megatron)),
        "Megatron, sequences cut": (tensor, _laid_out(sequences)),
        "fully_shard of blocks": (data, _laid_out({}, blocks)),
        "fully_shard of the model": (data, _laid_out({})),
    }
    if num_ranks % 2 == 0 and num_ranks > 2:
        found["Megatron, fully_shard"] = (mesh_axes({"dp": 2, "tp": num_ranks // 2}), _laid_out(megatron, blocks))
    return found


def _laid_out(styles: dict[str, StyleChoice], *sharded: str) -> LaidOut:
    return LaidOut(tuple(styles.items()), (), False, sharded)


class Trainer:
    """A model under a plan, with its optimizer; `step` is one update on this rank's part of the batch."""

    def __init__(self, request: Request, model: nn.Module, num_parts: int, part: int) -> None:
        self._model, self._num_parts, self._part = model, num_parts, part
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self._batches = Batches(4, request.batch, request.sizes.sequence, seed=0)
        self.losses: list[float] = []
        self.processor_s = float("inf")

    def step(self) -> None:
        """Forward, backward and update; keeps the loss before it, and the least of the processor's time."""
        start = time.process_time()
        tokens, following = (it.chunk(self._num_parts)[self._part] for it in self._batches.read(len(self.losses) % 4))
        self._optimizer.zero_grad()
        loss = self._model(tokens, following)
        loss.backward()
        self._optimizer.step()
        self.losses.append(loss.item())
        self.processor_s = min(self.processor_s, time.process_time() - start)


def measured_flop_rate(sizes: Model) -> float:
    """Operations a second of a matmul of the model's width on one thread, all ranks at work; a collective call."""
    left, right = torch.randn(_ROWS, sizes.width), torch.randn(sizes.width, sizes.hidden)
    found = []
    for _ in range(25):
        start = time.perf_counter()
        left @ right
        found.append(time.perf_counter() - start)
    seconds = torch.tensor(statistics.median(found))
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return 2 * _ROWS * sizes.width * sizes.hidden / seconds.item()


def measure_on_rank(send: Callable[[object], None], request: Request) -> None:
    """All plans in turns; rank 0 sends the FLOP rate and the sides. A collective call of all ranks."""
    torch.set_num_threads(1)
    rank, num_ranks, sizes = dist.get_rank(), dist.get_world_size(), request.sizes
    costs = world.current().costs_for("cpu")
    rate = costs.rate("float32") if costs.is_measured else measured_flop_rate(sizes)
    costs = costs.with_prices({"flop_rate": rate})
    prices = Prices("cpu", costs, world.current().hosts(range(num_ranks)))
    whole = Batches(4, request.batch, sizes.sequence, seed=0).read(0)
    best = find_mesh(_model(sizes), num_ranks, whole, costs=costs).best
    plans = {"found": (best.mesh, best.laid_out), **by_hand(sizes, num_ranks)}
    trainers, predicted = [], []
    for axes, laid_out in plans.values():
        parts = axes.num_parts
        inputs = tuple(it.chunk(parts)[0] for it in whole)
        step = predicted_step(_model(sizes), (inputs, {}), axes, laid_out, prices, 0, train=True, optimizer_tensors=2)
        predicted.append((step.seconds, step.traffic.received_bytes))
        plan = FoundPlan(axes, laid_out, 0, step, (), (), True)
        model = plan.apply(_model(sizes), T.Mesh(axes.sizes, axes.names))
        trainers.append(Trainer(request, model, parts, axes.part_of(rank)))
    trainers.append(Trainer(request, DistributedDataParallel(_model(sizes)), num_ranks, rank))
    counted = [received_bytes(trainer) for trainer in trainers]
    times = time_interleaved([trainer.step for trainer in trainers], request.rounds, request.budget_s)
    losses = torch.tensor([trainer.losses for trainer in trainers])
    dist.all_reduce(losses)
    processors = torch.tensor([trainer.processor_s for trainer in trainers])
    dist.all_reduce(processors)
    processors /= min(num_ranks, num_cores())
    if rank == 0:
        meshes = [*(str(axes) for axes, _ in plans.values()), f"dp={num_ranks}"]
        # torch's DistributedDataParallel sends by another backend.
        known: Sequence[tuple[float | int | None, ...]] = [
            *((*seen, moved) for seen, moved in zip(predicted, counted, strict=False)),
            (None, None, None),
        ]
        means = (losses / num_ranks).tolist()
        rows = zip((*plans, _DDP), meshes, times, processors.tolist(), known, means, strict=True)
        found: list[Any] = [(*measured, *seen, tuple(of_side)) for *measured, seen, of_side in rows]
        send((rate, [Side(*fields) for fields in found]))


def received_bytes(trainer: Trainer) -> int:
    """Bytes that a step receives; a collective call."""
    with CommDebugMode() as comm:
        trainer.step()
    return comm.get_received_bytes()


def _model(sizes: Model) -> nn.Module:
    return WithLoss(make_gpt(sizes, seed=0))


def kendall(first: Sequence[float], second: Sequence[float]) -> float:
    """Kendall's tau of two lists of numbers.

    >>> kendall([1, 2, 3], [10, 30, 20])
    0.3333333333333333
    """
    signs = [
        ((first[i] > first[j]) - (first[i] < first[j])) * ((second[i] > second[j]) - (second[i] < second[j]))
        for i, j in combinations(range(len(first)), 2)
    ]
    return sum(signs) / len(signs)


@click.command(context_settings={"show_default": True})
@click.option("--ranks", type=click.IntRange(min=2), default=4, help="Processes to start.")
@click.option("--heads", type=click.IntRange(min=1), default=6, help="Attention heads.")
@click.option("--layers", type=click.IntRange(min=2), default=4, help="Transformer blocks.")
@click.option("--width", type=click.IntRange(min=1), default=192, help="Features, a multiple of --heads.")
@click.option("--seq", "sequence", type=click.IntRange(min=1), default=128, help="Positions.")
@click.option("--batch", type=click.IntRange(min=1), default=8, help="Sequences of a step, a multiple of --ranks.")
@click.option("--rounds", type=click.IntRange(min=1), default=15, help="Most rounds.")
@click.option("--seconds", type=float, default=60.0, help="Time for all rounds; 9 are made anyway.")
@json_option
def found_plans(
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
    """Time steps under found plans and plans by hand. Ends with status 1 where the losses differ."""
    if width % heads or batch % ranks:
        raise click.UsageError(f"--width {width} must be a multiple of --heads {heads}, --batch {batch} of {ranks}")
    request = Request(Model(heads, layers, width, sequence), batch, rounds, seconds)
    messages: list[Any] = []
    run_on_ranks(ranks, measure_on_rank, request, on_message=messages.append, preload=("torch._dynamo",))
    ((rate, sides),) = messages
    # A found plan may be one of those by hand, which has the same prediction.
    known = list({side.predicted_s: side for side in sides if side.predicted_s is not None}.values())
    predicted = [side.predicted_s or 0.0 for side in known]
    taus = {
        "median_s": kendall(predicted, [side.times.median for side in known]),
        "fastest_s": kendall(predicted, [side.times.fastest for side in known]),
        "processors_s": kendall(predicted, [side.processors_s for side in known]),
    }
    _print_table(rate, sides, taus)
    difference = max(abs(a - b) for side in sides for a, b in zip(side.losses, sides[0].losses, strict=True))
    found = {
        "benchmark": "found_plans",
        **surroundings(),
        **asdict(request.sizes),
        "ranks": ranks,
        "batch": batch,
        "flop_rate": rate,
        "kendall_tau": taus,
        "load": os.getloadavg()[0],
        "loss_max_abs_diff": difference,
        "plans": [
            {
                "name": side.name,
                "mesh": side.mesh,
                "median_s": side.times.median,
                "fastest_s": side.times.fastest,
                "processors_s": side.processors_s,
                "predicted_s": side.predicted_s,
                "received_bytes": side.received_bytes,
                "counted_bytes": side.counted_bytes,
            }
            for side in sides
        ],
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
    write_json(found, json_to)
    if wrong := [side.name for side in sides if side.counted_bytes != side.received_bytes]:
        raise click.ClickException(f"other bytes than predicted arrive in a step of {', '.join(wrong)}")
    if not difference <= _LOSS_TOLERANCE:
        raise click.ClickException(f"the losses differ by up to {difference:.2e}; allowed is {_LOSS_TOLERANCE:.0e}")


def _print_table(rate: float, sides: Sequence[Side], taus: Mapping[str, float]) -> None:
    console, table = (
        Console(width=118),
        Table("plan", "mesh", "median ms", "fastest", "processors", "predicted", "bytes in", "of best", "fastest"),
    )
    best, fastest = (min(getattr(side.times, kind) for side in sides[1:]) for kind in ("median", "fastest"))
    for column in table.columns[2:]:
        column.justify = "right"
    for side in sides:
        predicted = "" if side.predicted_s is None else f"{side.predicted_s * 1e3:.1f}"
        received = "" if side.received_bytes is None else f"{side.received_bytes:,}"
        seconds = side.times.median, side.times.fastest, side.processors_s
        times = [f"{it * 1e3:.1f}" for it in seconds]
        table.add_row(
            side.name,
            side.mesh,
            *times,
            predicted,
            received,
            f"{side.times.median / best:.3f}",
            f"{side.times.fastest / fastest:.3f}",
        )
    console.print(table)
    console.print(
        f"matmuls of {rate:.3g} FLOPs a second; of best, and fastest: in units of the best by hand\n"
        f"Kendall's tau of predicted times and medians {taus['median_s']:.2f}, fastest steps {taus['fastest_s']:.2f}, "
        f"processors' time {taus['processors_s']:.2f}; load {os.getloadavg()[0]:.0f}",
        highlight=False,
    )


# The ranks that the benchmark starts import this file again, under another name.
if __name__ == "__main__":
    found_plans(prog_name="python -m benchmarks.parallel.found_plans")
