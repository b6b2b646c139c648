"""Refusal of communication in a process that was forked from a rank.

The child has the parent's sockets but none of its threads, and two processes that speak as one rank would tear each
other's messages. It may use plain tensors and what the parent had gathered.
"""

import os
from collections.abc import Iterable, Sequence
from typing import NoReturn

from tritondt.comm.communicator import Communicator
from tritondt.comm.monitor.flight import Flight
from tritondt.errors import ForkedError
from tritondt.planning.cost import CostTable


def forked_error(rank: int) -> ForkedError:
    """The error of this process, which has just been forked."""
    return ForkedError(
        f"process {os.getpid()} was forked from rank {rank}, process {os.getppid()}, and cannot communicate in its "
        "place; use plain tensors in it, or start by spawn what has to communicate"
    )


class InheritedWorld:
    """The world of a forked process: it refuses everything, and does nothing to the parent's connections."""

    def __init__(self, rank: int, communicators: Iterable[Communicator]) -> None:
        self._error = forked_error(rank)
        # Kept for good: to end them would wait for threads that are not here.
        self._communicators = tuple(communicators)
        for communicator in self._communicators:
            communicator.disown(self._error)

    @property
    def costs(self) -> CostTable:
        """Refused."""
        self._refuse()

    def costs_for(self, device_type: str) -> CostTable:
        """Refused."""
        self._refuse()

    @property
    def flight(self) -> Flight:
        """Refused."""
        self._refuse()

    def hosts(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Refused."""
        self._refuse()

    def communicator(self, ranks: Sequence[int], device_type: str = "cpu", inside: Sequence[int] = ()) -> Communicator:
        """Refused."""
        self._refuse()

    def set_timeout(self, ranks: Sequence[int], device_type: str, seconds: float) -> None:
        """Refused."""
        self._refuse()

    def report(self, error: BaseException) -> None:
        """Refused."""
        self._refuse()

    def close(self) -> None:
        """Refused: it is a collective call of ranks."""
        self._refuse()

    def abort(self) -> None:
        """Leaves the parent's world alone."""

    def inherited(self) -> "InheritedWorld":
        """The same world for a child of the child."""
        return self

    def successor(self) -> "InheritedWorld":
        """The same world: there is none to follow."""
        return self

    def _refuse(self) -> NoReturn:
        raise ForkedError(str(self._error))
