"""Pending tensors: distributed tensors whose local tensor is still being received.

A pending tensor is of a subclass, where `_local_tensor` is a property that waits; then the tensor is of the plain class
again. So whoever uses it waits, and nobody else pays for the question.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from tritondt.comm.work import Work
from tritondt.dtensor.copies import own_view
from tritondt.dtensor.operator_call import Wrap
from tritondt.dtensor.views.copied_views import refresh
from tritondt.dtensor.writes import MEMORY, ORIGIN, Count, LocalCount, Watch, held_local, memory_of
from tritondt.redistribution.run import redistribute_local, redistribute_local_async
from tritondt.sharding.placement import Partial
from tritondt.sharding.spec import DTensorSpec, element_kind, has_reduction

_WORK = "_tritondt_work"
_PREFETCHED = "_tritondt_prefetched"

Dispatch = Callable[..., Any]


@lru_cache(maxsize=64)
def pending_class(tensor_class: type[torch.Tensor]) -> type[torch.Tensor]:
    """The subclass of `tensor_class` for pending tensors."""
    slot: Any = tensor_class._local_tensor  # type: ignore[attr-defined]
    wrap: Any = tensor_class

    def wait_for_local(tensor: Any) -> torch.Tensor:
        """The local tensor, once the work is done; raises the work's failure, every time."""
        tensor.__dict__[_WORK].wait()
        tensor.__class__ = tensor_class  # as `set_arrived`, which is a call
        tensor.__dict__.pop(_WORK, None)
        local: torch.Tensor = slot.__get__(tensor)
        return local

    def replace(tensor: Any, local: torch.Tensor) -> None:
        """Sets another local tensor: the pending work no longer matters."""
        slot.__set__(tensor, local)
        set_arrived(tensor)

    def set_arrived(tensor: Any) -> None:
        tensor.__class__ = tensor_class
        tensor.__dict__.pop(_WORK, None)

    def dispatch(
        op: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Waits for every operator but an alias of the tensor: autograd detaches the gradients that it keeps."""
        if op is torch.ops.aten.detach.default and type(args[0]) is pending_type:
            tensor: Any = args[0]
            alias = wrap(slot.__get__(tensor).detach(), tensor._spec)
            alias.__dict__[MEMORY] = memory_of(tensor)
            mark_pending(alias, tensor.__dict__[_WORK])
            return alias
        # Another subclass among the arguments has its own to say.
        kind = next((other for other in types if other is not pending_type and issubclass(other, tensor_class)), None)
        return (kind or tensor_class).__torch_dispatch__(op, types, tuple(args), dict(kwargs or {}))

    pending_type = type(
        f"Pending{tensor_class.__name__}",
        (tensor_class,),
        {
            "__slots__": (),
            "__module__": tensor_class.__module__,
            "__torch_dispatch__": staticmethod(dispatch),
            "_local_tensor": property(wait_for_local, replace),
        },
    )
    return pending_type


def mark_pending(tensor: torch.Tensor, work: Work) -> None:
    """Makes the tensor wait for `work` on first use; it holds the local tensor that `work` fills."""
    tensor.__dict__[_WORK] = work
    tensor.__class__ = pending_class(type(tensor))


def work_of(tensor: torch.Tensor) -> Work | None:
    """The work that a tensor waits for; None for a tensor that is not pending."""
    return tensor.__dict__.get(_WORK)


def redistribute_dtensor(
    distributed: Any,
    wrap: Wrap,
    target: DTensorSpec,
    *,
    async_op: bool,
    wire_dtype: torch.dtype | None = None,
) -> Any:
    """The tensor under `target`, without history: the result of a `prefetch`, or else of a redistribution now."""
    attributes = distributed.__dict__
    if ORIGIN in attributes:
        refresh(distributed)
    found = take_prefetched(distributed, target, wire_dtype) if _PREFETCHED in attributes else None
    if found is not None:
        return found if async_op else waited(found)
    spec: DTensorSpec = distributed._spec
    if async_op:
        before = attributes.get(_WORK)
        held = distributed._local_tensor if before is None else held_local(distributed)
        local, work = redistribute_local_async(held, spec, target, before, wire_dtype)
        result = wrap(own_view(local) if local is held else local, target)
        if work is not None:  # as `mark_pending`, which is a call
            result.__dict__[_WORK] = work
            result.__class__ = pending_class(type(result))
        return result
    held = distributed._local_tensor
    local = redistribute_local(held, spec, target, wire_dtype)
    return wrap(own_view(local) if local is held else local, target)


def convert_and_redistribute(
    distributed: Any,
    wrap: Wrap,
    target: DTensorSpec,
    dtype: torch.dtype,
    *,
    async_op: bool = False,
    wire_dtype: torch.dtype | None = None,
) -> Any:
    """The tensor under `target`, of its own dtype, converted to `dtype`, without history.

    Terms of floats are converted one by one and then reduced in `dtype`. Other values are the same in either order, so
    that they travel in the shorter dtype, unless that would wait or they have a wire dtype.
    """
    spec: DTensorSpec = distributed._spec
    if dtype is spec.dtype:
        return redistribute_dtensor(distributed, wrap, target, async_op=async_op, wire_dtype=wire_dtype)
    if any(isinstance(placement, Partial) for placement in spec.placements):
        converted = _converted_terms(distributed, wrap, dtype)
    elif dtype.itemsize <= spec.dtype.itemsize or async_op or wire_dtype is not None:
        converted = distributed.to(dtype)
    else:
        return redistribute_dtensor(distributed, wrap, target, async_op=False).to(dtype)
    target = target.shallow_copy_with_tensor_meta(target.tensor_meta._replace(dtype=dtype))
    if converted._spec is target:
        return converted
    return redistribute_dtensor(converted, wrap, target, async_op=async_op, wire_dtype=wire_dtype)


def _converted_terms(distributed: Any, wrap: Wrap, dtype: torch.dtype) -> Any:
    """Terms in another dtype: each by itself from floats to floats, or complex to complex; else reduced first."""
    spec: DTensorSpec = distributed._spec
    is_each = element_kind(dtype) == element_kind(spec.dtype) and element_kind(dtype) in ("float", "complex")
    terms = [placement for placement in spec.placements if isinstance(placement, Partial)]
    if not is_each or not all(has_reduction(placement.reduce_op, dtype) for placement in terms):
        return distributed.to(dtype)
    if ORIGIN in distributed.__dict__:
        refresh(distributed)
    meta = spec.tensor_meta._replace(dtype=dtype)
    return wrap(distributed._local_tensor.to(dtype), spec.shallow_copy_with_tensor_meta(meta))


_PrefetchKey = tuple[DTensorSpec, torch.dtype | None]


class _Issued(NamedTuple):
    """A prefetched tensor, and the source when it was issued: spec, local tensor, and what was written to it."""

    result: torch.Tensor
    source: DTensorSpec
    local: torch.Tensor
    watch: Watch
    seen: tuple[Count, LocalCount]

    def holds(self, distributed: Any) -> bool:
        """Whether the source is still what it was."""
        if self.source is not distributed._spec or self.local is not held_local(distributed):
            return False
        return self.seen == (self.watch.count(distributed), self.watch.local_count(distributed))


class _Prefetched(dict[_PrefetchKey, _Issued]):
    """Prefetched tensors by target and wire dtype.

    Copies and files start without.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Prefetched":
        return _Prefetched()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Prefetched, ()


def issue_prefetch(distributed: Any, wrap: Wrap, target: DTensorSpec, wire_dtype: torch.dtype | None = None) -> None:
    """Issues the redistribution to `target` for the next call that asks for it."""
    refresh(distributed)
    prefetched = distributed.__dict__.setdefault(_PREFETCHED, _Prefetched())
    key = target, wire_dtype
    if key in prefetched and prefetched[key].holds(distributed):
        return
    watch = Watch(memory_of(distributed))
    count = watch.count(distributed), watch.local_count(distributed)
    source = distributed._spec, held_local(distributed)
    result = redistribute_dtensor(distributed, wrap, target, async_op=True, wire_dtype=wire_dtype)
    prefetched[key] = _Issued(result, *source, watch, count)


def forget_prefetched(tensor: Any) -> None:
    """Drops what was prefetched of a tensor whose memory is about to hold other values."""
    vars(tensor).pop(_PREFETCHED, None)


def take_prefetched(distributed: Any, target: DTensorSpec, wire_dtype: torch.dtype | None) -> torch.Tensor | None:
    """The result of a prefetch to `target`, taken off the tensor; None where there is none that still holds."""
    prefetched = distributed.__dict__.get(_PREFETCHED)
    if prefetched is None or (target, wire_dtype) not in prefetched:
        return None
    issued: _Issued = prefetched.pop((target, wire_dtype))
    # Written to since, what was moved is of the past.
    return issued.result if issued.holds(distributed) else None


def waited(distributed: Any) -> torch.Tensor:
    """The tensor itself once it is there; raises the failure of its work."""
    work = work_of(distributed)
    if work is not None:
        work.wait()
        _ = distributed._local_tensor
    result: torch.Tensor = distributed
    return result
