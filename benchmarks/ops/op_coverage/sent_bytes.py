"""Bytes that torch.distributed.tensor sends, and operators for which ours sends more, each with the reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed.tensor as torch_tensor
from torch.utils._python_dispatch import TorchDispatchMode

# What a rank sends of its input in each collective of n ranks, at best.
_SHARES: Mapping[str, Callable[[int], float]] = {
    "all_gather_into_tensor": lambda n: n - 1,
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_reduce_": lambda n: 2 * (n - 1) / n,
    "reduce_scatter_tensor": lambda n: (n - 1) / n,
    "all_to_all_single": lambda n: (n - 1) / n,
    "shard_dim_alltoall": lambda n: (n - 1) / n,
    "broadcast": lambda n: (n - 1) / n,
}
_NAMESPACES = ("_c10d_functional", "_dtensor")


class TorchBytes(TorchDispatchMode):
    """Counts the bytes that this rank thread sends in torch's functional collectives."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_ranks, self.sent_bytes = num_ranks, 0.0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Lets distributed tensors come apart first, and counts what they come apart into."""
        if any(issubclass(kind, torch_tensor.DTensor) for kind in types):
            return NotImplemented
        name = func._schema.name.partition("::")[2]
        if func.namespace in _NAMESPACES and name in _SHARES:
            given: torch.Tensor = args[0]
            self.sent_bytes += given.numel() * given.element_size() * _SHARES[name](self.num_ranks)
        return func(*args, **(kwargs or {}))


_SEVERAL = "each operator that it is made of moves least by itself, which here is more over all of them"
_ROUNDED = "terms are added before they are rounded to fewer bits; torch rounds them first"
_VIEWS = "the whole is gathered; torch takes it apart into views, which keep some cuts of images"
_STATISTICS = "running statistics of which one is cut are cut alike, and gathered where they are written"
_COUNTED = "boundaries that are cut are gathered; torch counts in each piece, and adds"

_LONGER = "the result keeps the terms of a shorter argument; torch adds them before the result is made longer"

# Operators that send more than torch's, until no result is terms, in some layout that both run; and why.
MORE_BYTES: Mapping[str, str] = {
    **dict.fromkeys(("gradient", "nn.functional.cross_entropy", "nn.functional.linear_cross_entropy"), _SEVERAL),
    **dict.fromkeys(("fft.ifftn", "linalg.pinv.singular", "masked.argmin"), _SEVERAL),
    "masked.logsumexp": _SEVERAL,
    **dict.fromkeys(("bfloat16", "half"), _ROUNDED),
    **dict.fromkeys(
        ("nn.functional.pixel_shuffle", "nn.functional.pixel_unshuffle", "nn.functional.channel_shuffle"), _VIEWS
    ),
    **dict.fromkeys(("native_batch_norm", "nn.functional.instance_norm"), _STATISTICS),
    **dict.fromkeys(("sub", "__radd__", "diag_embed", "fft.fftn"), _LONGER),
    "bucketize": _COUNTED,
    "any": "one exchange in place of two where a rank receives few bytes",
    "equal": "all ranks agree on the answer; torch's ranks compare their own parts",
    "fill": "terms that are overwritten are added first",
    "nn.functional.one_hot": "the largest class is that of all ranks",
    "rot90": "turns by whole circles move as others do",
}
