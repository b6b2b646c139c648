"""Writes to the memory of distributed tensors, counted for who holds copies of their elements.

`_version` counts for autograd: not what is written through `x.data`, by fused optimizers or as running statistics.
Copies that must not grow old are watched here: every operator that writes looks whether anything is watched, and counts
what it writes to by the memory that tensors share. All ranks count alike, whatever each of them holds of the elements.
"""

import os
import threading
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch._ops import OpOverload

# A tensor's attributes: the local tensors that stand for its memory, by identity; those that it had before it was given
# another's memory, which views that were made before still have; and how a copied view was made.
MEMORY = "_tritondt_memory"
FORMER = "_tritondt_former_memory"
ORIGIN = "_tritondt_origin"
# There once autograd has recorded a view of it; and which operator changed its dims after that.
RECORDED = "_tritondt_recorded_view"
CHANGED = "_tritondt_changed_after_view"
NOTES_OF_VIEWS = (RECORDED, CHANGED)
# A storage's: how far its version was raised by copying a view again.
_RENEWALS = "_tritondt_renewals"
# Torch counts writes at this key, or in the kernels of plain tensors, which distributed ones do not reach: as those of
# lists do, but not these.
_COUNTING_KEY = torch._C.DispatchKey.ADInplaceOrView
_UNCOUNTED = frozenset({
    *(f"aten::_fused_{step}_" for step in ("adam", "adamw", "sgd", "adagrad")),
    *("aten::_native_batch_norm_legit", "aten::_batch_norm_with_update"),
})  # fmt: skip

Memory = tuple[torch.Tensor, ...]
Count = tuple[int, int]
LocalCount = tuple[int, ...]


class _Cell:
    """Numbers of writes and of changes of shape since a memory is watched, by the identities of its local tensors."""

    __slots__ = ("keys", "num_reshapes", "num_writes")

    def __init__(self, keys: tuple[int, ...]) -> None:
        self.keys, self.num_reshapes, self.num_writes = keys, 0, 0


# Cells by the identity of a local tensor; empty whenever nothing is watched.
watched: dict[int, tuple[_Cell, ...]] = {}
_changing = threading.Lock()
# Cells of watches that have ended: garbage collection ends them anywhere, also where the lock is held.
_ended: list[_Cell] = []


class Watch:
    """Watch on a memory from now on, ended with the object."""

    __slots__ = ("_cell", "memory")

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._cell = _Cell(tuple(map(id, memory)))
        _forget_ended()
        with _changing:
            for key in self._cell.keys:
                watched[key] = (*watched.get(key, ()), self._cell)

    def __del__(self) -> None:
        _ended.append(self._cell)

    def count(self, distributed: Any) -> Count:
        """Numbers of writes by operators, which all ranks know: to a tensor as torch counts, to the memory as we do.

        Torch counts changes of shape too.
        """
        cell = self._cell
        return -1 if distributed.is_inference() else distributed._version - cell.num_reshapes, cell.num_writes

    def local_count(self, distributed: Any) -> LocalCount:
        """Numbers of writes to the local tensors themselves, of which other ranks do not know."""
        return tuple(map(num_foreign_writes, (held_local(distributed), *self.memory)))


def num_foreign_writes(local: torch.Tensor) -> int:
    """Writes to a local tensor, as torch counts them, but for those that are known to be no one rank's own."""
    return -1 if local.is_inference() else local._version - getattr(local.untyped_storage(), _RENEWALS, 0)


def renew_elements(local: torch.Tensor, elements: torch.Tensor) -> None:
    """Gives a local tensor other elements where they lie: for autograd a write, and for no watch.

    Other tensors may share its memory, and see them.
    """
    if local.is_inference():
        with torch.inference_mode():
            local.copy_(elements)
        return
    before = local._version
    with torch.no_grad():
        local.copy_(elements)
    note_known_writes(local, before)


def note_known_writes(local: torch.Tensor, before: int) -> None:
    """Notes that all writes to a local tensor since its version was `before` are no one rank's own."""
    storage = local.untyped_storage()
    setattr(storage, _RENEWALS, getattr(storage, _RENEWALS, 0) + local._version - before)


def count_writes(tensors: Iterable[Any], *, reshapes: bool) -> None:
    """Counts a write to each distributed one of these tensors, or a change of its shape.

    A write to a copied view counts where it is written back.
    """
    if _ended:
        _forget_ended()
    for tensor in tensors:
        if not hasattr(tensor, "_spec") or (ORIGIN in tensor.__dict__ and not reshapes):
            continue
        for local in memory_of(tensor):
            for cell in watched.get(id(local), ()):
                cell.num_reshapes += reshapes
                cell.num_writes += not reshapes


def leaves_counting(op: OpOverload) -> bool:
    """Whether torch leaves it to the kernels of plain tensors to count what an operator writes, as of lists."""
    return not op.has_kernel_for_dispatch_key(_COUNTING_KEY) and op._schema.name not in _UNCOUNTED


def memory_of(distributed: Any) -> Memory:
    """The local tensors that stand for the memory of a tensor: for all that share it, at least one is the same."""
    attributes = distributed.__dict__
    found: Memory | None = attributes.get(MEMORY)
    if found is not None:
        return found
    base = distributed._base
    if base is None:
        found = attributes[MEMORY] = (held_local(distributed),)
        return found
    former: list[weakref.ref[torch.Tensor]] | None = base.__dict__.get(FORMER)
    if former is None:
        return memory_of(base)
    return *memory_of(base), *[local for reference in former if (local := reference()) is not None]


def take_memory(distributed: Any, new: Any) -> None:
    """Notes that a tensor is given the memory of another one; views that were made before keep the former."""
    attributes = distributed.__dict__
    former = [*attributes.get(FORMER, ()), *map(weakref.ref, memory_of(distributed))]
    attributes[FORMER] = _References(reference for reference in former if reference() is not None)
    attributes[MEMORY] = memory_of(new)


class _References(list[weakref.ref[torch.Tensor]]):
    """Weak references; copies start without."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "_References":
        return _References()


def lasting_attributes(distributed: Any) -> dict[str, Any]:
    """The attributes of a tensor, without those that hold in this process alone."""
    return {
        name: value
        for name, value in distributed.__dict__.items()
        if name not in (MEMORY, FORMER, ORIGIN, *NOTES_OF_VIEWS)
    }


def held_local(distributed: Any) -> torch.Tensor:
    """The local tensor as it is held, filled or not, up to date or not."""
    kind: Any = type(distributed)
    slot = kind._local_tensor
    found: torch.Tensor = (kind.__base__._local_tensor if isinstance(slot, property) else slot).__get__(distributed)
    return found


def _forget_ended() -> None:
    with _changing:
        while _ended:
            cell = _ended.pop()
            for key in cell.keys:
                left = tuple([other for other in watched.get(key, ()) if other is not cell])
                if left:
                    watched[key] = left
                else:
                    watched.pop(key, None)


def _after_fork() -> None:
    """Makes the lock anew in a forked child: another thread may have held it."""
    global _changing
    _changing = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
