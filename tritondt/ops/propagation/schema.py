"""Terms of propagation: an operator's call with specs in place of tensors, and the decision about it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch._ops import OpOverload

from tritondt.errors import MeshError, MixedTensorsError, PropagationError
from tritondt.ops.propagation.strategies import OpStrategy, PlacementStrategy, TupleStrategy
from tritondt.ops.propagation.strategies import OutputSpecs as OutputSpecs  # for those who import it from here
from tritondt.ops.propagation.strategies import specs_in as specs_in
from tritondt.sharding.mesh import Mesh
from tritondt.sharding.placement import Placement
from tritondt.sharding.spec import DTensorSpec

# Runs on local tensors in place of the operator, with the same arguments.
LocalOp: TypeAlias = Callable[..., Any]


class RuntimeSchemaInfo(NamedTuple):
    """Arguments that decide an operator's placements besides its tensors.

    Positional arguments from `static_argnum` on, and keyword arguments, are distinguished by value, earlier ones only
    by type. A learning rate that changes every step therefore does not fill the cache. `needs_pytree` marks an operator
    with a list of tensors among its arguments.
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
    found_metas: list[Any] = field(default_factory=list, compare=False, repr=False, kw_only=True)
    schema_info: RuntimeSchemaInfo | None = field(default=None, compare=False, repr=False)

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

    @property
    def args_strategy(self) -> tuple[OpStrategy, ...]:
        """The strategy of each tensor argument, without those in lists and named ones.

        A `schema_info` with `needs_pytree` includes those in lists.
        """
        return tuple(map(_as_it_comes, self._specs_beside(self.args_schema)))

    @property
    def kwargs_strategy(self) -> tuple[OpStrategy, ...]:
        """The strategy of each named tensor argument, without those in lists as in `args_strategy`."""
        return tuple(map(_as_it_comes, self._specs_beside(tuple(self.kwargs_schema.values()))))

    def _specs_beside(self, arguments: tuple[Any, ...]) -> Iterator[DTensorSpec]:
        if self.schema_info is None or not self.schema_info.needs_pytree:
            arguments = tuple(item for item in arguments if isinstance(item, DTensorSpec | OpStrategy))
        return specs_in(arguments)

    def with_strategies(self, schema_info: RuntimeSchemaInfo | None = None) -> "OpSchema":
        """The call in the form of torch's strategy functions: an OpStrategy for each tensor, a TupleStrategy for each
        list.

        A list that holds anything besides tensors stays a list.
        """
        args = tuple(map(_in_strategies, self.args_schema))
        kwargs = {name: _in_strategies(argument) for name, argument in self.kwargs_schema.items()}
        return OpSchema(self.op, args, kwargs, schema_info or self.schema_info, found_metas=self.found_metas)

    def with_specs_alone(self) -> "OpSchema":
        """The call with a DTensorSpec for each tensor instead of strategies."""
        given = (*self.args_schema, *self.kwargs_schema.values())
        if not any(isinstance(item, OpStrategy | TupleStrategy | list | tuple) for item in given):
            return self
        args = tuple(map(_in_specs, self.args_schema))
        kwargs = {name: _in_specs(argument) for name, argument in self.kwargs_schema.items()}
        return OpSchema(self.op, args, kwargs, self.schema_info, found_metas=self.found_metas)

    @property
    def args_meta(self) -> tuple[Any, ...]:
        """Positional arguments with global shape, stride and dtype wherever a tensor stood."""
        return tuple(_meta_of(_in_specs(argument)) for argument in self.args_schema)

    @property
    def kwargs_meta(self) -> dict[str, Any]:
        """Named arguments with global shape, stride and dtype wherever a tensor stood."""
        return {name: _meta_of(_in_specs(argument)) for name, argument in self.kwargs_schema.items()}

    def get_mesh_from_args(self, validate: bool = True) -> Mesh:
        """The mesh of the first positional tensor; MeshError without one, MixedTensorsError for a second mesh.

        Without `validate` other meshes are not looked for, nor are they in lists.
        """
        first = next(specs_in(self.args_schema), None)
        if first is None:
            raise MeshError(f"the mesh of {self.op}'s arguments was asked for; there is no distributed tensor in them")
        for spec in map(_in_specs, self.args_schema if validate else ()):
            if isinstance(spec, DTensorSpec) and spec.mesh is not first.mesh:
                raise MixedTensorsError(
                    f"{self.op} was called with tensors on {first.mesh} and on {spec.mesh}; allowed is one mesh"
                )
        return first.mesh

    def is_inplace_op(self) -> bool:
        """Whether the operator writes into its first argument and returns it."""
        return self.is_inplace

    def is_out_variant_op(self) -> bool:
        """Whether the operator writes into `out` arguments."""
        return self.is_out_variant

    def is_view_op(self) -> bool:
        """Whether the operator gives aliases of its first argument, without writing to it."""
        return self.is_view

    def arg_type_tensor_or_tensor_list_like(self, arg: object) -> bool:
        """Whether an argument of the schema is a tensor, or a list of tensors and None."""
        arg = _in_specs(arg)
        items = arg if isinstance(arg, list) else [arg]
        return all(isinstance(item, DTensorSpec) or (item is None and items is arg) for item in items)

    def return_type_tensor(self) -> bool:
        """Whether the first result is a tensor."""
        returns = self.op._schema.returns
        return bool(returns) and isinstance(returns[0].type, torch.TensorType)

    def return_type_tuple_tensor_like(self) -> bool:
        """Whether there are several results, of which the first is a tensor."""
        return len(self.op._schema.returns) > 1 and self.return_type_tensor()

    def return_type_list_tensor_like(self) -> bool:
        """Whether the only result is a list."""
        returns = self.op._schema.returns
        return len(returns) == 1 and isinstance(returns[0].type, torch.ListType)

    def gen_fake_args(self) -> tuple[Any, ...]:
        """Positional arguments with an empty tensor of global size for each spec; to be called under FakeTensorMode."""
        return tuple(_replaced(argument, _empty_tensors(argument)) for argument in self.args_schema)

    def gen_fake_kwargs(self) -> dict[str, Any]:
        """Named arguments with an empty tensor of global size for each spec; to be called under FakeTensorMode."""
        return {name: _replaced(argument, _empty_tensors(argument)) for name, argument in self.kwargs_schema.items()}

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
        return OpSchema(self.op, args, kwargs, self.schema_info)

    def __str__(self) -> str:
        return f"{self.op}({', '.join(map(str, self.args_spec))})"


def _replaced(argument: Any, specs: Iterator[Any]) -> Any:
    argument = _in_specs(argument)
    if isinstance(argument, DTensorSpec):
        return next(specs)
    if isinstance(argument, list | tuple):
        return type(argument)([_replaced(item, specs) for item in argument])
    return argument


def _as_it_comes(spec: DTensorSpec) -> OpStrategy:
    return OpStrategy([PlacementStrategy(spec)])


def _in_strategies(argument: Any) -> Any:
    if isinstance(argument, DTensorSpec):
        return _as_it_comes(argument)
    if not isinstance(argument, list | tuple) or not argument:
        return argument
    found = type(argument)(map(_in_strategies, argument))
    return TupleStrategy(found) if all(isinstance(item, DTensorSpec) for item in argument) else found


def _in_specs(argument: Any) -> Any:
    """The argument with specs for strategies of the ways in which tensors come."""
    if isinstance(argument, OpStrategy):
        return argument.strategies[0].output_spec
    if isinstance(argument, TupleStrategy):
        argument = argument.childs
    return type(argument)(map(_in_specs, argument)) if isinstance(argument, list | tuple) else argument


def _meta_of(argument: Any) -> Any:
    if isinstance(argument, DTensorSpec):
        return argument.tensor_meta
    if isinstance(argument, list | tuple):
        metas = map(_meta_of, argument)
        return tuple(metas) if next(specs_in(argument), None) is not None else type(argument)(metas)
    return argument


def _empty_tensors(argument: Any) -> Iterator[torch.Tensor]:
    for spec in specs_in((argument,)):
        shape, stride, dtype = spec.tensor_meta
        yield torch.empty_strided(shape, stride, dtype=dtype, device=spec.mesh.device_type)


class AxisStrategy(NamedTuple):
    """One way to shard an operator over one mesh axis: a placement per tensor argument and per output.

    A Shard with only a dim stands for any cut of that dim. All such arguments take the cut that one of them has
    already, so the dims must be cuts of one index. With `exact` it stands for itself.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement | None, ...]
    exact: bool = False


@dataclass(frozen=True, slots=True)
class OutputSharding:
    """The decision of propagation about a call.

    `input_specs` are the required specs of the tensor arguments, None if they have them already. `local` replaces the
    operator on local tensors where it needs local sizes or offsets. `copies_view` marks outputs that are copied views,
    which are copied again after a write to the first argument. `data_dependent` marks outputs whose shapes depend on
    values: without specs, every tensor among them is whole on every rank. `is_viewed` marks a `local` that views the
    local tensor as the output's local shape, which its strides may not allow. `refusal` is the reason why the call is
    refused, unless the fallback lets it run as decided.

    `redistribute_schema` gives `input_specs` as a whole call, whose values a rule may also use:
    `use_val_from_redistribute_schema`. A rule that returns it without `output_spec` is asked about that call next.
    """

    output_spec: OutputSpecs
    input_specs: tuple[DTensorSpec, ...] | None = None
    local: LocalOp | None = None
    copies_view: bool = False
    data_dependent: bool = False
    is_viewed: bool = False
    refusal: str = ""
    redistribute_schema: OpSchema | None = field(default=None, compare=False, repr=False, kw_only=True)
    # Whether an argument has to move first: follows from the others.
    needs_redistribute: bool = field(default=False, compare=False, repr=False, kw_only=True)
    use_val_from_redistribute_schema: bool = field(default=False, compare=False, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        suggested = self.redistribute_schema
        if suggested is None and self.use_val_from_redistribute_schema:
            raise PropagationError("use_val_from_redistribute_schema was given; it needs a redistribute_schema")
        if suggested is None and self.input_specs is None and self.needs_redistribute:
            raise PropagationError("needs_redistribute was given; it needs a redistribute_schema, or input_specs")
        if suggested is not None and self.input_specs is None:
            object.__setattr__(self, "input_specs", suggested.args_spec)
        object.__setattr__(self, "needs_redistribute", self.input_specs is not None)

    @property
    def mesh(self) -> Mesh:
        """The mesh of the first output; PropagationError where that is no tensor."""
        first = next(specs_in((self.output_spec,)), None)
        if first is None:
            raise PropagationError(f"the mesh was asked for of a decision whose output is {self.output_spec}")
        return first.mesh


# What a strategy function may return, and the functions themselves. It may decide the call itself.
Strategies: TypeAlias = "Sequence[AxisStrategy] | OpStrategy | TupleStrategy | OutputSharding"
StrategyFunction: TypeAlias = Callable[[OpSchema], Strategies]
RuleFunction: TypeAlias = Callable[[OpSchema], OutputSharding]
# Called once per signature with the schema as it will run and its outputs; None where the operator runs as it is.
LocalizeFunction: TypeAlias = Callable[[OpSchema, OutputSpecs], "LocalOp | None"]
