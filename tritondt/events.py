"""Events: steps and implicit moves of redistributions, handed to subscribers; without any, no event is built.

unsubscribe = events.subscribe(print)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, overload


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
    """An operator's argument that has to move before the operator can run; each of the steps is an event of its own."""

    op: str
    source: str
    target: str
    shape: tuple[int, ...]


Event = StepRan | ImplicitRedistribution
EventKind = TypeVar("EventKind", StepRan, ImplicitRedistribution)
Subscriber = Callable[[Any], None]

# Subscribers with the kind of events that each takes. A hot path asks `if subscribers:`, which costs no call; the list
# is never replaced by another.
subscribers: list[tuple[type[Event], Subscriber]] = []


@overload
def subscribe(callback: Callable[[StepRan], None]) -> Callable[[], None]: ...
@overload
def subscribe(callback: Callable[[EventKind], None], kind: type[EventKind]) -> Callable[[], None]: ...
def subscribe(callback: Subscriber, kind: type[Any] = StepRan) -> Callable[[], None]:
    """Calls `callback` with every event of a kind in this process from now on; returns the function that ends it.

    >>> steps: list[StepRan] = []
    >>> unsubscribe = subscribe(steps.append)
    >>> emit_step("local", "(R)", "(S0)", (4,))
    >>> unsubscribe()
    >>> steps[0].kind, steps[0].shape, steps[0].sent_bytes
    ('local', (4,), 0)
    """
    entry = (kind, callback)
    subscribers.append(entry)

    def unsubscribe() -> None:
        if entry in subscribers:
            subscribers.remove(entry)

    return unsubscribe


def enabled() -> bool:
    """Whether anybody has subscribed."""
    return bool(subscribers)


def emit(event: Event) -> None:
    """Hands an event to every subscriber to its kind."""
    for kind, subscriber in tuple(subscribers):
        if isinstance(event, kind):
            subscriber(event)


class Traffic(Protocol):
    """Counters of bytes and messages, as a communicator keeps them."""

    sent_bytes: int
    received_bytes: int
    num_sent: int
    num_received: int


def emit_step(
    kind: str,
    source: str,
    target: str,
    shape: tuple[int, ...],
    traffic: Traffic | None = None,
    before: Traffic | None = None,
    seconds: float = 0.0,
) -> None:
    """Emits a StepRan that moved what `traffic` counts beyond `before`; None counts nothing."""
    counted = zip(_counts(traffic), _counts(before), strict=True)
    sent_bytes, received_bytes, num_sent, num_received = (now - then for now, then in counted)
    emit(StepRan(kind, source, target, shape, sent_bytes, received_bytes, num_sent, num_received, seconds))


def _counts(traffic: Traffic | None) -> tuple[int, int, int, int]:
    if traffic is None:
        return 0, 0, 0, 0
    return traffic.sent_bytes, traffic.received_bytes, traffic.num_sent, traffic.num_received
