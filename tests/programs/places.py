"""Where a program runs: on one device with plain tensors, or on a mesh with distributed ones.

A program asks its place for what differs between the two; all else is written alike. This file imports torch and
tritondt alone: a failing program is printed with it in front.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

import tritondt as T


def whole_tensor(seed: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, which every dtype adds and multiplies exactly."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(2, tuple(shape), generator=generator).bool()
    if dtype.is_complex:
        return torch.view_as_complex(torch.randint(-3, 4, (*shape, 2), generator=generator).to(dtype.to_real()))
    return torch.randint(-3, 4, tuple(shape), generator=generator).to(dtype)


def terms_of(whole: torch.Tensor, op: str, num_terms: int, num_of_mean: int, seed: int) -> list[torch.Tensor]:
    """Different terms whose reduction by `op` is `whole`, exactly; another one decides at every element."""
    if op in ("sum", "avg"):
        others = [whole_tensor(seed + term, whole.shape, whole.dtype) for term in range(1, num_terms)]
        return [term * num_of_mean for term in (whole - sum(others), *others)]
    chooser = torch.Generator().manual_seed(seed)
    deciding = torch.randint(num_terms, whole.shape, generator=chooser)
    if op == "product":
        weaker = torch.ones_like(whole)
    elif whole.dtype is torch.bool:
        weaker = torch.full_like(whole, op == "min")
    else:
        weaker = whole - 2 if op == "max" else whole + 2
    return [torch.where(deciding == term, whole, weaker) for term in range(num_terms)]


class OneDevice:
    """Plain tensors: what a program must give on every mesh."""

    def make(self, seed: int, shape: Any, dtype: str, placements: str, order: Any, requires_grad: bool) -> torch.Tensor:
        """The whole tensor."""
        return whole_tensor(seed, shape, getattr(torch, dtype)).requires_grad_(requires_grad)

    def move(self, tensor: torch.Tensor, placements: str, order: Any = None, **asked: Any) -> torch.Tensor:
        """A contiguous copy."""
        return tensor.clone(memory_format=torch.contiguous_format)

    def prefetch(self, tensor: torch.Tensor, placements: str, order: Any = None) -> None:
        """Nothing."""

    def wait(self, tensor: torch.Tensor) -> None:
        """Nothing."""

    def through_local(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy."""
        return tensor.clone(memory_format=torch.contiguous_format)

    def through_whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy."""
        return self.through_local(tensor)

    def through_columns(self, tensor: torch.Tensor) -> torch.Tensor:
        """The transposed view of a contiguous copy."""
        return self.through_local(tensor).mT

    def compiled(self, function: Callable[..., Any], backend: str) -> Callable[..., Any]:
        """The function as it is."""
        return function


class OnMesh(OneDevice):
    """Distributed tensors on a mesh of some ranks of the world."""

    def __init__(self, mesh_shape: Sequence[int], ranks: Sequence[int]) -> None:
        self.mesh = T.Mesh(tuple(mesh_shape), ranks=tuple(ranks))

    def make(self, seed: int, shape: Any, dtype: str, placements: str, order: Any, requires_grad: bool) -> torch.Tensor:
        """The tensor under the placements; terms of a Partial differ."""
        whole = whole_tensor(seed, shape, getattr(torch, dtype))
        wanted = T.parse_placements(placements)
        ops = [placement.reduce_op if isinstance(placement, T.Partial) else None for placement in wanted]
        if any(ops):
            sizes = [size if op else 1 for size, op in zip(self.mesh.shape, ops, strict=True)]
            means = prod(size for size, op in zip(self.mesh.shape, ops, strict=True) if op == "avg")
            terms = terms_of(whole, next(filter(None, ops)), prod(sizes), means, seed + 1000)
            whole = terms[self._term(sizes)]
        cut = [T.Replicate() if op else placement for op, placement in zip(ops, wanted, strict=True)]
        local = T.distribute_tensor(whole, self.mesh, cut, src_data_rank=None, order=order).to_local()
        made = T.DTensor.from_local(local, self.mesh, wanted, shape=torch.Size(shape), order=order)
        return made.requires_grad_(requires_grad)

    def _term(self, sizes: Sequence[int]) -> int:
        """Which of the terms this rank holds."""
        found = 0
        for size, index in zip(sizes, self.mesh.coordinate or (0,) * len(sizes), strict=True):
            found = found * size + min(index, size - 1)
        return found

    def move(self, tensor: Any, placements: str, order: Any = None, **asked: Any) -> torch.Tensor:
        """The tensor under other placements; a copy where these are its own."""
        found = tensor.redistribute(placements=T.parse_placements(placements), order=order, **asked)
        return super().move(found, placements) if found._spec is tensor._spec else found

    def prefetch(self, tensor: Any, placements: str, order: Any = None) -> None:
        """Sends ahead what a later redistribution to these placements needs."""
        T.prefetch(tensor, T.parse_placements(placements), order=order)

    def wait(self, tensor: Any) -> None:
        """Waits for a redistribution that is under way."""
        tensor.wait()

    def through_local(self, tensor: Any) -> torch.Tensor:
        """A tensor of copies of the local tensors, under the placements that it had."""
        local, spec = super().through_local(tensor.to_local()), tensor._spec
        return T.DTensor.from_local(local, self.mesh, spec.placements, shape=tensor.shape, order=spec.order)

    def through_whole(self, tensor: Any) -> torch.Tensor:
        """A replicated tensor of what every rank gathers."""
        return self._replicated(super().through_local(tensor.full_tensor()), tensor.shape)

    def through_columns(self, tensor: Any) -> torch.Tensor:
        """A replicated tensor of which the local tensors are not row-major."""
        columns = super().through_local(tensor.full_tensor())
        shape = torch.Size((*tensor.shape[:-2], tensor.shape[-1], tensor.shape[-2]))
        if self.mesh.coordinate is not None:
            columns = columns.mT
        whole = torch.empty(tensor.shape, device="meta").mT
        return self._replicated(columns, shape, whole.stride())

    def _replicated(self, local: torch.Tensor, shape: Any, stride: Any = None) -> torch.Tensor:
        placements = [T.Replicate()] * self.mesh.ndim
        return T.DTensor.from_local(local, self.mesh, placements, shape=torch.Size(shape), stride=stride)

    def compiled(self, function: Callable[..., Any], backend: str) -> Callable[..., Any]:
        """The function as torch.compile runs it."""
        return torch.compile(function, backend=backend)
