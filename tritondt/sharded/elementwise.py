"""Operators that go shard by shard: each element of the result follows from the elements at its own place."""

from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map

from tritondt.errors import LayoutError, PropagationError
from tritondt.sharded.registries import Function, check_group, name_of, tensors_among
from tritondt.sharded.tensor import ShardedTensor

_NAMES = """
    abs acos acosh add asin asinh atan atan2 atanh bitwise_and bitwise_not bitwise_or bitwise_xor ceil clamp
    clamp_max clamp_min clip copysign cos cosh deg2rad digamma div divide eq erf erfc erfinv exp exp2 expm1
    float_power floor floor_divide fmax fmin fmod frac ge gt heaviside hypot isfinite isinf isnan ldexp le lerp
    lgamma log log10 log1p log2 logaddexp logical_and logical_not logical_or logical_xor logit lt masked_fill maximum
    minimum mul multiply nan_to_num ne neg negative nextafter polygamma positive pow rad2deg reciprocal relu
    remainder round rsqrt rsub sgn sigmoid sign sin sinc sinh sqrt square sub subtract tan tanh true_divide trunc
    where xlogy addcmul addcdiv threshold
    __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __floordiv__ __rfloordiv__ __mod__
    __pow__ __rpow__ __neg__ __pos__ __abs__ __invert__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __and__ __or__ __xor__
    bfloat16 bool byte char double float half int long short
"""
_IN_PLACE = """
    abs_ add_ ceil_ clamp_ clamp_max_ clamp_min_ copy_ div_ exp_ fill_ floor_ lerp_ log_ masked_fill_ mul_ neg_ pow_
    reciprocal_ relu_ round_ rsqrt_ sigmoid_ sqrt_ square_ sub_ tanh_ zero_ addcmul_ addcdiv_
    __iadd__ __isub__ __imul__ __itruediv__
"""
_OF_FUNCTIONAL = """
    celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu relu6 selu sigmoid silu
    softplus softshrink softsign tanh tanhshrink threshold
"""


def _functions(names: str, *modules: Any) -> frozenset[Any]:
    found = [getattr(module, name) for name in names.split() for module in modules if hasattr(module, name)]
    return frozenset(found)


FUNCTIONS = _functions(_NAMES, torch, torch.Tensor) | _functions(_OF_FUNCTIONAL, F)
IN_PLACE = _functions(_IN_PLACE, torch, torch.Tensor)


def run_elementwise(func: Function, args: Any, kwargs: Any) -> Any:
    """Result of an operator on every shard, cut as its arguments are; nothing is sent.

    Sharded tensors among the arguments hold the same boxes: LayoutError where they do not. Plain tensors have no dims:
    PropagationError for others, of which nothing says which part a shard meets.
    """
    check_group(func, args, kwargs)
    found = tensors_among(args, kwargs)
    first = found[0]
    for tensor in found[1:]:
        if tensor._boxes != first._boxes:
            raise LayoutError(
                f"{name_of(func)} goes shard by shard, and was given tensors of sizes {tuple(first.shape)} and "
                f"{tuple(tensor.shape)} that are cut differently, as {first._sharding_spec} and "
                f"{tensor._sharding_spec}; reshard one of them first"
            )
    if func in IN_PLACE:
        return _run_in_place(func, args, kwargs)
    if kwargs.get("out") is not None:
        raise PropagationError(f"{name_of(func)} of sharded tensors takes no out=; use the result")
    tree_map(lambda leaf: _check_plain(func, leaf), (args, kwargs))
    tensors = [_on_shard(func, args, kwargs, number) for number in range(len(first._local_shards))]
    # A rank without shards learns the dtype from none of its elements.
    like = tensors[0] if tensors else _on_shard(func, args, kwargs, None)
    if like is NotImplemented:  # as of x == None, which Python then answers
        return like
    properties = first._metadata.copy().tensor_properties
    properties.dtype = like.dtype
    wants_grad = any(tensor._metadata.tensor_properties.requires_grad for tensor in found)
    differentiable = like.dtype.is_floating_point or like.dtype.is_complex
    properties.requires_grad = (
        any(tensor.requires_grad for tensor in tensors) or (not tensors and wants_grad and differentiable)
    ) and torch.is_grad_enabled()
    return first._with_tensors([tensor.contiguous() for tensor in tensors], properties)


def _run_in_place(func: Function, args: Any, kwargs: Any) -> ShardedTensor:
    target = args[0]
    if not isinstance(target, ShardedTensor):
        raise PropagationError(
            f"{name_of(func)} writes a plain tensor, got sharded ones to write from; use gather(out=...)"
        )
    tree_map(lambda leaf: _check_plain(func, leaf), (args, kwargs))
    for number in range(len(target._local_shards)):
        _on_shard(func, args, kwargs, number)
    return target


def _on_shard(func: Function, args: Any, kwargs: Any, number: int | None) -> Any:
    """The function on shard `number` of every sharded tensor, or on tensors without elements."""

    def chosen(leaf: Any) -> Any:
        if not isinstance(leaf, ShardedTensor):
            return leaf
        if number is None:
            return torch.empty((0,) * leaf.dim(), dtype=leaf.dtype)
        return leaf._local_shards[number].tensor

    return func(*tree_map(chosen, args), **tree_map(chosen, kwargs))


def _check_plain(func: Function, leaf: Any) -> None:
    if isinstance(leaf, torch.Tensor) and not isinstance(leaf, ShardedTensor) and leaf.dim():
        raise PropagationError(
            f"{name_of(func)} was given a plain tensor of shape {tuple(leaf.shape)} beside sharded ones, and nothing "
            "says which part of it a shard meets; shard it too, by spec.shard(tensor)"
        )
