"""Exchanges of one rank that stands for a whole world: shapes, memory and bytes of a real one, and no messages.

Under torch's "fake" process group no other rank exists. Every peer is taken to send what this rank sends to it, where
that is equally long, and zeros otherwise: what ranks compare among each other agrees, and every number is defined.
"""

from tritondt.comm.communicator import Transfer
from tritondt.comm.member import CommunicatorContext
from tritondt.comm.monitor.flight import ExchangeRecord
from tritondt.comm.packing.messages import MessageBuffers
from tritondt.comm.packing.packed_transfer import ALIGNED, PackedTransfer, TensorStarts, packed_transfer
from tritondt.comm.transports.base import PackedCommunicator
from tritondt.comm.work import ThreadQueue
from tritondt.planning.collectives import Collective


class FakeCommunicator(PackedCommunicator):
    """A communicator whose peers do not exist; it opens no store and no connection."""

    device_types = ("cpu", "cuda")

    def __init__(self, context: CommunicatorContext) -> None:
        super().__init__(context, ThreadQueue())

    def _compiled_collective(
        self, transfer: Transfer, collective: Collective, starts: TensorStarts = ALIGNED
    ) -> PackedTransfer:
        return packed_transfer(transfer, self.alignment)  # which moves as little

    def start(self, record: ExchangeRecord, receives: MessageBuffers, sends: MessageBuffers) -> None:
        """Sends nothing."""

    def finish(self, record: ExchangeRecord, receives: MessageBuffers, sends: MessageBuffers) -> None:
        """Fills what would be received."""
        own = dict(sends.parts())
        for peer, tensor in receives.parts():
            sent = own.get(peer)
            if sent is not None and sent.numel() == tensor.numel():
                tensor.copy_(sent)
            else:
                tensor.zero_()

    def break_off(self, record: ExchangeRecord, error: BaseException) -> None:
        """Fails the communicator, as one of real ranks would."""
        self.failure = self.failure or error

    def _refuse(self, error: BaseException) -> None:
        self.sequence += 1  # nobody waits to be told

    def barrier(self) -> None:
        """Returns when all that was issued has run."""
        self._queue.drain()
        self._check_usable("a barrier")

    def set_timeout(self, seconds: float) -> None:
        """Changes nothing: nothing waits for another rank."""
        self._check_usable(f"a timeout of {seconds:g} s")

    def _disconnect(self, reason: BaseException) -> None:
        """Has no connections."""

    def _interrupt(self, reason: BaseException) -> None:
        """Nothing waits."""
