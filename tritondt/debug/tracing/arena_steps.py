"""Steps of exchanges through arenas, which one call of the extension makes: it notes when, and they are spans then."""

import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from tritondt.comm.communicator import Transfer
from tritondt.comm.packing.messages import Slice, Slices
from tritondt.comm.transports.shared_memory import SharedMemoryCommunicator
from tritondt.planning.exchange import Message


class ArenaSteps:
    """Steps and messages of communicators, as spans of a recording and as fields of `Exchanged`, in its lists."""

    def __init__(self, add: Callable[[str, Any, int, int], None], sends: list[Any], receives: list[Any]) -> None:
        self._add, self._sends, self._receives = add, sends, receives
        # Sent and received messages of each transfer, made once: tuples of every exchange would be the garbage
        # collector's to visit.
        self._slices: WeakKeyDictionary[Transfer, tuple[Slices, Slices]] = WeakKeyDictionary()

    def exchange_of(self, communicator: SharedMemoryCommunicator) -> Callable[..., None]:
        """The communicator's exchange, whose steps are recorded."""
        exchange = communicator._exchange

        def recorded(sources: Any, targets: Any, transfer: Transfer, site: int) -> None:
            communicator.take_steps()  # of an exchange that nobody recorded, before the recording began
            try:
                exchange(sources, targets, transfer, site)
            finally:
                self._record(communicator, transfer)

        return recorded

    def _record(self, communicator: SharedMemoryCommunicator, transfer: Transfer) -> None:
        steps = communicator.take_steps()
        for kind, started, ended in steps:
            self._add(kind, transfer.description if kind == "wait" else kind, started, ended)
        if transfer not in self._slices:
            self._slices[transfer] = tuple(  # type: ignore[assignment]  # two
                _slices(transfer, messages) for messages in (transfer.exchange.sends, transfer.exchange.receives)
            )
        sent, received = self._slices[transfer]
        packs, waits = ([step for step in steps if step[0] == kind] for kind in ("pack", "wait"))
        if not packs:
            return
        # A message is begun with the first of its rounds, and there with the last; who has packed waits for others'.
        sides = ((self._sends, sent, packs[0][1], packs[-1][2]), (self._receives, received, packs[0][2], waits[-1][2]))
        for exchanged, slices, began, at in sides:
            if slices:
                name, thread = transfer.description, threading.get_ident()
                exchanged.extend((communicator, communicator.sequence, slices, began, at, thread, name))


def _slices(transfer: Transfer, messages: tuple[Message, ...]) -> Slices:
    """Messages as other transports have them: whom they go to or come from, and how long they are."""
    return Slices(
        Slice(message.peer, None, 0, sum(part.numel * transfer.dtypes[part.tensor].itemsize for part in message.parts))
        for message in messages
    )
