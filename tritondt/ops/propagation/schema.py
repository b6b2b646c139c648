"""Terms of propagation: an operator's call with specs in place of tensors, and the decision about it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from torch._ops import OpOverload

from tritondt.sharding.mesh import Mesh
from tritondt.sharding.placement import Placement
from tritondt.sharding.spec import DTensorSpec

# The spec of every output in the operator's order, None where it is no tensor; a lone output stands by itself.
OutputSpecs: TypeAlias = "DTensorSpec | Sequence[DTensorSpec | None] | None"

# Runs on local tensors in place of the operator, with the same arguments.
LocalOp: TypeAlias = Callable[..., Any]


class RuntimeSchemaInfo(NamedTuple):
    """Arguments that decide an operator's placements besides its tensors.

    Positional arguments from `static_argnum` on, and keyword arguments, are told apart by value; earlier ones by
    type only, which keeps a learning rate that changes every step from filling the cache. `needs_pytree` says
    that an argument is a list of tensors.
    """

    static_argnum: int = 0
    static_kwargkey: tuple[str, ...] | None = None
    needs_pytree: bool = False


@dataclass(frozen=True, slots=True)
class OpSchema:
    """One call of `op`: its arguments with a DTensorSpec wherever a tensor stood, alone or in a list."""

    op: OpOverload
    args_schema: tuple[Any, ...]
    kwargs_schema: Mapping[str, Any] = field(default_factory=dict)
    # The one item is what `propagate_tensor_meta` found: several parts of a decision ask, and a fake run takes 0.5 ms.
    found_metas: list[Any] = field(default_factory=list, compare=False, repr=False)

    @property
    def args_spec(self) -> tuple[DTensorSpec, ...]:
        """The specs of all tensor arguments, those in lists included, in argument order."""
        return tuple(specs_in((*self.args_schema, *self.kwargs_schema.values())))

    @property
    def mesh(self) -> Mesh:
        """The mesh of the first tensor argument."""
        return self.args_spec[0].mesh

    @property
    def is_inplace(self) -> bool:
        """Whether the operator writes into its first argument and returns it."""
        return self.op._schema.name[-1] == "_" and self.op._schema.name[-2] != "_"

    @property
    def is_view(self) -> bool:
        """Whether the operator gives aliases of its first argument, without writing to it."""
        alias = self.op._schema.arguments[0].alias_info if self.op._schema.arguments else None
        return alias is not None and not alias.is_write

    @property
    def is_out_variant(self) -> bool:
        """Whether the operator writes into `out` arguments."""
        return any(argument.is_out for argument in self.op._schema.arguments)

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """A non-tensor argument, given by position or by name."""
        if position < len(self.args_schema):
            return self.args_schema[position]
        return self.kwargs_schema.get(name, default)

    def with_specs(self, specs: Sequence[DTensorSpec]) -> "OpSchema":
        """The call with other specs for its tensors, given in the order of `args_spec`."""
        left = iter(specs)
        args = tuple(_replaced(argument, left) for argument in self.args_schema)
        kwargs = {name: _replaced(argument, left) for name, argument in self.kwargs_schema.items()}
        return OpSchema(self.op, args, kwargs)

    def __str__(self) -> str:
        return f"{self.op}({', '.join(map(str, self.args_spec))})"


def specs_in(arguments: Sequence[Any]) -> Iterator[DTensorSpec]:
    """The specs among arguments and in lists of them."""
    for argument in arguments:
        if isinstance(argument, DTensorSpec):
            yield argument
        elif isinstance(argument, list | tuple):
            yield from specs_in(argument)


def _replaced(argument: Any, specs: Iterator[DTensorSpec]) -> Any:
    if isinstance(argument, DTensorSpec):
        return next(specs)
    if isinstance(argument, list | tuple):
        return type(argument)([_replaced(item, specs) for item in argument])
    return argument


class AxisStrategy(NamedTuple):
    """One way to shard an operator over one mesh axis: a placement per tensor argument and per output.

    A Shard without unit, sizes or repeats stands for any cut of that dim: the cut that an argument has already is
    used for all of them, so they must be cuts of one index. With `exact` it means what it says.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement | None, ...]
    exact: bool = False


@dataclass(frozen=True, slots=True)
class PlacementStrategy:
    """One way to shard an operator over all axes; `redistribute_cost` holds bytes per input."""

    output_specs: OutputSpecs
    input_specs: tuple[DTensorSpec, ...] | None = None
    redistribute_cost: tuple[float, ...] | None = None


# The name in torch 2.13; PlacementStrategy is the former one, which code for older versions uses.
OpSpec = PlacementStrategy


@dataclass(frozen=True, slots=True)
class OpStrategy:
    """The ways that a strategy function offers, over all axes at once."""

    strategies: Sequence[PlacementStrategy]


@dataclass(frozen=True, slots=True)
class TupleStrategy:
    """Strategies of a list argument, one per element."""

    childs: Sequence[OpStrategy]

    @property
    def children(self) -> Sequence[OpStrategy]:
        """The strategies of the elements: the name in torch 2.13, where `childs` is deprecated."""
        return self.childs


@dataclass(frozen=True, slots=True)
class OutputSharding:
    """The decision of propagation about a call.

    `input_specs` are the specs that the tensor arguments must have, None where they have them already; `local`
    replaces the operator on local tensors where it needs local sizes or offsets. `copies_view` says that the
    outputs are views that had to move: copies, which are to be copied again when the first argument is written to.
    `data_dependent` says that only the values tell the outputs' shapes: without specs, every tensor among them is
    whole on every rank. `is_viewed` says that `local` views the local tensor as the output's local shape, which its
    strides may not allow. `refusal` says why the call is refused, unless the fallback lets it run as decided.
    """

    output_spec: OutputSpecs
    input_specs: tuple[DTensorSpec, ...] | None = None
    local: LocalOp | None = None
    copies_view: bool = False
    data_dependent: bool = False
    is_viewed: bool = False
    refusal: str = ""

    @property
    def needs_redistribute(self) -> bool:
        """Whether an argument has to move first."""
        return self.input_specs is not None


# What a strategy function may return, and the functions themselves. It may decide the call itself.
Strategies: TypeAlias = "Sequence[AxisStrategy] | OpStrategy | OutputSharding"
StrategyFunction: TypeAlias = Callable[[OpSchema], Strategies]
RuleFunction: TypeAlias = Callable[[OpSchema], OutputSharding]
# Called once per signature with the schema as it will run and its outputs; None where the operator runs as it is.
LocalizeFunction: TypeAlias = Callable[[OpSchema, OutputSpecs], "LocalOp | None"]
