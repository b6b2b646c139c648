"""The style `dtensor`: a model of torch.nn's modules, laid over the ranks by a plan; what moves follows from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import tritondt as T
from tritondt.cli.demo import data
from tritondt.cli.demo.by_tokens import LaidOutByTokens
from tritondt.cli.demo.experiment import Experiment, ignore
from tritondt.cli.demo.gpt import make_gpt, make_plan
from tritondt.cli.demo.grid import BY_TOKENS, LaidOut, grid_of
from tritondt.cli.demo.model import Model
from tritondt.cli.demo.traffic import Phase
from tritondt.parallel import ParallelStyle


@dataclass(frozen=True)
class DTensorStyle:
    """The demo written with torch.nn modules; `make_plan` lays them over the ranks, and a test passes a wrong one
    here. `parallel` is one of `grid.PARALLEL`.
    """

    make_plan: Callable[[Model], Mapping[str, ParallelStyle]] = make_plan
    name: str = "dtensor"
    parallel: str = "tp"

    def num_tensor_ranks(self, num_ranks: int) -> int:
        """Ranks that share heads, hidden features and the sequence."""
        return grid_of(self.parallel, num_ranks).tensor

    def on_ranks(self, experiment: Experiment, enter: Callable[[Phase], None]) -> DTensorLearner:
        """Learner whose parameters are distributed on all ranks of the process group."""
        model = make_gpt(experiment.model, experiment.seed)
        num_ranks = dist.get_world_size()
        laid_out: LaidOut | LaidOutByTokens
        if self.parallel in BY_TOKENS:
            laid_out = LaidOutByTokens(model, self.parallel, num_ranks, experiment.model.sequence)
        else:
            grid = grid_of(self.parallel, num_ranks)
            laid_out = LaidOut(model, self.parallel, grid, self.make_plan(experiment.model))
        return DTensorLearner(experiment, laid_out.model, laid_out, enter)

    def on_one_process(self, experiment: Experiment) -> DTensorLearner:
        """Learner of the module without a plan."""
        return DTensorLearner(experiment, make_gpt(experiment.model, experiment.seed))


class DTensorLearner:
    """A training loop as people write one, equal with a mesh and without."""

    def __init__(
        self,
        experiment: Experiment,
        model: nn.Module,
        laid_out: LaidOut | LaidOutByTokens | None = None,
        enter: Callable[[Phase], None] = ignore,
    ) -> None:
        self._laid_out, self._enter, self._largest_norm = laid_out, enter, experiment.largest_norm
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=experiment.learning_rate, foreach=True)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, experiment.rate_factor)
        sequence = experiment.model.sequence
        positions = torch.arange(sequence)
        self._positions = positions if laid_out is None else laid_out.own_positions(positions)
        self._batches = data.Batches(experiment.steps, experiment.batch, sequence, experiment.seed)

    def run_step(self, index: int) -> float:
        """Loss before one update, in nats a byte; runs the update."""
        with nullcontext() if self._laid_out is None else self._laid_out.context():
            loss = self._loss_with_gradients(index)
        self._enter("gradients")
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._largest_norm, foreach=True)
        self.optimizer.step()
        self._schedule.step()
        loss = loss.full_tensor() if isinstance(loss, T.DTensor) else loss
        return (loss if self._laid_out is None else self._laid_out.mean(loss)).item()

    def _loss_with_gradients(self, index: int) -> Tensor:
        """Loss of this rank's part of the batch, once the gradients are there."""
        self._enter("forward")
        tokens, following = self._batches.read(index)
        laid_out, num_tokens = self._laid_out, float(following.numel())
        if laid_out is not None:
            tokens, following = laid_out.own_part(tokens), laid_out.own_part(following)
            # Gradients are means over the parts of the batch, which need not be equally long.
            num_tokens /= laid_out.num_parts
        logits = self.model(tokens, self._positions)
        answers = following if laid_out is None else laid_out.by_position(following)
        # A mean would have the ranks agree first on how many bytes there are.
        loss = F.cross_entropy(logits.flatten(0, 1), answers.flatten(), reduction="sum") / num_tokens
        self._enter("backward")
        self.optimizer.zero_grad()
        loss.backward()
        return loss.detach()
