"""What is trained and what comes out of it, for either style of writing the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tritondt.cli.demo import model
from tritondt.cli.demo.traffic import Flow, Phase


@dataclass(frozen=True)
class Experiment:
    """Everything that decides the losses; both runs are given the same one."""

    model: model.Model
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
        """What the learning rate of a step is multiplied by: it rises from nothing, then stays."""
        return min(1.0, (index + 1) / self.warmup_steps)


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


class Learner(Protocol):
    """This rank's weights, optimizer and text; every rank runs the same steps together."""

    def run_step(self, index: int) -> float:
        """One update; the loss before it, of all positions of all ranks."""


class Style(Protocol):
    """A way of writing the model and of laying it over ranks; pickled to every rank."""

    @property
    def name(self) -> str:
        """What --style calls it."""

    def on_ranks(self, experiment: Experiment, enter: Callable[[Phase], None]) -> Learner:
        """This rank's part of the run on all ranks of the process group; `enter` is told the phases of a step."""

    def on_one_process(self, experiment: Experiment) -> Learner:
        """The same without ranks."""


def ignore(_: object) -> None:
    """Callback for who does not want to be told."""
