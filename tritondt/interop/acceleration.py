"""Torch's own DTensor on our engine: its redistributions, explicit and implicit, run here while this is switched on.

Torch has one function that redistributes a local tensor, which its modules import by name; each name is set. The method
of a tensor is set, too: at each call of it torch makes a spec and a node of autograd, which takes as long as a small
redistribution, and is left out where no gradient is asked for. Redistributions that the engine cannot hold stay with
torch, decided alike on all ranks by specs: placements of torch's own (masks, norms, and _StridedShard where lengths do
not divide), new terms of a sum, which torch makes otherwise (v / n on each rank), traced graphs, fake groups.
"""

import importlib
import sys
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import ModuleType, TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard

from tritondt import identity
from tritondt.errors import TritondtError
from tritondt.identity import Identity
from tritondt.interop.torch_specs import spec_of_torch
from tritondt.kernels.memory import has_memory
from tritondt.redistribution.run import redistribute_local
from tritondt.sharding.placement import Partial
from tritondt.sharding.spec import DTensorSpec

_NAME = "redistribute_local_tensor"
_METHOD = "redistribute"
_ROOM = "torch.distributed.tensor"
_MODULES = ("_redistribute", "_api", "_dispatch", "experimental._tp_transform")

_PLAIN = (TorchShard, TorchReplicate, TorchPartial)
# What torch's class has as __new__: its __init__ does nothing, in three frames that keep Dynamo out.
_new_dtensor: Callable[..., TorchDTensor] = getattr(torch.Tensor, "_dtensor__new__")  # noqa: B009

_switching = threading.Lock()
_users = 0
_original: Callable[..., Any] | None = None
_original_method: Callable[..., Any] | None = None


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
    global _users, _original, _original_method
    with _switching:
        before = _users
        _users += change
        if before and _users:
            return
        modules = _modules()
        if _original is None:
            _original, _original_method = getattr(modules[0], _NAME), TorchDTensor.redistribute
        for module in modules:
            setattr(module, _NAME, _redistribute_local_tensor if _users else _original)
        setattr(TorchDTensor, _METHOD, _redistribute if _users else _original_method)


def _redistribute_local_tensor(local_tensor: Any, current_spec: Any, target_spec: Any, **options: Any) -> torch.Tensor:
    """Torch's function of this name, on our engine where that can hold both specs."""
    assert _original is not None, "torch's function was replaced and not kept"
    local = local_tensor.wait() if hasattr(local_tensor, "wait") else local_tensor  # AsyncCollectiveTensor
    found = None
    if has_memory(local) and current_spec.mesh == target_spec.mesh and not _is_traced():
        found = _specs(identity.current(), current_spec, target_spec, local.dtype)
    if found is None:
        result: torch.Tensor = _original(local_tensor, current_spec, target_spec, **options)
        return result
    return redistribute_local(local, *found)


def _redistribute(
    self: Any, device_mesh: Any = None, placements: Sequence[Any] | None = None, **options: Any
) -> TorchDTensor:
    """Torch's method of this name, on our engine where that can hold both layouts and no gradient is asked for."""
    assert _original_method is not None, "torch's method was replaced and not kept"
    given = placements if type(placements) is tuple else tuple(placements or ())
    if type(self) is TorchDTensor and device_mesh is None and not options and not self.requires_grad:
        local = self._local_tensor
        if type(local) is torch.Tensor and not torch.compiler.is_compiling() and not _num_modes():
            spec, who = self._spec, identity.current()
            call = _calls.get((id(spec), given))
            if call is None or not call.is_of(spec, who, local.dtype):
                found = _whole_call(who, spec, given, local.dtype)
                call = _Call(spec, spec.placements, spec.tensor_meta, who, local.dtype, found)
                _remember(call, given)
            if call.found is not None:
                source, target, wanted = call.found
                return _new_dtensor(
                    TorchDTensor, redistribute_local(local, source, target), wanted, requires_grad=False
                )
    result: TorchDTensor = _original_method(self, device_mesh, placements, **options)
    return result


_num_modes = torch._C._len_torch_dispatch_stack


def _is_traced() -> bool:
    return torch.compiler.is_compiling() or bool(_num_modes())


class _Call(NamedTuple):
    """The result of `_whole_call` for a tensor's spec, and that spec, kept so that no other spec gets its id."""

    spec: Any
    placements: tuple[Any, ...]
    meta: Any
    who: Identity
    dtype: torch.dtype
    found: tuple[DTensorSpec, DTensorSpec, Any] | None

    def is_of(self, spec: Any, who: Identity, dtype: torch.dtype) -> bool:
        """Whether this is the spec as it is, which torch may set fields of, on this rank."""
        is_same = self.spec is spec and self.placements is spec.placements and self.meta is spec.tensor_meta
        return is_same and self.who is who and self.dtype is dtype


# By the id of torch's spec, and placements: a hash of that spec and of a rank's identity takes 1 us.
_calls: dict[tuple[int, tuple[Any, ...]], _Call] = {}
_MOST_CALLS = 4096


def _remember(call: _Call, placements: tuple[Any, ...]) -> None:
    if len(_calls) >= _MOST_CALLS:
        _calls.clear()
    _calls[id(call.spec), placements] = call


@lru_cache(maxsize=4096)
def _whole_call(
    who: Identity, spec: Any, placements: tuple[Any, ...], dtype: torch.dtype
) -> tuple[DTensorSpec, DTensorSpec, Any] | None:
    """Our specs, and torch's of the result, of a tensor's redistribution; None where torch's own method decides."""
    plain = len(placements) == len(spec.placements) and all(type(p) in _PLAIN for p in placements)
    if not plain or any(type(p) is TorchShard and p.dim < 0 for p in placements):
        return None
    wanted = type(spec)(spec.mesh, placements, tensor_meta=spec.tensor_meta)
    found = _specs(who, spec, wanted, dtype)
    return None if found is None or found[0] is found[1] else (*found, wanted)


@lru_cache(maxsize=4096)
def _specs(
    who: Identity, current_spec: Any, target_spec: Any, dtype: torch.dtype
) -> tuple[DTensorSpec, DTensorSpec] | None:
    """Our specs of a pair of torch's on rank `who`; None where the redistribution stays with torch."""
    if dist.get_backend() == "fake":  # of a world, which `who` is of
        return None
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


identity.on_end(_specs.cache_clear)
identity.on_end(_whole_call.cache_clear)
identity.on_end(_calls.clear)
