"""A rank's part in a communicator: its ranks, and what records and watches over its exchanges."""

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from tritondt._C import Watchdog
from tritondt.comm.monitor.flight import Flight
from tritondt.comm.monitor.watch import Watch
from tritondt.comm.secret import Secret
from tritondt.comm.store.client import StoreClient


@dataclass(frozen=True)
class CommunicatorContext:
    """A rank's part in the communicator `name` of `ranks`, ascending; no other communicator has its `key`.

    Exchanges are recorded by `flight`; with `compares` ranks compare what they are about to exchange.
    """

    name: str
    key: str
    ranks: tuple[int, ...]
    rank: int
    flight: Flight
    compares: bool

    @property
    def place(self) -> int:
        """Position of the rank among the communicator's ranks."""
        return self.ranks.index(self.rank)


@dataclass(frozen=True)
class ProcessContext(CommunicatorContext):
    """The part of a rank that is a process: the store that connects the ranks, and what watches over its waits.

    `client` calls the store with a bound. `secret` is what all ranks prove on their connections that they know.
    """

    store: dist.Store
    client: StoreClient
    timeout: timedelta
    watch: Watch
    watchdog: Watchdog
    secret: Secret | None = None
