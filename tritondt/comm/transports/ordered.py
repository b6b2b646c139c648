"""Communicators whose exchanges run in the order of issue: one issuing thread at a time, a queue, one end.

Which of two threads came first may differ among the ranks, so a second thread that issues meanwhile is refused.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from weakref import ref

import torch

from tritondt.comm.communicator import Transfer
from tritondt.comm.member import CommunicatorContext
from tritondt.comm.transports.closable import Closable
from tritondt.comm.work import IssueQueue, Run, Work
from tritondt.errors import WorldError

NO_SITE = -1


class OrderedCommunicator(Closable, ABC):
    """A communicator that runs what is issued on it in the order of issue, until it is closed or aborted."""

    def __init__(self, context: CommunicatorContext, queue: IssueQueue) -> None:
        self._key, self._ranks, self._rank, self._place = context.key, context.ranks, context.rank, context.place
        self._others = tuple(place for place in range(len(self._ranks)) if place != self._place)
        self._queue, self._flight, self._recorder = queue, context.flight, context.flight.recorder
        self._issued_at = NO_SITE  # the line that issued what the queue runs now
        self._turn = threading.RLock()
        self.sequence = 0  # exchanges so far, those without a message of ours included
        # What this one and others run as one, each with exchanges of its own; see `Wait`.
        self.collective: tuple[str, int] | None = None
        self._inside: list[OrderedCommunicator] = []
        self._around: Callable[[], OrderedCommunicator | None] = lambda: None

    @property
    def key(self) -> str:
        """Name of the communicator in the store."""
        return self._key

    @property
    def ranks(self) -> tuple[int, ...]:
        """The world's ranks in this communicator, ascending."""
        return self._ranks

    def contain(self, inner: "OrderedCommunicator") -> None:
        """Counts exchanges of `inner`, of some ranks of this one, with its own: what runs on both is in its order.

        Where one of them fails for good, all do.
        """
        self._inside.append(inner)
        inner._around = ref(self)  # weakly: a cycle would wait for the collector

    def fail(self, error: BaseException) -> None:
        """Ends the communicator for good for what happened in one that works with it, and tells the others why."""
        self.failure = self.failure or error
        self._interrupt(error)

    def _fail_together(self, error: BaseException) -> None:
        """Ends for good what runs in one order with this one, which has failed: half of what ran on them has gone.

        Ranks elsewhere wait there, and would take this rank for one that has refused and goes on.
        """
        around = self._around() or self
        for each in (around, *around._inside):
            if each.is_usable:
                each.fail(error)

    def _begin_run(self) -> None:
        """Numbers what runs as one, alike on all ranks: by the exchanges that have been counted here and inside."""
        if self._inside:
            both = (self, *self._inside)
            number = sum(each.sequence for each in both)
            for each in both:
                each.collective = f"{self._key}/order", number

    def exchange(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], transfer: Transfer) -> None:
        """Runs this rank's side of `transfer`; see `tritondt.comm.communicator.Communicator`."""
        queue = self._queue
        if queue.thread_id == threading.get_ident():
            if not queue.runs_at_once:  # the tensors were looked at when this was issued, and may have changed since
                self._check_tensors(sources, targets, transfer)
            self._exchange(sources, targets, transfer, self._issued_at)
            return
        if not self._turn.acquire(False):
            raise self._second_thread_error(transfer.description)
        try:
            if queue.last is not None:
                queue.drain()
            self._exchange_now(sources, targets, transfer)
        finally:
            self._turn.release()

    def _exchange_now(
        self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], transfer: Transfer
    ) -> None:
        self._exchange(sources, targets, transfer, self._recorder.site())

    @abstractmethod
    def _exchange(
        self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], transfer: Transfer, site: int
    ) -> None:
        """Runs an exchange that the line `site` of the program has asked for."""

    @abstractmethod
    def _check_tensors(
        self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], transfer: Transfer
    ) -> None:
        """Refuses tensors that are not what the transfer was compiled for; the others hear why at once."""

    def prepare(self, transfers: Sequence[Transfer]) -> None:
        """Does nothing: transfers are compiled when they are first exchanged."""

    def issue(
        self, run: Run, description: str, sources: Sequence[torch.Tensor] = (), *, sources_ready: bool = True
    ) -> Work:
        """Runs `run`, which may exchange and reads `sources`, after all that was issued before; returns at once."""
        if not self._turn.acquire(False):
            raise self._second_thread_error(description)
        try:
            if self.failure is not None:
                self._check_usable(description)
            site = self._recorder.site()
            if self._queue.runs_at_once:
                self._issued_at = site
                return self._queue.submit(run, description, sources, sources_ready=sources_ready)

            def issued() -> None:
                self._issued_at = site
                self._begin_run()
                run()

            return self._queue.submit(issued, description, sources, sources_ready=sources_ready)
        finally:
            self._turn.release()

    def has_issued(self, work: Work) -> bool:
        """Whether `work` was issued here, so that what is issued later runs after it."""
        return work.is_in(self._queue)

    @property
    def has_queued(self) -> bool:
        """Whether something was issued, which nobody has waited for since."""
        return self._queue.last is not None

    @property
    def is_usable(self) -> bool:
        """Whether the communicator can exchange: it has not ended or failed."""
        return self.failure is None

    def in_order(self, run: Run, description: str) -> None:
        """Runs `run`, which exchanges more than once, here or inside, after what was issued, and nothing between."""
        if self._queue.is_own_thread():
            run()
            return
        if not self._turn.acquire(False):
            raise self._second_thread_error(description)
        try:
            # The first exchange may be one inside, whose communicator has not been asked for what was issued here.
            if self._queue.last is not None:
                self._queue.drain()
            self._begin_run()
            run()
        finally:
            self._turn.release()

    def _second_thread_error(self, description: str) -> WorldError:
        return WorldError(
            f"{description} was asked for by thread {threading.current_thread().name!r} while another thread issues on "
            f"the communicator of ranks {self._ranks}, and which of the two came first may differ among the ranks; "
            "issue from one thread, or from one after the other"
        )

    def refuse(self, error: BaseException) -> None:
        """Reports why this rank takes no part in the next exchange, which counts as run, to the other ranks."""
        if self._is_inherited:  # nobody waits for this process
            return
        if self._queue.is_own_thread():
            self._refuse(error)
            return
        with self._turn:  # behind what another thread exchanges now: exchanges are counted
            self._queue.drain()
            self._refuse(error)

    @abstractmethod
    def _refuse(self, error: BaseException) -> None: ...

    def drain(self) -> None:
        """Returns when all that was issued has run, well or not."""
        if not self._queue.is_own_thread():
            self._queue.drain()

    def settle(self) -> None:
        """Returns when all that was issued has run; raises the first failure that nobody has seen."""
        self._queue.close()
        self._queue.raise_unseen()

    @abstractmethod
    def barrier(self) -> None:
        """Returns when every rank of the communicator has called it."""

    def close(self) -> None:
        """Waits for all that was issued and for all ranks, and disconnects; raises a failure that nobody has seen."""
        self._check_own()
        self._queue.close()
        if self.failure is None:
            self.barrier()
        self._disconnect(self._end("closed"))
        self._queue.raise_unseen()

    def begin_abort(self) -> None:
        """Does the part of `abort` that waits for nothing, so that several communicators can be aborted together."""
        if not self._is_inherited:  # connections, devices and those who wait are the parent's
            self._interrupt(self._end("aborted"))

    def abort(self) -> None:
        """Ends the communicator without the other ranks: what was issued fails, and a thread that waits is woken."""
        if self._is_inherited:
            return
        self.begin_abort()
        self._queue.close_aborted()
        self._let_go()

    def end_with_process(self, limit_s: float) -> None:
        """Ends the communicator with its process, which may wait `limit_s` seconds for what is under way."""
        self.abort()

    @abstractmethod
    def _interrupt(self, reason: BaseException) -> None:
        """Wakes the threads that wait, which fail for `reason`; nothing can be exchanged afterwards."""

    def _let_go(self) -> None:
        """Lets go of what an aborted communicator still has, when its queue has ended: nothing, by default."""

    @abstractmethod
    def _disconnect(self, reason: BaseException) -> None:
        """Lets go of the connections for `reason`."""

    def disown(self, error: WorldError) -> None:
        """Refuses all further use with `error`, in a process that was forked from the communicator's."""
        self.failure = error
        self._turn = threading.RLock()  # another thread of the parent may have it
        self._queue.disown(error)
