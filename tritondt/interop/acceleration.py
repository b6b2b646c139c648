"""Torch's own DTensor on our engine: its redistributions, explicit and implicit, run here while this is switched on.

Torch has one function that redistributes a local tensor, which its modules import by name; each name is set. What the
engine cannot hold stays with torch, decided alike on all ranks by specs: placements of torch's own (masks, norms, and
_StridedShard where lengths do not divide), new terms of a sum, which torch makes otherwise (v / n on each rank), traced
graphs, fake groups.
"""

import importlib
import sys
import threading
from collections.abc import Callable
from functools import lru_cache
from types import ModuleType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from tritondt import identity
from tritondt.comm import registry
from tritondt.errors import TritondtError
from tritondt.identity import Identity
from tritondt.interop.torch_specs import spec_of_torch
from tritondt.redistribution.run import has_memory, redistribute_local
from tritondt.sharding.placement import Partial
from tritondt.sharding.spec import DTensorSpec

_NAME = "redistribute_local_tensor"
_ROOM = "torch.distributed.tensor"
_MODULES = ("_redistribute", "_api", "_dispatch", "experimental._tp_transform")

_switching = threading.Lock()
_users = 0
_original: Callable[..., Any] | None = None


class Acceleration:
    """A switch that `accelerate_torch` has set; it goes back at the end of a `with` block, or by `undo()`."""

    def __init__(self) -> None:
        self._is_on = True
        _switch(+1)

    def undo(self) -> None:
        """Leaves torch's redistributions to torch again, once all others who switched them have done so too."""
        if self._is_on:
            self._is_on = False
            _switch(-1)

    def __enter__(self) -> "Acceleration":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


def _modules() -> list[ModuleType]:
    importlib.import_module(_ROOM)
    return [sys.modules[name] for module in _MODULES if (name := f"{_ROOM}.{module}") in sys.modules]


def _switch(change: int) -> None:
    global _users, _original
    with _switching:
        before = _users
        _users += change
        if before and _users:
            return
        modules = _modules()
        if _original is None:
            _original = getattr(modules[0], _NAME)
        for module in modules:
            setattr(module, _NAME, _redistribute_local_tensor if _users else _original)


def _redistribute_local_tensor(local_tensor: Any, current_spec: Any, target_spec: Any, **options: Any) -> torch.Tensor:
    """Torch's function of this name, on our engine where that can hold both specs."""
    assert _original is not None, "torch's function was replaced and not kept"
    local = local_tensor.wait() if hasattr(local_tensor, "wait") else local_tensor  # AsyncCollectiveTensor
    found = None
    if has_memory(local) and current_spec.mesh == target_spec.mesh and not _is_traced_or_fake():
        found = _specs(identity.current(), current_spec, target_spec, local.dtype)
    if found is None:
        result: torch.Tensor = _original(local_tensor, current_spec, target_spec, **options)
        return result
    return redistribute_local(local, *found)


def _is_traced_or_fake() -> bool:
    return torch.compiler.is_compiling() or bool(torch._C._len_torch_dispatch_stack()) or dist.get_backend() == "fake"


@lru_cache(maxsize=4096)
def _specs(
    who: Identity, current_spec: Any, target_spec: Any, dtype: torch.dtype
) -> tuple[DTensorSpec, DTensorSpec] | None:
    """Our specs of a pair of torch's on rank `who`; None where the redistribution stays with torch."""
    try:
        source, target = spec_of_torch(current_spec, dtype), spec_of_torch(target_spec, dtype)
    except TritondtError:  # what no layout of ours says, as reductions that a dtype does not have
        return None
    if source is None or target is None or source.shape != target.shape:
        return None
    ops = {p.reduce_op for p in (*source.placements, *target.placements) if isinstance(p, Partial)}
    makes_terms = any(
        isinstance(after, Partial) and before != after
        for before, after in zip(source.placements, target.placements, strict=True)
    )
    if makes_terms or len(ops) > 1:
        return None
    return (source, source) if source.layout is target.layout else (source, target)


registry.on_end(_specs.cache_clear)
