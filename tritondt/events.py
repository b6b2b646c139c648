"""What ran, told to whoever subscribed; without subscribers nobody builds an event.

unsubscribe = events.subscribe(print)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, overload


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


@dataclass(frozen=True, slots=True)
class ImplicitRedistribution:
    """An operator's argument that has to move before the operator can run; the steps are told one by one."""

    op: str
    source: str
    target: str
    shape: tuple[int, ...]


Event = StepRan | ImplicitRedistribution
EventKind = TypeVar("EventKind", StepRan, ImplicitRedistribution)
Subscriber = Callable[[Any], None]

_subscribers: list[tuple[type[Event], Subscriber]] = []
_switches: list[Callable[[bool], None]] = []


@overload
def subscribe(callback: Callable[[StepRan], None]) -> Callable[[], None]: ...
@overload
def subscribe(callback: Callable[[EventKind], None], kind: type[EventKind]) -> Callable[[], None]: ...
def subscribe(callback: Subscriber, kind: type[Any] = StepRan) -> Callable[[], None]:
    """Calls `callback` with every event of a kind in this process from now on; returns the function that ends it."""
    entry = (kind, callback)
    _subscribers.append(entry)
    _switch()

    def unsubscribe() -> None:
        if entry in _subscribers:
            _subscribers.remove(entry)
            _switch()

    return unsubscribe


def enabled() -> bool:
    """Whether anybody listens."""
    return bool(_subscribers)


def emit(event: Event) -> None:
    """Hands an event to every subscriber to its kind."""
    for kind, subscriber in tuple(_subscribers):
        if isinstance(event, kind):
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
