"""A run of the demo: its settings, the styles of writing it, the training loop, and what the ranks have measured."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import tritondt as T
from tritondt.cli.demo import data
from tritondt.cli.demo.laid_out import BY_TOKENS, ByHand, ByTokens, LaidOut, OnGrid, Redistribute, grid_of
from tritondt.cli.demo.model import Model, make_gpt, make_plan
from tritondt.comm.objects import gather_objects
from tritondt.events import StepRan, subscribe
from tritondt.parallel import ParallelStyle

Phase = Literal["forward", "backward", "gradients"]


@dataclass(frozen=True)
class Kind:
    """One kind of movement: in which phase of a training step, from and to which placements."""

    phase: Phase
    source: str
    target: str


@dataclass(frozen=True)
class Flow:
    """Cost of one kind of movement: calls, messages and bytes sent, seconds including waiting."""

    kind: Kind
    calls: int
    messages: int
    sent_bytes: int
    seconds: float


class Traffic:
    """Sums of the events of one rank; `enter` names the phase that the next events belong to."""

    def __init__(self) -> None:
        self._phase: Phase = "forward"
        self._events: defaultdict[Kind, list[StepRan]] = defaultdict(list)

    def enter(self, phase: Phase) -> None:
        """Counts events for `phase` from now on."""
        self._phase = phase

    def record(self, event: StepRan) -> None:
        """Counts one event; the function to subscribe with."""
        self._events[Kind(self._phase, event.source, event.target)].append(event)

    def flows(self) -> tuple[Flow, ...]:
        """Counts so far on this rank, one flow a kind."""
        return tuple(
            Flow(
                kind,
                calls=len(events),
                messages=sum(event.num_sent for event in events),
                sent_bytes=sum(event.sent_bytes for event in events),
                seconds=sum(event.seconds for event in events),
            )
            for kind, events in self._events.items()
        )


def merge_ranks(flows_of_ranks: Sequence[Iterable[Flow]]) -> tuple[Flow, ...]:
    """Flows of all ranks, one a kind: messages and bytes summed, seconds the mean over the ranks.

    A call that all ranks make together counts once. Ordered by phase, then by bytes.
    """
    by_kind: defaultdict[Kind, list[Flow]] = defaultdict(list)
    for flows in flows_of_ranks:
        for flow in flows:
            by_kind[flow.kind].append(flow)
    merged = (
        Flow(
            kind,
            calls=max(flow.calls for flow in flows),
            messages=sum(flow.messages for flow in flows),
            sent_bytes=sum(flow.sent_bytes for flow in flows),
            seconds=sum(flow.seconds for flow in flows) / len(flows_of_ranks),
        )
        for kind, flows in by_kind.items()
    )
    phases = get_args(Phase)
    return tuple(sorted(merged, key=lambda flow: (phases.index(flow.kind.phase), -flow.sent_bytes)))


@dataclass(frozen=True)
class Experiment:
    """Settings that decide the losses; both runs are given one experiment."""

    model: Model
    steps: int
    batch: int
    seed: int
    learning_rate: float = 1e-3
    warmup_steps: int = 20
    # The norm of the gradient is about 2 in the first step and 0.5 after the warm-up.
    largest_norm: float = 1.0

    @property
    def tokens_per_step(self) -> int:
        """Positions that one step predicts, on all ranks together."""
        return self.batch * self.model.sequence

    def rate_factor(self, index: int) -> float:
        """Factor of the learning rate of a step: it rises from nothing, then stays."""
        return min(1.0, (index + 1) / self.warmup_steps)


@dataclass(frozen=True)
class Step:
    """One finished step: its number from 0, the loss before its update in nats a byte, its time."""

    index: int
    loss: float
    seconds: float


@dataclass(frozen=True)
class RanksRun:
    """Run on all ranks: rank 0's steps and the traffic of all ranks.

    `compute_seconds` and `communication_seconds` are means over the ranks; waiting for a slower rank
    is communication.
    """

    steps: tuple[Step, ...]
    flows: tuple[Flow, ...]
    compute_seconds: float
    communication_seconds: float


def ignore(_: object) -> None:
    """Callback that does nothing."""


class Learner:
    """A training loop as people write one, equal with a mesh and without."""

    def __init__(
        self,
        experiment: Experiment,
        laid_out: LaidOut,
        enter: Callable[[Phase], None] = ignore,
    ) -> None:
        self._laid_out, self._enter, self._largest_norm = laid_out, enter, experiment.largest_norm
        self.model = laid_out.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=experiment.learning_rate, foreach=True)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, experiment.rate_factor)
        sequence = experiment.model.sequence
        self._positions = laid_out.own_positions(torch.arange(sequence))
        self._batches = data.Batches(experiment.steps, experiment.batch, sequence, experiment.seed)

    def run_step(self, index: int) -> float:
        """Loss before one update, in nats a byte; runs the update."""
        with self._laid_out.context():
            loss = self._loss_with_gradients(index)
        self._enter("gradients")
        self._laid_out.clip(self._largest_norm)
        self.optimizer.step()
        self._schedule.step()
        loss = loss.full_tensor() if isinstance(loss, T.DTensor) else loss
        return self._laid_out.mean(loss).item()

    def _loss_with_gradients(self, index: int) -> Tensor:
        """Loss of this rank's part of the batch, once the gradients are there."""
        self._enter("forward")
        tokens, following = self._batches.read(index)
        # Gradients are means over the parts of the batch, which need not be equally long.
        laid_out, num_tokens = self._laid_out, following.numel() / self._laid_out.num_parts
        tokens, following = laid_out.own_part(tokens), laid_out.own_part(following)
        logits = self.model(tokens, self._positions)
        answers = laid_out.by_position(following)
        # A mean would have the ranks agree first on how many bytes there are.
        loss = F.cross_entropy(logits.flatten(0, 1), answers.flatten(), reduction="sum") / num_tokens
        self._enter("backward")
        self.optimizer.zero_grad()
        loss.backward()
        return loss.detach()


@dataclass(frozen=True)
class Style:
    """A way of writing the model and of laying it over ranks; pickled to every rank.

    `name` is that of --style, `parallel` of --parallel: one of `demo.PARALLEL`.
    """

    name: str
    parallel: str = "tp"

    def num_tensor_ranks(self, num_ranks: int) -> int:
        """Ranks that share heads, hidden features and the sequence."""
        return grid_of(self.parallel, num_ranks).tensor

    def lay_out(self, experiment: Experiment, num_ranks: int) -> LaidOut:
        """The model on all ranks of the process group; a collective call."""
        raise NotImplementedError

    def on_ranks(self, experiment: Experiment, enter: Callable[[Phase], None]) -> Learner:
        """This rank's part of the run on all ranks of the process group; `enter` receives the phases of a step."""
        return Learner(experiment, self.lay_out(experiment, dist.get_world_size()), enter)

    def on_one_process(self, experiment: Experiment) -> Learner:
        """Run without ranks."""
        whole = LaidOut()
        whole.model = make_gpt(experiment.model, experiment.seed)
        return Learner(experiment, whole)


@dataclass(frozen=True)
class DTensorStyle(Style):
    """Modules of torch.nn, which a plan lays over the ranks; a test passes a wrong one."""

    name: str = "dtensor"
    make_plan: Callable[[Model], Mapping[str, ParallelStyle]] = make_plan

    def lay_out(self, experiment: Experiment, num_ranks: int) -> LaidOut:
        model = make_gpt(experiment.model, experiment.seed)
        if self.parallel in BY_TOKENS:
            return ByTokens(model, self.parallel, num_ranks, experiment.model.sequence)
        return OnGrid(model, self.parallel, grid_of(self.parallel, num_ranks), self.make_plan(experiment.model))


@dataclass(frozen=True)
class LocalStyle(Style):
    """Plain tensors; `redistribute` moves activations and gradients, a test passes a wrong one."""

    name: str = "local"
    redistribute: Redistribute = T.redistribute

    def lay_out(self, experiment: Experiment, num_ranks: int) -> LaidOut:
        model = make_gpt(experiment.model, experiment.seed)
        return ByHand(model, experiment.model, experiment.batch, num_ranks, self.redistribute)


STYLES: dict[str, Style] = {style.name: style for style in (DTensorStyle(), LocalStyle())}


def train(experiment: Experiment, learner: Learner, *, on_step: Callable[[Step], None] = ignore) -> tuple[Step, ...]:
    """Runs all steps; every rank calls it together with a learner of its own.

    Example: `train(experiment, style.on_one_process(experiment))` is the run on one process.
    """
    steps = []
    for index in range(experiment.steps):
        started = time.perf_counter()
        loss = learner.run_step(index)
        steps.append(Step(index, loss, time.perf_counter() - started))
        on_step(steps[-1])
    return tuple(steps)


def train_on_ranks(experiment: Experiment, style: Style, *, on_step: Callable[[Step], None] = ignore) -> RanksRun:
    """Train on every rank of the process group, which must exist; the result is alike on all ranks."""
    traffic = Traffic()
    learner = style.on_ranks(experiment, traffic.enter)
    unsubscribe = subscribe(traffic.record)
    try:
        steps = train(experiment, learner, on_step=on_step)
    finally:
        unsubscribe()
    flows = traffic.flows()
    communication_seconds = sum(flow.seconds for flow in flows)
    compute_seconds = sum(step.seconds for step in steps) - communication_seconds
    return _merge(steps, flows, compute_seconds, communication_seconds)


def train_on_this_rank(send: Callable[[object], None], experiment: Experiment, style: Style) -> RanksRun:
    """`train_on_ranks` in a process that the demo started; rank 0 sends its steps."""
    return train_on_ranks(experiment, style, on_step=send if dist.get_rank() == 0 else ignore)


def train_on_this_process(send: Callable[[object], None], experiment: Experiment, style: Style) -> tuple[Step, ...]:
    """Run without ranks, in a process that the demo started, which sends its steps."""
    return train(experiment, style.on_one_process(experiment), on_step=send)


def _merge(
    steps: tuple[Step, ...],
    flows: tuple[Flow, ...],
    compute_seconds: float,
    communication_seconds: float,
) -> RanksRun:
    num_ranks = dist.get_world_size()
    own = (steps, flows, compute_seconds, communication_seconds)
    steps_of_ranks, flows_of_ranks, compute, communication = zip(*gather_objects(own), strict=True)
    return RanksRun(
        steps_of_ranks[0],
        merge_ranks(flows_of_ranks),
        sum(compute) / num_ranks,
        sum(communication) / num_ranks,
    )
