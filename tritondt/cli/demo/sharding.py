"""The two ways in which the demo holds its model: whole on one process, or cut over the ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

import tritondt as T
from tritondt.cli.demo.model import Boundaries, Model, Parameter


class Sharding(Boundaries, Protocol):
    """Division of weights, sequence, loss and gradients; `Boundaries` moves the activations."""

    @property
    def positions(self) -> slice:
        """Part of every sequence that this rank reads."""

    def place(self, parameter: Parameter, whole: Tensor) -> Tensor:
        """This rank's piece of a weight, a tensor of its own."""

    def total(self, loss: Tensor) -> Tensor:
        """Loss summed over the ranks' parts of the sequence."""

    def sum_replicated(self, gradients: Iterable[Tensor]) -> None:
        """Adds, in place, the gradients of all ranks for the weights that all of them hold whole."""


class OneProcess:
    """Sharding on one process, where nothing is cut and nothing moves: the run that the ranks are compared with."""

    def __init__(self, model: Model) -> None:
        self.positions = slice(0, model.sequence)

    def gather(self, x: Tensor) -> Tensor:
        return x

    def scatter(self, x: Tensor) -> Tensor:
        return x

    def place(self, parameter: Parameter, whole: Tensor) -> Tensor:
        return whole.clone()

    def total(self, loss: Tensor) -> Tensor:
        return loss

    def sum_replicated(self, gradients: Iterable[Tensor]) -> None:
        return


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


class TensorParallel:
    """Sharding of heads and hidden features over one mesh axis, and of the sequence between the blocks."""

    def __init__(
        self,
        mesh: T.DeviceMesh,
        model: Model,
        batch: int,
        *,
        redistribute: Redistribute = T.redistribute,
    ) -> None:
        self._mesh = mesh
        self._redistribute = redistribute
        shape = (batch, model.sequence, model.width)
        self._by_sequence = self._spec(shape, T.Shard(1))
        self._whole = self._spec(shape, T.Replicate())
        self._partial = self._spec(shape, T.Partial())
        self.positions = self._own(shape, T.Shard(1))[1]

    def gather(self, x: Tensor) -> Tensor:
        # Each rank's matmul gives a contribution to the gradient of the whole: its sum is scattered.
        return self._redistribute(x, self._by_sequence, self._whole, grad_placements=(T.Partial(),))

    def scatter(self, x: Tensor) -> Tensor:
        return self._redistribute(x, self._partial, self._by_sequence)

    def place(self, parameter: Parameter, whole: Tensor) -> Tensor:
        return whole[self._own(parameter.shape, parameter.placement)].clone()

    def total(self, loss: Tensor) -> Tensor:
        return self._sum(loss.reshape(1)).reshape(())

    def sum_replicated(self, gradients: Iterable[Tensor]) -> None:
        gradients = list(gradients)
        summed = self._sum(torch.cat([gradient.reshape(-1) for gradient in gradients]))
        pieces = summed.split([gradient.numel() for gradient in gradients])
        for gradient, piece in zip(gradients, pieces, strict=True):
            gradient.copy_(piece.view_as(gradient))

    def _sum(self, x: Tensor) -> Tensor:
        shape = tuple(x.shape)
        return self._redistribute(x, self._spec(shape, T.Partial()), self._spec(shape, T.Replicate()))

    def _spec(self, shape: tuple[int, ...], placement: T.Placement) -> T.DTensorSpec:
        meta = T.TensorMeta.contiguous(shape, torch.float32)
        return T.DTensorSpec(self._mesh, (placement,), meta)

    def _own(self, shape: tuple[int, ...], placement: T.Placement) -> tuple[slice, ...]:
        local_shape, offset = T.compute_local_shape_and_global_offset(shape, self._mesh, (placement,))
        return tuple(slice(start, start + length) for start, length in zip(offset, local_shape, strict=True))
