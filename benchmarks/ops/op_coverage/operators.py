"""Which entries of torch's operator database (op_db) are measured, and which element type and samples each is given."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves

# Make tensors from numbers, or of another's shape without its values.
_FACTORIES = (
    *("arange", "broadcast_shapes", "empty", "empty_permuted", "empty_strided", "eye", "full", "linspace", "logspace"),
    *("ones", "scalar_tensor", "tril_indices", "triu_indices", "zeros", "signal.windows.*"),
    *("linspace.tensor_overload", "logspace.tensor_overload"),
    *("empty_like", "full_like", "ones_like", "zeros_like", "new_*", "resize_", "resize_as_"),
)
# Give other values at every call.
_RANDOM = (
    *("bernoulli", "cauchy", "exponential", "geometric", "log_normal", "multinomial", "normal", "normal.*", "uniform"),
    *("rand_like", "randint", "randint_like", "randn", "randn_like", "pca_lowrank", "svd_lowrank"),
    *("nn.functional.*dropout*", "nn.functional.fractional_max_pool?d", "nn.functional.rrelu"),
    "nn.functional.multi_head_attention_forward",
)
_SPARSE = ("sparse.*", "to_sparse")
# Have no kernel for the CPU, or none that takes what the samples hold.
_OF_DEVICES = (
    *("jiterator_*", "torch.ops.aten._flash_attention_forward", "torch.ops.aten._efficient_attention_forward"),
    *("torch._scaled_mm", "torch._scaled_mm_v2", "nn.functional.batch_norm.without_cudnn", "bmm.triton_optimized"),
)
_LEFT_OUT = (*_FACTORIES, *_RANDOM, *_SPARSE, *_OF_DEVICES)

# Give elements of their arguments, unchanged: compared exactly.
_MOVEMENT = frozenset({
    *("T", "H", "mT", "mH", "t", "t_copy", "transpose", "transpose_copy", "permute", "permute_copy", "movedim"),
    *("view", "view_as", "view_copy", "reshape", "reshape_as", "ravel", "flatten", "unflatten", "squeeze"),
    *("squeeze.multiple", "squeeze_copy", "unsqueeze", "unsqueeze_copy", "expand", "expand_as", "expand_copy"),
    *("broadcast_to", "broadcast_tensors", "atleast_1d", "atleast_2d", "atleast_3d", "clone", "contiguous"),
    *("cat", "stack", "hstack", "vstack", "dstack", "column_stack", "block_diag", "_chunk_cat"),
    *("chunk", "unsafe_chunk", "split", "split.list_args", "split_with_sizes", "split_with_sizes_copy"),
    *("unsafe_split", "tensor_split", "hsplit", "vsplit", "dsplit", "unbind", "unbind_copy"),
    *("narrow", "narrow_copy", "select", "slice", "__getitem__", "diagonal", "diagonal_copy", "linalg.diagonal"),
    *("diag", "diag_embed", "diagflat", "tril", "triu", "flip", "fliplr", "flipud", "roll", "rot90"),
    *("gather", "index_select", "take", "take_along_dim", "masked_select", "where", "masked_fill", "repeat", "tile"),
    *("repeat_interleave", "scatter", "index_copy", "index_fill", "select_scatter", "slice_scatter"),
    *("diagonal_scatter", "masked_scatter", "put", "as_strided", "as_strided_copy", "as_strided_scatter"),
    *("constant_pad_nd", "nn.functional.pad.constant", "nn.functional.pad.reflect", "nn.functional.pad.replicate"),
    *("nn.functional.pad.circular", "nn.functional.pixel_shuffle", "nn.functional.pixel_unshuffle"),
    *("nn.functional.channel_shuffle", "nn.functional.one_hot", "nn.functional.embedding", "unfold", "unfold_copy"),
    *("sort", "argsort", "msort", "topk", "kthvalue", "amax", "amin", "aminmax", "argmax", "argmin", "maximum"),
    *("minimum", "max.reduction_with_dim", "min.reduction_with_dim", "nonzero", "argwhere", "unique", "item"),
    *("fft.fftshift", "fft.ifftshift", "meshgrid.variadic_tensors", "meshgrid.list_of_tensors", "resolve_conj"),
})  # fmt: skip

_DTYPES = (torch.float64, torch.float32, torch.complex128, torch.int64, torch.bool)
# Some operators have thousands of samples; the first hold every kind of argument.
_NUM_SAMPLES = 80


class Operator(NamedTuple):
    """One entry of op_db with the dtype in which it is measured."""

    name: str
    info: Any
    dtype: torch.dtype

    @property
    def is_movement(self) -> bool:
        """Whether results must be equal to the last bit."""
        return self.name in _MOVEMENT

    @property
    def is_differentiable(self) -> bool:
        """Whether gradients are compared as well."""
        supported = self.dtype in self.info.supported_backward_dtypes(torch.device("cpu").type)
        return bool(self.info.supports_autograd) and supported

    def random(self, *parts: object) -> random.Random:
        """Random choices that depend on the operator's name and on `parts` only."""
        return random.Random(zlib.crc32(repr((self.name, *parts)).encode()))

    def samples(self) -> list[Any]:
        """The first samples with a tensor among their arguments, alike in every process."""
        torch.manual_seed(0)
        found = islice(self.info.sample_inputs("cpu", self.dtype, requires_grad=self.is_differentiable), _NUM_SAMPLES)
        return [sample for sample in found if _is_measured(sample)]


def _is_measured(sample: Any) -> bool:
    """Whether a sample has a tensor, and gives the same values at every call."""
    has_tensor = any(isinstance(leaf, torch.Tensor) for leaf in leaves_of(sample))
    return has_tensor and not sample.kwargs.get("dropout_p")


def leaves_of(sample: Any) -> list[Any]:
    """Everything that a sample hands to the operator."""
    return list(tree_leaves((sample.input, sample.args, sample.kwargs)))


@lru_cache(maxsize=1)
def operators() -> dict[str, Operator]:
    """All that are measured, by name."""
    return {operator.name: operator for operator in _measured()}


def matching(patterns: str) -> list[str]:
    """The names that match one of several patterns, such as 'linalg.*,einsum'."""
    return [name for name in operators() if any(fnmatch(name, pattern) for pattern in patterns.split(","))]


def _measured() -> Iterator[Operator]:
    for info in op_db:
        name = f"{info.name}.{info.variant_test_name}" if info.variant_test_name else info.name
        dtype = next((dtype for dtype in _DTYPES if dtype in info.dtypes), None)
        if dtype is not None and not any(fnmatch(name, pattern) for pattern in _LEFT_OUT):
            yield Operator(name, info, dtype)
