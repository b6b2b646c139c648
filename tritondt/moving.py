"""What happens when an operator's argument has to move first: it is counted, or refused where the user asked so."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch._ops import OpOverload

from tritondt import events
from tritondt.errors import ImplicitRedistributionError
from tritondt.execute import redistribute_local
from tritondt.placement import placements_code, placements_text
from tritondt.runnable import received_bytes
from tritondt.spec import DTensorSpec

_refused: ContextVar[bool] = ContextVar("refuse implicit redistribution", default=False)


def move_input(op: OpOverload, local: torch.Tensor, source: DTensorSpec, target: DTensorSpec) -> torch.Tensor:
    """The local tensor of an argument of `op` where the operator needs it.

    ImplicitRedistributionError within `explicit_redistribution()`, where bytes would be sent.
    """
    if _refused.get():
        # The most that any rank receives, so that all ranks refuse alike.
        moved = received_bytes(source, target)
        if moved:
            raise ImplicitRedistributionError(
                f"{op} needs {source} as {placements_text(target.placements)}, which moves up to {moved:,} bytes to a "
                f"rank; ask for it: x.redistribute(placements={placements_code(target.placements)})"
            )
    if events.enabled():
        events.emit(events.InputMoved(str(op), str(source), str(target), source.shape))
    return redistribute_local(local, source, target)


@contextmanager
def explicit_redistribution() -> Iterator[None]:
    """Refuses, within, every redistribution that sends bytes and was not asked for by name.

    The error names the operator, the bytes and the call that asks for it. Holds for the calling thread; a backward
    pass that other threads run is not covered.
    """
    token = _refused.set(True)
    try:
        yield
    finally:
        _refused.reset(token)
