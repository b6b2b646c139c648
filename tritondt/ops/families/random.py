"""Dropout and random fills, with the same numbers whatever the layout."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from tritondt.kernels.memory import has_memory
from tritondt.ops.propagation.homomorphisms import LINEAR, term_strategies
from tritondt.ops.propagation.pointwise import elementwise_strategies
from tritondt.ops.propagation.registration import NUMBERS_BY_TYPE, strategy_of
from tritondt.ops.propagation.schema import AxisStrategy, LocalOp, OpSchema, OutputSpecs
from tritondt.ops.random import distributions
from tritondt.ops.random.generator import words_like
from tritondt.sharding.placement import Partial, Replicate
from tritondt.sharding.spec import DTensorSpec
from tritondt.sharding.strides import strides_in_order_of

aten = torch.ops.aten

# Numbers of a type from random bits, with the arguments of the operator after its first.
_Draw = Callable[..., torch.Tensor]
_Words = Sequence[torch.Tensor]


def _uniform(words: _Words, dtype: torch.dtype, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
    found = distributions.uniform(words, dtype)
    return found if (low, high) == (0.0, 1.0) else found * (high - low) + low


def _normal(words: _Words, dtype: torch.dtype, mean: float = 0.0, std: float = 1.0) -> torch.Tensor:
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return distributions.normal(words, wide) * std + mean


def _log_normal(words: _Words, dtype: torch.dtype, mean: float = 1.0, std: float = 2.0) -> torch.Tensor:
    return _normal(words, torch.float64, mean, std).exp()


def _exponential(words: _Words, dtype: torch.dtype, rate: float = 1.0) -> torch.Tensor:
    return distributions.exponential(words, rate)


def _cauchy(words: _Words, dtype: torch.dtype, median: float = 0.0, sigma: float = 1.0) -> torch.Tensor:
    return distributions.cauchy(words, median, sigma)


def _geometric(words: _Words, dtype: torch.dtype, probability: float) -> torch.Tensor:
    return distributions.geometric(words, probability)


def _bernoulli(words: _Words, dtype: torch.dtype, probability: float | torch.Tensor = 0.5) -> torch.Tensor:
    if isinstance(probability, torch.Tensor):
        fits = ((probability >= 0) & (probability <= 1)).all()
        torch._assert_async(fits, "bernoulli expects probabilities from [0, 1]")
    return distributions.bernoulli(words, probability)


def _any_integer(words: _Words, dtype: torch.dtype) -> torch.Tensor:
    most = distributions.largest_integer(dtype)
    return distributions.integers(words, 0, most + 1)


def _integer_below(words: _Words, dtype: torch.dtype, high: int) -> torch.Tensor:
    return distributions.integers(words, 0, high)


def _integer_from(words: _Words, dtype: torch.dtype, low: int, high: int | None = None) -> torch.Tensor:
    most = distributions.largest_integer(dtype)
    return distributions.integers(words, low, most + 1 if high is None else high)


# Those that fill their argument, those that give a new tensor of its shape, and torch's forms of the former for graphs.
_FILLING: Mapping[str, _Draw] = {
    **dict.fromkeys(("uniform_", "uniform", "rand_like", "rand_like.generator"), _uniform),
    **dict.fromkeys(("normal_", "normal_functional", "randn_like", "randn_like.generator"), _normal),
    **dict.fromkeys(("exponential_", "exponential"), _exponential),
    **dict.fromkeys(("cauchy_", "cauchy"), _cauchy),
    **dict.fromkeys(("log_normal_", "log_normal"), _log_normal),
    **dict.fromkeys(("geometric_", "geometric"), _geometric),
    **dict.fromkeys(("bernoulli_.float", "bernoulli.p"), _bernoulli),
    **dict.fromkeys(("random_", "random"), _any_integer),
    **dict.fromkeys(("random_.to", "random.to", "randint_like", "randint_like.generator"), _integer_below),
    **dict.fromkeys(("random_.from", "random.from"), _integer_from),
    **dict.fromkeys(("randint_like.low_dtype", "randint_like.low_generator_dtype"), _integer_from),
}
# Arguments that are the probabilities, means or deviations of the elements.
_BY_ELEMENT: Mapping[str, _Draw] = {
    "bernoulli": lambda words, dtype, p: _bernoulli(words, dtype, p),
    "bernoulli.Tensor": lambda words, dtype, like, p: _bernoulli(words, dtype, p),
    "bernoulli_.Tensor": lambda words, dtype, like, p: _bernoulli(words, dtype, p),
    **dict.fromkeys(("normal.Tensor_float", "normal.float_Tensor", "normal.Tensor_Tensor"), _normal),
}


def _named(names: Mapping[str, _Draw]) -> Iterator[OpOverload]:
    """The operators of these names that this torch has."""
    for name in names:
        packet, _, overload = name.partition(".")
        found = getattr(getattr(aten, packet, None), overload or "default", None)
        if found is not None:
            yield found


def _draw_of(op: OpOverload, known: Mapping[str, _Draw]) -> _Draw:
    return known[op._schema.name.partition("::")[2] + ("." + op._schema.overload_name).rstrip(".")]


def _drawing(schema: OpSchema, outputs: OutputSpecs, draw: _Draw, num_left_out: int) -> LocalOp | None:
    """A function that draws this rank's part; `num_left_out` arguments do not concern the distribution."""
    assert isinstance(outputs, DTensorSpec), f"{schema.op} gives a tensor"
    spec, op, writes = outputs, schema.op._op, schema.is_inplace
    if spec.coordinate is None:
        return None
    strides = strides_in_order_of(spec.local_shape, spec.tensor_meta.stride)
    declares_generator = any(argument.name == "generator" for argument in schema.op._schema.arguments)

    def run(*args: Any, generator: torch.Generator | None = None, **options: Any) -> torch.Tensor:
        local: torch.Tensor = next(argument for argument in args if isinstance(argument, torch.Tensor))
        if has_memory(local):
            if declares_generator:
                options["generator"] = None
            # Torch refuses here what it refuses elsewhere, and draws nothing.
            op(*(item.new_empty(0) if isinstance(item, torch.Tensor) else item for item in args), **options)
        words = words_like(local, spec, generator, 1 + spec.dtype.is_complex)
        values = draw(words, spec.dtype, *args[num_left_out:])
        if writes:
            return local.copy_(values)
        made = torch.empty_strided(spec.local_shape, strides, dtype=spec.dtype, device=local.device)
        return made.copy_(values)

    return run


def _filled(schema: OpSchema, outputs: OutputSpecs) -> LocalOp | None:
    return _drawing(schema, outputs, _draw_of(schema.op, _FILLING), 1)


def _drawn_by_element(schema: OpSchema, outputs: OutputSpecs) -> LocalOp | None:
    return _drawing(schema, outputs, _draw_of(schema.op, _BY_ELEMENT), 0)


@strategy_of([*_named(_FILLING)], schema_info=NUMBERS_BY_TYPE, localize=_filled)
def filled(schema: OpSchema) -> list[AxisStrategy]:
    """The tensor keeps its cuts; terms of a sum are not drawn."""
    found = [
        AxisStrategy((placement,), (Replicate() if isinstance(placement, Partial) else placement,), exact=True)
        for placement in dict.fromkeys(schema.args_spec[0].placements)
        if not (schema.is_inplace and isinstance(placement, Partial))
    ]
    return [*found, AxisStrategy((Replicate(),), (Replicate(),))]


@strategy_of([*_named(_BY_ELEMENT)], schema_info=NUMBERS_BY_TYPE, localize=_drawn_by_element)
def drawn_by_element(schema: OpSchema) -> list[AxisStrategy]:
    """The arguments are the probabilities, means or deviations of the elements."""
    return elementwise_strategies(schema.args_spec)


def _drawn_events(schema: OpSchema, outputs: OutputSpecs) -> LocalOp | None:
    def events(words: _Words, dtype: torch.dtype, rate: torch.Tensor) -> torch.Tensor:
        torch._assert_async((rate >= 0).all(), "invalid Poisson rate, expected rate to be non-negative")
        return distributions.poisson(words, rate)

    draw = _drawing(schema, outputs, events, 0)
    if draw is None:
        return None
    run = draw
    return lambda rate, generator=None: run(rate, generator=generator)


@strategy_of([aten.poisson.default], schema_info=NUMBERS_BY_TYPE, localize=_drawn_events)
def poisson(schema: OpSchema) -> list[AxisStrategy]:
    """The argument has the rates of the elements, and the generator comes by place."""
    return elementwise_strategies(schema.args_spec)


def _dropping(schema: OpSchema, outputs: OutputSpecs) -> LocalOp | None:
    spec = None if outputs is None or isinstance(outputs, DTensorSpec) else outputs[0]
    assert spec is not None, f"{schema.op} gives a result and a mask"
    if spec.coordinate is None:
        return None
    op = schema.op._op

    def run(features: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
        if train is False:
            result, mask = op(features, p, train)
            return result, mask.bool()  # for an empty part torch gives the input's dtype
        (words,) = words_like(features, spec)
        # As torch.dropout keeps what it makes of bernoulli_(1 - p).
        mask = distributions.bernoulli([words], 1 - p)
        return features * mask * (0.0 if p == 1 else 1 / (1 - p)), mask

    return run


@strategy_of([aten.native_dropout.default], schema_info=NUMBERS_BY_TYPE, localize=_dropping)
def dropout(schema: OpSchema) -> list[AxisStrategy]:
    """Result and mask are cut alike; terms of a sum stay terms, for which all of them get one mask."""
    terms = term_strategies(schema, [LINEAR.at(0)], whole_results=(1,))
    return [*elementwise_strategies(schema.args_spec, num_outputs=2), *terms]


@strategy_of([aten.native_dropout_backward.default], schema_info=NUMBERS_BY_TYPE)
def dropout_backward(schema: OpSchema) -> list[AxisStrategy]:
    """The gradient times the mask: linear in the gradient."""
    return [*elementwise_strategies(schema.args_spec), *term_strategies(schema, [LINEAR.at(0)])]
