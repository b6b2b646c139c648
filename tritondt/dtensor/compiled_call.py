"""Calls with input redistribution, written arguments, or several results, compiled from what propagation decided."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch._ops import OpOverload

from tritondt.comm import read_guard
from tritondt.dtensor.operator_call import CompiledCall, Kind, Wrap, direct_binding
from tritondt.dtensor.own_sources import run_apart, tensors_in
from tritondt.dtensor.writes import MEMORY, count_writes, leaves_counting, memory_of, take_memory, watched
from tritondt.errors import PropagationError
from tritondt.kernels.memory import has_memory
from tritondt.ops.propagation.placeholders import placeholder_numbers
from tritondt.ops.propagation.schema import LocalOp, OpSchema, OutputSharding, OutputSpecs
from tritondt.ops.propagation.tensor_meta import meta_of
from tritondt.redistribution.implicit import redistribute_input
from tritondt.sharding.placement import Replicate
from tritondt.sharding.spec import DTensorSpec, TensorMeta
from tritondt.sharding.strides import strides_without_gaps


class WrapAll(Protocol):
    """Makes distributed tensors of many local tensors and their specs."""

    def __call__(self, locals_: Iterable[torch.Tensor], specs: Iterable[DTensorSpec], /) -> list[torch.Tensor]:
        """The distributed tensors."""


class TrackBase(Protocol):
    """Makes results of a view that had to be copied track the view's first argument."""

    def __call__(
        self, results: Any, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], /, *, is_local: bool = False
    ) -> Any:
        """The results, as copied views; `is_local` where no rank sends anything to copy them again."""


class KeepKinds(Protocol):
    """Lets plain and distributed tensors of one operator each have gradients of their own kind."""

    def __call__(self, tensors: Iterable[Any], /, *, writes_plain: bool) -> None:
        """None; `writes_plain` says that the operator writes to a plain one."""


class Admit(Protocol):
    """Raises PropagationError with a decision's refusal, unless the fallback lets the call run."""

    def __call__(self, op: OpOverload, refusal: str, /) -> None:
        """None, or PropagationError."""


class _InputMove(NamedTuple):
    """The spec of an argument and the spec that the operator needs; a written argument is moved back afterwards."""

    source: DTensorSpec
    target: DTensorSpec
    is_written: bool


# This rank's part of a written argument, the redistributed stand-in that the operator writes to, and the move.
_Replaced = tuple[torch.Tensor, torch.Tensor, _InputMove]


class Signature:
    """One signature of an operator, compiled: redistributes arguments, runs on local tensors, writes back and wraps."""

    def __init__(
        self,
        schema: OpSchema,
        decision: OutputSharding,
        local: LocalOp,
        written: Sequence[int],
        wrap: Wrap,
        wrap_all: WrapAll,
        track_base: TrackBase,
        admit: Admit,
    ) -> None:
        _check_own_elements(schema, decision.input_specs, written)
        self._op, self._local, self._wrap, self._wrap_all = schema.op, local, wrap, wrap_all
        self._refusal, self._admit = decision.refusal, admit
        self._track_base = track_base if decision.copies_view else None
        self._outputs, self._data_dependent = decision.output_spec, decision.data_dependent
        self._mesh, self._in_mesh = schema.mesh, schema.mesh.coordinate is not None
        self._numbers = () if self._in_mesh else placeholder_numbers(schema)
        targets = decision.input_specs
        self._input_moves = () if targets is None else tuple(_input_moves(schema, targets, written))
        # One list: of several results each may be missing, as the gradient of what needs none.
        self._returns_list = len(schema.op._schema.returns) == 1 and isinstance(self._outputs, Sequence)
        self._names = tuple(schema.kwargs_schema)
        self._num_positional = len(schema.args_schema)
        self._written = frozenset(written)
        # An operator may write to arguments and give new tensors, as batch norm does.
        self._returns_arguments = bool(written) and all(result.alias_info for result in schema.op._schema.returns)
        self._reshapes = torch.Tag.inplace_view in schema.op.tags
        self._written_arguments = tuple(_written_arguments(schema.op)) if written else ()
        self._raises_versions = bool(written) and leaves_counting(schema.op)
        self._returns = tuple(_returned_arguments(schema.op))

    def compiled(self) -> CompiledCall:
        """The call as the extension runs it: by itself where nothing moves, and there is one result, or a list."""
        specs = self._outputs
        is_special = self._refusal or self._input_moves or self._reshapes or self._data_dependent or self._track_base
        if is_special or not self._in_mesh:
            return CompiledCall(Kind.GENERAL, general=self.run)
        if self._returns_arguments and len(self._returns) <= 1:
            # The places of written tensors, of the argument that is returned, and of those whose versions are raised.
            returned = next((place for place, _ in self._returns), -1)
            raised = tuple(place for place, _ in self._written_arguments) if self._raises_versions else ()
            if all(place < self._num_positional for place in (returned, *raised)):
                details = self._written, returned, raised
                direct = direct_binding(self._op, self._local)
                return CompiledCall(Kind.WRITE, self._local, general=self.run, details=details, direct=direct)
        is_list = not self._written and self._returns_list and isinstance(specs, Sequence)
        if is_list and all(isinstance(spec, DTensorSpec) for spec in cast(Sequence[Any], specs)):
            made = tuple(cast(Sequence[DTensorSpec], specs))
            return CompiledCall(Kind.LIST, self._local, made, self.run)
        return CompiledCall(Kind.GENERAL, general=self.run)

    def run(
        self,
        local_args: Sequence[Any],
        local_kwargs: Mapping[str, Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Redistributes arguments, runs the operator, copies written stand-ins back, and wraps the results."""
        if self._refusal:
            self._admit(self._op, self._refusal)
        if self._written and (read_guard.readers or watched):
            self._announce_write(local_args, local_kwargs, args, kwargs)
        replaced: list[_Replaced] = []
        if self._input_moves:
            moves = iter(self._input_moves)
            local_args = [
                self._redistributed(argument, moves, given, replaced)
                for argument, given in zip(local_args, args, strict=True)
            ]
            local_kwargs = {
                name: self._redistributed(local_kwargs[name], moves, kwargs[name], replaced) for name in self._names
            }
        try:
            result = self._local(*local_args, **local_kwargs) if self._in_mesh else None
        except RuntimeError as error:
            named = {name: local_kwargs[name] for name in self._names}
            result = run_apart(self._local, local_args, named, self._written, error)
        for own, stand_in, move in replaced:
            own.copy_(redistribute_input(self._op, stand_in, move.target, move.source))
        if self._raises_versions:
            torch._C._increment_version(self._tensors_written(args, kwargs))
        if self._reshapes:
            return self._reshaped(result, args, kwargs)
        if self._returns_arguments:
            given = [_argument(args, kwargs, place, name) for place, name in self._returns]
            return given[0] if len(given) == 1 else tuple(given) if given else None
        wrapped = self._replicated(result) if self._data_dependent else self._wrapped(result, self._outputs)
        return wrapped if self._track_base is None else self._track_base(wrapped, self._op, args, kwargs)

    def _announce_write(
        self,
        local_args: Sequence[Any],
        local_kwargs: Mapping[str, Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Waits for messages that still read the memory of an argument that is about to be written to; counts it."""
        if read_guard.readers:
            tensors = tensors_in((*local_args, *(local_kwargs[name] for name in self._names)))
            read_guard.wait_before_writing(tensor for place, tensor in enumerate(tensors) if place in self._written)
        if watched:
            count_writes(self._tensors_written(args, kwargs), reshapes=self._reshapes)

    def _tensors_written(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """The distributed tensors that the operator writes to."""
        found: list[torch.Tensor] = []
        for place, name in self._written_arguments:
            given = args[place] if place < len(args) else kwargs.get(name)
            if isinstance(given, list | tuple):
                found.extend(given)
            elif given is not None:
                found.append(given)
        return found

    def _reshaped(self, local: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The argument itself with another shape: the operator runs on the outer tensor as well, which has no data."""
        distributed = args[0]
        memory_of(distributed)  # known by the local tensor that is replaced
        with torch._C._DisableTorchDispatch():
            self._op(*args, **kwargs)
        distributed._spec = self._outputs
        if self._in_mesh:
            distributed._local_tensor = local
        if self._op is torch.ops.aten.set_.source_Tensor:
            take_memory(distributed, args[1])
        return distributed

    def _redistributed(self, argument: Any, moves: Iterator[_InputMove], given: Any, replaced: list[_Replaced]) -> Any:
        if isinstance(given, list | tuple):
            return [self._redistributed(item, moves, of, replaced) for item, of in zip(argument, given, strict=True)]
        if not isinstance(given, torch.Tensor):
            return argument
        move = next(moves)
        if move.source is move.target:
            return argument
        if not self._in_mesh and argument.numel():  # a number as a plain tensor, which no rank outside the mesh has
            argument = argument.new_empty(0)
        stand_in = redistribute_input(self._op, argument, move.source, move.target)
        if self._data_dependent and self._in_mesh:
            stand_in = _in_order_of(move.source.tensor_meta, stand_in)
        if move.is_written:
            replaced.append((argument, stand_in, move))
        return stand_in

    def _wrapped(self, result: Any, specs: OutputSpecs) -> Any:
        if isinstance(specs, DTensorSpec):
            return self._wrap(_empty(specs) if result is None else result, specs)
        if not self._in_mesh:
            return self._placeholders(specs)
        if specs is None:
            return result
        if self._returns_list:
            return self._wrap_all(result, cast(Sequence[DTensorSpec], specs))
        pairs = zip(result, specs, strict=True)
        return tuple(item if spec is None or item is None else self._wrap(item, spec) for item, spec in pairs)

    def _placeholders(self, specs: Sequence[DTensorSpec | None] | None) -> Any:
        """Results on a rank outside the mesh: empty tensors, and numbers that stand for those it cannot know."""
        if specs is None:
            return self._numbers[0] if len(self._numbers) == 1 else self._numbers or None
        numbers = self._numbers * len(specs) if self._returns_list else self._numbers
        return tuple(
            number if spec is None else self._wrap(_empty(spec), spec)
            for number, spec in zip(numbers, specs, strict=True)
        )

    def _replicated(self, result: Any) -> Any:
        """Results of which every rank has all."""
        if isinstance(result, torch.Tensor):
            return self._wrap(result, DTensorSpec(self._mesh, [Replicate()] * self._mesh.ndim, meta_of(result)))
        return tuple(map(self._replicated, result)) if isinstance(result, list | tuple) else result


def alias_of(spec: DTensorSpec, wrap: Wrap) -> CompiledCall:
    """Detach under `spec`: a tensor that torch does not know for a view, but that shares memory."""

    def detach(
        local_args: Sequence[Any], local_kwargs: Mapping[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> torch.Tensor:
        made = wrap(local_args[0].detach(), spec)
        made.__dict__[MEMORY] = memory_of(args[0])
        return made

    return CompiledCall(Kind.DETACH, None, spec, detach)


def _written_arguments(op: OpOverload) -> Iterator[tuple[int, str]]:
    for place, declared in enumerate(op._schema.arguments):
        if declared.alias_info is not None and declared.alias_info.is_write:
            yield place, declared.name


def viewed_or_copied(op: OpOverload, spec: DTensorSpec, wrap: Wrap, track_base: TrackBase) -> CompiledCall:
    """A view in another shape, compiled: a copied view where this rank's strides allow no view, though the whole's do.

    The strides of a local tensor are this rank's alone: from_local takes any, and what has moved is row-major.
    """
    shape = spec.local_shape

    def run(
        local_args: Sequence[Any], local_kwargs: Mapping[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        local: torch.Tensor = local_args[0]
        try:
            return wrap(local.view(shape), spec)
        except (RuntimeError, ValueError):  # torch's fake tensors raise the latter
            copy = wrap(local.reshape(shape), spec)
        # A graph that torch traces knows no memory, and writes to what it views by itself.
        return track_base(copy, op, args, kwargs, is_local=True) if has_memory(local) else copy

    return CompiledCall(Kind.VIEW, torch.Tensor.view, spec, run, shape)


# What gives elements that share memory one value, torch lets write.
_FILLING = frozenset({
    *("fill_", "zero_", "masked_fill_", "index_fill_", "index_put_", "_index_put_impl_", "triu_", "tril_"),
    "_foreach_zero_",
})  # fmt: skip


def _check_own_elements(schema: OpSchema, targets: Sequence[DTensorSpec] | None, written: Sequence[int]) -> None:
    """Refuses to write to elements that share memory, as kernels do; a rank that has one of them would not see it."""
    if torch.Tag.inplace_view in schema.op.tags:
        return
    fills, specs = schema.op._schema.name.removeprefix("aten::") in _FILLING, schema.args_spec
    for place in written:
        spec = specs[place]
        moves = targets is not None and targets[place] is not spec
        if (moves or not fills) and spec.tensor_meta.shares_elements:
            raise PropagationError(
                f"{schema.op} would write to {spec} with strides {spec.tensor_meta.stride}, elements of which share "
                "memory, as those of expand do; write to a copy of its own elements: x = x.clone()"
            )


def _in_order_of(meta: TensorMeta, whole: torch.Tensor) -> torch.Tensor:
    """The moved tensor `whole`, which is row-major, with its dims in memory as the meta has them.

    Where only values tell the shapes of results, only a kernel tells their strides, and takes them from its arguments.
    """
    if whole.stride() == meta.stride or meta.shares_elements:
        return whole
    ordered = strides_without_gaps(meta.shape, meta.stride)
    return whole.new_empty_strided(meta.shape, ordered).copy_(whole)


def _input_moves(schema: OpSchema, targets: Sequence[DTensorSpec], written: Sequence[int]) -> Iterator[_InputMove]:
    for place, (source, target) in enumerate(zip(schema.args_spec, targets, strict=True)):
        yield _InputMove(source, target, place in written)


def _empty(spec: DTensorSpec) -> torch.Tensor:
    return torch.empty((0,), dtype=spec.dtype, device=spec.mesh.device_type)


def _returned_arguments(op: OpOverload) -> Iterator[tuple[int, str]]:
    """Arguments that the operator writes to and returns, in the order of what it returns."""
    names = [frozenset(result.alias_info.before_set) for result in op._schema.returns if result.alias_info is not None]
    for aliases in names:
        for place, declared in enumerate(op._schema.arguments):
            if declared.alias_info is not None and frozenset(declared.alias_info.before_set) & aliases:
                yield place, declared.name


def _argument(args: Sequence[Any], kwargs: Mapping[str, Any], place: int, name: str) -> Any:
    return args[place] if place < len(args) else kwargs[name]
