"""The style `dtensor`: a model of torch.nn's modules, laid over the ranks by a plan; what moves follows from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import tritondt as T
from tritondt.cli.demo import data
from tritondt.cli.demo.experiment import Experiment, ignore
from tritondt.cli.demo.gpt import make_gpt, make_plan
from tritondt.cli.demo.model import Model
from tritondt.cli.demo.traffic import Phase
from tritondt.parallel import ParallelStyle, parallelize_module


@dataclass(frozen=True)
class DTensorStyle:
    """The demo written with torch.nn modules; `make_plan` lays them over the ranks, and a test passes a wrong one
    here.
    """

    make_plan: Callable[[Model], Mapping[str, ParallelStyle]] = make_plan
    name: str = "dtensor"

    def on_ranks(self, experiment: Experiment, enter: Callable[[Phase], None]) -> DTensorLearner:
        """Learner whose parameters are distributed on all ranks of the process group."""
        mesh = T.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        return DTensorLearner(experiment, mesh, self.make_plan(experiment.model), enter)

    def on_one_process(self, experiment: Experiment) -> DTensorLearner:
        """Learner of the module without a plan."""
        return DTensorLearner(experiment)


class DTensorLearner:
    """A training loop as people write one, equal with a mesh and without."""

    def __init__(
        self,
        experiment: Experiment,
        mesh: T.DeviceMesh | None = None,
        plan: Mapping[str, ParallelStyle] | None = None,
        enter: Callable[[Phase], None] = ignore,
    ) -> None:
        self._mesh, self._enter, self._largest_norm = mesh, enter, experiment.largest_norm
        self._model = make_gpt(experiment.model, experiment.seed)
        if mesh is not None:
            # Every rank has drawn the same weights from the same seed, so that none has to be sent.
            parallelize_module(self._model, mesh, plan, src_data_rank=None)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=experiment.learning_rate, foreach=True)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, experiment.rate_factor)
        sequence = experiment.model.sequence
        self._positions = torch.arange(sequence)
        self._batches = data.Batches(experiment.steps, experiment.batch, sequence, experiment.seed)

    def run_step(self, index: int) -> float:
        """Loss before one update, in nats a byte; runs the update."""
        self._enter("forward")
        tokens, following = self._batches.read(index)
        logits = self._model(tokens, self._positions)
        # A mean would have the ranks agree first on how many bytes there are.
        total = F.cross_entropy(logits.flatten(0, 1), self._by_position(following).flatten(), reduction="sum")
        loss = total / following.numel()
        self._enter("backward")
        self._optimizer.zero_grad()
        loss.backward()
        self._enter("gradients")
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._largest_norm, foreach=True)
        self._optimizer.step()
        self._schedule.step()
        loss = loss.detach()
        return (loss.full_tensor() if isinstance(loss, T.DTensor) else loss).item()

    def _by_position(self, following: Tensor) -> Tensor:
        """Right answers, laid out as the scores are."""
        if self._mesh is None:
            return following
        return T.distribute_tensor(following, self._mesh, [T.Shard(1)], src_data_rank=None)
