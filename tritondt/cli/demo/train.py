"""Training of the demo's model: one loop for either style, on one process and on the ranks."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch.distributed as dist

from tritondt.cli.demo.dtensor_style import DTensorStyle
from tritondt.cli.demo.experiment import Experiment, Learner, RanksRun, Step, Style, ignore
from tritondt.cli.demo.local_style import LocalStyle
from tritondt.cli.demo.traffic import Flow, Traffic, merge_ranks
from tritondt.comm.objects import gather_objects
from tritondt.events import subscribe

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
