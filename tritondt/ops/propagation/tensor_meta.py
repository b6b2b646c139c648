"""Shapes, strides and dtypes of an operator's results, by a run on tensors of global shape without memory."""

import logging
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeAlias, cast

import torch
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)

from tritondt.errors import PropagationError
from tritondt.ops.propagation.elementwise_strides import elementwise_strides
from tritondt.ops.propagation.meta_kernels import is_elementwise, leave_compiler_out, runs_on_meta
from tritondt.ops.propagation.schema import OpSchema
from tritondt.sharding.spec import DTensorSpec, TensorMeta

aten = torch.ops.aten

# One for every output, None where it is no tensor; a lone output stands by itself.
TensorMetas: TypeAlias = "TensorMeta | Sequence[TensorMeta | None] | None"

# Values tell the shapes, or nobody has said how to find them without values.
SHAPES_UNKNOWN = (DynamicOutputShapeException, DataDependentOutputException, UnsupportedOperatorException)
# What torch.library.custom_op says of an operator for which nobody has registered a fake.
_NOT_FAKED = "no fake impl registered"
_ASKS_FOR_VALUES = "cannot be called on meta tensors"
# What operators raise for arguments that do not fit; NotImplementedError is a RuntimeError.
META_ERRORS = (RuntimeError, TypeError, ValueError, IndexError)


# Results are made like the argument at a place; torch's fakes (2.13) promote it with the target, which kernels do not.
_DTYPE_OF = {
    **dict.fromkeys((aten.huber_loss.default, aten.soft_margin_loss.default), 0),
    **dict.fromkeys((aten.mse_loss_backward.default, aten.smooth_l1_loss_backward.default), 1),
    aten.soft_margin_loss_backward.default: 1,
}
# Kernels make the first result row-major, batch norm's with channels last if its image's are; torch's fakes (2.13) keep
# other strides.
_ROW_MAJOR = frozenset((
    *(aten.isin.Tensor_Tensor, aten.pow.Scalar, aten.log_sigmoid_forward.default),
    *(aten.masked_fill.Scalar, aten.masked_fill.Tensor),
))  # fmt: skip
_AS_IMAGES = frozenset((
    *(aten._native_batch_norm_legit.default, aten._native_batch_norm_legit.no_stats),
    aten._native_batch_norm_legit_no_training.default,
))  # fmt: skip
# Kernels write to a clone of the first argument, torch's fakes (2.13) to another copy.
_AS_CLONES = frozenset((aten.index_fill.int_Scalar, aten.index_fill.int_Tensor))

# What operators give that torch's fakes refuse, as functions of the call.
meta_of_call: dict[OpOverload, Callable[[OpSchema], TensorMeta]] = {}
# The same where the first tensor has no elements.
meta_of_nothing: dict[OpOverload, Callable[[OpSchema], TensorMeta]] = {}

# Where two batches of matrices start that are multiplied: kernels (2.13) compare no dtypes where there are no products
# to add up, and give the result that of the second batch.
_FIRST_BATCH = {aten.bmm.default: 0, aten.baddbmm.default: 1}


class _Faker:
    """Runs operators under one fake mode for all calls: making one costs more than most operators under it."""

    def __init__(self) -> None:
        self._mode: FakeTensorMode | None = None
        self._turn = threading.Lock()
        self._thread: int | None = None
        # Torch logs what a fake operator raises, with its traceback, 25 lines; here it is raised to who called.
        logging.getLogger("torch._subclasses.fake_tensor").addFilter(lambda record: record.thread != self._thread)

    def run(self, schema: OpSchema) -> tuple[Any, Any]:
        """Results, and the keyword arguments as they are afterwards."""
        with self._turn:
            if self._mode is None:
                self._mode = FakeTensorMode()
                # Torch's cache of what fake operators give is never emptied: 3 entries, 4 kB, a new shape.
                self._mode.cache_enabled = False
            self._thread = threading.get_ident()
            try:
                with self._mode, torch.inference_mode(False), torch.no_grad():
                    args, kwargs = fake_arguments(schema)
                    return schema.op(*args, **kwargs), kwargs
            except RuntimeError as error:
                if _NOT_FAKED in str(error):
                    raise UnsupportedOperatorException(schema.op) from error
                raise
            finally:
                self._thread = None


_faker = _Faker()


def propagate_tensor_meta(schema: OpSchema) -> TensorMetas:
    """Metas of the operator's results for tensors of the arguments' global shapes."""
    if not schema.found_metas:
        schema.found_metas.append(_found_metas(schema.with_specs_alone()))
    metas: TensorMetas = schema.found_metas[0]
    return metas


def _found_metas(schema: OpSchema) -> TensorMetas:
    own = meta_of_call.get(schema.op)
    if schema.op in meta_of_nothing and not schema.args_spec[0].layout.numel:
        own = meta_of_nothing[schema.op]
    if own is not None:
        return own(schema)
    try:
        metas = _computed_metas(_with_one_dtype(_with_dims_from_front(schema)))
    except AssertionError as error:  # torch's forms in Python assert what its kernels check and raise as this
        raise RuntimeError(f"{schema.op}: {error}") from error
    if schema.op in _ROW_MAJOR or schema.op in _AS_IMAGES:
        return _with_kernel_strides(schema.op, metas)
    if schema.op in _AS_CLONES:
        return cast(TensorMeta, metas)._replace(stride=torch.empty_like(_on_meta(schema.args_spec[0])).stride())
    place = _DTYPE_OF.get(schema.op)
    return metas if place is None else cast(TensorMeta, metas)._replace(dtype=schema.args_spec[place].dtype)


def _with_dims_from_front(schema: OpSchema) -> OpSchema:
    """The call with the dims of a norm counted from the front: torch's fake form (2.13) looks at no others' lengths."""
    place, args = 2, schema.args_schema
    if schema.op is not aten.linalg_vector_norm.default or len(args) <= place or args[place] is None:
        return schema
    num_dims = schema.args_spec[0].ndim
    dims = [dim + num_dims if dim < 0 else dim for dim in args[place]]
    return replace(schema, args_schema=(*args[:place], dims, *args[place + 1 :]), found_metas=[])


def _with_one_dtype(schema: OpSchema) -> OpSchema:
    """The call with the dtype of the second batch of matrices for all, where products of the two have no elements."""
    place = _FIRST_BATCH.get(schema.op)
    if place is None:
        return schema
    specs = schema.args_spec
    first, second = specs[place : place + 2]
    if 0 not in (*first.shape, *second.shape) or len({spec.dtype for spec in specs}) == 1:
        return schema
    dtype = second.dtype
    return schema.with_specs(
        [spec.shallow_copy_with_tensor_meta(spec.tensor_meta._replace(dtype=dtype)) for spec in specs]
    )


def _with_kernel_strides(op: OpOverload, metas: TensorMetas) -> TensorMetas:
    """Metas with the strides that the operator's kernel gives its first result."""
    if not isinstance(metas, TensorMeta):
        assert metas is not None, f"{op} gives tensors"
        first, *others = metas
        return [cast(TensorMeta, _with_kernel_strides(op, first)), *others]
    if op in _ROW_MAJOR:
        return TensorMeta.contiguous(metas.shape, metas.dtype)
    image = torch.empty_strided(metas.shape, metas.stride, device="meta")
    made = torch.empty_like(image, memory_format=suggest_memory_format(image))
    return metas._replace(stride=made.stride())


def _computed_metas(schema: OpSchema) -> TensorMetas:
    # Modes, as those of a graph that is traced, would see what is tried here, and autocast acts on no meta tensor.
    if torch._C._len_torch_dispatch_stack() or torch.is_autocast_enabled(schema.mesh.device_type):
        return _metas_of(schema.op, _faker.run(schema)[0])
    if is_elementwise(schema.op):
        meta = _elementwise_meta(schema)
        if meta is not None:
            return meta
    return _metas_of(schema.op, _run(schema) if "torch._dynamo" in sys.modules else _run_in_a_thread(schema))


def _run(schema: OpSchema) -> Any:
    result = NotImplemented
    if runs_on_meta(schema.op, frozenset(spec.dtype for spec in schema.args_spec)):
        result = _run_on_meta(schema)
    return _faker.run(schema)[0] if result is NotImplemented else result


def _run_in_a_thread(schema: OpSchema) -> Any:
    """The operator's results by a run without a call's arguments below it.

    Whatever first imports torch._dynamo leaves a frame in a cycle (that of torch.fx.wrap), and with it all frames
    below: the arguments would stay until a garbage collection.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_run, schema).result()


def _metas_of(op: OpOverload, result: Any) -> TensorMetas:
    if isinstance(result, torch.Tensor):
        check_gives_strided(op, result.layout)
        return meta_of(result)
    if isinstance(result, list | tuple):
        return [_meta_of_one(op, item) for item in result]
    return None


def _meta_of_one(op: OpOverload, item: Any) -> TensorMeta | None:
    return cast("TensorMeta", _metas_of(op, item)) if isinstance(item, torch.Tensor) else None


def check_gives_strided(op: OpOverload, layout: torch.layout) -> None:
    """Raises PropagationError for an operator whose result is sparse, or laid out in another way without strides."""
    if layout is not torch.strided:
        raise PropagationError(
            f"{op} gives a tensor of {layout}, and distributed tensors are strided; take x.full_tensor() or "
            "x.to_local() where a sparse tensor is wanted, and sparse=False in nn.Embedding for a dense gradient"
        )


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


def _elementwise_meta(schema: OpSchema) -> TensorMeta | None:
    """The meta of an elementwise operator's result; None where it raises, so that fake tensors say what is wrong."""
    try:
        shape = torch.broadcast_shapes(*(spec.shape for spec in schema.args_spec))
        args, kwargs = _stand_in(schema.args_schema, _one_element), _stand_in(schema.kwargs_schema, _one_element)
        with torch.inference_mode(False), torch.no_grad():
            found = schema.op(*args, **kwargs)
    except META_ERRORS:
        return None
    if schema.op._schema.is_mutable:
        written = schema.args_spec[0]
        return written.tensor_meta if found is args[0] and written.shape == shape else None
    strides = elementwise_strides(tuple(shape), [_on_meta(spec) for spec in schema.args_spec])
    return TensorMeta(tuple(shape), strides, found.dtype)


def _run_on_meta(schema: OpSchema) -> Any:
    """The operator's results as meta tensors; NotImplemented where it asks for values, so that fake tensors refuse it.

    Any other error of the operator is one that it would raise on one device.
    """
    args, kwargs = _stand_in(schema.args_schema, _on_meta), _stand_in(schema.kwargs_schema, _on_meta)
    leave_compiler_out()
    with torch.inference_mode(False), torch.no_grad():
        try:
            return schema.op(*args, **kwargs)
        except NotImplementedError:
            return NotImplemented
        except RuntimeError as error:
            if _ASKS_FOR_VALUES in str(error):
                return NotImplemented
            raise


def fake_arguments(schema: OpSchema) -> tuple[Any, Any]:
    """Arguments of a call with tensors of the global shapes, fake ones under a fake mode."""
    return _stand_in(schema.args_schema, _fake), _stand_in(schema.kwargs_schema, _fake)


def _fake(spec: DTensorSpec) -> torch.Tensor:
    meta = spec.tensor_meta
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=spec.mesh.device_type)


def _on_meta(spec: DTensorSpec) -> torch.Tensor:
    meta = spec.tensor_meta
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")


def _one_element(spec: DTensorSpec) -> torch.Tensor:
    return torch.ones((1,) * len(spec.shape), dtype=spec.dtype)


def _stand_in(argument: Any, make: Callable[[DTensorSpec], torch.Tensor]) -> Any:
    """An argument with tensors in place of specs; where these are meta tensors, so is the device."""
    if isinstance(argument, DTensorSpec):
        return make(argument)
    if isinstance(argument, torch.device) and make is _on_meta:
        return torch.device("meta")
    if isinstance(argument, list | tuple):
        return type(argument)([_stand_in(item, make) for item in argument])
    if isinstance(argument, Mapping):
        return {name: _stand_in(item, make) for name, item in argument.items()}
    return argument
