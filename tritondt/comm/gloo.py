"""Point-to-point messages on a Gloo group of our own: the transport for CPU tensors.

Four ranks that exchange 64 MB from Shard(0) to Shard(1) take 12.8 ms this way and 83.6 ms through Gloo's own
all-to-all, which is why its collectives are not used.

Gloo matches messages by tag alone. A message longer than its receive aborts the process and a shorter one
passes unnoticed, so the tag is a fingerprint of what is exchanged: ranks that disagree never match, and the
watch tells them so.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tritondt.comm.communicator import Errand, tag_of
from tritondt.comm.membership import Membership
from tritondt.comm.packed import Letters, PackedCommunicator
from tritondt.comm.watch import Wait
from tritondt.comm.work import Run, ThreadQueue
from tritondt.errors import PeerError

# Gloo's own limit must never strike first: it closes every connection without saying why.
_GLOO_TIMEOUT_FACTOR = 4
_INTERRUPT_TAG = 0x7FFFFFFF


class GlooCommunicator(PackedCommunicator):
    """Ranks connected pairwise by Gloo; made by all of them together."""

    def __init__(self, member: Membership) -> None:
        super().__init__(member, ThreadQueue())
        self._watch, self._timeout_s = member.watch, member.timeout.total_seconds()
        store, timeout = dist.PrefixStore(member.name, member.store), member.timeout * _GLOO_TIMEOUT_FACTOR
        self._group: Any = dist.ProcessGroupGloo(store, self._place, len(self._ranks), timeout)

    def carry(self, errand: Errand, receives: Letters, sends: Letters, pack: Run, meanwhile: Run) -> None:
        """Posts all receives, packs, posts all sends, keeps, and waits."""
        tag, group = tag_of(errand.fingerprint, self.sequence), self._group
        wait = Wait(self._name, self.sequence, errand, self._ranks, self._interrupt, self._timeout_s)
        self._watch.begin(wait)
        try:
            pending = [(peer, group.recv([tensor], peer, tag)) for peer, tensor in receives.memory()]
            pack()
            pending += [(peer, group.send([tensor], peer, tag)) for peer, tensor in sends.memory()]
            meanwhile()
            for peer, work in pending:
                wait.peer = self._ranks[peer]
                work.wait()
        except RuntimeError as error:
            self._check_usable(errand.description)  # another thread may have aborted
            self.failure = self._recorded(self._cause(wait, error))
            raise self.failure from error
        finally:
            self._watch.end(wait)

    def _refuse(self, error: BaseException) -> None:
        self.sequence += 1
        self._watch.report(self._name, self.sequence, error)

    def barrier(self) -> None:
        """Returns when every rank of the communicator has called it."""
        self._queue.drain()
        self._check_usable("a barrier")
        self._group.barrier().wait()

    def set_timeout(self, seconds: float) -> None:
        """How long a message may take from now on."""
        self._timeout_s = seconds
        self._group._set_default_timeout(timedelta(seconds=seconds) * _GLOO_TIMEOUT_FACTOR)

    def close(self) -> None:
        """Waits for all that was issued and for the others, and disconnects; raises what nobody has been told."""
        self._queue.close()
        if self.failure is None:
            self.barrier()
        self._end("closed")
        self._group = None
        self._queue.raise_unseen()

    def abort(self) -> None:
        """Disconnects without waiting for the others."""
        self._end("aborted")
        self._interrupt()
        self._queue.close()

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
