"""Runs a call that moves arguments, writes to them, or gives several tensors or none, as propagation decided."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

import torch
from torch._ops import OpOverload

from tritondt.comm import reading
from tritondt.moving import move_input
from tritondt.ops.schema import LocalOp, OpSchema, OutputSharding, OutputSpecs
from tritondt.spec import DTensorSpec


class Wrap(Protocol):
    """Makes a distributed tensor of a local tensor and its spec."""

    def __call__(self, local: torch.Tensor, spec: DTensorSpec, /) -> torch.Tensor:
        """The distributed tensor."""


class WrapAll(Protocol):
    """Makes distributed tensors of many local tensors and their specs."""

    def __call__(self, locals_: Iterable[torch.Tensor], specs: Iterable[DTensorSpec], /) -> list[torch.Tensor]:
        """The distributed tensors."""


class Follow(Protocol):
    """Makes the results of a view that had to move follow its argument."""

    def __call__(self, results: Any, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], /) -> Any:
        """The results."""


# Runs a signature: positional and keyword arguments with local tensors in place, then the arguments as they came.
Compiled = Callable[[Sequence[Any], Mapping[str, Any], Sequence[Any], Mapping[str, Any]], Any]


class Signature:
    """A signature that moves arguments, writes to them, or gives several tensors or none."""

    def __init__(
        self,
        schema: OpSchema,
        decision: OutputSharding,
        local: LocalOp,
        written: Sequence[int],
        wrap: Wrap,
        wrap_all: WrapAll,
        follow: Follow,
    ) -> None:
        self._op, self._local, self._wrap, self._wrap_all = schema.op, local, wrap, wrap_all
        self._follow = follow if decision.follows else None
        self._outputs = decision.output_spec
        self._in_mesh = schema.mesh.coordinate is not None
        self._moves = (
            () if decision.input_specs is None else tuple(zip(schema.args_spec, decision.input_specs, strict=True))
        )
        # One list: of several results each may be missing, as the gradient of what needs none.
        self._gives_list = len(schema.op._schema.returns) == 1 and isinstance(self._outputs, Sequence)
        self._names = tuple(schema.kwargs_schema)
        self._writes, self._written = bool(written), frozenset(written)
        self._reshapes = torch.Tag.inplace_view in schema.op.tags
        self._returns = tuple(_returned(schema.op))

    def run(
        self,
        local_args: Sequence[Any],
        local_kwargs: Mapping[str, Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Moves what has to move, runs, and wraps."""
        if self._moves:
            moves = iter(self._moves)
            local_args = [self._moved(argument, moves, given) for argument, given in zip(local_args, args, strict=True)]
            local_kwargs = {name: self._moved(local_kwargs[name], moves, kwargs[name]) for name in self._names}
        if self._writes and reading.readers:
            self._wait_for_readers(local_args, local_kwargs)
        result = self._local(*local_args, **local_kwargs) if self._in_mesh else None
        if self._reshapes:
            return self._reshaped(result, args, kwargs)
        if self._writes:
            given = [_argument(args, kwargs, place, name) for place, name in self._returns]
            return given[0] if len(given) == 1 else tuple(given) if given else None
        wrapped = self._wrapped(result, self._outputs)
        return wrapped if self._follow is None else self._follow(wrapped, self._op, args, kwargs)

    def _wait_for_readers(self, local_args: Sequence[Any], local_kwargs: Mapping[str, Any]) -> None:
        """Messages may be on their way out of the memory that is about to be written to."""
        tensors = _tensors_in((*local_args, *(local_kwargs[name] for name in self._names)))
        reading.wait_before_writing(tensor for place, tensor in enumerate(tensors) if place in self._written)

    def _reshaped(self, local: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The argument itself with another shape: the operator runs on the outer tensor as well, which has no data."""
        distributed = args[0]
        with torch._C._DisableTorchDispatch():
            self._op(*args, **kwargs)
        distributed._spec = self._outputs
        if self._in_mesh:
            distributed._local_tensor = local
        return distributed

    def _moved(self, argument: Any, moves: Iterator[tuple[DTensorSpec, DTensorSpec]], given: Any) -> Any:
        if isinstance(given, list | tuple):
            return [self._moved(item, moves, of) for item, of in zip(argument, given, strict=True)]
        if not isinstance(given, torch.Tensor):
            return argument
        source, target = next(moves)
        return argument if source is target else move_input(self._op, argument, source, target)

    def _wrapped(self, result: Any, specs: OutputSpecs) -> Any:
        if isinstance(specs, DTensorSpec):
            return self._wrap(_empty(specs) if result is None else result, specs)
        if specs is None:
            return result
        if self._gives_list and self._in_mesh:
            return self._wrap_all(result, cast(Sequence[DTensorSpec], specs))
        if not self._in_mesh:
            return tuple(None if spec is None else self._wrap(_empty(spec), spec) for spec in specs)
        pairs = zip(result, specs, strict=True)
        return tuple(item if spec is None or item is None else self._wrap(item, spec) for item, spec in pairs)


def _empty(spec: DTensorSpec) -> torch.Tensor:
    return torch.empty((0,), dtype=spec.dtype, device=spec.mesh.device_type)


def _tensors_in(arguments: Iterable[Any]) -> Iterator[torch.Tensor]:
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, list | tuple):
            yield from _tensors_in(argument)


def _returned(op: OpOverload) -> Iterator[tuple[int, str]]:
    """Arguments that the operator writes to and returns, in the order of what it returns."""
    names = [frozenset(result.alias_info.before_set) for result in op._schema.returns if result.alias_info is not None]
    for aliases in names:
        for place, declared in enumerate(op._schema.arguments):
            if declared.alias_info is not None and frozenset(declared.alias_info.before_set) & aliases:
                yield place, declared.name


def _argument(args: Sequence[Any], kwargs: Mapping[str, Any], place: int, name: str) -> Any:
    return args[place] if place < len(args) else kwargs[name]
