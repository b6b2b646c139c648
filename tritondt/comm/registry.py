"""Which world an identity has, one per rank of this process."""

from collections.abc import Sequence
from typing import Protocol

from tritondt.comm.communicator import Communicator
from tritondt.identity import Identity
from tritondt.planning.cost import CostTable


class World(Protocol):
    """The ranks that can talk to each other, as one of them sees them."""

    @property
    def costs(self) -> CostTable:
        """The cost table that all ranks share."""
        ...

    def communicator(self, ranks: Sequence[int]) -> Communicator:
        """The communicator of these ranks; the first call is collective among them."""
        ...

    def close(self) -> None:
        """Ends all communicators; a collective call."""
        ...


_worlds: dict[Identity, World] = {}


def find(who: Identity) -> World | None:
    """The world of an identity, if it has one."""
    return _worlds.get(who)


def enter(who: Identity, world: World) -> None:
    """Makes `world` that of an identity."""
    _worlds[who] = world


def leave(who: Identity) -> World | None:
    """Forgets the world of an identity, and returns it."""
    return _worlds.pop(who, None)
