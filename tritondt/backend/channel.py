"""Messages from one rank to another: a lane of their own, made in the background by the two of them.

Each direction between two ranks has its own, and so a send never waits behind a receive: whatever order of isend and
irecv the ranks choose, it runs. Neither waits on the host for the other to come.
"""

import threading
from collections.abc import Callable, Sequence

import torch

from tritondt.backend.lane import Lane
from tritondt.backend.work import NcclWork
from tritondt.comm.streams import Streams


class Channel:
    """This rank's end of it."""

    def __init__(self, name: str, make: Callable[[], Lane], streams: Streams) -> None:
        self._name, self._make, self._streams = name, make, streams
        self._changing = threading.RLock()  # what fails while it is put ends its channel
        self._waiting: list[tuple[NcclWork, Sequence[torch.Tensor]]] = []
        self._lane: Lane | None = None
        self._is_connecting = False
        self._failure: BaseException | None = None

    def put(self, work: NcclWork, tensors: Sequence[torch.Tensor]) -> None:
        """Puts a message into the stream, when the other rank has come."""
        with self._changing:
            if self._failure is not None:
                work.fail(self._failure)
            elif self._lane is not None:
                self._lane.put(work, tensors)
            else:
                work.defer()
                self._waiting.append((work, tensors))
                self._connect_once()

    def _connect_once(self) -> None:
        if not self._is_connecting:
            self._is_connecting = True
            threading.Thread(target=self._connect, name=f"tritondt-{self._name}", daemon=True).start()

    def _connect(self) -> None:
        try:
            self._streams.bind_thread()
            lane = self._make()
        except BaseException as error:  # noqa: BLE001  whoever waits for a message raises it
            self.fail(error)
            return
        with self._changing:
            if self._failure is not None:
                lane.fail(self._failure)
            self._lane = lane
            for work, tensors in self._waiting:
                lane.put(work, tensors)
            self._waiting.clear()

    def fail(self, error: BaseException) -> None:
        """Ends it, and what waits for the other rank, with this error."""
        if self._lane is not None:  # first, so that whoever is held up in it lets go
            self._lane.fail(error)
        with self._changing:
            self._failure = self._failure or error
            for work, _ in self._waiting:
                work.fail(error)
            self._waiting.clear()

    def close(self) -> None:
        """Waits for all that was issued, and ends it."""
        if self._lane is not None:
            self._lane.close()
