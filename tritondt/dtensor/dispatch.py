"""Dispatch of operators on distributed tensors: a look-up, the operator on local tensors, the wrapping of its result.

A signature (operator, specs, plain arguments) is decided once by the propagator and compiled into a `CompiledCall`.
Each call then is one call of the extension: the key, a look-up, the local operator and the wrapping. The tensor class
is passed in, so that this file knows of (local tensor, spec) pairs only.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload

from tritondt import identity
from tritondt._C import make_call_splitter, make_dispatch, running_operator
from tritondt.comm import read_guard
from tritondt.dtensor.call_keys import OPEN_NUMBERS, flat, plain_key, value_of
from tritondt.dtensor.compiled_call import (
    KeepKinds,
    Signature,
    TrackBase,
    WrapAll,
    alias_of,
    viewed_or_copied,
)
from tritondt.dtensor.decompose import decompose, outs_to_fit
from tritondt.dtensor.list_positions import clipping, in_order, number_on, run_by_kind, written_lists
from tritondt.dtensor.operator_call import CompiledCall, Kind, Wrap, direct_binding
from tritondt.dtensor.own_sources import check_from_others, from_others, run_apart
from tritondt.dtensor.text import mixed_text
from tritondt.dtensor.views.recorded_views import noting_views
from tritondt.dtensor.writes import FORMER, MEMORY, RECORDED, watched
from tritondt.errors import MeshError, MixedTensorsError, OpenLengthError, check_not_of_torch
from tritondt.kernels.memory import has_memory
from tritondt.ops.propagation.propagator import ShardingPropagator
from tritondt.ops.propagation.replication import are_alike, are_replicated, as_replicated
from tritondt.ops.propagation.schema import LocalOp, OpSchema
from tritondt.ops.propagation.selection import written_positions
from tritondt.redistribution.in_graphs import (
    hold_for_lengths_at_hand,
    holds_for_lengths_at_hand,
    prefer_lengths_of_forward,
)
from tritondt.sharding.mesh import Mesh
from tritondt.sharding.placement import Replicate
from tritondt.sharding.spec import DTensorSpec, TensorMeta

# Signatures kept per operator; the oldest goes first. 1,024 signatures of a binary operator take about 1 MB.
MAX_SIGNATURES = 1024

_NOTHING: Mapping[str, Any] = {}


class _Operator(NamedTuple):
    """Compiled signatures of one operator; see RuntimeSchemaInfo for `static_argnum`. The extension reads the first two
    fields."""

    signatures: dict[tuple[Any, ...], CompiledCall]
    static_argnum: int
    op: OpOverload


def enter(run: Callable[..., Any], *args: Any) -> Any:
    """Calls a function: the extension calls all of Python through here, where torch.compile stops looking."""
    return run(*args)


class Dispatcher:
    """Dispatch for one tensor class, whose instances carry `_local_tensor` and `_spec`.

    `dispatch` is a function of the extension, for it runs at every call of every operator.
    """

    def __init__(
        self,
        tensor_class: type[torch.Tensor],
        wrap: Wrap,
        wrap_all: WrapAll,
        track_base: TrackBase,
        keep_kinds: KeepKinds,
        propagator: ShardingPropagator,
    ) -> None:
        self._class, self._wrap, self._wrap_all, self._track_base = tensor_class, wrap, wrap_all, track_base
        self._keep_kinds, self._propagator = keep_kinds, propagator
        self._split = make_call_splitter(tensor_class)
        self._operators: dict[int, _Operator] = {}
        propagator.on_change(self._operators.clear)
        identity.on_end(self._operators.clear)
        self.dispatch = self._make_dispatch()

    def num_signatures(self, op: OpOverload) -> int:
        """Number of signatures of an operator that are kept now."""
        return len(found.signatures) if (found := self._operators.get(id(op))) else 0

    def running(self) -> OpOverload | None:
        """The operator that the calling thread dispatches, the innermost; None where it dispatches none."""
        found: OpOverload | None = running_operator()
        return found

    def _make_dispatch(self) -> Callable[..., Any]:
        def dispatch(
            op: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            """The operator's result, with distributed tensors for tensors.

            Raises MixedTensorsError, MeshError and PropagationError before anything is sent.
            """
            return self.dispatch(op, types, args, kwargs)  # positional, as the extension takes them

        by = self._operators, self._wrap, self._run_any, enter, run_apart
        return make_dispatch(dispatch, self._class, *by, read_guard.readers, watched, RECORDED, MEMORY, FORMER)

    def _run_any(self, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The operator's result for arguments of any kind, and for signatures that are not compiled yet."""
        operator = self._operator(op)
        key: list[Any] = []
        local_args = self._local_arguments(args, key, operator.static_argnum)
        local_kwargs = kwargs
        if kwargs:
            names = sorted(kwargs)
            key.append(tuple(names))
            # Keyword arguments count as static unless all numbers do.
            values = self._local_arguments([kwargs[name] for name in names], key, 100 * (operator.static_argnum >= 100))
            local_kwargs = dict(zip(names, values, strict=True))
        found, is_kept = _look_up(operator, key)
        if found is None and self._leaves_open(args, kwargs):
            result = self._run_open(op, args, kwargs, local_args, local_kwargs)
            if result is NotImplemented:
                hold_for_lengths_at_hand()
                return self._run_any(op, *self._with_values(args, kwargs))
            return result
        if found is None:
            return self._run_new(op, args, kwargs, local_args, local_kwargs, key if is_kept else None)
        return found.run(self._wrap, local_args, local_kwargs, args, kwargs)

    def _run_new(
        self,
        op: OpOverload,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        local_args: Sequence[Any],
        local_kwargs: Mapping[str, Any],
        key: Sequence[Any] | None,
    ) -> Any:
        """The result of a call whose signature is not compiled yet; it is then, and kept by its key if it has one."""
        mixed = self._keep_gradients(op, args, kwargs)
        result = self._run_otherwise(op, args, kwargs)
        if result is not NotImplemented:
            return result
        schema = self._schema(op, args, kwargs)
        if not self._propagator.knows(op):
            check_from_others(op, args, kwargs)
            result = decompose(schema, args, kwargs)
            if result is not NotImplemented:
                return result
        if schema.is_out_variant and (outs := outs_to_fit(schema, args, kwargs)).any:
            with outs:
                return self._run_any(op, args, kwargs)
        found = noting_views(schema, self._compile(schema), self._wrap)
        found = self._with_gradients_kept(op, found) if mixed else found
        if key is not None:
            _keep(self._operator(op), key, found)
            if not kwargs:
                return self.dispatch(op, (), tuple(args))  # in the way of all later calls
        return found.run(self._wrap, local_args, local_kwargs, args, kwargs)

    def _run_otherwise(self, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The results of a call with plain arguments by calls with other arguments; NotImplemented if there are none.

        A list of both kinds runs kind by kind, a distributed number is a plain one to the plain tensor that it changes,
        and plain tensors may count as replicated.
        """
        result = run_by_kind(op, args, kwargs, self._class)
        if result is not NotImplemented:
            return result
        if self._are_numbers(args, kwargs) and self._writes(op, args, kwargs, self._is_plain):
            named = {name: self._plain_number(op, argument) for name, argument in kwargs.items()}
            return op(*(self._plain_number(op, argument) for argument in args), **named)
        if self._are_replicated(op, args, kwargs):
            return self._run_any(op, *self._all_distributed(args, kwargs))
        return NotImplemented

    def _leaves_open(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether an argument has lengths, or is a number, that a graph leaves open."""
        return any(
            item._spec.is_open if isinstance(item, self._class) else isinstance(item, OPEN_NUMBERS)  # type: ignore[attr-defined]
            for item in flat((*args, *kwargs.values()))
        )

    def _run_open(
        self,
        op: OpOverload,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        local_args: Sequence[Any],
        local_kwargs: Mapping[str, Any],
    ) -> Any:
        """The result for all lengths that guards let pass; NotImplemented where the call is decided by values.

        TypeError is what anything says that looks such a length up: it has no hash.
        """
        given = [*flat((*args, *kwargs.values()))]
        distributed: list[Any] = [item for item in given if isinstance(item, self._class)]
        if holds_for_lengths_at_hand() or any(has_memory(item._local_tensor) for item in distributed):
            return NotImplemented
        prefer_lengths_of_forward()
        mixed = self._keep_gradients(op, args, kwargs)
        result = self._run_otherwise(op, args, kwargs)
        if result is not NotImplemented or any(map(self._is_plain, given)):
            return result
        schema = self._schema(op, args, kwargs)
        try:
            if not self._propagator.knows(op):
                return decompose(schema, args, kwargs)
            found = noting_views(schema, self._compile(schema), self._wrap)
        except (OpenLengthError, TypeError):
            return NotImplemented
        if any(item._spec.is_known_now for item in distributed):
            hold_for_lengths_at_hand()
        found = self._with_gradients_kept(op, found) if mixed else found
        return found.run(self._wrap, local_args, local_kwargs, args, kwargs)

    def _are_replicated(self, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether there are plain arguments with dims, and they count as replicated."""
        plain = [*filter(self._is_plain, flat((*args, *kwargs.values())))]
        if not plain:
            return False
        return are_replicated(written=self._writes(op, args, kwargs, self._is_plain)) or are_alike(op, args, plain)

    def _are_numbers(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether the distributed arguments have no dims, as a factor of clip_grad_norm_ for plain gradients."""
        return all(not item.ndim for item in flat((*args, *kwargs.values())) if isinstance(item, self._class))

    def _plain_number(self, op: OpOverload, argument: Any) -> Any:
        return number_on(op, argument, None) if isinstance(argument, self._class) else argument

    def _may_need_gradient(self, argument: Any) -> bool:
        """Whether an argument that has gradients is plain, or empty: torch.cat gives such a one a plain gradient."""
        if not isinstance(argument, torch.Tensor) or (isinstance(argument, self._class) and argument.shape != (0,)):
            return False
        return argument.is_floating_point() or argument.is_complex()

    def _keep_gradients(self, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Lets plain arguments have plain gradients, and distributed ones distributed; whether there are plain ones."""
        given = tuple(flat((*args, *kwargs.values())))
        mixed = any(map(self._may_need_gradient, given))
        if mixed and torch.is_grad_enabled():
            writes = op._schema.is_mutable and self._writes(op, args, kwargs, self._may_need_gradient)
            self._keep_kinds(given, writes_plain=writes)
        return mixed

    def _with_gradients_kept(self, op: OpOverload, found: CompiledCall) -> CompiledCall:
        """The compiled call of a signature with plain arguments, which are looked at every time."""

        def kept(
            local_args: Sequence[Any], local_kwargs: Mapping[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any]
        ) -> Any:
            if torch.is_grad_enabled():
                self._keep_gradients(op, args, kwargs)
            return found.run(self._wrap, local_args, local_kwargs, args, kwargs)

        return CompiledCall(Kind.GENERAL, general=kept)

    def _with_values(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        """The arguments with values in place of what a graph leaves open; the graph then holds for these values."""
        return [*map(self._with_value, args)], {name: self._with_value(given) for name, given in kwargs.items()}

    def _with_value(self, argument: Any) -> Any:
        if isinstance(argument, list | tuple):
            return [self._with_value(item) for item in argument]
        if isinstance(argument, self._class):
            distributed: Any = argument
            spec = distributed._spec
            if spec.is_open:
                shape, stride = (tuple(map(int, sizes)) for sizes in (spec.shape, spec.tensor_meta.stride))
                distributed._spec = spec.placed.of_size(shape, stride)
                _ = [*map(int, distributed._local_tensor.shape)]
            return argument
        return value_of(argument)

    def _is_plain(self, argument: Any) -> bool:
        """Whether an argument is a tensor of this rank alone, with dims."""
        return isinstance(argument, torch.Tensor) and argument.ndim > 0 and not isinstance(argument, self._class)

    def _writes(
        self, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], is_such: Callable[[Any], bool]
    ) -> bool:
        """Whether the operator writes to such a tensor."""
        declared = op._schema.arguments
        given = {argument.name: found for argument, found in zip(declared, args, strict=False)} | dict(kwargs)
        return any(
            any(map(is_such, flat((given[argument.name],))))
            for argument in declared
            if argument.alias_info is not None and argument.alias_info.is_write and argument.name in given
        )

    def _all_distributed(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        """The arguments with replicated distributed tensors in place of plain ones."""
        given = flat((*args, *kwargs.values()))
        mesh = next(item._spec.mesh for item in given if isinstance(item, self._class))  # type: ignore[attr-defined]
        made = [self._distributed(argument, mesh) for argument in args]
        return made, {name: self._distributed(argument, mesh) for name, argument in kwargs.items()}

    def _distributed(self, argument: Any, mesh: Mesh) -> Any:
        if self._is_plain(argument):
            return self._wrap(*as_replicated(argument, mesh))
        return [self._distributed(item, mesh) for item in argument] if isinstance(argument, list | tuple) else argument

    def _operator(self, op: OpOverload) -> _Operator:
        found = self._operators.get(id(op))
        if found is None:
            # Operators live as long as torch; keeping the object makes sure of it.
            found = self._operators[id(op)] = _Operator({}, self._propagator.schema_info(op).static_argnum, op)
        return found

    def _local_arguments(self, args: Sequence[Any], key: list[Any], static_argnum: int) -> list[Any]:
        """Local tensors in place of distributed ones; appends the key's parts to `key`, as dispatch does."""
        local_args: list[Any] = []
        for argument in args:
            if isinstance(argument, list | tuple):
                local_args.append(self._local_list(argument, key, len(local_args) < static_argnum))
            elif isinstance(argument, self._class):
                distributed: Any = argument
                key.append(distributed._spec)
                local_args.append(distributed._local_tensor)
            else:
                by_value = len(local_args) >= static_argnum
                key.extend(plain_key(argument, by_value))
                local_args.append(argument)
        return local_args

    def _local_list(self, items: Sequence[Any], key: list[Any], numbers_by_type: bool) -> Sequence[Any]:
        found = self._split((list(items),), int(numbers_by_type))
        if found is not None:  # tensors alone, of which foreach operators and optimizers pass hundreds, or numbers
            local_items: Sequence[Any]
            parts, (local_items,) = found
            key.extend(parts)
            return local_items
        key.append(len(items))
        return self._local_arguments(items, key, len(items) if numbers_by_type else 0)

    def _compile(self, schema: OpSchema) -> CompiledCall:
        decision = self._propagator.propagate(schema)
        local: LocalOp = decision.local or schema.op._op
        written = written_positions(schema)
        runs_as_it_is = schema.mesh.coordinate is not None and not written
        runs_as_it_is &= not decision.needs_redistribute and not decision.copies_view
        if runs_as_it_is and isinstance(decision.output_spec, DTensorSpec):
            if schema.op is torch.ops.aten.detach.default:
                return alias_of(decision.output_spec, self._wrap)
            if decision.is_viewed:
                return viewed_or_copied(schema.op, decision.output_spec, self._wrap, self._track_base)
            return CompiledCall(Kind.ONE, local, decision.output_spec, direct=direct_binding(schema.op, local))
        made_by = self._wrap, self._wrap_all, self._track_base, self._propagator.fallback.admit
        signature = Signature(schema, decision, local, written, *made_by)
        found = signature.compiled()
        run = from_others(schema.op, signature.run) if written else signature.run
        if decision.needs_redistribute and written_lists(schema.op):
            run = in_order(schema.op, run)
        return found if run == signature.run else CompiledCall(Kind.GENERAL, general=run)

    def _schema(self, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> OpSchema:
        """The call with specs in place of tensors; MeshError or MixedTensorsError where tensors do not go together."""
        distributed = [item for item in flat((*args, *kwargs.values())) if isinstance(item, self._class)]
        spec = distributed[0]._spec  # type: ignore[attr-defined]
        for other in distributed:
            if other._spec.mesh is not spec.mesh:  # type: ignore[attr-defined]
                raise MeshError(
                    f"{op} got tensors on {spec.mesh} and on {other._spec.mesh}; "  # type: ignore[attr-defined]
                    "all must be on one mesh: redistribute to full tensors, or make them on one mesh"
                    f"{clipping(op)}"
                )
        # In declared order, whatever order the caller gave them in: signatures do not tell that apart.
        declared = (argument.name for argument in op._schema.arguments)
        named = {name: self._spec_of(kwargs[name], op, spec) for name in declared if name in kwargs}
        return OpSchema(op, tuple(self._spec_of(argument, op, spec) for argument in args), named)

    # A method, as all that calls itself here: a function within would be in a cycle with its own cell, and hold the
    # call's tensors until the next garbage collection.
    def _spec_of(self, argument: Any, op: OpOverload, beside: DTensorSpec) -> Any:
        """Specs in place of tensors, in lists too; MixedTensorsError for a plain one `beside` a distributed one."""
        if isinstance(argument, self._class):
            return argument._spec  # type: ignore[attr-defined]
        if isinstance(argument, torch.Tensor):
            check_not_of_torch(argument, str(op))
            if argument.ndim:
                raise MixedTensorsError(mixed_text(op, beside, argument))
            return DTensorSpec(beside.mesh, [Replicate()] * beside.mesh.ndim, TensorMeta((), (), argument.dtype))
        if isinstance(argument, list | tuple):
            return [self._spec_of(item, op, beside) for item in argument]
        return argument


def _look_up(operator: _Operator, key: Sequence[Any]) -> tuple[CompiledCall | None, bool]:
    """The call compiled for a signature, and whether it can be kept: not where an argument has no hash."""
    try:
        return operator.signatures.get(tuple(key)), True
    except TypeError:
        return None, False


def _keep(operator: _Operator, key: Sequence[Any], found: CompiledCall) -> None:
    if len(operator.signatures) >= MAX_SIGNATURES:
        del operator.signatures[next(iter(operator.signatures))]
    operator.signatures[tuple(key)] = found
