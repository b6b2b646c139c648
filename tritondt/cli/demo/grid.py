"""The ranks of the demo as a grid of data and tensor axes, and the model laid over it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import tritondt as T
from tritondt.errors import MeshError
from tritondt.parallel import ParallelStyle, parallelize_module

PARALLEL = ("tp", "fsdp", "fsdp+tp", "hsdp+tp", "ddp+tp", "ep", "cp")
# Ways in which all else than experts, or attention, is on every rank.
BY_TOKENS = ("ep", "cp")


class Grid(NamedTuple):
    """Numbers of ranks that hold equal parameters, that shard them, and that cut tensors."""

    replicate: int
    shard: int
    tensor: int

    @property
    def num_parts(self) -> int:
        """Number of parts of the batch."""
        return self.replicate * self.shard


def grid_of(parallel: str, num_ranks: int) -> Grid:
    """Grid of `num_ranks` for a way of `PARALLEL`; MeshError where their number does not fit.

    >>> grid_of("fsdp+tp", 8)
    Grid(replicate=1, shard=4, tensor=2)
    """
    if parallel == "tp" or parallel in BY_TOKENS:
        return Grid(1, 1, num_ranks)
    if parallel == "fsdp":
        return Grid(1, num_ranks, 1)
    factor = 4 if parallel == "hsdp+tp" else 2
    if num_ranks % factor:
        raise MeshError(f"{parallel} takes a number of ranks that is a multiple of {factor}, got {num_ranks}")
    if parallel == "ddp+tp":
        return Grid(num_ranks // 2, 1, 2)
    return Grid(1, num_ranks // 2, 2) if parallel == "fsdp+tp" else Grid(2, num_ranks // 4, 2)


def num_batch_parts(parallel: str, num_ranks: int) -> int:
    """Number of ranks that share the batch; MeshError where the number of ranks does not fit.

    >>> num_batch_parts("fsdp+tp", 8), num_batch_parts("ep", 8), num_batch_parts("cp", 8)
    (4, 8, 1)
    """
    return num_ranks if parallel == "ep" else grid_of(parallel, num_ranks).num_parts


class LaidOut:
    """A model on a grid, and this rank's part of batches and losses."""

    def __init__(self, model: nn.Module, parallel: str, grid: Grid, plan: Mapping[str, ParallelStyle]) -> None:
        self.mesh = T.init_device_mesh("cpu", grid, mesh_dim_names=("replicate", "shard", "tp"))
        self.num_parts = grid.num_parts
        self.part = int(self.mesh["replicate", "shard"].get_local_rank(0)) * grid.shard
        self.part += int(self.mesh["shard"].get_local_rank())
        self.cuts = parallel != "fsdp"
        if self.cuts:
            # Every rank has drawn the same weights from the same seed, so that none has to be sent.
            parallelize_module(model, self.mesh["tp"], plan, src_data_rank=None)
        self.model: nn.Module = model
        if "fsdp" in parallel or "hsdp" in parallel:
            self._shard(model, parallel)
        elif parallel == "ddp+tp":
            self.model = DistributedDataParallel(model, process_group=self.mesh["replicate"].get_group())

    def _shard(self, model: nn.Module, parallel: str) -> None:
        from tritondt.fsdp import fully_shard  # noqa: PLC0415  torch.distributed.fsdp takes long to import

        data = self.mesh["replicate", "shard"] if parallel == "hsdp+tp" else self.mesh["shard"]
        blocks: Any = model.get_submodule("blocks")
        for block in blocks:
            fully_shard(block, mesh=data)
        fully_shard(model, mesh=data)

    def context(self) -> AbstractContextManager[None]:
        """Context of forward and backward: DistributedDataParallel has plain tensors of its own beside gradients."""
        return T.implicit_replication() if isinstance(self.model, DistributedDataParallel) else nullcontext()

    def own_part(self, batch: Tensor) -> Tensor:
        """This rank's part of a batch, which need not divide."""
        return torch.tensor_split(batch, self.num_parts)[self.part]

    def own_positions(self, positions: Tensor) -> Tensor:
        """Positions of the model's tokens: all, which a plan may cut."""
        return positions

    def by_position(self, following: Tensor) -> Tensor:
        """Right answers, laid out as the scores are."""
        if not self.cuts:
            return following
        return T.distribute_tensor(following, self.mesh["tp"], [T.Shard(1)], src_data_rank=None)

    def mean(self, loss: Tensor) -> Tensor:
        """Mean of the losses of all parts of the batch."""
        if self.num_parts == 1:
            return loss
        data = self.mesh["replicate", "shard"]
        return T.DTensor.from_local(loss.reshape(1), data, [T.Partial("avg")] * 2).full_tensor().reshape(())
