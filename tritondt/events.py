"""What ran, told to whoever subscribed; without subscribers nobody builds an event.

unsubscribe = events.subscribe(print)
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepRan:
    """One step of a redistribution as this rank ran it; bytes and messages are counted by the transport."""

    kind: str
    source: str
    target: str
    shape: tuple[int, ...]
    sent_bytes: int
    received_bytes: int
    num_sent: int
    num_received: int
    seconds: float


Subscriber = Callable[[StepRan], None]

_subscribers: list[Subscriber] = []
_switches: list[Callable[[bool], None]] = []


def subscribe(callback: Subscriber) -> Callable[[], None]:
    """Calls `callback` with every event of this process from now on; returns the function that ends it."""
    _subscribers.append(callback)
    _switch()

    def unsubscribe() -> None:
        if callback in _subscribers:
            _subscribers.remove(callback)
            _switch()

    return unsubscribe


def emit(event: StepRan) -> None:
    """Hands an event to every subscriber."""
    for subscriber in tuple(_subscribers):
        subscriber(event)


def on_switch(switch: Callable[[bool], None]) -> None:
    """Calls `switch(True)` when the first subscriber comes and `switch(False)` when the last one goes.

    The code that would emit swaps its functions there, so that its normal path holds no test.
    """
    _switches.append(switch)
    switch(bool(_subscribers))


def _switch() -> None:
    for switch in _switches:
        switch(bool(_subscribers))
