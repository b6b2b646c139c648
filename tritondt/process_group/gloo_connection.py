"""One rank's end of operations that Gloo runs by itself, and their Works.

Nothing interrupts an operation of Gloo but the end of its connections. The watch looks at those under way once a
second, costs them nothing before, and closes this rank's connections for what it hears: that another rank refuses one,
has failed or is late. Every rank does so, since a rank waits for its neighbour alone, whose connection stays open.
"""

import ctypes
import threading
import time
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work

from tritondt.comm.communicator import CPU
from tritondt.comm.daemons import start_daemon, within
from tritondt.comm.member import ProcessContext
from tritondt.comm.monitor.flight import DONE, EXCHANGING, FAILED, ExchangeRecord
from tritondt.comm.monitor.watch import Wait
from tritondt.comm.refusals import Refusals
from tritondt.comm.transports.closable import Closable
from tritondt.comm.transports.gloo import TIMEOUT_FACTOR, close_connections, connected
from tritondt.comm.work import again
from tritondt.errors import PeerError, WorldError
from tritondt.process_group.cpu_works import WorkOfTensors
from tritondt.process_group.debug_compare import MUST
from tritondt.process_group.futures import fail, succeed
from tritondt.process_group.operation import fingerprint_of
from tritondt.process_group.staging import Copies, copy_back

_NO_TIMEOUT = timedelta(0)  # as torch says it
_MOST_TEXTS = 1024
# The number of every message of two ranks, which nobody else counts, in the notices that ranks leave while they wait.
_UNCOUNTED = -1


def _is_over() -> bool:
    return True


def _find_nothing() -> str | None:
    return None


class Named(NamedTuple):
    """One collective as all ranks name it: its text, its fingerprint, and the text as the flight recorder knows it."""

    text: str
    fingerprint: int
    label: int


class Operation:
    """An operation on Gloo: its number among the group's collectives, the program's line, the recorder's entry.

    `peers` are those that it may wait for, as ranks of the world. The watch's `late` is made when it first looks.
    `has_run` is set by a wait that went well: a reduce_scatter of Gloo never says so itself, and one that is waited for
    again writes its tensors again.
    """

    __slots__ = (
        *("__weakref__", "entry", "has_run", "late", "named", "native", "peers", "sequence", "site", "started"),
        "timeout_s",
    )

    def __init__(
        self, native: Work, named: Named, sequence: int, site: int, entry: int, timeout_s: float, peers: tuple[int, ...]
    ) -> None:
        self.native, self.named, self.sequence, self.site, self.entry = native, named, sequence, site, entry
        self.started, self.timeout_s, self.peers = time.monotonic(), timeout_s, peers
        self.late: Wait | None = None
        self.has_run = False

    @property
    def is_completed(self) -> bool:
        """Whether the operation has run, well or not, as far as Gloo tells before it is waited for."""
        return self.has_run or bool(self.native.is_completed())

    @property
    def trouble(self) -> str | None:
        """The first line of what Gloo has raised; None where it has run well, or is under way."""
        if self.has_run or not self.native.is_completed():
            return None
        try:
            self.native.get_future().value()
        except RuntimeError as error:
            return str(error).splitlines()[0]
        return None

    @property
    def is_over(self) -> bool:
        """Whether the operation has run well: one that has not waits to be explained."""
        return self.is_completed and self.trouble is None

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> None:
        """Returns when the operation has run; raises what Gloo does where it has not within `timeout`."""
        if not self.has_run:
            self.native.wait(timeout)
            self.has_run = True


class GlooWork(WorkOfTensors):
    """An operation on Gloo, maybe on other memory than the tensors that it writes, which are copied once it has run."""

    _error: BaseException | None = None
    _finishing = threading.Lock()

    def __init__(
        self, connection: "GlooConnection", operation: Operation, results: Sequence[torch.Tensor], copies: Copies
    ) -> None:
        super().__init__(results)
        self._connection, self._operation, self._copies = connection, operation, copies

    def _finish(self) -> None:
        if self._copies:
            with self._finishing:
                copy_back(self._copies)  # what raises here raises at every wait
                self._copies = ()

    def is_completed(self) -> bool:
        """Whether the operation has run, well or not, and its tensors are written."""
        if self._error is not None:
            return True
        if self._operation.is_over:
            self._finish()
        return self._operation.is_completed

    def is_success(self) -> bool:
        """Whether the operation has run well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Any:
        """The operation's error; None where it has none, or is under way."""
        if self._error is None and (trouble := self._operation.trouble) is not None:
            self._explain(RuntimeError(trouble))
        return self._error

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Returns when the operation has run and its tensors are written; raises its error.

        PeerError where that is not within `timeout`.
        """
        if self._error is None:
            try:
                self._wait(timeout)
            except RuntimeError as error:
                operation = self._operation
                if timeout > _NO_TIMEOUT and self._connection.failure is None and not operation.is_completed:
                    text, limit_s = operation.named.text, timeout.total_seconds()
                    raise PeerError(f"{text} was waited for {limit_s:g} s, as asked, and is under way") from None
                self._explain(error)
        if self._error is not None:
            raise again(self._error) from self._error
        self._connection.end(self._operation)
        self._finish()
        return True

    def _wait(self, timeout: timedelta) -> None:
        self._operation.wait(timeout)

    def _explain(self, error: BaseException) -> None:
        self._error = self._error or self._connection.explained(self._operation, error)
        self._connection.end(self._operation)

    def _made_future(self) -> Any:
        made = torch.futures.Future[Any]()
        self._operation.native.get_future().add_done_callback(partial(self._settle, made))
        return made

    def _settle(self, made: Any, done: Any) -> None:
        """Gives a future what there is, in Gloo's thread, which runs nothing else meanwhile."""
        error: BaseException | None = None
        try:
            done.value()
        except Exception as found:  # noqa: BLE001  whoever waits for the future raises what explains it
            self._explain(found)
            error = self._error
        else:
            try:
                self._finish()
            except RuntimeError as found:  # of this rank's tensors, while the others go on
                error = found
        if error is None:
            succeed(made, self._results)
        else:
            fail(made, self._results, error)


class MessageWork(GlooWork):
    """A message of two ranks, which the watch looks at while it is waited for."""

    def _wait(self, timeout: timedelta) -> None:
        with self._connection.watching(self._operation):
            self._operation.wait(timeout)

    def is_completed(self) -> bool:
        """Whether the message has been waited for: Gloo knows no more."""
        return self._error is not None or self._operation.is_completed

    def exception(self) -> Any:
        """The message's error, once it has been waited for."""
        return self._error

    def _made_future(self) -> Any:
        return self._operation.native.get_future()  # which says that messages have none

    def _source_rank(self) -> int:
        return self.source_rank()

    def source_rank(self) -> int:
        """The rank of the group that the message comes from."""
        rank: int = self._operation.native._source_rank()
        return rank


class FromAnyWork(MessageWork):
    """A message of whoever sends first: ending all connections does not wake who waits for it."""

    def _wait(self, timeout: timedelta) -> None:
        operation = self._operation
        limit = timeout if timeout > _NO_TIMEOUT else timedelta(seconds=operation.timeout_s)
        with self._connection.watching(operation):
            try:
                within(limit, partial(operation.wait, limit), "tritondt-gloo", self._connection.look)
            except TimeoutError:
                raise RuntimeError(f"no rank has sent one within {limit.total_seconds():g} s") from None


class GlooConnection(Closable):
    """One rank's end of a group on Gloo, which all ranks of `context` make together, in one world.

    `ranks` are the group's, as ranks of the world, and this one has number `own`.
    """

    def __init__(self, context: ProcessContext, ranks: Sequence[int], own: int) -> None:
        self._context, self._ranks, self._own = context, tuple(ranks), own
        self._others = tuple(rank for rank in ranks if rank != context.rank)
        self._recorder, self._watch = context.flight.recorder, context.watch
        self._label = self._recorder.label(context.name)
        self._sequence, self._timeout_s = 0, context.timeout.total_seconds()
        self._under_way: deque[Operation] = deque()
        self._named: dict[Hashable, Named] = {}
        self._refusals = Refusals(context, "Gloo tells operations apart by how many have run")
        self._breaking, self._explaining = threading.Lock(), threading.Lock()
        self._gloo: Any = connected(context, own)
        # torch's own group over it, for it has methods that a Backend does not show.
        self._over_gloo: Any = dist.ProcessGroup(dist.PrefixStore(context.key, context.store), own, len(ranks))
        self._over_gloo._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self._over_gloo._register_backend(CPU, dist.ProcessGroup.BackendType.GLOO, self._gloo)
        self._watch.attend(self._waits)

    def begin(self, kind: str, memory: Sequence[Any], key: Hashable, asked: object, timeout_s: float) -> Operation:
        """Begins a collective of torch's group on `memory`; `asked` names it, alike wherever `key` is equal.

        Raises what this rank has failed with, or has refused alone.
        """
        named = self._named.get(key) or self._name(key, str(asked))
        if self.failure is not None:
            self._check_usable(named.text)
        if self._refusals.open:
            self._settle_refusals()
        try:
            native = getattr(self._over_gloo, kind)(*memory)
        except Exception as error:  # Gloo refuses it here, before it counts it
            self.refuse(error)
            raise
        self._sequence += 1
        recorder, under_way = self._recorder, self._under_way
        site = recorder.site()
        entry = recorder.begin(self._label, self._sequence, named.label, named.fingerprint, site, EXCHANGING)
        operation = Operation(native, named, self._sequence, site, entry, timeout_s, self._others)
        while under_way and under_way[0].is_over:
            self.end(under_way[0])
        under_way.append(operation)
        return operation

    def wait_for(self, operation: Operation) -> None:
        """Returns when a collective has run; raises why it does not."""
        try:
            operation.wait()
        except RuntimeError as error:
            found = self.explained(operation, error)
            self.end(operation)
            raise again(found) from found
        self.end(operation)

    def message(
        self,
        kind: str,
        memory: Sequence[Any],
        tensors: tuple[Sequence[torch.Tensor], Copies],
        asked: object,
        peers: Sequence[int],
    ) -> MessageWork:
        """Begins a message on `memory` to or from one of `peers`, ranks of the world.

        `tensors` are its results, and what is copied to them.
        """
        text = str(asked)
        if self.failure is not None:
            self._check_usable(text)
        native = getattr(self._over_gloo, kind)(*memory)
        named = Named(text, 0, self._recorder.label(text))  # waits of two messages are no two collectives
        site, timeout_s = self._recorder.site(), self._timeout_s
        operation = Operation(native, named, _UNCOUNTED, site, -1, timeout_s, tuple(peers))
        return (FromAnyWork if kind == "recv_anysource" else MessageWork)(self, operation, *tensors)

    def _name(self, key: Hashable, text: str) -> Named:
        if len(self._named) >= _MOST_TEXTS:
            del self._named[next(iter(self._named))]
        found = self._named[key] = Named(text, fingerprint_of(text), self._recorder.label(text))
        return found

    def refuse(self, error: BaseException) -> None:
        """Tells the others why this rank takes no part in the next collective, which counts as run."""
        if self.failure is not None:
            return
        self._sequence += 1
        self._watch.report(self._context.key, self._sequence, error, is_refusal=True)
        with suppress(RuntimeError):  # a store that does not answer is found out when the refusal is settled
            self._refusals.add(self._sequence, error)

    def _settle_refusals(self) -> None:
        try:
            self._refusals.settle()
        except PeerError as error:
            self._give_up(error)
            raise

    def end(self, operation: Operation) -> None:
        """Forgets an operation that is over, whose error, if any, is known."""
        try:
            self._under_way.remove(operation)
        except ValueError:  # another thread has, or it is a message
            return
        if self.failure is None:
            self._recorder.end(operation.entry, DONE)
        late = operation.late
        if late is not None:  # unlinked: a cycle would keep its tensors for the collector
            self._watch.end(late)
            late.is_over, late.trouble, operation.late = _is_over, _find_nothing, None

    @contextmanager
    def watching(self, operation: Operation) -> Iterator[None]:
        """Context of a wait for a message, which the watch looks at."""
        late = self._as_late(operation)
        self._watch.begin(late)
        try:
            yield
        finally:
            self._watch.end(late)

    def look(self) -> None:
        """RuntimeError once the connections have ended."""
        if self.failure is not None:
            raise RuntimeError(str(self.failure))

    def _waits(self) -> list[Wait]:
        """Waits for collectives that are under way, or have failed and are not explained; called by the watch."""
        return [self._as_late(operation) for operation in list(self._under_way) if not operation.is_over]

    def _as_late(self, operation: Operation) -> Wait:
        with self._breaking:  # the watch and whoever waits may come at once
            if operation.late is None:
                operation.late = self._late(operation)
            return operation.late

    def _late(self, operation: Operation) -> Wait:
        context, (text, fingerprint, label) = self._context, operation.named
        record = ExchangeRecord(fingerprint, text, label, self._recorder, operation.site, operation.entry)
        late = Wait(context.key, operation.sequence, record, context.ranks, self._interrupt, operation.timeout_s)
        late.started, late.suspects = operation.started, operation.peers
        late.limit, late.must = "the process group's", MUST
        if operation.sequence != _UNCOUNTED:
            late.is_over, late.trouble = partial(_is_past, ref(operation)), partial(_trouble_of, ref(operation))
        return late

    def _interrupt(self, wait: Wait) -> None:
        """Ends everything for the reason why `wait` will not end; called by the watch."""
        reason = wait.reason or PeerError(f"{wait.description} was broken off")
        self._give_up(self._context.flight.written_for(reason))

    def explained(self, operation: Operation, error: BaseException) -> BaseException:
        """Why an operation has failed, of which Gloo says no more than that a connection has ended, or the time."""
        with self._explaining:
            if self.failure is None:
                self._give_up(self._context.flight.written_for(self._cause(self._as_late(operation), error)))
        assert self.failure is not None
        return self.failure

    def _cause(self, late: Wait, error: BaseException) -> PeerError:
        if late.reason is None and time.monotonic() - late.started >= late.timeout_s:
            return self._watch.why_expired(late)
        return self._watch.lost(late, str(error).splitlines()[0])

    def _give_up(self, error: BaseException) -> None:
        """Ends everything for good, and reports to the other ranks why."""
        if self.failure is None:
            self._watch.report(self._context.key, None, error)
        self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._breaking:
            if self.failure is not None:
                return
            self.failure = error
        self._end_all(error)

    def _end_all(self, error: BaseException) -> None:
        """Ends what is under way, for what is the connection's failure now."""
        self._watch.leave(self._waits)
        label = self._recorder.label(f"{type(error).__name__}: {error}")
        for operation in list(self._under_way):
            if not operation.is_over:
                self._recorder.end(operation.entry, FAILED, label)
        close_connections(self._gloo, self._own, len(self._ranks))

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets how long an operation may take from now on."""
        self._timeout_s = timeout.total_seconds()
        if self.failure is None:
            self._gloo._set_default_timeout(timeout * TIMEOUT_FACTOR)

    def close(self) -> None:
        """Waits for all that was issued, and ends without meeting the others."""
        for operation in list(self._under_way):
            with suppress(RuntimeError):  # whoever waits for it raises it
                self.wait_for(operation)
        self._end("closed")
        self._watch.leave(self._waits)
        self._let_go()

    def abort(self) -> None:
        """Ends what is under way without the others, and waits for nothing."""
        if self._is_inherited:  # connections, and those who wait, are the parent's
            return
        with self._breaking:
            is_first = self.failure is None
            reason = self._end("aborted")
        if is_first:
            self._end_all(reason)
        self._let_go()

    def end_with_process(self, limit_s: float) -> None:
        """Ends with the process."""
        self.abort()

    def disown(self, error: WorldError) -> None:
        """Refuses all further use in a forked process; keeps Gloo, whose end would take the parent's sockets away."""
        self.failure = error
        for each in (self._gloo, self._over_gloo):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))

    def _let_go(self) -> None:
        """Ends Gloo's threads, which run what is left first: here, or behind whoever may not wait for that."""
        left = [self._gloo, self._over_gloo]
        self._gloo = self._over_gloo = None
        if any(not operation.is_completed for operation in list(self._under_way)):
            start_daemon(left.clear, "tritondt-gloo")
        self._under_way.clear()


def _is_past(known: ref[Operation]) -> bool:
    operation = known()
    return operation is None or operation.is_over


def _trouble_of(known: ref[Operation]) -> str | None:
    operation = known()
    return None if operation is None else operation.trouble
