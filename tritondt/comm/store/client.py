"""Calls on the store of a job that take no longer than a bound.

The store may be gone, which c10d says with a RuntimeError, or the process that holds it stopped. Calls on a stopped one
never return, whatever its timeout (torch 2.13: `check` came back when the process went on). So they run in a thread of
their own, and whoever asks gives up after `PATIENCE_S`; what was asked happens when the store goes on.
"""

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

import torch.distributed as dist

from tritondt.comm.daemons import start_daemon
from tritondt.comm.store.host import StoreHost
from tritondt.errors import PeerError

PATIENCE_S = 1.0

Result = TypeVar("Result")


def values(store: dist.Store, keys: list[str]) -> list[bytes]:
    """Values of keys, by one call where the store takes one: those of 4,000 ranks by as many are 16 million."""
    extended: bool = store.has_extended_api()  # type: ignore[attr-defined]  # not in torch's stub
    return store.multi_get(keys) if extended else [store.get(key) for key in keys]


class SilentStoreError(PeerError):
    """The store has not answered in time: the process that holds it has stopped, or its machine."""


class _Call(Generic[Result]):
    """A call on the store, and its result or error."""

    def __init__(self, function: Callable[[dist.Store], Result]) -> None:
        self._function = function
        self.asked, self.answered = time.monotonic(), threading.Event()
        self._result: list[Result] = []
        self._error: Exception | None = None

    def run(self, store: dist.Store) -> None:
        """Makes the call."""
        try:
            self._result.append(self._function(store))
        except Exception as error:  # noqa: BLE001  raised by whoever asked
            self._error = error
        self.answered.set()

    def result(self) -> Result:
        """The call's result; raises its error, once: an error that this kept would keep its callers' frames in turn.

        A world that ended behind its store held 8 descriptors so, until the garbage collector ran.
        """
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
            return self._result[0]
        finally:
            del error


class StoreClient:
    """Calls on a store from one thread, which starts with the first; `host` is where the store is.

    `presence` is the part of the same store in which ranks say what they are: `store` itself by default.
    """

    def __init__(self, store: dist.Store, host: StoreHost, presence: dist.Store | None = None) -> None:
        self._store, self.host = store, host
        self.presence = store if presence is None else presence
        self._calls: SimpleQueue[_Call[object] | None] = SimpleQueue()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._oldest: _Call[object] | None = None

    def call(self, function: Callable[[dist.Store], Result], patience_s: float = PATIENCE_S) -> Result:
        """The result of `function`; SilentStoreError where the store takes longer than `patience_s` to answer."""
        made = _Call(function)
        with self._starting:
            if self._thread is None:
                self._thread = start_daemon(self._serve, "tritondt-store")
        self._calls.put(made)  # type: ignore[arg-type]
        if not made.answered.wait(self._left_of(patience_s)):
            raise SilentStoreError(f"{self.host} has not answered for {patience_s:g} s")
        return made.result()

    def silence(self, error: RuntimeError) -> str:
        """Clause of an error message about a store that does not answer: whose process has stopped, if known."""
        if isinstance(error, SilentStoreError):
            return f"and {error}"
        return f"nor does {self.host} answer ({error})"

    def _left_of(self, patience_s: float) -> float:
        """Seconds left for a new call: no caller waits longer because calls before it hang."""
        oldest = self._oldest
        waited = 0.0 if oldest is None else time.monotonic() - oldest.asked
        return min(max(patience_s - waited, 0.01), threading.TIMEOUT_MAX)

    def close(self) -> None:
        """Ends the client's thread; one that hangs in the store ends when the store answers, or with the process."""
        with self._starting:
            if self._thread is not None:
                self._calls.put(None)
                self._thread.join(self._left_of(PATIENCE_S))
                self._thread = None

    def _serve(self) -> None:
        while True:
            self._oldest = None
            call = self._calls.get()
            if call is None:
                return
            self._oldest = call
            call.run(self._store)
