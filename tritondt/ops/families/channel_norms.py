"""Batch norm and group norm: channels may be cut, and per-channel parameters and statistics with them.

Batch norm over a batch that is cut exchanges two numbers a channel forward and two backward; running statistics are the
same on every rank then.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch

from tritondt.ops.propagation.homomorphisms import LINEAR, term_strategies
from tritondt.ops.propagation.registration import strategy_of
from tritondt.ops.propagation.schema import (
    AxisStrategy,
    LocalOp,
    OpSchema,
    OutputSharding,
    OutputSpecs,
    Strategies,
)
from tritondt.ops.rules.empty_shards import empty_shard_result
from tritondt.ops.rules.reductions import accumulation_dtype, completion, is_sharded
from tritondt.sharding.placement import Partial, Placement, Replicate, Shard
from tritondt.sharding.spec import DTensorSpec, TensorMeta

aten = torch.ops.aten

_CHANNELS = 1
_LEGIT = aten._native_batch_norm_legit
_FORWARD = [_LEGIT.default, _LEGIT.no_stats, aten._native_batch_norm_legit_no_training.default]


def _summed_dims(spec: DTensorSpec) -> tuple[int, ...]:
    return tuple(dim for dim in range(spec.ndim) if dim != _CHANNELS)


def _is_training(schema: OpSchema) -> bool:
    declared = [argument.name for argument in schema.op._schema.arguments]
    name = "train" if "train" in declared else "training"
    return name in declared and bool(schema.argument(declared.index(name), name))


def _by_channel(spec: DTensorSpec, num_channels: int) -> Placement:
    """Shard(0) for a tensor of one element per channel, Replicate for one that was left empty."""
    return Shard(0) if spec.shape == (num_channels,) else Replicate()


def _channels_cut(schema: OpSchema, num_images: int, num_results: int) -> AxisStrategy:
    specs = schema.args_spec
    channels = specs[0].shape[_CHANNELS]
    others = tuple(_by_channel(spec, channels) for spec in specs[num_images:])
    of_channel: Placement = Shard(0) if _is_training(schema) or num_images > 1 else Replicate()
    return AxisStrategy((*(Shard(_CHANNELS),) * num_images, *others), (Shard(_CHANNELS), *(of_channel,) * num_results))


def _local_batch_norm(schema: OpSchema, outputs: OutputSpecs) -> LocalOp | None:
    """Batch norm with statistics over all ranks, where a batch is cut while training."""
    image, dims = schema.args_spec[0], _summed_dims(schema.args_spec[0])
    if not (_is_training(schema) and is_sharded(image, dims)):
        return empty_shard_result(schema, outputs)
    several = cast("Sequence[DTensorSpec]", outputs)
    wide = accumulation_dtype(image.dtype)
    complete = completion(image, dims, "sum", wide)
    count = image.layout.numel // max(image.shape[_CHANNELS], 1)
    momentum, eps = schema.args_schema[-2:]
    shape = [-1 if dim == _CHANNELS else 1 for dim in range(image.ndim)]
    has_statistics = schema.op is _LEGIT.default

    def normalize(x: torch.Tensor, weight: Any, bias: Any, *statistics: Any) -> tuple[torch.Tensor, ...]:
        x = x.to(wide)
        mean = complete(x.sum(dims, keepdim=True)) / count
        var = complete((x - mean).square_().sum(dims, keepdim=True)) / count
        scale = (var + eps).rsqrt_()
        result = (x - mean).mul_(scale)
        if weight is not None:
            result = result * weight.view(shape)
        if bias is not None:
            result = result + bias.view(shape)
        if has_statistics:
            running_mean, running_var = statistics[:2]
            running_mean.lerp_(mean.flatten().to(running_mean.dtype), momentum)
            running_var.lerp_((var.flatten() * (count / (count - 1))).to(running_var.dtype), momentum)
        found = (result, mean.flatten(), scale.flatten())
        return tuple(tensor.to(spec.dtype) for tensor, spec in zip(found, several, strict=True))

    return normalize


@strategy_of(_FORWARD, localize=_local_batch_norm)
def batch_norm(schema: OpSchema) -> list[AxisStrategy]:
    """Image and result are cut alike; statistics are whole, or cut with the channels."""
    image, *others = schema.args_spec
    whole: tuple[Placement, ...] = (Replicate(),) * len(others)
    found = [_channels_cut(schema, 1, 2)]
    for dim in _summed_dims(image):
        found.append(AxisStrategy((Shard(dim), *whole), (Shard(dim), Replicate(), Replicate())))
    return [*found, AxisStrategy((Replicate(), *whole), (Replicate(),) * 3)]


def _local_gradient(schema: OpSchema, outputs: OutputSpecs) -> LocalOp | None:
    """The gradient with sums over all ranks, where a batch is cut while training."""
    gradient, image = schema.args_spec[:2]
    dims = _summed_dims(image)
    if not (_is_training(schema) and is_sharded(image, dims)):
        return empty_shard_result(schema, outputs)
    several = cast("Sequence[DTensorSpec | None]", outputs)
    wide = accumulation_dtype(image.dtype)
    complete = completion(gradient, dims, "sum", wide)
    count = image.layout.numel // max(image.shape[_CHANNELS], 1)
    shape = [-1 if dim == _CHANNELS else 1 for dim in range(image.ndim)]

    def gradients(
        grad: torch.Tensor, x: torch.Tensor, weight: Any, *statistics: Any
    ) -> tuple[torch.Tensor | None, ...]:
        _, _, mean, scale, *_ = statistics
        grad, scale = grad.to(wide), scale.view(shape).to(wide)
        normal = (x.to(wide) - mean.view(shape)).mul_(scale)
        of_bias = complete(grad.sum(dims, keepdim=True))
        of_weight = complete((grad * normal).sum(dims, keepdim=True))
        of_image = (grad - of_bias / count - normal * (of_weight / count)) * scale
        if weight is not None:
            of_image = of_image * weight.view(shape)
        found = (of_image, of_weight.flatten(), of_bias.flatten())
        return tuple(None if spec is None else item.to(spec.dtype) for item, spec in zip(found, several, strict=True))

    return gradients


@strategy_of([aten.native_batch_norm_backward.default], localize=_local_gradient)
def batch_norm_gradient(schema: OpSchema) -> list[AxisStrategy]:
    """Gradients of scale and shift come whole while training; otherwise every rank has terms of them."""
    _, image, *others = schema.args_spec
    whole: tuple[Placement, ...] = (Replicate(),) * len(others)
    of_channels: Placement = Replicate() if _is_training(schema) else Partial()
    found = [_channels_cut(schema, 2, 2)]
    for dim in _summed_dims(image):
        found.append(AxisStrategy((Shard(dim), Shard(dim), *whole), (Shard(dim), of_channels, of_channels)))
    found += term_strategies(schema, [LINEAR.at(0)])
    return [*found, AxisStrategy((Replicate(), Replicate(), *whole), (Replicate(),) * 3)]


def _with_local_batch(schema: OpSchema, outputs: OutputSpecs) -> LocalOp | None:
    """The operator with the length of this rank's batch in place of the global one."""
    nothing = empty_shard_result(schema, outputs)
    if nothing is not None:
        return nothing
    image, op = schema.args_spec[0], schema.op._op
    place = [argument.name for argument in schema.op._schema.arguments].index("N")
    batch = image.local_shape[0]

    def run(*args: Any) -> Any:
        return op(*(_contiguous(argument) for argument in args[:place]), batch, *args[place + 1 :])

    return run


def _contiguous(argument: Any) -> Any:
    return argument.contiguous() if isinstance(argument, torch.Tensor) else argument


@strategy_of([aten.native_group_norm.default], localize=_with_local_batch)
def group_norm(schema: OpSchema) -> list[AxisStrategy]:
    """The batch may be cut; result, mean and reciprocal deviation with it."""
    num_parameters = len(schema.args_spec) - 1
    whole: tuple[Placement, ...] = (Replicate(),) * num_parameters
    return [AxisStrategy((placement, *whole), (placement,) * 3) for placement in (Shard(0), Replicate())]


def _gradients_of_nothing(schema: OpSchema) -> OutputSharding:
    """The decision about the gradients of images without elements, for which torch's fake form divides by zero."""
    image, mesh = schema.args_spec[1], schema.mesh
    whole: tuple[Placement, ...] = (Replicate(),) * mesh.ndim
    placements = [p if isinstance(p, Shard) else Replicate() for p in image.placements]
    declared = [argument.name for argument in schema.op._schema.arguments]
    of_channels = TensorMeta.contiguous((schema.argument(declared.index("C"), "C"),), image.dtype)
    specs = (
        DTensorSpec(mesh, placements, TensorMeta.contiguous(image.shape, image.dtype), image.order),
        DTensorSpec(mesh, whole, of_channels),
        DTensorSpec(mesh, whole, of_channels),
    )
    wanted = schema.argument(declared.index("output_mask"), "output_mask")
    outputs = [spec if is_wanted else None for spec, is_wanted in zip(specs, wanted, strict=True)]

    # Of images without pixels the mean is nan, and so is what is multiplied with it.
    values = (0.0, float("nan") if image.shape[0] else 0.0, 0.0)

    def constants(gradient: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        return tuple(
            None if spec is None else gradient.new_full(spec.local_shape, value, dtype=spec.dtype)
            for spec, value in zip(outputs, values, strict=True)
        )

    return OutputSharding(outputs, None, constants)


@strategy_of([aten.native_group_norm_backward.default], localize=_with_local_batch)
def group_norm_gradient(schema: OpSchema) -> Strategies:
    """Parameters have terms of their gradients wherever there are images."""
    if not schema.args_spec[1].layout.numel:
        return _gradients_of_nothing(schema)
    others: tuple[Placement, ...] = (Replicate(),) * (len(schema.args_spec) - 4)
    found = [AxisStrategy(((Shard(0),) * 4) + others, (Shard(0), Partial(), Partial()))]
    found += term_strategies(schema, [LINEAR.at(0)])
    return [*found, AxisStrategy((Replicate(),) * len(schema.args_spec), (Replicate(),) * 3)]
