"""Convolution, pooling, padding and resampling: batch and channels may be cut, the dims of the image must be whole."""

from collections.abc import Sequence
from typing import cast

import torch

from tritondt.ops.propagation.homomorphisms import ADDITIVE, LINEAR, SELECTIVE
from tritondt.ops.propagation.propagator import propagator
from tritondt.ops.propagation.schema import AxisStrategy, LocalOp, OpSchema, OutputSpecs
from tritondt.ops.propagation.tensor_meta import meta_of_nothing
from tritondt.ops.rules.empty_shards import empty_shard_result
from tritondt.ops.rules.equations import declared_tensors, equation_strategies, equation_terms, register_equation
from tritondt.sharding.spec import TensorMeta

aten = torch.ops.aten

# Every dim in front of the image, which has one to three dims, is one of a batch.
_POOLED = {
    **dict.fromkeys(("avg_pool2d", "_adaptive_avg_pool2d"), "*..->*.."),
    **dict.fromkeys(("avg_pool3d", "_adaptive_avg_pool3d"), "*...->*..."),
    **dict.fromkeys(("avg_pool2d_backward", "_adaptive_avg_pool2d_backward"), "*..,*..->*.."),
    **dict.fromkeys(("avg_pool3d_backward", "_adaptive_avg_pool3d_backward"), "*...,*...->*..."),
    **dict.fromkeys(("max_pool2d_with_indices_backward", "adaptive_max_pool2d_backward"), "*..,*..,*..->*.."),
    **dict.fromkeys(("max_pool3d_with_indices_backward", "adaptive_max_pool3d_backward"), "*...,*...,*...->*..."),
    **{
        f"{kind}_pad{n}d_backward": f"*{'.' * n},*{'.' * n}->*{'.' * n}"
        for kind in ("reflection", "replication")
        for n in (1, 2, 3)
    },
    "col2im": "*..->*...",
}
# Elements in other places, some of them several times.
_ARRANGED = {
    **{f"{kind}_pad{n}d": f"*{'.' * n}->*{'.' * n}" for kind in ("reflection", "replication") for n in (1, 2, 3)},
    "im2col": "*...->*..",
    **dict.fromkeys(("pixel_shuffle", "pixel_unshuffle"), "*...->*..."),
}
_MAXIMA = {
    **dict.fromkeys(("max_pool2d_with_indices", "adaptive_max_pool2d"), "*..->*..,*.."),
    **dict.fromkeys(("max_pool3d_with_indices", "adaptive_max_pool3d"), "*...->*...,*..."),
    "max_unpool2d": "*..,*..->*..",
    "max_unpool3d": "*...,*...->*...",
}
_UPSAMPLED = {
    **{f"upsample_{kind}{n}d": n for kind, n in (("nearest", 1), ("nearest", 2), ("nearest", 3), ("linear", 1))},
    **{f"_upsample_nearest_exact{n}d": n for n in (1, 2, 3)},
    **{f"upsample_{kind}": n for kind, n in (("bilinear2d", 2), ("bicubic2d", 2), ("trilinear3d", 3))},
    **{f"_upsample_{kind}2d_aa": 2 for kind in ("bilinear", "bicubic", "lanczos")},
}


def _register() -> None:
    for name, equation in _POOLED.items():
        register_equation(name, equation, passing=[LINEAR.at(0)])
    for name, equation in _ARRANGED.items():
        register_equation(name, equation, passing=[SELECTIVE.at(0)])
    for name, equation in _MAXIMA.items():
        register_equation(name, equation)
    for name, num_dims in _UPSAMPLED.items():
        equation = f"nc{'.' * num_dims}->nc{'.' * num_dims}"
        register_equation(name, equation, passing=[LINEAR.at(0)])
        register_equation(f"{name}_backward", equation, passing=[LINEAR.at(0)], sizes="input_size")
        if hasattr(aten, name):
            meta_of_nothing[getattr(aten, name).default] = _resampled_nothing
    register_equation("channel_shuffle", _of_channels, passing=[SELECTIVE.at(0)])
    for n in (2, 3):
        image, grid = f"nc{'.' * n}", f"n{'.' * (n + 1)}"
        register_equation(f"grid_sampler_{n}d", f"{image},{grid}->{image}", passing=[LINEAR.at(0)])
        gradients = f"{image},{image},{grid}->{image},{grid}"
        register_equation(f"grid_sampler_{n}d_backward", gradients, passing=[LINEAR.at(0)])
    propagator.set_strategy(aten.convolution.default, convolution, localize=empty_shard_result)
    propagator.set_strategy(
        aten.convolution_backward.default, convolution_backward, localize=_local_convolution_backward
    )


def _resampled_nothing(schema: OpSchema) -> TensorMeta:
    """Images of a batch without any, resampled; torch's fakes (2.13) refuse these, and allow no channels and pixels."""
    image = schema.args_spec[0]
    sizes = cast(Sequence[int], schema.args_schema[1])
    if 0 in image.shape[1:] or len(sizes) != image.ndim - 2:
        raise RuntimeError(
            f"{schema.op} got images of {tuple(image.shape)} for results of {tuple(sizes)}; of the "
            "dims of an image the batch alone may be empty, and each behind the channels has a length in the result"
        )
    return TensorMeta.contiguous((*image.shape[:2], *sizes), image.dtype)


def _of_channels(schema: OpSchema) -> str:
    rest = "." * (schema.args_spec[0].ndim - 1)
    return f"n{rest}->n{rest}"


def convolution(schema: OpSchema) -> list[AxisStrategy]:
    """Batch and output channels may be cut; input channels without a bias, which leaves terms of a sum."""
    tensors = declared_tensors(schema)
    *_, is_transposed, _, groups = schema.args_schema
    image = "." * (schema.args_spec[0].ndim - 2)
    inner, outer = ("c", "o") if groups == 1 else (".", ".")
    if tensors[2] is not None:
        inner = "."
    weight = inner + outer if is_transposed else outer + inner
    equation = f"n{inner}{image},{weight}{image},+{outer}->n{outer}{image}"
    terms = equation_terms(schema, equation, [ADDITIVE.at(0), ADDITIVE.at(1)])
    return [*equation_strategies(equation, tensors), *terms]


def convolution_backward(schema: OpSchema) -> list[AxisStrategy]:
    """Dims are cut as in `convolution`; the bias gradient lacks input channels, and is not summed over them."""
    *_, is_transposed, _, groups, mask = schema.args_schema
    image = "." * (schema.args_spec[0].ndim - 2)
    inner, outer = ("c", "o") if groups == 1 else (".", ".")
    if mask[2]:
        inner = "."
    weight = inner + outer if is_transposed else outer + inner
    arguments = f"n{outer}{image},n{inner}{image},{weight}{image}"
    equation = f"{arguments}->n{inner}{image},{weight}{image},{outer}"
    terms = equation_terms(schema, equation, [ADDITIVE.at(0)])
    return [*equation_strategies(equation, declared_tensors(schema)), *terms]


def _local_convolution_backward(schema: OpSchema, outputs: OutputSpecs) -> LocalOp | None:
    """The operator with the local size of the bias."""
    nothing = empty_shard_result(schema, outputs)
    if nothing is not None:
        return nothing
    assert isinstance(outputs, list), f"{schema.op} gives three tensors"
    if outputs[2] is None or outputs[2].local_shape == outputs[2].shape:
        return None
    run, sizes = schema.op._op, list(outputs[2].local_shape)
    return lambda grad, image, weight, _, *rest: run(grad, image, weight, sizes, *rest)


_register()
