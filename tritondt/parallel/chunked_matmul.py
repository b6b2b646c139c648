"""The two matmuls whose chunks travel while others are multiplied, and their gradients, on local tensors.

Tensors are taken as (everything before the dim that is shared out, positions, features), so that a run of positions is
a strided matrix per item, which a matmul reads and writes where it lies.
"""

from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch

from tritondt import identity
from tritondt.comm import world
from tritondt.kernels.memory import allocate
from tritondt.planning.pipelining import Rows, merged, pace_of
from tritondt.redistribution.autograd import redistribute
from tritondt.redistribution.chunked import chunked_gather, chunked_scatter, gather, scatter
from tritondt.redistribution.run import redistribute_local
from tritondt.sharding.placement import Partial, Replicate
from tritondt.sharding.spec import DTensorSpec

Grads = tuple[torch.Tensor | None, ...]


class ChunkSchedule(NamedTuple):
    """Order and sizes of chunks of positions: out of `shards` into the whole, or as terms of the whole into `shards`.

    Each rank's part goes in pieces of such shares, in this order into the whole, backwards out of it; without any,
    nothing overlaps. With `merges` a product may take several pieces.
    """

    shards: DTensorSpec
    shares: tuple[int, ...]
    merges: bool

    @property
    def whole(self) -> DTensorSpec:
        """Spec of all positions on every rank."""
        return self.shards.with_placements((Replicate(),))

    @property
    def terms(self) -> DTensorSpec:
        """Spec of a term of all positions on every rank."""
        return self.shards.with_placements((Partial(),))


class AllGatherMatmul(torch.autograd.Function):
    """x @ weight.T + bias of all positions, of which every rank brings some."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, schedule: ChunkSchedule
    ) -> torch.Tensor:
        """Multiplies, and keeps the whole of `x` for the gradient of the weight."""
        whole, out = gathered_product(x, weight.t(), bias, schedule)
        ctx.schedule = schedule
        ctx.save_for_backward(x, weight, whole if ctx.needs_input_grad[1] else None)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Grads:
        """Gradients of input, weight and bias; that of `x` is sent while that of the weight is computed."""
        x, weight, whole = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad[:3]
        schedule: ChunkSchedule = ctx.schedule
        if torch.is_grad_enabled():
            return _gathered_again(x, weight, grad, schedule, ctx.needs_input_grad)
        grad, found = grad.contiguous(), list[torch.Tensor | None]((None, None, None))

        def of_parameters() -> None:
            if of_weight:
                found[1] = _weight_gradient(grad, whole)
            if of_bias:
                found[2] = grad.flatten(0, -2).sum(0)

        if of_x:
            found[0] = scattered_product(grad, weight, schedule, of_parameters, int(of_weight))
        else:
            of_parameters()
        return (*found, None)


class MatmulReduceScatter(torch.autograd.Function):
    """Sum over ranks of x @ weight.T, of which every rank gets some positions."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, schedule: ChunkSchedule) -> torch.Tensor:
        """Multiplies and scatters, and keeps the arguments only."""
        ctx.schedule = schedule
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return scattered_product(x, weight.t(), schedule)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Grads:
        """Gradients of input and weight; the output's comes in while that of `x` is computed."""
        x, weight = ctx.saved_tensors
        of_x, of_weight = ctx.needs_input_grad[:2]
        schedule: ChunkSchedule = ctx.schedule
        if torch.is_grad_enabled():
            whole = redistribute(grad, schedule.shards, schedule.whole, grad_placements=(Partial(),))
            return (
                torch.matmul(whole, weight) if of_x else None,
                torch.mm(whole.flatten(0, -2).t(), x.flatten(0, -2)) if of_weight else None,
                None,
            )
        if of_x:
            whole, grad_of_x = gathered_product(grad, weight, None, schedule)
        else:
            whole, grad_of_x = redistribute_local(grad, schedule.shards, schedule.whole), None
        return grad_of_x, _weight_gradient(whole, x) if of_weight else None, None


def _gathered_again(
    x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor, schedule: ChunkSchedule, needed: tuple[bool, ...]
) -> Grads:
    """Gradients of AllGatherMatmul as functions that have gradients themselves: `x` is gathered once more."""
    of_x, of_weight, of_bias = needed[:3]
    found = list[torch.Tensor | None]((None, None, None))
    if of_x:
        found[0] = redistribute(torch.matmul(grad, weight), schedule.terms, schedule.shards)
    if of_weight:
        whole = redistribute(x, schedule.shards, schedule.whole, grad_placements=(Partial(),))
        found[1] = torch.mm(grad.flatten(0, -2).t(), whole.flatten(0, -2))
    if of_bias:
        found[2] = grad.flatten(0, -2).sum(0)
    return (*found, None)


def gathered_product(
    local: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, schedule: ChunkSchedule
) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole tensor that has `local` as part of this rank, and its product with `matrix`; own positions come first."""
    local = local.resolve_conj().resolve_neg()
    source, target = schedule.shards, schedule.whole
    out = allocate((*target.shape[:-1], matrix.shape[1]), local.dtype, local.device)
    single = len(target.mesh.ranks) == 1
    overlaps = schedule.shares and not single
    chunked = chunked_gather(source, target, local.stride(), schedule.shares, local.device) if overlaps else None
    if chunked is None:
        whole = local.contiguous() if single else redistribute_local(local, source, target)
        _multiply(_folded(whole, 0), matrix, _folded(out, 0), bias)
        return whole, out
    whole = allocate(target.shape, local.dtype, local.device)
    multiply = _Positions(chunked.dim, whole, matrix, out, bias)
    gather(chunked, local, whole, multiply, _products(schedule, matrix.shape[1], torch.get_num_threads()))
    return whole, out


def scattered_product(
    local: torch.Tensor,
    matrix: torch.Tensor,
    schedule: ChunkSchedule,
    meanwhile: Callable[[], None] = lambda: None,
    num_meanwhile: int = 0,
) -> torch.Tensor:
    """Part of this rank of the sum over ranks of `local` @ `matrix`; other ranks' positions come first.

    `meanwhile` is called once, when all that others wait for is on its way; it takes as long as `num_meanwhile` of such
    products.
    """
    local = local.contiguous()
    source, target = schedule.terms, schedule.shards
    single = len(target.mesh.ranks) == 1
    overlaps = schedule.shares and not single
    chunked = chunked_scatter(source, target, schedule.shares[::-1], local.device) if overlaps else None
    product = allocate((*local.shape[:-1], matrix.shape[1]), local.dtype, local.device)
    if chunked is None:
        _multiply(_folded(local, 0), matrix, _folded(product, 0))
        meanwhile()
        return product if single else redistribute_local(product, source, target)
    multiply = _Positions(chunked.dim, local, matrix, product)
    products = _products(schedule, matrix.shape[0], torch.get_num_threads(), num_meanwhile)
    return scatter(chunked, product, target.local_shape, multiply, products[::-1], meanwhile)


@lru_cache(maxsize=1024)
def _products(schedule: ChunkSchedule, num_others: int, num_threads: int, num_meanwhile: int = 0) -> tuple[int, ...]:
    """Numbers of pieces that the products of a gather take; reversed, that the products of a scatter make.

    The matrix has what travels on one side and `num_others` on the other. Every rank decides that for itself: messages
    are the same.
    """
    rows, shares = rows_of(schedule.shards), schedule.shares
    if not schedule.merges:
        return (1,) * ((rows.num_ranks - 1) * len(shares))
    device_type = schedule.shards.mesh.device_type
    # A device multiplies with all that it has, whatever the host's threads.
    num_threads = num_threads if device_type == "cpu" else 1
    pace = pace_of(rows, num_others, num_threads, world.current().costs_for(device_type))
    return merged(rows.num_ranks - 1, shares, pace, pace.part_s * (1 + rows.num_ranks * num_meanwhile))


def rows_of(shards: DTensorSpec) -> Rows:
    """Rows that one rank has for another, on average."""
    num_ranks = len(shards.mesh.ranks)
    return Rows(prod(shards.shape[:-1]) / num_ranks, shards.shape[-1], shards.dtype.itemsize, num_ranks)


class _Positions:
    """Multiplication of requested positions of dim `dim` of `x` into those of `out`."""

    def __init__(
        self, dim: int, x: torch.Tensor, matrix: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None = None
    ) -> None:
        self._x, self._out = _folded(x, dim), _folded(out, dim)
        self._matrix, self._bias = matrix, bias
        self._rows = prod(x.shape[dim + 1 : -1])

    def __call__(self, start: int, stop: int) -> None:
        rows = slice(start * self._rows, stop * self._rows)
        _multiply(self._x[:, rows], self._matrix, self._out[:, rows], self._bias)


def _folded(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """View of a dense tensor as (dims before `dim`, `dim` and dims that follow, features)."""
    before, between, features = tensor.shape[:dim], tensor.shape[dim:-1], tensor.shape[-1]
    return tensor.view(prod(before), prod(between), features)


# How many elements of a matrix a product reads again in the time in which one is copied: measured, and about that.
_READ_PER_COPY = 4


def _multiply(x: torch.Tensor, matrix: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """Writes x @ matrix + bias to `out`; since `out` is given, autocast has no say.

    A batch of few positions each, cut out of more, is copied together and apart again where that is less than to read
    the matrix for each: 8 times 32 positions of 1024 features, and 2048 results, take 12 ms so, and 15 ms else.
    """
    if not out.numel():
        return
    if len(x) > 1 and len(x) * matrix.numel() > _READ_PER_COPY * (x.numel() + out.numel()):
        together = out.new_empty((1, x.shape[0] * x.shape[1], out.shape[2]))
        _multiply(x.reshape(1, -1, x.shape[2]), matrix, together, bias)
        out.copy_(together.view(out.shape))
    elif len(x) == 1:
        if bias is None:
            torch.mm(x[0], matrix, out=out[0])
        else:
            torch.addmm(bias, x[0], matrix, out=out[0])
    elif bias is None:
        torch.bmm(x, matrix.expand(len(x), *matrix.shape), out=out)
    else:
        torch.baddbmm(bias.expand(out.shape), x, matrix.expand(len(x), *matrix.shape), out=out)


def _weight_gradient(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """grad.T @ x over all positions."""
    grad, x = grad.flatten(0, -2), x.flatten(0, -2)
    return torch.mm(grad.t(), x, out=x.new_empty(grad.shape[1], x.shape[1]))


identity.on_end(_products.cache_clear)
