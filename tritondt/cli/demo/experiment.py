"""Experiment and results of the demo, for either style of writing the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tritondt.cli.demo import model
from tritondt.cli.demo.traffic import Flow, Phase


@dataclass(frozen=True)
class Experiment:
    """Settings that decide the losses; both runs are given one experiment."""

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


class Learner(Protocol):
    """This rank's weights, optimizer and text; every rank runs the same steps together."""

    def run_step(self, index: int) -> float:
        """Loss before one update, of all positions of all ranks; runs the update."""


class Style(Protocol):
    """Way of writing the model and of laying it over ranks; pickled to every rank."""

    @property
    def name(self) -> str:
        """Name of the style for --style."""

    @property
    def parallel(self) -> str:
        """Way of using the ranks, for --parallel."""

    def num_tensor_ranks(self, num_ranks: int) -> int:
        """Ranks that share heads, hidden features and the sequence."""

    def on_ranks(self, experiment: Experiment, enter: Callable[[Phase], None]) -> Learner:
        """This rank's part of the run on all ranks of the process group; `enter` receives the phases of a step."""

    def on_one_process(self, experiment: Experiment) -> Learner:
        """Run without ranks."""


def ignore(_: object) -> None:
    """Callback that does nothing."""
