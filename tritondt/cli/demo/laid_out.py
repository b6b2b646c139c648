"""The demo's model laid over the ranks: on a grid of data and tensor axes, by tokens, or with every move by hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import tritondt as T
from tritondt.cli.demo.model import Model
from tritondt.comm import world
from tritondt.errors import MeshError
from tritondt.parallel import (
    ExpertParallel,
    ParallelStyle,
    ReplicateParallel,
    context_parallel_shard,
    parallelize_module,
    ring_attention,
)

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
    """Grid of `num_ranks` for a way of --parallel; MeshError where their number does not fit.

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
    """A model on the ranks, and this rank's part of batches and losses; as it is here, on one process."""

    model: nn.Module
    num_parts = 1  # of the batch; gradients are means over them

    def context(self) -> AbstractContextManager[None]:
        """Context of forward and backward: none."""
        return nullcontext()

    def own_part(self, batch: Tensor) -> Tensor:
        """This rank's part of a batch."""
        return batch

    def own_positions(self, positions: Tensor) -> Tensor:
        """Positions of this rank's tokens: all, which a plan may cut."""
        return positions

    def by_position(self, following: Tensor) -> Tensor:
        """Right answers, laid out as the scores are."""
        return following

    def clip(self, largest_norm: float) -> None:
        """Scales all gradients down where their norm, that of the whole model, is larger than it may be."""
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), largest_norm, foreach=True)

    def mean(self, loss: Tensor) -> Tensor:
        """Mean over all tokens of all ranks, from this rank's loss."""
        return loss


def _mesh_of(parallel: str, grid: Grid) -> Any:
    """The mesh of a grid; of "hsdp+tp" on several hosts a replica for each host, found whatever ranks it has."""
    names = ("replicate", "shard", "tp")
    if parallel == "hsdp+tp" and len(set(world.current().hosts(range(prod(grid))))) > 1:
        from tritondt.fsdp import init_host_mesh  # noqa: PLC0415  torch.distributed.fsdp takes long to import

        return init_host_mesh("cpu", (-1, grid.tensor), mesh_dim_names=names)
    return T.init_device_mesh("cpu", grid, mesh_dim_names=names)


class OnGrid(LaidOut):
    """A model on a grid, under a plan."""

    def __init__(self, model: nn.Module, parallel: str, grid: Grid, plan: Mapping[str, ParallelStyle]) -> None:
        self.mesh = _mesh_of(parallel, grid)
        self.num_parts = grid.num_parts
        self.part = int(self.mesh["replicate", "shard"].get_local_rank(0)) * int(self.mesh["shard"].size())
        self.part += int(self.mesh["shard"].get_local_rank())
        self.cuts = parallel != "fsdp"
        if self.cuts:
            # Every rank has drawn the same weights from the same seed, so that none has to be sent.
            parallelize_module(model, self.mesh["tp"], plan, src_data_rank=None)
        self.model = model
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
        # DistributedDataParallel has plain tensors of its own beside gradients.
        return T.implicit_replication() if isinstance(self.model, DistributedDataParallel) else nullcontext()

    def own_part(self, batch: Tensor) -> Tensor:
        return torch.tensor_split(batch, self.num_parts)[self.part]

    def by_position(self, following: Tensor) -> Tensor:
        if not self.cuts:
            return following
        return T.distribute_tensor(following, self.mesh["tp"], [T.Shard(1)], src_data_rank=None)

    def mean(self, loss: Tensor) -> Tensor:
        if self.num_parts == 1:
            return loss
        data = self.mesh["replicate", "shard"]
        return T.DTensor.from_local(loss.reshape(1), data, [T.Partial("avg")] * 2).full_tensor().reshape(())


class ByTokens(LaidOut):
    """A model on ranks that share the batch and the experts ("ep") or the sequence ("cp").

    All else is on every rank, with gradients that are sums over the ranks.
    """

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

    def own_part(self, batch: Tensor) -> Tensor:
        if self._by_sequence:
            return context_parallel_shard(batch, self._mesh, 1, balanced=True)
        return torch.tensor_split(batch, self._mesh.size())[self._mesh.get_local_rank()]

    def own_positions(self, positions: Tensor) -> Tensor:
        return context_parallel_shard(positions, self._mesh, 0, balanced=True) if self._by_sequence else positions

    def mean(self, loss: Tensor) -> Tensor:
        return T.DTensor.from_local(loss.reshape(1), self._mesh, [T.Partial()]).full_tensor().reshape(())


class Redistribute(Protocol):
    """`tritondt.redistribute`, or a stand-in that a test passes."""

    def __call__(
        self,
        local: Tensor,
        source: T.DTensorSpec,
        target: T.DTensorSpec,
        *,
        grad_placements: tuple[T.Placement, ...] | None = None,
    ) -> Tensor:
        """Piece of this rank under `target`."""


def cut_of(sizes: Model, name: str) -> T.Placement:
    """Cut of a weight over the ranks: of heads and hidden features; all others are on every rank.

    >>> cut_of(Model(heads=6, layers=1, width=24, sequence=5), "blocks.0.attention.wo.weight")
    S1(unit=4)
    """
    cuts = {
        ".qkv.weight": T.Shard(0, unit=sizes.head_width, repeats=3),
        ".qkv.bias": T.Shard(0, unit=sizes.head_width, repeats=3),
        ".wo.weight": T.Shard(1, unit=sizes.head_width),
        ".up.weight": T.Shard(0),
        ".up.bias": T.Shard(0),
        ".down.weight": T.Shard(1),
    }
    return next((cut for ending, cut in cuts.items() if name.endswith(ending)), T.Replicate())


class ByHand(LaidOut):
    """A model of plain local tensors, in which every move between ranks is a call of `redistribute`.

    Heads, hidden features and, between the blocks, the sequence are over one mesh axis. Shapes of activations: (batch,
    own part of the sequence, width) outside attention and MLP, (batch, sequence, width) in them.
    """

    def __init__(self, model: nn.Module, sizes: Model, batch: int, num_ranks: int, redistribute: Redistribute) -> None:
        self.model, self._redistribute = model, redistribute
        self._mesh = T.init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("tp",))
        shape = (batch, sizes.sequence, sizes.width)
        by_sequence, whole, terms = (self._spec(shape, each) for each in (T.Shard(1), T.Replicate(), T.Partial()))
        lengths, starts = T.compute_local_shape_and_global_offset(shape, self._mesh, (T.Shard(1),))
        self._positions = slice(starts[1], starts[1] + lengths[1])
        self._shared: list[nn.Parameter] = []
        self._cut: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            cut = cut_of(sizes, name)
            (self._shared if cut.is_replicate() else self._cut).append(parameter)
            placed = T.distribute_tensor(parameter.detach(), self._mesh, (cut,), src_data_rank=None)
            parameter.data = placed.to_local().clone()

        def gather(_: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            # Each rank's matmul gives a contribution to the gradient of the whole: its sum is scattered.
            x = redistribute(given[0], by_sequence, whole, grad_placements=(T.Partial(),))
            return x, *given[1:]

        def scatter(bias: Tensor, _: nn.Module, __: object, result: Tensor) -> Tensor:
            return redistribute(result, terms, by_sequence) + bias

        blocks: Any = model.get_submodule("blocks")
        for block in blocks:
            for module, last in ((block.attention, block.attention.wo), (block.mlp, block.mlp.down)):
                bias = last.bias
                last.bias = None  # which is added once, to the sum
                module.register_parameter("bias", bias)
                module.register_forward_pre_hook(gather)
                module.register_forward_hook(partial(scatter, bias))

    def own_part(self, batch: Tensor) -> Tensor:
        return batch[:, self._positions]

    def own_positions(self, positions: Tensor) -> Tensor:
        return positions[self._positions]

    def clip(self, largest_norm: float) -> None:
        # All ranks hold the shared weights whole, yet use them on their own part of the sequence only.
        shared, cut = _gradients(self._shared), _gradients(self._cut)
        summed = self._sum(torch.cat([gradient.reshape(-1) for gradient in shared]))
        pieces = summed.split([gradient.numel() for gradient in shared])
        for gradient, piece in zip(shared, pieces, strict=True):
            gradient.copy_(piece.view_as(gradient))
        squares = self.mean(_sum_of_squares(cut)) + _sum_of_squares(shared)
        scale = largest_norm / (squares.sqrt() + 1e-6)
        torch._foreach_mul_([*shared, *cut], scale.clamp(max=1.0))

    def mean(self, loss: Tensor) -> Tensor:
        return self._sum(loss.reshape(1)).reshape(())

    def _sum(self, x: Tensor) -> Tensor:
        shape = tuple(x.shape)
        return self._redistribute(x, self._spec(shape, T.Partial()), self._spec(shape, T.Replicate()))

    def _spec(self, shape: tuple[int, ...], placement: T.Placement) -> T.DTensorSpec:
        return T.DTensorSpec(self._mesh, (placement,), T.TensorMeta.contiguous(shape, torch.float32))


def _gradients(weights: Iterable[nn.Parameter]) -> list[Tensor]:
    return [weight.grad for weight in weights if weight.grad is not None]


def _sum_of_squares(tensors: list[Tensor]) -> Tensor:
    return torch.stack(torch._foreach_norm(tensors)).square().sum()
