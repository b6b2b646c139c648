"""The model on ranks that each have tokens of their own: parts of the batch with experts apart, or of the sequence."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import tritondt as T
from tritondt.parallel import (
    ExpertParallel,
    ParallelStyle,
    ReplicateParallel,
    context_parallel_shard,
    parallelize_module,
    ring_attention,
)


class LaidOutByTokens:
    """A model on ranks that share the batch and the experts ("ep") or the sequence ("cp").

    All else is on every rank, with gradients that are sums over the ranks.
    """

    num_parts = 1  # of a mean: losses and gradients are sums

    def __init__(self, model: nn.Module, parallel: str, num_ranks: int, sequence: int) -> None:
        self.model = model
        self._by_sequence = parallel == "cp"
        self._mesh = T.init_device_mesh("cpu", (num_ranks,), mesh_dim_names=(parallel,))
        plan: dict[str, ParallelStyle] = {"": ReplicateParallel(input_layouts=T.Shard(int(self._by_sequence)))}
        if self._by_sequence:
            plan = {"position_embedding": ReplicateParallel(input_layouts=T.Shard(0)), **plan}
            blocks: Any = model.get_submodule("blocks")
            for block in blocks:
                block.attention.attend = partial(ring_attention, device_mesh=self._mesh, length=sequence, balanced=True)
        else:
            plan = {"blocks.*.mlp.experts": ExpertParallel(), **plan}
        # Every rank has drawn the same weights from the same seed, so that none has to be sent.
        parallelize_module(model, self._mesh, plan, src_data_rank=None)

    def context(self) -> AbstractContextManager[None]:
        """Context of forward and backward: none."""
        return nullcontext()

    def own_part(self, batch: Tensor) -> Tensor:
        """This rank's sequences of a batch, or positions of all; neither need divide."""
        if self._by_sequence:
            return context_parallel_shard(batch, self._mesh, 1, balanced=True)
        return torch.tensor_split(batch, self._mesh.size())[self._mesh.get_local_rank()]

    def own_positions(self, positions: Tensor) -> Tensor:
        """Positions of this rank's tokens."""
        return context_parallel_shard(positions, self._mesh, 0, balanced=True) if self._by_sequence else positions

    def by_position(self, following: Tensor) -> Tensor:
        """Right answers, laid out as the scores are."""
        return following

    def mean(self, loss: Tensor) -> Tensor:
        """Mean of all tokens, of which `loss` is this rank's term."""
        return T.DTensor.from_local(loss.reshape(1), self._mesh, [T.Partial()]).full_tensor().reshape(())
