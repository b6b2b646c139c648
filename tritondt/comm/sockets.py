"""Messages over TCP sockets that the waiting thread drives itself: the transport for CPU tensors.

Gloo makes three writes per message, and its own thread spins while ours holds a connection's lock: 24 kB from
Shard(0) to Replicate on 4 ranks of 2 cores took 3.9 ms (median) in Gloo's messages and 1.0 ms in messages like
these, at a seventh of the processor time. A letter here is one write and one read.

Letters of a pair of ranks arrive in order, and each begins with a fingerprint of what is exchanged and its
length, so ranks that disagree find out on arrival.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from tritondt._C import SocketGroup
from tritondt.comm.communicator import Transfer, tag_of
from tritondt.comm.connect import connect
from tritondt.comm.packed import Letter, PackedCommunicator
from tritondt.comm.watch import Wait, Watch
from tritondt.errors import PeerError, WorldError

_BARRIER_FINGERPRINT = 0x62617272


class SocketCommunicator(PackedCommunicator):
    """Ranks connected pairwise by TCP; made by all of them together."""

    def __init__(
        self, name: str, store: dist.Store, ranks: Sequence[int], rank: int, timeout: timedelta, watch: Watch
    ) -> None:
        super().__init__(ranks)
        self._name, self._rank, self._watch = name, rank, watch
        self._sockets = connect(dist.PrefixStore(name, store), self._ranks, self._ranks.index(rank), timeout)
        self._group = SocketGroup([-1 if found is None else found.fileno() for found in self._sockets])
        self._dead: BaseException | None = None

    def carry(
        self,
        transfer: Transfer,
        receives: Sequence[Letter],
        packed: Callable[[], Sequence[Letter]],
        meanwhile: Callable[[], None],
    ) -> None:
        """Packs, sends what the sockets take, keeps, and carries on until all has gone and come."""
        sends = packed()
        for _, tensor in sends:
            self._traffic.sent_bytes += tensor.numel()
        for _, tensor in receives:
            self._traffic.received_bytes += tensor.numel()
        self._exchange(transfer.fingerprint, transfer.description, sends, receives, meanwhile)

    def _exchange(
        self,
        fingerprint: int,
        description: str,
        sends: Sequence[Letter],
        receives: Sequence[Letter],
        meanwhile: Callable[[], None],
    ) -> None:
        if self._dead is not None:
            raise WorldError(
                f"{description} was asked of a communicator that failed before ({self._dead}); make a new world"
            ) from self._dead
        wait = Wait(self._name, self.sequence, fingerprint, description, self._ranks, self._group.interrupt)
        self._watch.begin(wait)
        try:
            self._group.start(_addresses(sends), _addresses(receives), tag_of(fingerprint, self.sequence))
            meanwhile()
            outcome, peer = self._group.finish()
            while outcome == "pending":
                wait.peer = self._ranks[peer]
                outcome, peer = self._group.finish()
        except BaseException as error:  # half of the exchange is under way, so nothing can follow it
            self._dead = error
            self._disconnect()
            raise
        finally:
            self._watch.end(wait)
        if outcome != "done":
            wait.peer = self._ranks[peer]
            self._dead = self._cause(wait, outcome)
            self._disconnect()
            raise self._dead

    def refuse(self, error: BaseException) -> None:
        """Counts the exchange that this rank will not take part in, and tells the others why."""
        self.sequence += 1
        self._watch.report(self._name, self.sequence, error)

    def barrier(self) -> None:
        """Returns when every rank of the communicator has called it."""
        self.sequence += 1
        peers = [place for place, found in enumerate(self._sockets) if found is not None]
        byte = torch.zeros(1, dtype=torch.uint8)
        sends = [(peer, byte) for peer in peers]
        receives = [(peer, torch.empty_like(byte)) for peer in peers]
        self._exchange(_BARRIER_FINGERPRINT, "a barrier", sends, receives, lambda: None)

    def close(self) -> None:
        """Waits for the others and disconnects."""
        if self._dead is None:
            self.barrier()
        self._dead = self._dead or WorldError("it was closed")
        self._disconnect()

    def abort(self) -> None:
        """Disconnects without waiting for the others; whoever waits here is woken."""
        self._dead = self._dead or WorldError("it was aborted")
        self._group.interrupt()
        self._disconnect()

    def _disconnect(self) -> None:
        for found in self._sockets:
            if found is not None:
                found.close()

    def _cause(self, wait: Wait, outcome: str) -> PeerError:
        """Why an exchange broke off: what the watch or the store knows, else what the socket said."""
        what = "closed its connection" if outcome == "closed" else "sent something else"
        text = f"rank {wait.peer} {what} while rank {self._rank} waited for it in {wait.description}"
        try:
            known = self._watch.reason(wait, patient=outcome == "mismatch")
        except RuntimeError as gone:  # the store's rank has left too: the socket's news is all there is
            return PeerError(f"{text}; the store is gone as well ({gone})")
        return known or PeerError(f"{text}; it has failed or left")


def _addresses(letters: Sequence[Letter]) -> list[tuple[int, int, int]]:
    return [(peer, tensor.data_ptr(), tensor.numel()) for peer, tensor in letters]
