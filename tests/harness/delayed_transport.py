"""A test double: sockets on which every exchange takes longer, as on a slower network, without using the processor.

    slow_down(Delay(latency_s=1e-4, bandwidth=1e8))  # in a rank's process, before its first mesh is made

The messages themselves are sent as ever, once the delay has passed.
"""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from tests.harness.doubled import doubled, keep
from tritondt import identity
from tritondt.comm import registry
from tritondt.comm.monitor.flight import ExchangeRecord
from tritondt.comm.packing.messages import MessageBuffers
from tritondt.comm.transports.sockets import SocketCommunicator


@dataclass(frozen=True)
class Delay:
    """What an exchange takes longer: a latency, and the bytes of the busier direction at a bandwidth."""

    latency_s: float
    bandwidth: float

    def seconds(self, sent_bytes: int, received_bytes: int) -> float:
        """Seconds for an exchange."""
        return self.latency_s + max(sent_bytes, received_bytes) / self.bandwidth


class DelayedCommunicator(SocketCommunicator):
    """Sleeps for `delay` before the messages of an exchange go."""

    delay: Delay

    def post(self, record: ExchangeRecord, receives: MessageBuffers, sends: MessageBuffers) -> None:
        """Sleeps, before anything is packed."""
        time.sleep(self.delay.seconds(_bytes(sends), _bytes(receives)))
        super().post(record, receives, sends)


def _bytes(messages: MessageBuffers) -> int:
    return sum(num_bytes for *_, num_bytes in messages.slices)


def slow_down(delay: Delay, prices: Mapping[str, float] | None = None) -> None:
    """Gives this process, which has made no world yet, a network slower by `delay`, and prices that say so.

    `prices` are others of the cost table.
    """
    assert registry.find(identity.current()) is None, "the cost table is that of the first world"
    DelayedCommunicator.delay = delay
    keep(doubled("cpu", transport=DelayedCommunicator))
    os.environ["TRITONDT_COSTS"] = json.dumps({**(prices or {}), "host": {**asdict(delay), "busy_share": 0}})
