"""Shapes, strides and dtypes of an operator's results, by a run on fake tensors of global shape."""

import threading
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, UnsupportedOperatorException

from tritondt.ops.propagation.schema import OpSchema
from tritondt.sharding.spec import DTensorSpec, TensorMeta

# One for every output, None where it is no tensor; a lone output stands by itself.
TensorMetas: TypeAlias = "TensorMeta | Sequence[TensorMeta | None] | None"

# What torch.library.custom_op says of an operator for which nobody has registered a fake.
_NOT_FAKED = "no fake impl registered"


class _Faker:
    """Runs operators under one fake mode for all calls: making one costs more than most operators under it."""

    def __init__(self) -> None:
        self._mode: FakeTensorMode | None = None
        self._turn = threading.Lock()

    def run(self, schema: OpSchema) -> tuple[Any, Any]:
        """Results, and the keyword arguments as they are afterwards."""
        with self._turn:
            if self._mode is None:
                self._mode = FakeTensorMode()
                # Torch's cache of what fake operators give is never emptied: 3 entries, 4 kB, a new shape.
                self._mode.cache_enabled = False
            with self._mode, torch.inference_mode(False), torch.no_grad():
                args, kwargs = fake_arguments(schema)
                try:
                    return schema.op(*args, **kwargs), kwargs
                except RuntimeError as error:
                    if _NOT_FAKED in str(error):
                        raise UnsupportedOperatorException(schema.op) from error
                    raise


_faker = _Faker()


def propagate_tensor_meta(schema: OpSchema) -> TensorMetas:
    """Metas of the operator's results for tensors of the arguments' global shapes."""
    result, _ = _faker.run(schema)
    if isinstance(result, torch.Tensor):
        return meta_of(result)
    if isinstance(result, list | tuple):
        return [meta_of(item) if isinstance(item, torch.Tensor) else None for item in result]
    return None


def keyword_shapes(schema: OpSchema) -> dict[str, Any]:
    """Shapes of a call's keyword arguments that are tensors, or lists of them, after the call."""
    _, kwargs = _faker.run(schema)
    return {name: _shapes(found) for name, found in kwargs.items() if _shapes(found) is not None}


def _shapes(found: Any) -> Any:
    if isinstance(found, list | tuple):
        return [_shapes(item) for item in found]
    return tuple(found.shape) if isinstance(found, torch.Tensor) else None


def meta_of(tensor: torch.Tensor) -> TensorMeta:
    """Shape, stride and dtype of a tensor."""
    return TensorMeta(tuple(tensor.shape), tensor.stride(), tensor.dtype)


def fake_arguments(schema: OpSchema) -> tuple[Any, Any]:
    """Arguments of a call with tensors of the global shapes, fake ones under a fake mode."""
    return _fake(schema.args_schema), _fake(dict(schema.kwargs_schema))


def _fake(argument: Any) -> Any:
    if isinstance(argument, DTensorSpec):
        meta = argument.tensor_meta
        return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=argument.mesh.device_type)
    if isinstance(argument, list | tuple):
        return type(argument)([_fake(item) for item in argument])
    if isinstance(argument, dict):
        return {name: _fake(item) for name, item in argument.items()}
    return argument
