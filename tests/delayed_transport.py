"""A test double: sockets on which every exchange takes longer, as on a slower network, without using the processor.

    delay_messages()                       # in a rank's process, before its first communicator is made
    communicator_of(ranks).delay = Delay(latency_s=1e-4, bytes_per_s=1e8)

The messages themselves are sent as ever, once the delay has passed.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tritondt.comm import world
from tritondt.comm.communicator import Errand
from tritondt.comm.packed import Letters
from tritondt.comm.sockets import SocketCommunicator
from tritondt.comm.work import Run


@dataclass(frozen=True)
class Delay:
    """What an exchange takes longer: a latency, and the bytes of the busier direction at a bandwidth."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, sent_bytes: int, received_bytes: int) -> float:
        """Seconds for an exchange."""
        return self.latency_s + max(sent_bytes, received_bytes) / self.bytes_per_s


class DelayedCommunicator(SocketCommunicator):
    """Sleeps for `delay` before the messages of an exchange go; as fast as its base while that is None."""

    delay: Delay | None = None

    def carry(self, errand: Errand, receives: Letters, sends: Letters, pack: Run, meanwhile: Run) -> None:
        """Sleeps, then carries."""
        if self.delay is not None:
            time.sleep(self.delay.seconds(_bytes(sends), _bytes(receives)))
        super().carry(errand, receives, sends, pack, meanwhile)


def _bytes(letters: Letters) -> int:
    return sum(num_bytes for *_, num_bytes in letters.slices)


def delay_messages() -> None:
    """Lets this process make delayed communicators from now on, in place of those on sockets."""
    made: Any = DelayedCommunicator
    world.__dict__["SocketCommunicator"] = made


def communicator_of(ranks: Sequence[int]) -> DelayedCommunicator:
    """The communicator of these ranks, once `delay_messages` was called."""
    found = world.current().communicator(ranks)
    assert isinstance(found, DelayedCommunicator), f"{found} was made before delay_messages()"
    return found
