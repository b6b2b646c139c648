"""Work that was issued and is not waited for yet, and the queues that run it in the order of issue.

Ranks may wait in any order; what runs is always the oldest issued. Waiting in opposite orders for plans of two steps
would deadlock otherwise, for a second step starts only when somebody drives it.
"""

import copy
import threading
import traceback
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch

from tritondt import identity
from tritondt._C import note_queue_thread
from tritondt.comm import read_guard
from tritondt.comm.daemons import start_daemon
from tritondt.errors import ForkedError, WorldError

Run = Callable[[], None]
# The name of threads that a queue starts.
QUEUE_THREAD = "tritondt-queue"


class Work:
    """An operation that was issued and runs by itself; made by `redistribute(async_op=True)` and its like.

    A second wait returns, or raises, the same. An operation that is never waited for still runs, and then releases its
    tensors.

    >>> import torch
    >>> import tritondt as T
    >>> from tritondt.comm.transports.threads import run_ranks
    >>> def body(rank):
    ...     x = T.ones(4, device_mesh=T.Mesh((2,)), placements=[T.Shard(0)])
    ...     moved = x.redistribute(placements=[T.Replicate()], async_op=True)
    ...     other = torch.ones(2, 2) @ torch.ones(2, 2)  # meanwhile
    ...     moved.work.wait()  # the first use of `moved` waits, too
    ...     return moved.work.is_completed(), moved.to_local().tolist()
    >>> run_ranks(2, body)[0]
    (True, [1.0, 1.0, 1.0, 1.0])
    """

    __slots__ = ("__weakref__", "_error", "_finished", "_is_seen", "_issuer", "_queue", "description")

    def __init__(self, queue: "IssueQueue", description: str) -> None:
        self.description = description
        self._queue, self._issuer = queue, queue.issuer
        self._finished, self._is_seen = False, False
        self._error: BaseException | None = None

    def __repr__(self) -> str:
        state = "under way" if not self._finished else "failed" if self._error is not None else "done"
        return f"Work({self.description}, {state})"

    def is_completed(self) -> bool:
        """Whether the work has run, well or not."""
        return self._finished

    def is_in(self, queue: "IssueQueue") -> bool:
        """Whether `queue` runs the work."""
        return self._queue is queue

    def exception(self) -> BaseException | None:
        """Error of the work; None where it succeeded, or is in progress."""
        return self._error

    def wait(self) -> None:
        """Waits for the work, and raises its error.

        Raises WorldError where another rank thread, or another world, waits for work in progress, and where a local
        tensor was written to while it was read.
        """
        if not self._finished:
            if identity.current() is not self._issuer:
                self._check_issuer()
            self._queue.wait_for(self)
        if self._error is not None:
            self._is_seen = True
            raise again(self._error) from self._error

    def run(self) -> None:
        """Waits for the work, whether it succeeds or not, and runs it in this thread if no other thread does."""
        if not self._finished:
            self._check_issuer()
            self._queue.run_until(self)

    def settle(self) -> None:
        """Returns when the work has run, well or not."""
        if not self._finished:
            self._queue.wait_for(self)

    def _check_issuer(self) -> None:
        caller, issuer = identity.current(), self._issuer
        if caller is not issuer and caller != issuer:
            raise WorldError(
                f"{self.description} was issued by rank {issuer.rank} of world {issuer.generation} and is waited for "
                f"by rank {caller.rank} of world {caller.generation}; only who issued it may wait for it, in its world"
            )

    @property
    def is_unseen_failure(self) -> bool:
        """Whether the work failed and nobody has waited for it since."""
        return self._error is not None and not self._is_seen

    @property
    def is_interruption(self) -> bool:
        """Whether an event that ends the program, such as Ctrl-C, ended the work in the thread that ran it."""
        return self._error is not None and not isinstance(self._error, Exception)

    def finish(self, error: BaseException | None) -> None:
        """Marks the work as run; for its queue."""
        self._error = error
        self._finished = True


class IssueQueue(ABC):
    """A queue that runs what is issued, one after the other, in a thread of its own, or `runs_at_once`."""

    runs_at_once = False

    def __init__(self) -> None:
        self.issuer = identity.current()  # whoever makes the communicator issues on it
        self.last: Work | None = None  # what was submitted last, unless it has been drained
        self._failed: Work | None = None
        self.thread_id: int | None = None  # of the thread that runs the queue now
        self._disowned: WorldError | None = None

    @abstractmethod
    def submit(self, run: Run, description: str, sources: Sequence[torch.Tensor] = (), *, sources_ready: bool) -> Work:
        """Runs `run`, which reads `sources`, after earlier work, which may fill them unless they are ready."""

    @property
    def is_busy(self) -> bool:
        """Whether something is under way."""
        return self.last is not None and not self.last.is_completed()

    def drain(self) -> None:
        """Returns when all that was submitted has run; raises none of its failures."""
        if self.last is not None:
            self.last.settle()
            self.last = None

    def disown(self, error: WorldError) -> None:
        """Makes every wait raise `error`: the queue's thread stayed in the process that this one was forked from."""
        self._disowned = error

    @property
    def is_disowned(self) -> bool:
        """Whether this process was forked from the queue's."""
        return self._disowned is not None

    def _check_owned(self, work: Work) -> None:
        if self._disowned is not None:
            raise ForkedError(f"{work.description} is under way, but {self._disowned}")

    def is_own_thread(self) -> bool:
        """Whether the calling thread runs the queue: its own, or one that waits and runs it meanwhile."""
        return threading.get_ident() == self.thread_id

    def raise_unseen(self) -> None:
        """Raises the first failure, unless somebody has seen it."""
        if self._failed is not None and self._failed.is_unseen_failure:
            self._failed.wait()

    @abstractmethod
    def wait_for(self, work: Work) -> None:
        """Returns when `work` has run."""

    def run_until(self, work: Work) -> None:
        """Runs what was issued, `work` the last, where the queue lets others than its thread do so; or waits."""
        self.wait_for(work)

    @abstractmethod
    def close(self) -> None:
        """Ends the queue's thread when all that was submitted has run."""

    def close_aborted(self) -> None:
        """Ends the queue of a communicator that was aborted, whose work fails."""
        self.close()


class GuardedQueue(IssueQueue):
    """A queue that runs what is issued later, in a thread: until then its sources count as read."""

    def submit(self, run: Run, description: str, sources: Sequence[torch.Tensor] = (), *, sources_ready: bool) -> Work:
        """Runs `run`, which reads `sources`, after earlier work, which may fill them unless they are ready."""
        work = self.last = Work(self, description)
        self._enqueue(work, _Guarded(work, run, sources, sources_ready=sources_ready) if sources else run)
        return work

    @abstractmethod
    def _enqueue(self, work: Work, run: Run) -> None: ...

    def _run(self, work: Work, run: Run) -> None:
        error: BaseException | None = None
        try:
            run()
        except BaseException as raised:  # noqa: BLE001  whoever waits for it raises it
            error = without_frames(raised)
            self._failed = self._failed or work
        work.finish(error)


def without_frames(error: BaseException) -> BaseException:
    """The error with a traceback that still says where it came from, but keeps no local variables alive.

    A pending gradient keeps its error, and Python collects no cycle that goes through a tensor's gradient.
    """
    error.with_traceback(None if error.__traceback__ is None else error.__traceback__.tb_next)
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__
    return error


def again(error: BaseException) -> BaseException:
    """A copy of the error for one more waiter, whose own frames must not stay with the error that others wait for."""
    try:
        return copy.copy(error)
    except TypeError:  # its constructor takes something else than it keeps
        return error


class _Guarded:
    """A call that reads tensors: their storages count as read until it has run, and a write to them is an error."""

    def __init__(self, work: Work, run: Run, sources: Sequence[torch.Tensor], *, sources_ready: bool) -> None:
        self._work, self._run, self._sources = work, run, sources
        self._versions = versions(sources) if sources_ready else None
        self._addresses = read_guard.begin(sources, work.settle)

    def __call__(self) -> None:
        found = versions(self._sources) if self._versions is None else self._versions
        try:
            self._run()
        finally:
            read_guard.end(self._addresses, self._work.settle)
        for source, version in zip(self._sources, found, strict=True):
            if version is not None and source._version != version:
                raise WorldError(torn(source, self._work.description))


def torn(source: torch.Tensor, description: str) -> str:
    """The text of the error where a tensor was written to while it was read."""
    return (
        f"a local tensor of shape {tuple(source.shape)} was written to while {description} read it, and what was sent "
        "may be torn; wait for the result before writing to the local tensor, or write through the distributed tensor, "
        "which waits by itself"
    )


def versions(tensors: Sequence[torch.Tensor]) -> list[int | None]:
    """Version counters of tensors, by which torch counts writes; None for inference tensors."""
    if len(tensors) == 1:  # a comprehension is a call
        (tensor,) = tensors
        return [None if tensor.is_inference() else tensor._version]
    return [None if tensor.is_inference() else tensor._version for tensor in tensors]


class ThreadQueue(GuardedQueue):
    """The queue of a process that is one rank; a thread of its own starts with the first work.

    A thread that waits for work which nothing runs yet may run it, after all that was issued before. Where the system
    gives no thread, whoever issues work runs it at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self._items: deque[tuple[Work, Run]] = deque()
        # One for each item, which somebody else may have run by then; False ends the thread.
        self._tokens: SimpleQueue[bool] = SimpleQueue()
        self._serving = threading.Lock()  # while the oldest item is taken and run
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._has_no_thread = False

    def wait_for(self, work: Work) -> None:
        """Returns when `work` has run; signals are handled meanwhile."""
        self._check_owned(work)
        if self.is_own_thread():
            self._run_within(work)
            return
        with self._changed:
            while not work.is_completed():
                self._changed.wait()

    def run_until(self, work: Work) -> None:
        """Runs what was issued, `work` the last, as far as the queue's thread has not; returns when it has run."""
        self._check_owned(work)
        if self.is_own_thread():
            self._run_within(work)
            return
        while not work.is_completed():
            with self._serving:
                ended = None if work.is_completed() else self._run_oldest()
            if ended is not None and ended.is_interruption:
                ended.wait()  # Ctrl-C ends the program, whose work it met

    def close(self) -> None:
        """Ends the queue's thread when all that was submitted has run."""
        if self._thread is not None and not self.is_own_thread() and not self.is_disowned:
            self._tokens.put(False)
            self._thread.join()
            self._thread = None

    def _enqueue(self, work: Work, run: Run) -> None:
        if self._thread is None and not self._has_no_thread:
            self._start_thread(work)
        self._items.append((work, run))
        if self._has_no_thread:
            self.run_until(work)
        else:
            self._tokens.put(True)

    def _start_thread(self, work: Work) -> None:
        try:
            self._thread = start_daemon(self._serve, QUEUE_THREAD)
        except WorldError as error:
            self._has_no_thread = True
            warnings.warn(
                f"rank {self.issuer.rank} runs {work.description}, and what follows on its communicator, when it is "
                f"issued and not beside the program: {error}",
                RuntimeWarning,
                stacklevel=2,
            )

    def _serve(self) -> None:
        note_queue_thread()
        while self._tokens.get():
            with self._serving:
                if self._items:
                    self._run_oldest()

    def _run_within(self, work: Work) -> None:
        """Runs what was issued, `work` the last, within what the queue runs: a callback there waits for `work`."""
        while not work.is_completed():
            if all(queued is not work for queued, _ in self._items):
                raise WorldError(f"{work.description} is waited for by what it runs itself, and cannot end before that")
            ended = self._run_oldest()
            if ended.is_interruption:
                ended.wait()

    def _run_oldest(self) -> Work:
        """Runs the oldest item, as whoever runs the queue, and returns its work."""
        outer, self.thread_id = self.thread_id, threading.get_ident()  # an outer one where a callback waits
        try:
            work, run = self._items.popleft()
            self._run(work, run)
        finally:
            self.thread_id = outer
            with self._changed:
                self._changed.notify_all()
        return work


def run_at_once(run: Callable[..., object], *arguments: object) -> None:
    """Calls `run` with its arguments, where no stream is to come to that first."""
    run(*arguments)
