"""Operators of torch on sharded tensors: registered ones first, then those here, then those of distributed tensors."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from tritondt.errors import ArgumentError, LayoutError, PropagationError
from tritondt.ops.random.distributions import normal, uniform
from tritondt.sharded import factories
from tritondt.sharded.agreement import all_ranks
from tritondt.sharded.chunk_operators import embedding, embedding_bag, linear, run_on_dtensors
from tritondt.sharded.elementwise import FUNCTIONS, IN_PLACE, run_elementwise
from tritondt.sharded.registries import Implementation, name_of, registered, tensors_among
from tritondt.sharded.tensor import ShardedTensor


def _getters(*names: str) -> list[Any]:
    return [getattr(torch.Tensor, name).__get__ for name in names]


# What the outer tensor answers by itself: size, dtype and flags, without memory.
_OF_OUTER = {
    *_getters("shape", "dtype", "layout", "ndim", "requires_grad", "grad_fn", "is_leaf", "device"),
    *_getters("_version", "is_meta", "is_cuda", "is_cpu", "is_sparse", "is_quantized", "is_nested", "output_nr"),
    *(getattr(torch.Tensor, name) for name in ("size", "dim", "numel", "nelement", "stride", "is_contiguous")),
    *(getattr(torch.Tensor, name) for name in ("is_floating_point", "is_complex", "element_size", "__len__")),
    *(torch.is_floating_point, torch.is_complex, torch.numel, torch.Tensor.get_device, torch.Tensor.is_shared),
}


# They would act on a tensor that is gone once the call returns.
_OF_ONE_MEMORY = {
    *("backward", "data_ptr", "pin_memory", "register_hook", "register_post_accumulate_grad_hook", "retain_grad"),
    *("storage", "untyped_storage", "_typed_storage"),
}


def call(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Result of a function of torch with sharded tensors among its arguments; PropagationError where there is none."""
    kwargs = kwargs or {}
    if func in _OF_OUTER:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    found = tensors_among(args, kwargs)
    if not found:
        raise PropagationError(f"{name_of(func)} was called for sharded tensors, and given none")
    own = registered(func, found[0]) or _TABLE.get(func)
    if own is not None:
        return own(types, args, kwargs, found[0]._process_group)
    if func in FUNCTIONS or func in IN_PLACE:
        return run_elementwise(func, args, kwargs)
    if getattr(func, "__name__", "") in _OF_ONE_MEMORY:
        raise PropagationError(
            f"{name_of(func)} is about the memory or the gradient of one tensor, and a sharded one has those of its "
            "shards; call it on the tensors of local_shards()"
        )
    if _writes(func):
        raise PropagationError(
            f"{name_of(func)} writes its tensor, and is not known to go shard by shard; call it on "
            "x.to_dtensor(), which shares the shards' memory, or register it with custom_sharded_op_impl"
        )
    try:
        return run_on_dtensors(func, args, kwargs)
    except LayoutError as error:
        raise PropagationError(
            f"{name_of(func)} of {', '.join(map(_text, found))} is not known to go shard by shard, and not that of "
            f"distributed tensors: {error}; reshard first, or register it with custom_sharded_op_impl"
        ) from error


def _writes(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name in ("__set__", "__setitem__") or (name.endswith("_") and not name.endswith("__"))


def _text(tensor: ShardedTensor) -> str:
    return f"a sharded tensor of size {tuple(tensor.shape)}"


def _compare(name: str, compare: Callable[..., bool]) -> Implementation:
    def compared(types: Any, args: Any, kwargs: Any, process_group: Any) -> bool:
        """Whether two tensors are cut alike and every shard compares so, alike on all ranks: a collective call."""
        left, right = args
        if not (isinstance(left, ShardedTensor) and isinstance(right, ShardedTensor)):
            raise ArgumentError(
                f"torch.{name} takes two sharded tensors, got {type(left).__name__}, {type(right).__name__}"
            )
        if left._mesh is not right._mesh or left._metadata != right._metadata:
            return False
        pairs = zip(left._local_shards, right._local_shards, strict=True)
        own = all(compare(ours.tensor, theirs.tensor, **kwargs) for ours, theirs in pairs)
        return own if left._mesh.coordinate is None else all_ranks(left._mesh, own)

    return compared


def _like(factory: Callable[..., ShardedTensor]) -> Implementation:
    def made(types: Any, args: Any, kwargs: Any, process_group: Any) -> ShardedTensor:
        """A tensor cut as another one, of its dtype unless one is given."""
        tensor, *rest = args
        options = {"dtype": tensor.dtype, "process_group": process_group} | {
            key: value for key, value in kwargs.items() if value not in (None, torch.preserve_format)
        }
        size = tensor.metadata().size
        found: ShardedTensor = factory(tensor.sharding_spec(), size, *rest, **options)
        return found

    return made


def _type_as(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
    """The first tensor with the dtype of the second."""
    tensor, other = args
    if isinstance(tensor, ShardedTensor):
        return tensor.to(other.dtype)
    return tensor.to(other.dtype)


def _copy(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
    """The first tensor with the values of the second, which is cut alike."""
    target, source, *_ = args
    if not (isinstance(target, ShardedTensor) and isinstance(source, ShardedTensor)):
        raise PropagationError("copy_ goes between two sharded tensors; cut a whole one by spec.shard(tensor) first")
    if target._boxes != source._boxes:
        raise LayoutError(
            f"copy_ goes between sharded tensors that are cut alike, got {target._sharding_spec} and "
            f"{source._sharding_spec}; reshard the source first"
        )
    return run_elementwise(torch.Tensor.copy_, args, kwargs)


def _init(fill: Callable[..., ShardedTensor]) -> Implementation:
    def filled(types: Any, args: Any, kwargs: Any, process_group: Any) -> ShardedTensor:
        """The tensor, filled in place."""
        options = dict(kwargs)
        tensor = options.pop("tensor", None)
        return fill(args[0] if tensor is None else tensor, *args[1:], **options)

    return filled


def _uniform(tensor: ShardedTensor, a: float = 0.0, b: float = 1.0, generator: Any = None) -> ShardedTensor:
    return factories.fill_at_random(tensor, uniform, b - a, a, generator)


def _normal(tensor: ShardedTensor, mean: float = 0.0, std: float = 1.0, generator: Any = None) -> ShardedTensor:
    return factories.fill_at_random(tensor, normal, std, mean, generator)


def _kaiming_uniform(
    tensor: ShardedTensor, a: float = 0, mode: Any = "fan_in", nonlinearity: Any = "leaky_relu", generator: Any = None
) -> ShardedTensor:
    """Numbers whose bound follows from the fan of the whole tensor, not from that of a shard."""
    fan = torch.nn.init._calculate_correct_fan(torch.empty(tensor.metadata().size, device="meta"), mode)
    bound = torch.nn.init.calculate_gain(nonlinearity, a) * math.sqrt(3.0 / fan)
    return _uniform(tensor, -bound, bound, generator)


def _constant(tensor: ShardedTensor, val: float) -> ShardedTensor:
    return factories.fill(tensor, val)


def _gradient(types: Any, args: Any, kwargs: Any, process_group: Any) -> ShardedTensor | None:
    """Gradients of the shards as a tensor, cut alike; None before there is one, and on a rank without shards."""
    (tensor,) = args
    parts = [shard.tensor for shard in tensor.local_shards()]
    if all(part.grad is None for part in parts):
        return None
    found = [torch.zeros_like(part) if part.grad is None else part.grad for part in parts]
    properties = tensor.metadata().copy().tensor_properties
    properties.requires_grad = any(part.requires_grad for part in found)
    made: ShardedTensor = tensor._with_tensors(found, properties)
    return made


def _set_gradient(types: Any, args: Any, kwargs: Any, process_group: Any) -> None:
    """Gives every shard its part of a gradient that is cut alike, or None."""
    tensor, gradient = args
    if gradient is not None and (not isinstance(gradient, ShardedTensor) or gradient._boxes != tensor._boxes):
        raise LayoutError("the gradient of a sharded tensor is None, or a sharded tensor that is cut alike")
    for number, shard in enumerate(tensor.local_shards()):
        shard.tensor.grad = None if gradient is None else gradient.local_shards()[number].tensor


def _same(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
    return args[0]


def _never(types: Any, args: Any, kwargs: Any, process_group: Any) -> bool:
    """False: torch then makes new parameters, and does not set the data of old ones."""
    return False


_TABLE: dict[Any, Implementation] = {
    torch.equal: _compare("equal", torch.equal),
    torch.Tensor.equal: _compare("equal", torch.equal),
    getattr(torch, "allclose"): _compare("allclose", getattr(torch, "allclose")),  # noqa: B009  banned in tests alone
    torch.Tensor.type_as: _type_as,
    getattr(torch.Tensor, "grad").__get__: _gradient,  # noqa: B009  a descriptor, which its type hides
    getattr(torch.Tensor, "grad").__set__: _set_gradient,  # noqa: B009
    getattr(torch.Tensor, "data").__get__: lambda types, args, kwargs, group: args[0].detach(),  # noqa: B009
    torch.Tensor.copy_: _copy,
    torch.Tensor.contiguous: _same,
    torch._has_compatible_shallow_copy_type: _never,
    torch.clone: lambda types, args, kwargs, group: args[0].clone(**kwargs),
    torch.detach: lambda types, args, kwargs, group: args[0].detach(),
    torch.nn.init.uniform_: _init(_uniform),
    torch.nn.init.normal_: _init(_normal),
    torch.nn.init.kaiming_uniform_: _init(_kaiming_uniform),
    torch.nn.init.constant_: _init(_constant),
    torch.full_like: _like(factories.full),
    torch.empty_like: _like(factories.empty),
    torch.zeros_like: _like(factories.zeros),
    torch.ones_like: _like(factories.ones),
    torch.rand_like: _like(factories.rand),
    torch.randn_like: _like(factories.randn),
    F.linear: linear,
    F.embedding: embedding,
    F.embedding_bag: embedding_bag,
}
