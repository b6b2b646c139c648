"""Trains the demo's model: the same loop for one process and for the ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import tritondt as T
from tritondt.cli.demo import data, model
from tritondt.cli.demo.sharding import OneProcess, Redistribute, Sharding, TensorParallel
from tritondt.cli.demo.traffic import Flow, Phase, Traffic, merge_ranks
from tritondt.events import subscribe


@dataclass(frozen=True)
class Experiment:
    """Everything that decides the losses; both runs are given the same one."""

    model: model.Model
    steps: int
    batch: int
    seed: int
    learning_rate: float = 1e-3
    warmup_steps: int = 20

    @property
    def tokens_per_step(self) -> int:
        """Positions that one step predicts, on all ranks together."""
        return self.batch * self.model.sequence


@dataclass(frozen=True)
class Step:
    """One finished step: its number from 0, the loss before its update in nats a byte, its time."""

    index: int
    loss: float
    seconds: float


@dataclass(frozen=True)
class RanksRun:
    """A run on all ranks: rank 0's steps and what all ranks sent.

    `compute_seconds` and `communication_seconds` are means over the ranks; waiting for a slower rank
    is communication.
    """

    steps: tuple[Step, ...]
    flows: tuple[Flow, ...]
    compute_seconds: float
    communication_seconds: float


def ignore(_: object) -> None:
    """Callback for who does not want to be told."""


def train_model(
    experiment: Experiment,
    sharding: Sharding,
    *,
    on_step: Callable[[Step], None] = ignore,
    enter: Callable[[Phase], None] = ignore,
) -> tuple[Step, ...]:
    """Train from the experiment's seed; every rank of `sharding` calls it together.

    Example: `train_model(experiment, OneProcess(experiment.model))` is the run on one process.
    """
    learner = _Learner(experiment, sharding, enter)
    steps = []
    for index in range(experiment.steps):
        started = time.perf_counter()
        loss = learner.run_step(index)
        steps.append(Step(index, loss, time.perf_counter() - started))
        on_step(steps[-1])
    return tuple(steps)


def train_on_ranks(
    experiment: Experiment,
    *,
    on_step: Callable[[Step], None] = ignore,
    redistribute: Redistribute = T.redistribute,
) -> RanksRun:
    """Train on every rank of the process group, which must exist; the result is alike on all ranks.

    `redistribute` moves all activations and gradients; a test passes a wrong one here.
    """
    mesh = T.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    sharding = TensorParallel(mesh, experiment.model, experiment.batch, redistribute=redistribute)
    traffic = Traffic()
    unsubscribe = subscribe(traffic.record)
    try:
        steps = train_model(experiment, sharding, on_step=on_step, enter=traffic.enter)
    finally:
        unsubscribe()
    flows = traffic.flows()
    communication_seconds = sum(flow.seconds for flow in flows)
    compute_seconds = sum(step.seconds for step in steps) - communication_seconds
    return _merge(steps, flows, compute_seconds, communication_seconds)


def train_on_this_rank(send: Callable[[object], None], experiment: Experiment, redistribute: Redistribute) -> RanksRun:
    """`train_on_ranks` in a process that the demo started; rank 0 sends its steps."""
    on_step = send if dist.get_rank() == 0 else ignore
    return train_on_ranks(experiment, on_step=on_step, redistribute=redistribute)


def train_on_this_process(send: Callable[[object], None], experiment: Experiment) -> tuple[Step, ...]:
    """The run without ranks, in a process that the demo started, which sends its steps."""
    return train_model(experiment, OneProcess(experiment.model), on_step=send)


def _merge(
    steps: tuple[Step, ...],
    flows: tuple[Flow, ...],
    compute_seconds: float,
    communication_seconds: float,
) -> RanksRun:
    num_ranks = dist.get_world_size()
    own = (steps, flows, compute_seconds, communication_seconds)
    everyone: list[tuple[tuple[Step, ...], tuple[Flow, ...], float, float]] = [own] * num_ranks
    dist.all_gather_object(everyone, own)
    steps_of_ranks, flows_of_ranks, compute, communication = zip(*everyone, strict=True)
    return RanksRun(
        steps_of_ranks[0],
        merge_ranks(flows_of_ranks),
        sum(compute) / num_ranks,
        sum(communication) / num_ranks,
    )


class _Learner:
    """This rank's weights, optimizer and text; every rank runs the same steps together."""

    def __init__(self, experiment: Experiment, sharding: Sharding, enter: Callable[[Phase], None]) -> None:
        self._experiment, self._sharding, self._enter = experiment, sharding, enter
        whole = model.initial_weights(experiment.model, experiment.seed)
        parameters = model.parameters(experiment.model)
        self._weights = {
            parameter.name: sharding.place(parameter, whole[parameter.name]).requires_grad_()
            for parameter in parameters
        }
        # Held whole by every rank, yet used on its own part of the sequence only.
        self._shared = [self._weights[parameter.name] for parameter in parameters if parameter.placement.is_replicate()]
        self._optimizer = torch.optim.AdamW(self._weights.values(), lr=experiment.learning_rate, fused=True)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda index: min(1.0, (index + 1) / experiment.warmup_steps)
        )
        self._text = data.corpus()
        self._starts = data.batch_starts(
            len(self._text),
            steps=experiment.steps,
            batch=experiment.batch,
            sequence=experiment.model.sequence,
            seed=experiment.seed,
        )

    def run_step(self, index: int) -> float:
        """One update; the loss before it."""
        self._enter("forward")
        loss = self._loss(self._starts[index])
        self._enter("backward")
        self._optimizer.zero_grad()
        loss.backward()
        self._enter("gradients")
        self._sharding.sum_replicated(_gradient(weight) for weight in self._shared)
        self._optimizer.step()
        self._schedule.step()
        return loss.item()

    def _loss(self, starts: Tensor) -> Tensor:
        """The mean over all positions of all ranks, in nats a byte."""
        experiment, sharding = self._experiment, self._sharding
        tokens, following = data.read_batch(self._text, starts, sharding.positions)
        logits = model.next_byte_logits(experiment.model, self._weights, tokens, sharding.positions, sharding)
        own_sum = F.cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="sum")
        return sharding.total(own_sum / experiment.tokens_per_step)


def _gradient(weight: Tensor) -> Tensor:
    assert weight.grad is not None, "every weight takes part in the loss"
    return weight.grad
