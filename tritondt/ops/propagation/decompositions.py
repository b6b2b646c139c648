"""Decompositions of our own: operators in terms of others, where torch has no form that can be sharded as well.

Norms and comparisons, batch norm, random draws (multinomial, rrelu), and, for operators that write to an argument, the
operator that makes a new tensor with a copy.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._ops import OpOverload

from tritondt.errors import PropagationError
from tritondt.ops.propagation.fast_paths import attention, encoder_layer
from tritondt.ops.propagation.outputs import resize_out, same_without

aten = torch.ops.aten

Decomposition = Callable[..., Any]


def _norm(x: torch.Tensor, p: float | None = 2, dim: Any = None, keepdim: bool = False, **options: Any) -> torch.Tensor:
    found: torch.Tensor = torch.linalg.vector_norm(x, 2 if p is None else p, dim, keepdim, dtype=options.get("dtype"))
    return found


def _allclose(x: torch.Tensor, y: torch.Tensor, *tolerances: Any, **options: Any) -> bool:
    near = torch.isclose(x, y, *tolerances, **options)
    return torch.equal(near, torch.ones_like(near))


def _block_diagonal(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The matrices one below the other, each padded with zeros on both sides."""
    for place, tensor in enumerate(tensors):
        if tensor.ndim > 2:
            raise RuntimeError(f"torch.block_diag takes tensors of at most 2 dims; that at {place} has {tensor.ndim}")
    matrices = [tensor.reshape(1, -1) if tensor.ndim < 2 else tensor for tensor in tensors]
    dtype = matrices[0].dtype
    for matrix in matrices:
        dtype = torch.promote_types(dtype, matrix.dtype)
    width, passed, rows = sum(matrix.shape[1] for matrix in matrices), 0, []
    for matrix in matrices:
        right = width - passed - matrix.shape[1]
        rows.append(torch.constant_pad_nd(matrix.to(dtype), [passed, right]))
        passed += matrix.shape[1]
    return torch.cat(rows)


def _windows(x: torch.Tensor, dim: int, size: int, step: int) -> torch.Tensor:
    return x.unfold(dim, size, step).clone()


def _batch_norm(x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *rest: float) -> Any:
    """Batch norm by the operator whose schema says that it writes to the running statistics."""
    if mean is None or var is None:
        return aten._native_batch_norm_legit.no_stats(x, weight, bias, training, *rest)
    return aten._native_batch_norm_legit.default(x, weight, bias, mean, var, training, *rest)


def _batch_norm_with_reserve(x: Any, weight: Any, bias: Any, mean: Any, var: Any, *rest: float) -> Any:
    return *_batch_norm(x, weight, bias, mean, var, True, *rest), x.new_empty([0], dtype=torch.uint8)


def _batch_norm_without_update(x: Any, weight: Any, bias: Any, mean: Any, var: Any, *rest: float) -> Any:
    return *_batch_norm(x, weight, bias, mean, var, False, *rest), x.new_empty([0], dtype=torch.uint8)


def _batch_norm_gradient(*args: Any) -> Any:
    *shared, _ = args
    return aten.native_batch_norm_backward.default(*shared)


def _choices(
    weights: torch.Tensor, count: int, replacement: bool = False, *, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Multinomial: `count` positions of each row, those first in a race of exponential waiting times.

    With replacement, where as many uniform numbers fall among the running sums of the weights.
    """
    if not replacement and count > weights.shape[-1]:
        raise RuntimeError(f"multinomial cannot draw {count} of {weights.shape[-1]} places without replacement")
    valid = ((weights >= 0) & weights.isfinite()).all() & (weights.sum(-1) > 0).all()
    torch._assert_async(valid, "multinomial expects weights that are finite and not negative, with a sum above 0")
    if not replacement or count == 1:
        waits = torch.empty_like(weights).exponential_(generator=generator)
        return (weights / waits).topk(count, -1)[1]
    sums = weights.double().cumsum(-1)
    sums = sums / sums[..., -1:]
    drawn = sums[..., :1].expand(*sums.shape[:-1], count).contiguous()
    return torch.searchsorted(sums, drawn.uniform_(generator=generator), right=True)


def _slopes(x: torch.Tensor, lower: Any, upper: Any, *, is_training: bool, generator: Any) -> torch.Tensor | None:
    """Factors of the elements; None where they are not random."""
    if not is_training:
        return None
    drawn = torch.empty_like(x).uniform_(lower, upper, generator=generator)
    return torch.where(x <= 0, drawn, torch.ones_like(x))


def _leaky(
    x: torch.Tensor,
    noise: torch.Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """rrelu: elements up to 0 are multiplied with numbers of their own, which `noise` keeps for the gradient."""
    slopes = _slopes(x, lower, upper, is_training=training, generator=generator)
    if slopes is None:
        return torch.nn.functional.leaky_relu(x, (lower + upper) / 2)
    return x * noise.copy_(slopes)


def _leaky_in_place(x: torch.Tensor, *args: Any) -> torch.Tensor:
    """rrelu_, written to its argument."""
    return x.copy_(_leaky(x, *args))


def _leaky_functional(x: torch.Tensor, noise: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """rrelu with the noise as a second result."""
    kept = noise.clone()
    return _leaky(x, kept, *args), kept


def _weight_norm_gradient(
    grad: torch.Tensor, direction: torch.Tensor, length: torch.Tensor, norms: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the direction v and the length g of v * (g / |v|), whose norms are over all dims but one."""
    kept = dim % direction.ndim
    wide = torch.promote_types(direction.dtype, torch.float32) if norms.dtype != direction.dtype else direction.dtype
    along = (grad * direction).to(wide)
    sums = along.sum([other for other in range(direction.ndim) if other != kept], keepdim=True)
    of_direction = (length / norms) * (grad - direction * (sums / (norms * norms)))
    return of_direction.to(direction.dtype), (sums / norms).to(length.dtype)


def _place_of_number(ordered: torch.Tensor, number: float, **options: Any) -> torch.Tensor:
    """searchsorted of one number."""
    dtype = torch.result_type(ordered, number)
    return torch.searchsorted(ordered.to(dtype), ordered.new_full((), number, dtype=dtype), **options)


def _bucket_of_number(number: float, boundaries: torch.Tensor, **options: Any) -> torch.Tensor:
    return _place_of_number(boundaries, number, **options)


DECOMPOSITIONS: Mapping[OpOverload, Decomposition] = {
    **dict.fromkeys(
        (aten.norm.Scalar, aten.norm.ScalarOpt_dim, aten.norm.ScalarOpt_dtype, aten.norm.ScalarOpt_dim_dtype), _norm
    ),
    aten.allclose.default: _allclose,
    aten.block_diag.default: _block_diagonal,
    aten.unfold_copy.default: _windows,
    aten.native_batch_norm.default: _batch_norm,
    aten._batch_norm_with_update.default: _batch_norm_with_reserve,
    aten._batch_norm_no_update.default: _batch_norm_without_update,
    aten.batch_norm_backward.default: _batch_norm_gradient,
    aten.multinomial.default: _choices,
    aten._weight_norm_interface_backward.default: _weight_norm_gradient,
    aten._native_multi_head_attention.default: attention,
    aten._transformer_encoder_layer_fwd.default: encoder_layer,
    aten.searchsorted.Scalar: _place_of_number,
    aten.bucketize.Scalar: _bucket_of_number,
    aten.lift_fresh_copy.default: torch.clone,
    aten.zero.default: torch.zeros_like,
    aten.rrelu_with_noise.default: _leaky,
    aten.rrelu_with_noise_.default: _leaky_in_place,
    aten.rrelu_with_noise_functional.default: _leaky_functional,
}


def written_by_functional(op: OpOverload) -> Decomposition | None:
    """An operator that writes its one result, as the functional operator and a copy.

    None for other operators.
    """
    declared = op._schema.arguments
    written = [(place, argument.alias_info) for place, argument in enumerate(declared) if argument.alias_info]
    if len(written) != 1 or len(op._schema.returns) != 1 or torch.Tag.inplace_view in op.tags:
        return None
    ((place, aliases),), name = written, op._schema.name.partition("::")[2]
    target = declared[place]
    if not aliases.is_write or (target.is_out is name.endswith("_")):
        return None
    functional = same_without(op, name.removesuffix("_"), {target.name} if target.is_out else ())
    if functional is None:
        return None

    def write(*args: Any, **kwargs: Any) -> Any:
        given = {key: value for key, value in kwargs.items() if key != target.name} if target.is_out else kwargs
        into: torch.Tensor = kwargs[target.name] if target.is_out else args[0]
        result = functional(*args, **given)
        if result.shape != into.shape and target.is_out:
            resize_out(op, into, tuple(result.shape), (*args, *given.values()))
        elif result.shape != into.shape:
            raise PropagationError(
                f"{op} gives shape {tuple(result.shape)}, and writes it to one of {tuple(into.shape)}"
            )
        return into.copy_(result)

    return write
