"""What a rank that is a process brings to a communicator."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist

from tritondt._C import Watchdog
from tritondt.comm.monitor.flight import Flight
from tritondt.comm.monitor.watch import Watch


@dataclass(frozen=True)
class ProcessContext:
    """This rank's part in the communicator `name` of `ranks`, and whoever watches over it; no other has its `key`."""

    name: str
    key: str
    ranks: tuple[int, ...]
    rank: int
    store: dist.Store
    timeout: timedelta
    compares: bool
    flight: Flight
    watch: Watch
    watchdog: Watchdog


class CommunicatorContext(Protocol):
    """This rank's part in a communicator."""

    @property
    def name(self) -> str:
        """What the communicator is called, alike on all its ranks."""

    @property
    def key(self) -> str:
        """What no other communicator is called, of those with this name either."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Its ranks, ascending."""

    @property
    def rank(self) -> int:
        """This one."""

    @property
    def flight(self) -> Flight:
        """Where exchanges are recorded."""

    @property
    def compares(self) -> bool:
        """Whether ranks compare what they are about to exchange."""
