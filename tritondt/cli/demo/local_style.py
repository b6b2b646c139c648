"""The style `local`: a model that is one function of named weights on plain tensors, with explicit redistributions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import tritondt as T
from tritondt.cli.demo import data, model
from tritondt.cli.demo.experiment import Experiment, ignore
from tritondt.cli.demo.sharding import OneProcess, Redistribute, Sharding, TensorParallel
from tritondt.cli.demo.traffic import Phase


@dataclass(frozen=True)
class LocalStyle:
    """The demo written on local tensors; `redistribute` moves activations and gradients, a test passes a wrong one
    here.
    """

    redistribute: Redistribute = T.redistribute
    name: str = "local"
    parallel: str = "tp"

    def num_tensor_ranks(self, num_ranks: int) -> int:
        """Ranks that share heads, hidden features and the sequence: all."""
        return num_ranks

    def on_ranks(self, experiment: Experiment, enter: Callable[[Phase], None]) -> LocalLearner:
        """Learner with heads, hidden features and the sequence over all ranks of the process group."""
        mesh = T.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        sharding = TensorParallel(mesh, experiment.model, experiment.batch, redistribute=self.redistribute)
        return LocalLearner(experiment, sharding, enter)

    def on_one_process(self, experiment: Experiment) -> LocalLearner:
        """Learner whose weights are whole."""
        return LocalLearner(experiment, OneProcess(experiment.model))


class LocalLearner:
    """Weights that `sharding` leaves this rank, and its part of every sequence."""

    def __init__(self, experiment: Experiment, sharding: Sharding, enter: Callable[[Phase], None] = ignore) -> None:
        self._experiment, self._sharding, self._enter = experiment, sharding, enter
        whole = model.initial_weights(experiment.model, experiment.seed)
        parameters = model.parameters(experiment.model)
        self._weights = {
            parameter.name: sharding.place(parameter, whole[parameter.name]).requires_grad_()
            for parameter in parameters
        }
        # Held whole by every rank, yet used on its own part of the sequence only.
        self._shared = [self._weights[parameter.name] for parameter in parameters if parameter.placement.is_replicate()]
        self._cut = [self._weights[parameter.name] for parameter in parameters if parameter.placement.is_shard()]
        self._optimizer = torch.optim.AdamW(self._weights.values(), lr=experiment.learning_rate, foreach=True)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, experiment.rate_factor)
        self._batches = data.Batches(experiment.steps, experiment.batch, experiment.model.sequence, experiment.seed)

    def run_step(self, index: int) -> float:
        """Loss before one update; runs the update."""
        self._enter("forward")
        loss = self._loss(index)
        self._enter("backward")
        self._optimizer.zero_grad()
        loss.backward()
        self._enter("gradients")
        self._sharding.sum_replicated(map(_gradient, self._shared))
        self._clip()
        self._optimizer.step()
        self._schedule.step()
        return loss.item()

    def _clip(self) -> None:
        """Scales all gradients down where their norm, that of the whole model, is larger than it may be."""
        shared, cut = list(map(_gradient, self._shared)), list(map(_gradient, self._cut))
        squares = self._sharding.total(_sum_of_squares(cut)) + _sum_of_squares(shared)
        scale = self._experiment.largest_norm / (squares.sqrt() + 1e-6)
        torch._foreach_mul_([*shared, *cut], scale.clamp(max=1.0))

    def _loss(self, index: int) -> Tensor:
        """Mean over all positions of all ranks, in nats a byte."""
        experiment, sharding = self._experiment, self._sharding
        tokens, following = self._batches.read(index, sharding.positions)
        logits = model.next_byte_logits(experiment.model, self._weights, tokens, sharding.positions, sharding)
        own_sum = F.cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="sum")
        return sharding.total(own_sum / experiment.tokens_per_step)


def _sum_of_squares(tensors: list[Tensor]) -> Tensor:
    return torch.stack(torch._foreach_norm(tensors)).square().sum()


def _gradient(weight: Tensor) -> Tensor:
    assert weight.grad is not None, "every weight takes part in the loss"
    return weight.grad
