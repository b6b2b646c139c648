"""Dropout, and what fills a tensor with random numbers: shards draw different numbers, replicas the same."""

from collections.abc import Iterator
from typing import Any

import torch
from torch._ops import OpOverload

from tritondt.ops.pointwise import partial_ops, pointwise_strategies
from tritondt.ops.registration import NUMBERS_BY_TYPE, strategy_of
from tritondt.ops.schema import AxisStrategy, LocalOp, OpSchema, OutputSpecs
from tritondt.placement import Partial, Replicate
from tritondt.random import default_generator_seeded, shard_seed
from tritondt.spec import DTensorSpec

aten = torch.ops.aten


def _named(*names: str) -> Iterator[OpOverload]:
    """The operators of these names that this torch has."""
    for name in names:
        packet, _, overload = name.partition(".")
        found = getattr(getattr(aten, packet, None), overload or "default", None)
        if found is not None:
            yield found


def _seeded(schema: OpSchema, outputs: OutputSpecs) -> LocalOp | None:
    """The operator on this rank's part, with a generator that no other shard has."""
    spec = outputs if isinstance(outputs, DTensorSpec) or outputs is None else outputs[0]
    assert spec is not None, f"{schema.op} gives a tensor"
    if spec.coordinate is None:
        return None
    op, shard = schema.op._op, spec
    declares_generator = any(argument.name == "generator" for argument in schema.op._schema.arguments)

    def run(*args: Any, generator: torch.Generator | None = None, **options: Any) -> Any:
        if declares_generator:
            options["generator"] = None
        device = next(argument.device for argument in args if isinstance(argument, torch.Tensor))
        with default_generator_seeded(device, shard_seed(shard, generator)):
            return op(*args, **options)

    return run


@strategy_of(
    [
        *_named("bernoulli_.float", "uniform_", "normal_", "exponential_", "cauchy_", "log_normal_", "geometric_"),
        *_named("random_", "random_.from", "random_.to"),
        *_named("bernoulli.p", "rand_like", "rand_like.generator", "randn_like", "randn_like.generator"),
        *_named("randint_like", "randint_like.generator", "randint_like.low_dtype", "randint_like.low_generator_dtype"),
    ],
    schema_info=NUMBERS_BY_TYPE,
    localize=_seeded,
)
def filled(schema: OpSchema) -> list[AxisStrategy]:
    """Every part draws its own numbers; terms of a sum are not drawn."""
    found = [
        AxisStrategy((placement,), (Replicate() if isinstance(placement, Partial) else placement,), exact=True)
        for placement in dict.fromkeys(schema.args_spec[0].placements)
        if not (schema.is_inplace and isinstance(placement, Partial))
    ]
    return [*found, AxisStrategy((Replicate(),), (Replicate(),))]


@strategy_of(
    [
        *_named("bernoulli", "bernoulli.Tensor", "bernoulli_.Tensor"),
        *_named("normal.Tensor_float", "normal.float_Tensor", "normal.Tensor_Tensor"),
    ],
    schema_info=NUMBERS_BY_TYPE,
    localize=_seeded,
)
def drawn_by_element(schema: OpSchema) -> list[AxisStrategy]:
    """The arguments are the probabilities, means or deviations of the elements."""
    return pointwise_strategies(schema.args_spec)


def _seeded_dropout(schema: OpSchema, outputs: OutputSpecs) -> LocalOp | None:
    """As `_seeded`; for an empty part torch gives a mask of the input's dtype, where others have bool."""
    run = _seeded(schema, outputs)
    if run is None or schema.args_spec[0].local_numel:
        return run

    def run_empty(features: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        result, mask = run(features, *args)
        return result, mask.bool()

    return run_empty


@strategy_of([aten.native_dropout.default], schema_info=NUMBERS_BY_TYPE, localize=_seeded_dropout)
def dropout(schema: OpSchema) -> list[AxisStrategy]:
    """Gives the result and its mask; terms of a sum stay terms, for which all of them get one mask."""
    terms = [AxisStrategy((partial,), (partial, Replicate())) for partial in partial_ops(schema.args_spec)]
    return [*pointwise_strategies(schema.args_spec, num_outputs=2), *terms]


@strategy_of([aten.native_dropout_backward.default], schema_info=NUMBERS_BY_TYPE)
def dropout_backward(schema: OpSchema) -> list[AxisStrategy]:
    """The gradient times the mask: linear in the gradient."""
    return pointwise_strategies(schema.args_spec, linear_in=[(0,)])
