"""What a rank that is a process brings to a communicator."""

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from tritondt._C import Watchdog
from tritondt.comm.flight import Flight
from tritondt.comm.watch import Watch


@dataclass(frozen=True)
class Membership:
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
