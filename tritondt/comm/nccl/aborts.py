"""Aborts of NCCL communicators: each in a thread of its own, begun side by side and waited for under one limit.

An abort may not return. It waits while a captured CUDA graph has an operation of its communicator (localPersistentRefs,
init.cc of NCCL 2.30.7), and may wait for a device on which another communicator's kernel spins for a peer: that one
must be aborted meanwhile.
"""

import time
from collections.abc import Callable

from tritondt._C import NcclError
from tritondt.comm.daemons import start_daemon

# What an abort takes without a graph is some milliseconds; a device that has failed may never answer.
LIMIT_S = 5.0


class Abort:
    """An abort under way in a thread that ends with the process."""

    def __init__(self, run: Callable[[], object], name: str, num_captured: int) -> None:
        self._run, self._name, self._num_captured = run, name, num_captured
        self.error: NcclError | None = None
        self._thread = start_daemon(self._abort, "tritondt-abort")

    def _abort(self) -> None:
        try:
            self._run()
        except NcclError as error:
            self.error = error

    def has_ended(self, timeout_s: float) -> bool:
        """Whether the abort has returned, after at most so many seconds."""
        self._thread.join(max(timeout_s, 0.0))
        return not self._thread.is_alive()

    def complaint(self) -> str:
        """Text of the communicator that does not end, and why."""
        return self._name + captured_text(self._num_captured)


def captured_text(num_captured: int) -> str:
    """The reason why a communicator may not end, behind its name; empty where nothing of it was captured.

    >>> captured_text(2)
    ' (2 of its operations were captured into CUDA graphs; NCCL waits until these are deleted)'
    """
    if num_captured == 0:
        return ""
    were = "1 of its operations was" if num_captured == 1 else f"{num_captured} of its operations were"
    return f" ({were} captured into CUDA graphs; NCCL waits until these are deleted)"


_under_way: list[Abort] = []


def begin(run: Callable[[], object], name: str, num_captured: int) -> Abort:
    """Begins to abort the communicator `name` by `run`, beside those that are being aborted."""
    found = Abort(run, name, num_captured)
    _under_way.append(found)
    return found


def settle(limit_s: float | None = None) -> str | None:
    """Waits for all aborts under way, and returns the text of those that go on, or failed; None where there are none.

    The call waits `limit_s` seconds for all together, LIMIT_S by default. Aborts that go on are left to their threads
    and to the end of the process.
    """
    limit_s = LIMIT_S if limit_s is None else limit_s
    ends_at = time.monotonic() + limit_s
    aborts, _under_way[:] = list(_under_way), []
    going_on = [found.complaint() for found in aborts if not found.has_ended(ends_at - time.monotonic())]
    failed = [f"{found.complaint()}: {found.error}" for found in aborts if found.error is not None]
    texts = []
    if going_on:
        texts.append(f"NCCL had {limit_s:g} s to abort and did not end {', '.join(going_on)}")
    if failed:
        texts.append(f"ncclCommAbort failed for {', '.join(failed)}")
    return "; ".join(texts) or None
