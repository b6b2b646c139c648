"""Program of ranks of which one is killed in the middle of an exchange, at its first start.

torchrun ... -m tests.harness.killed_rank PROGRAM RANK EXCHANGE
"""

import os
import runpy
import signal
import sys
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


if __name__ == "__main__":
    program, rank, exchange = sys.argv[1:]
    if os.environ["RANK"] == rank and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        kill_at(int(exchange))
    sys.argv[1:] = []
    runpy.run_path(program, run_name="__main__")
