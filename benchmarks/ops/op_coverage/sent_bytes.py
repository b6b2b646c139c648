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


# Operators that send more than torch's in some layout that both run, and why.
MORE_BYTES: Mapping[str, str] = {}
