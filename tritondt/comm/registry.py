"""The worlds of this process, one per rank, by identity."""

import os
from collections.abc import Sequence
from typing import Protocol

from tritondt import identity
from tritondt.comm.communicator import Communicator
from tritondt.comm.monitor.flight import Flight
from tritondt.identity import Identity
from tritondt.planning.cost import CostTable


class World(Protocol):
    """The ranks that can talk to each other, as one of them sees them."""

    @property
    def costs(self) -> CostTable:
        """The cost table that all ranks share, for tensors on the CPU."""
        ...

    def costs_for(self, device_type: str) -> CostTable:
        """The cost table that all ranks share, for tensors on such devices."""
        ...

    @property
    def flight(self) -> Flight:
        """The flight recorder of this rank."""
        ...

    def hosts(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Number of the host of each of `ranks`, counted in the order of the list."""
        ...

    def communicator(self, ranks: Sequence[int], device_type: str = "cpu", inside: Sequence[int] = ()) -> Communicator:
        """The communicator of `ranks` for tensors on such devices; the first call is collective among them.

        One `inside` a wider communicator is apart from that of the same ranks by themselves: what runs on it is in the
        order of the wider one.
        """
        ...

    def set_timeout(self, ranks: Sequence[int], device_type: str, seconds: float) -> None:
        """Sets how long this rank waits in an exchange of `ranks`, or inside their communicator, from now on."""
        ...

    def report(self, error: BaseException) -> None:
        """Reports to the other ranks why this rank takes part in nothing any more; RuntimeError where it cannot."""
        ...

    def close(self) -> None:
        """Ends all communicators; a collective call. Raises a failure that nobody has seen."""
        ...

    def abort(self) -> None:
        """Ends all communicators without the other ranks."""
        ...

    def inherited(self) -> "World":
        """The world of a process that has just been forked from this one."""
        ...

    def successor(self) -> "World | None":
        """The world that follows one that has ended; None where it is made on first use."""
        ...


def numbered(machines: Sequence[object]) -> tuple[int, ...]:
    """Number of each machine of a list, in the order in which they first appear.

    >>> numbered(["b", "a", "b"])
    (0, 1, 0)
    """
    numbers = {machine: number for number, machine in enumerate(dict.fromkeys(machines))}
    return tuple(numbers[machine] for machine in machines)


_worlds: dict[Identity, World] = {}


def find(who: Identity) -> World | None:
    """The world of an identity, if it has one."""
    return _worlds.get(who)


def worlds() -> tuple[World, ...]:
    """The worlds of all identities of this process."""
    return tuple(_worlds.values())


def enter(who: Identity, world: World) -> None:
    """Makes `world` the one of an identity."""
    _worlds[who] = world


def leave(who: Identity) -> World | None:
    """Forgets the world of an identity, and returns that world."""
    return _worlds.pop(who, None)


def end(who: Identity) -> World | None:
    """Forgets the world of an identity and everything that was made of that world, and returns the world."""
    found = leave(who)
    identity.forget_ended()
    return found


def _after_fork() -> None:
    for who, world in tuple(_worlds.items()):
        _worlds[who] = world.inherited()
    identity.forget_ended()


os.register_at_fork(after_in_child=_after_fork)
