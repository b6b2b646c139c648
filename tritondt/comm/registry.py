"""Which world an identity has, one per rank of this process."""

import os
from collections.abc import Callable, Sequence
from typing import Protocol

from tritondt.comm.communicator import Communicator
from tritondt.comm.monitor.flight import Flight
from tritondt.identity import Identity
from tritondt.planning.cost import CostTable


class World(Protocol):
    """The ranks that can talk to each other, as one of them sees them."""

    @property
    def costs(self) -> CostTable:
        """The cost table that all ranks share."""
        ...

    @property
    def flight(self) -> Flight:
        """The flight recorder of this rank."""
        ...

    def communicator(self, ranks: Sequence[int], device_type: str = "cpu") -> Communicator:
        """The communicator of these ranks for tensors on such devices; the first call is collective among them."""
        ...

    def report(self, error: BaseException) -> None:
        """Tells the others why this rank takes part in nothing any more; RuntimeError where they cannot be told."""
        ...

    def close(self) -> None:
        """Ends all communicators; a collective call. Raises what failed without anybody having been told."""
        ...

    def abort(self) -> None:
        """Ends all communicators without the others."""
        ...

    def inherited(self) -> "World":
        """What a process gets in its place that has just been forked from this one."""
        ...

    def successor(self) -> "World | None":
        """The world that follows one that has ended; None where it is made on first use."""
        ...


_worlds: dict[Identity, World] = {}
_on_end: list[Callable[[], object]] = []


def find(who: Identity) -> World | None:
    """The world of an identity, if it has one."""
    return _worlds.get(who)


def worlds() -> tuple[World, ...]:
    """Those of all identities of this process."""
    return tuple(_worlds.values())


def enter(who: Identity, world: World) -> None:
    """Makes `world` that of an identity."""
    _worlds[who] = world


def leave(who: Identity) -> World | None:
    """Forgets the world of an identity, and returns it."""
    return _worlds.pop(who, None)


def on_end(forget: Callable[[], object]) -> None:
    """Calls `forget` whenever a world has ended, for whoever keeps communicators."""
    _on_end.append(forget)


def end(who: Identity) -> World | None:
    """Forgets the world of an identity and everything that was made of it, and returns it."""
    found = leave(who)
    for forget in _on_end:
        forget()
    return found


def _after_fork() -> None:
    for who, world in tuple(_worlds.items()):
        _worlds[who] = world.inherited()
    for forget in _on_end:
        forget()


os.register_at_fork(after_in_child=_after_fork)
