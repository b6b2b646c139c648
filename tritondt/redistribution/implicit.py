"""Implicit redistributions, those of an operator's arguments: counted and logged, or refused where asked so."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, NamedTuple

import torch
from torch._ops import OpOverload

from tritondt import events, logs
from tritondt.comm.monitor.call_site import calling_line
from tritondt.errors import ImplicitRedistributionError, ImplicitRedistributionWarning, PropagationError
from tritondt.errors.arguments import checked
from tritondt.redistribution.compile import received_bytes
from tritondt.redistribution.run import redistribute_local
from tritondt.sharding.placement import placements_code, placements_text
from tritondt.sharding.spec import DTensorSpec


class _Watch(NamedTuple):
    """The implicit redistributions that are told or refused: those that send bytes, with `is_strict` all."""

    is_strict: bool
    is_refused: bool


_watch: ContextVar[_Watch | None] = ContextVar("watch of implicit redistributions", default=None)


def redistribute_input(op: OpOverload, local: torch.Tensor, source: DTensorSpec, target: DTensorSpec) -> torch.Tensor:
    """Local tensor of an argument of `op`, redistributed from `source` to the `target` that the operator needs.

    ImplicitRedistributionError within `explicit_redistribution()`, where bytes would be sent. Each that sends
    bytes is a record of the logger "tritondt.moves" at DEBUG. A meta tensor has nothing to send: torch asks so for the
    shape of a product with zeros, as forward derivatives have.
    """
    if local.is_meta:
        return local.new_empty(target.local_shape)
    watch = _watch.get()
    if watch is not None and source is not target:
        _tell(op, source, target, watch)
    if events.enabled():
        events.emit(events.ImplicitRedistribution(str(op), str(source), str(target), source.shape))
    if logs.moves.isEnabledFor(logging.DEBUG):
        _log(op, source, target)
    return redistribute_local(local, source, target)


def _tell(op: OpOverload, source: DTensorSpec, target: DTensorSpec, watch: _Watch) -> None:
    # The most that any rank receives, so that all ranks refuse alike.
    num_bytes = received_bytes(source, target)
    if not num_bytes and not watch.is_strict:
        return
    text = (
        f"{op} needs {source} as {placements_text(target.placements)}, which moves up to {num_bytes:,} bytes "
        f"to a rank; ask for it: x.redistribute(placements={placements_code(target.placements)})"
    )
    if watch.is_refused:
        raise ImplicitRedistributionError(text)
    warnings.warn(text, ImplicitRedistributionWarning, stacklevel=2)


def _log(op: OpOverload, source: DTensorSpec, target: DTensorSpec) -> None:
    num_bytes = received_bytes(source, target)
    if not num_bytes:
        return
    logs.moves.debug(
        "rank %d: %s needs %s as %s, which moves up to %s bytes to a rank; called at %s",
        source.mesh.identity.rank,
        op,
        source,
        placements_text(target.placements),
        f"{num_bytes:,}",
        calling_line(),
    )


@checked
@contextmanager
def explicit_redistribution(
    enable: bool = True, strict: bool = False, mode: Literal["raise", "warn"] = "raise"
) -> Iterator[None]:
    """Context manager that refuses implicit redistributions that send bytes.

    With `strict` it also refuses those that send nothing, such as cutting a replicated tensor. With `mode="warn"` they
    run with an ImplicitRedistributionWarning. `enable=False` lifts an outer block.

    It is not a collective call, but all ranks must enter it, so that all refuse alike. It applies to the calling
    thread, and not to backward passes that other threads run. Within the block, an operator that needs to move an
    argument raises ImplicitRedistributionError, which names the operator, the bytes, and the explicit call.
    PropagationError for another mode.

    >>> import tritondt as T
    >>> from tritondt.comm.transports.threads import run_ranks
    >>> def refusal_on(rank):
    ...     rows = T.DTensor.from_local(torch.ones(2, 4), T.Mesh((2,)), (T.Shard(0),))
    ...     columns = rows.redistribute(placements=(T.Shard(1),))
    ...     with T.explicit_redistribution():
    ...         try:
    ...             rows + columns
    ...         except T.ImplicitRedistributionError as error:
    ...             return str(error).split("; ")
    >>> for clause in run_ranks(2, refusal_on)[0]:
    ...     print(clause)
    aten.add.Tensor needs (S1) of (4, 4) float32 as (S0), which moves up to 16 bytes to a rank
    ask for it: x.redistribute(placements=[Shard(0)])
    """
    if mode not in ("raise", "warn"):
        raise PropagationError(f"explicit_redistribution got mode={mode!r}; allowed are 'raise' and 'warn'")
    token = _watch.set(_Watch(strict, mode == "raise") if enable else None)
    try:
        yield
    finally:
        _watch.reset(token)
