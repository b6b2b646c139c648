"""A process that is killed in the middle of an exchange."""

import os
import signal
from typing import Any

from tritondt.comm.transports.base import PackedCommunicator


def kill_at(number: int) -> None:
    """Kills this process when the messages of its `number`-th exchange are half out."""
    keep, so_far = PackedCommunicator._keep, [0]

    def counted(*arguments: Any) -> None:
        so_far[0] += 1
        if so_far[0] == number:
            os.kill(os.getpid(), signal.SIGKILL)
        keep(*arguments)

    PackedCommunicator._keep = counted  # type: ignore[assignment, method-assign]
