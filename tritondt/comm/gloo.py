"""Point-to-point messages on a Gloo group of our own: the transport for CPU tensors.

Four ranks that exchange 64 MB from Shard(0) to Shard(1) take 12.8 ms this way and 83.6 ms through Gloo's own
all-to-all, which is why its collectives are not used.

Gloo matches messages by tag alone. A message longer than its receive aborts the process and a shorter one
passes unnoticed, so the tag is a fingerprint of what is exchanged: ranks that disagree never match, and the
watch tells them so.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tritondt.comm.communicator import Transfer, tag_of
from tritondt.comm.packed import Letter, PackedCommunicator
from tritondt.comm.watch import Wait, Watch
from tritondt.errors import PeerError, WorldError

# Gloo's own limit must never strike first: it closes every connection without saying why.
_GLOO_TIMEOUT_FACTOR = 4
_INTERRUPT_TAG = 0x7FFFFFFF


class GlooCommunicator(PackedCommunicator):
    """Ranks connected pairwise by Gloo; made by all of them together."""

    def __init__(
        self, name: str, store: dist.Store, ranks: Sequence[int], rank: int, timeout: timedelta, watch: Watch
    ) -> None:
        super().__init__(ranks)
        self._name, self._rank, self._watch = name, rank, watch
        self._place = self._ranks.index(rank)
        self._group: Any = dist.ProcessGroupGloo(
            dist.PrefixStore(name, store), self._place, len(self._ranks), timeout * _GLOO_TIMEOUT_FACTOR
        )
        self._dead: BaseException | None = None

    def carry(
        self,
        transfer: Transfer,
        receives: Sequence[Letter],
        packed: Callable[[], Sequence[Letter]],
        meanwhile: Callable[[], None],
    ) -> None:
        """Posts all receives, packs, posts all sends, keeps, and waits."""
        if self._dead is not None:
            raise WorldError(
                f"{transfer.description} was asked of a communicator that failed before ({self._dead}); make a new "
                "world"
            ) from self._dead
        tag, group, traffic = tag_of(transfer.fingerprint, self.sequence), self._group, self._traffic
        wait = Wait(self._name, self.sequence, transfer.fingerprint, transfer.description, self._ranks, self._interrupt)
        self._watch.begin(wait)
        try:
            pending = [(peer, group.recv([tensor], peer, tag)) for peer, tensor in receives]
            letters = packed()
            pending += [(peer, group.send([tensor], peer, tag)) for peer, tensor in letters]
            for _, tensor in letters:
                traffic.sent_bytes += tensor.numel()
            for _, tensor in receives:
                traffic.received_bytes += tensor.numel()
            meanwhile()
            for peer, work in pending:
                wait.peer = self._ranks[peer]
                work.wait()
        except RuntimeError as error:
            self._dead = self._cause(wait, error)
            raise self._dead from error
        finally:
            self._watch.end(wait)

    def refuse(self, error: BaseException) -> None:
        """Counts the exchange that this rank will not take part in, and tells the others why."""
        self.sequence += 1
        self._watch.report(self._name, self.sequence, error)

    def barrier(self) -> None:
        """Returns when every rank of the communicator has called it."""
        self._group.barrier().wait()

    def close(self) -> None:
        """Waits for the others and disconnects."""
        if self._dead is None:
            self.barrier()
        self._dead = self._dead or WorldError("it was closed")
        del self._group

    def abort(self) -> None:
        """Disconnects without waiting for the others."""
        self._dead = self._dead or WorldError("it was aborted")
        self._interrupt()

    def _interrupt(self) -> None:
        """Wakes whoever waits on this communicator; it cannot be used afterwards.

        Gloo closes all connections of a group when one receive in it times out; nothing else wakes a waiter.
        """
        if len(self._ranks) == 1:
            return
        other = (self._place + 1) % len(self._ranks)
        try:
            self._group.recv([torch.empty(1, dtype=torch.uint8)], other, _INTERRUPT_TAG).wait(timedelta(milliseconds=1))
        except RuntimeError:
            return  # the time-out that was asked for

    def _cause(self, wait: Wait, error: RuntimeError) -> PeerError:
        """Why a wait broke: what the watch or the store knows, else that the connection closed."""
        try:
            known = self._watch.reason(wait, patient=False)
        except RuntimeError as gone:  # the store's rank has left too: the broken connection is all that is known
            return PeerError(f"{_closed_text(wait, self._rank, error)}; the store is gone as well ({gone})")
        return known or PeerError(_closed_text(wait, self._rank, error))


def _closed_text(wait: Wait, rank: int, error: RuntimeError) -> str:
    return (
        f"rank {wait.peer} closed its connection while rank {rank} waited for it in {wait.description}; it has "
        f"failed or left ({str(error).splitlines()[0]})"
    )
