"""The life of the part of a process group on the CPU: made by the first call of all ranks, ended, or left by a fork."""

import os
import threading
from abc import ABC, abstractmethod
from datetime import timedelta
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakSet

from tritondt.comm import world
from tritondt.comm.process_world import ProcessWorld
from tritondt.comm.store import presence
from tritondt.errors import ForkedError, WorldError


class Carrier(Protocol):
    """The things that carry collectives, which end with the group or with its world."""

    def close(self) -> None:
        """Waits for all that was issued, and ends."""

    def abort(self) -> None:
        """Ends without waiting for the others."""

    def disown(self, error: WorldError) -> None:
        """Refuses all further use, in a forked process."""

    def end_with_process(self, limit_s: float) -> None:
        """Ends with the process."""


Carries = TypeVar("Carries", bound=Carrier)
_groups: "WeakSet[GroupOnCpu[Any]]" = WeakSet()


def _after_fork() -> None:
    for group in list(_groups):
        group.disown()


os.register_at_fork(after_in_child=_after_fork)


class GroupOnCpu(ABC, Generic[Carries]):
    """One rank's part in a process group; `ranks` are the group's, as ranks of the world."""

    def __init__(self, name: str, ranks: tuple[int, ...], group_rank: int, timeout: timedelta) -> None:
        self._name, self._ranks, self._own, self._timeout = name, ranks, group_rank, timeout
        self._turn = threading.Lock()
        self._world: ProcessWorld | None = None
        self._carrier: Carries | None = None
        self._ended = ""
        _groups.add(self)

    @property
    def timeout(self) -> timedelta:
        """How long an operation may take."""
        return self._timeout

    @timeout.setter
    def timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    @property
    def is_connected(self) -> bool:
        """Whether the ranks have run something."""
        return self._carrier is not None

    def _check_open(self, asked: object) -> None:
        if self._ended:
            raise WorldError(f"{asked} was asked of {self._name}, which {self._ended}; make a new one")

    def _current(self, asked: object) -> Carries:
        """The carrier in the world as it is, made by the first call of all ranks."""
        self._check_open(asked)
        if self._world is None or self._world.is_closed or self._carrier is None:
            found = world.current()
            if not isinstance(found, ProcessWorld):
                raise WorldError("a process group was used by a rank that is a thread; it connects processes")
            made = self._connected(found, f"{self._name}{presence.PART_OF_GROUP}the CPU")
            self._carrier, self._world = made, found
            found.keep(self._name, made)
        return self._carrier

    @abstractmethod
    def _connected(self, found: ProcessWorld, name: str) -> Carries:
        """The carrier of all ranks in a world, under a name there; a collective call."""

    def disown(self) -> None:
        """Closes this process's connections, which a fork copied: the others must notice when the parent dies."""
        self._turn, self._ended = threading.Lock(), "is the parent's of this process, which was forked from it"
        if self._carrier is not None:
            self._carrier.disown(ForkedError(f"{self._name} {self._ended}"))

    def abort(self) -> None:
        """Ends the group without waiting for the others."""
        self._ended = self._ended or "was aborted"
        if self._carrier is not None:
            self._carrier.abort()
        self._forget()

    def close(self) -> None:
        """Waits for all that was issued, and ends the group."""
        self._ended = self._ended or "was destroyed"
        if self._carrier is not None:
            self._carrier.close()
        self._forget()

    def _forget(self) -> None:
        """Lets go of what has ended: a program may make and destroy groups for as long as its world lasts."""
        if self._world is not None:
            self._world.forget(self._name)
