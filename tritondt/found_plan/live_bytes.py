"""Bytes of tensors that live at one time: those of each storage, from the operator that makes it until it is freed."""

import weakref
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tritondt.dtensor.tensor import DTensor


class LiveBytes:
    """Bytes of the storages that operators have made and nobody has freed: now, and the most of any moment.

    >>> live = LiveBytes()
    >>> kept = torch.ones(4)
    >>> live.made(kept), live.made(kept[1:]), live.made(torch.ones(2))
    (None, None, None)
    >>> live.now, live.most
    (16, 24)
    """

    def __init__(self) -> None:
        self.now = self.most = 0
        self._known = set[int]()

    def know(self, tensors: Any) -> None:
        """Takes tensors of a tree for others', whose storages do not count."""
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, torch.Tensor):
                self._watch(local_storage(tensor), 0)

    def made(self, tensors: Any) -> None:
        """Counts the storages of results of an operator, those known already left out."""
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, torch.Tensor):
                storage = local_storage(tensor)
                self._watch(storage, storage.nbytes())

    def hold(self, num_bytes: int) -> None:
        """Counts bytes that no operator makes, until `release`."""
        self.now += num_bytes
        self.most = max(self.most, self.now)

    def release(self, num_bytes: int) -> None:
        """Counts bytes of `hold` no longer."""
        self.now -= num_bytes

    def restart(self) -> None:
        """Counts from zero."""
        self.now = self.most = 0

    def _watch(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        self.now += num_bytes
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._freed, key, num_bytes).atexit = False

    def _freed(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.now -= num_bytes


def local_storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    """Storage of a tensor, or of this rank's part of a distributed one."""
    local: Any = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    found: torch.UntypedStorage = local.untyped_storage()
    return found
