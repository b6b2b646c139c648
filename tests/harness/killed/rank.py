"""A process that is killed in the middle of an exchange."""

import os
import signal
from collections.abc import Callable
from typing import Any

from tritondt.comm.transports.base import PackedCommunicator
from tritondt.comm.transports.shared_memory import SharedMemoryCommunicator


def kill_at(number: int) -> None:
    """Kills this process in its `number`-th exchange: when its messages are half out, or in arenas before they are."""
    so_far = [0]
    for owner, name in ((PackedCommunicator, "_keep"), (SharedMemoryCommunicator, "_run")):
        setattr(owner, name, _counted(getattr(owner, name), so_far, number))


def _counted(run: Callable[..., None], so_far: list[int], number: int) -> Callable[..., None]:
    def counted(*arguments: Any) -> None:
        so_far[0] += 1
        if so_far[0] == number:
            os.kill(os.getpid(), signal.SIGKILL)
        run(*arguments)

    return counted
