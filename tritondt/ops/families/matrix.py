"""Products of matrices and vectors: every index may be sharded, and a sharded contraction leaves terms of a sum."""

import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from tritondt.ops.propagation.homomorphisms import ADDITIVE, Passing, partials_of, term_strategies
from tritondt.ops.propagation.registration import NUMBERS_BY_TYPE, strategy_of
from tritondt.ops.propagation.schema import AxisStrategy, LocalOp, OpSchema, OutputSpecs
from tritondt.ops.rules.einop import einop_strategies
from tritondt.sharding.placement import Partial, Placement, Replicate, Shard
from tritondt.sharding.spec import DTensorSpec

aten = torch.ops.aten

_PRODUCTS: Mapping[str, str] = {
    "mm": "mk,kn->mn",
    "bmm": "bmk,bkn->bmn",
    "mv": "mk,k->m",
    "dot": "k,k->",
    "vdot": "k,k->",
    "_int_mm": "mk,kn->mn",
}
# The first argument is added, broadcast to the shape of the product; with "_" it is written to.
_ADDED_PRODUCTS: Mapping[str, str] = {
    "addmm": "mk,kn->mn",
    "baddbmm": "bmk,bkn->bmn",
    "addbmm": "bmk,bkn->mn",
    "addmv": "mk,k->m",
    "addr": "m,n->mn",
}
_BATCH_LETTERS = "".join(letter for letter in string.ascii_letters if letter not in "kn")


def _overloads(names: Iterable[str]) -> Iterator[OpOverload]:
    """The operators of these names; those with a dtype for the result are not in every torch."""
    for name in names:
        packet = getattr(aten, name)
        yield from (getattr(packet, overload) for overload in packet.overloads() if "out" not in overload)


@strategy_of([*_overloads(_PRODUCTS)], schema_info=NUMBERS_BY_TYPE)
def product(schema: OpSchema) -> list[AxisStrategy]:
    """Any index is cut alike in all tensors that have it; terms of one factor times the other whole are terms."""
    return [*einop_strategies(_PRODUCTS[_name(schema.op)]), *term_strategies(schema, [ADDITIVE.at(0), ADDITIVE.at(1)])]


def _local_scaled(schema: OpSchema, outputs: OutputSpecs) -> LocalOp:
    """The product with its second factor by columns, as kernels for 8-bit floats ask: what has moved lies by rows."""
    op = schema.op._op

    def product_by_columns(x: torch.Tensor, weight: torch.Tensor, *args: Any, **options: Any) -> Any:
        if weight.stride(0) != 1:
            weight = weight.t().contiguous().t()
        return op(x, weight, *args, **options)

    return product_by_columns


@strategy_of([aten._scaled_mm.default], localize=_local_scaled)
def scaled_product(schema: OpSchema) -> list[AxisStrategy]:
    """Rows of the first and columns of the second factor are cut, with the scales that belong to them.

    The contracted dim may be cut where scales are of rows, columns or all, and nothing is added.
    """
    _, _, of_rows, of_columns, *rest = schema.args_spec
    by_row = of_rows.ndim == 2 and of_rows.shape[0] == schema.args_spec[0].shape[0]
    by_column = of_columns.ndim == 2 and of_columns.shape[1] == schema.args_spec[1].shape[1]
    bias = isinstance(schema.argument(4, "bias"), DTensorSpec)
    whole: tuple[Placement, ...] = (Replicate(),) * len(rest)
    rows = Shard(0), Replicate(), Shard(0) if by_row else Replicate(), Replicate(), *whole
    beside: tuple[Placement, ...] = (Shard(0), *whole[1:]) if bias else whole
    columns = Replicate(), Shard(1), Replicate(), Shard(1) if by_column else Replicate(), *beside
    found = [AxisStrategy(rows, (Shard(0),)), AxisStrategy(columns, (Shard(1),))]
    is_in_blocks = any(length > 1 for length in (*of_rows.shape[1:], *of_columns.shape[:-1]))
    if not rest and not is_in_blocks:
        found.append(AxisStrategy((Shard(1), Shard(0), Replicate(), Replicate()), (Partial("sum"),)))
    return [*found, AxisStrategy((Replicate(),) * len(schema.args_spec), (Replicate(),))]


def _local_addmv(schema: OpSchema, outputs: OutputSpecs) -> LocalOp | None:
    """The expanded summand, for a rank without columns: torch's kernel (2.13) forgets to expand it."""
    assert isinstance(outputs, DTensorSpec), f"{schema.op} gives one tensor"
    if schema.op is not aten.addmv.default or schema.args_spec[1].local_shape[-1:] != (0,):
        return None
    op, shape = schema.op._op, outputs.local_shape
    return lambda added, *factors, **options: op(added.expand(shape), *factors, **options)


@strategy_of(
    [*_overloads(_ADDED_PRODUCTS), *_overloads(f"{name}_" for name in _ADDED_PRODUCTS)],
    schema_info=NUMBERS_BY_TYPE,
    localize=_local_addmv,
)
def added_product(schema: OpSchema) -> list[AxisStrategy]:
    """The strategies of `product`; the summand is cut like the product, and a term where the product is terms."""
    added = schema.args_spec[0]
    equation = _ADDED_PRODUCTS[_name(schema.op)]
    ndim = len(equation.partition("->")[2])
    cut = einop_strategies(equation)
    if schema.is_inplace:  # the summand is the result: cut alike, a dim of length 1 too
        placed = [(placement, strategy) for strategy in cut for placement in strategy.outputs if placement is not None]
        strategies = [AxisStrategy((placement, *strategy.inputs), (placement,)) for placement, strategy in placed]
    else:
        strategies = [_with_added(strategy, 0, added, ndim) for strategy in cut]
    return [*strategies, *term_strategies(schema, _of_factors(schema, (1, 2), (0,)))]


@strategy_of([aten.linear.default])
def linear(schema: OpSchema) -> list[AxisStrategy]:
    """Input (..., k), weight (n, k) or (k,), bias (n,) or none; where gradients are recorded, views and mm arrive."""
    features, weight, *bias = schema.args_spec
    batch = _BATCH_LETTERS[: features.ndim - 1]
    outer = "n" if weight.ndim == 2 else ""
    strategies = einop_strategies(f"{batch}k,{outer}k->{batch}{outer}")
    for added in bias:
        strategies = [_with_added(strategy, 2, added, len(batch + outer)) for strategy in strategies]
    return [*strategies, *term_strategies(schema, _of_factors(schema, (0, 1), range(2, 2 + len(bias))))]


def _of_factors(schema: OpSchema, factors: Sequence[int], added: Sequence[int]) -> list[Passing]:
    """The factors that have terms, each with what is added, which alone is reduced: it is smaller than the product."""
    specs = schema.args_spec
    return [ADDITIVE.at(factor, *added) for factor in factors if partials_of([specs[factor]])]


def _name(op: OpOverload) -> str:
    return op._schema.name.removeprefix("aten::").removesuffix("_")


def _with_added(strategy: AxisStrategy, place: int, added: DTensorSpec, ndim: int) -> AxisStrategy:
    """The strategy with one more argument at `place`, which is broadcast to the product's `ndim` dims and added."""
    placement: Placement | None = strategy.outputs[0]
    if isinstance(placement, Shard):
        dim = placement.dim - ndim + added.ndim
        # One element serves every piece.
        placement = Replicate() if dim < 0 or added.shape[dim] == 1 else Shard(dim)
    assert placement is not None, f"{strategy} gives no tensor"
    return AxisStrategy((*strategy.inputs[:place], placement, *strategy.inputs[place:]), strategy.outputs)
