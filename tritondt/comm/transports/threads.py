"""Ranks as threads of one process that take turns, for tests and for trying things out.

    def body(rank):
        mesh = Mesh((2, 2))
        ...
    results = run_ranks(4, body)

One thread runs at a time and hands over where it waits for a message, so a run is deterministic, needs no
timeouts, and never has two threads inside Triton's interpreter, which breaks there. When every rank waits,
each is told why.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from tritondt import environment, identity, logs
from tritondt._C import note_queue_thread
from tritondt.comm import registry
from tritondt.comm.forked import InheritedWorld
from tritondt.comm.member import CommunicatorContext
from tritondt.comm.monitor.comparison import MUST
from tritondt.comm.monitor.flight import ExchangeRecord, Flight
from tritondt.comm.monitor.watch import Wait
from tritondt.comm.packing.messages import MessageBuffers
from tritondt.comm.registry import World, numbered
from tritondt.comm.transports.base import PackedCommunicator
from tritondt.comm.transports.turns import Letter, Participant, TurnScheduler
from tritondt.comm.work import QUEUE_THREAD, GuardedQueue, Run, Work
from tritondt.errors import MismatchError, PeerError, WorldError
from tritondt.identity import Identity
from tritondt.planning.cost import CostTable

Result = TypeVar("Result")
_NO_TIMEOUT_S = float("inf")
# Told of the rank whose thread the calling one is, when it starts.
on_started: list[Callable[[int], object]] = []


class TurnQueue(GuardedQueue):
    """The queue of a rank thread's communicator: a thread that takes turns with the ranks."""

    def __init__(self, scheduler: TurnScheduler, owner: Participant) -> None:
        super().__init__()
        self._scheduler, self._owner, self._who = scheduler, owner, identity.current()
        self._waiting: deque[tuple[Work, Run]] = deque()
        self._closing = False
        self._participant: Participant | None = None

    def wait_for(self, work: Work) -> None:
        """Lets the other ranks run until `work` has run; one that writes memory that `work` reads waits, too."""
        self._check_owned(work)
        self._scheduler.wait_until(self._scheduler.participants[identity.current().rank], work.is_completed)

    def close(self) -> None:
        """Ends the queue's thread when all that was submitted has run."""
        participant, self._closing = self._participant, True
        if participant is not None and not self.is_disowned:
            self._scheduler.wait_until(self._owner, lambda: participant.done)

    def interrupt(self, error: BaseException) -> None:
        """Fails the running work and all that is queued."""
        if self._participant is not None and self.is_busy:
            self._participant.interruption = error

    def participant_of_caller(self) -> Participant:
        """The queue's participant where the queue's thread calls, else the rank's."""
        return self._participant if self._participant is not None and self.is_own_thread() else self._owner

    def _enqueue(self, work: Work, run: Run) -> None:
        self._waiting.append((work, run))
        if self._participant is None:
            self._participant = self._scheduler.join(self._owner.rank)
            threading.Thread(target=self._serve, args=(self._participant,), name=QUEUE_THREAD, daemon=True).start()

    def _serve(self, participant: Participant) -> None:
        participant.may_run.acquire()
        self.thread_id = threading.get_ident()
        note_queue_thread()
        for hook in on_started:
            hook(self._who.rank)
        with identity.assumed(self._who):
            while self._waiting or not self._closing:
                while self._waiting:
                    self._run(*self._waiting.popleft())
                participant.interruption = None
                self._scheduler.wait_until(participant, lambda: bool(self._waiting) or self._closing, is_idle=True)
        self._scheduler.finish(participant, None)


class ThreadCommunicator(PackedCommunicator):
    """A communicator of rank threads; messages wait at their scheduler; all ranks use one stream of a CUDA device."""

    device_types = ("cpu", "cuda")
    drops_refused = True

    def __init__(
        self, context: CommunicatorContext, scheduler: TurnScheduler, around: "ThreadCommunicator | None" = None
    ) -> None:
        self._owner = scheduler.participants[context.rank]
        self._turns = TurnQueue(scheduler, self._owner)
        self._calling = self._turns if around is None else around._turns
        super().__init__(context, self._turns)
        self._scheduler = scheduler
        self._barriers = 0
        self._skipped = 0  # the last exchange that some rank refused

    def start(self, record: ExchangeRecord, receives: MessageBuffers, sends: MessageBuffers) -> None:
        """Leaves copies of this rank's messages with the scheduler."""
        self._check_agreed()
        description = record.description
        for peer, tensor in sends.parts():
            letter = Letter(self.sequence, record.fingerprint, description, tensor.clone())
            self._scheduler.mail[self._key, self._place, peer].append(letter)

    def finish(self, record: ExchangeRecord, receives: MessageBuffers, sends: MessageBuffers) -> None:
        """Collects this rank's messages, and lets other ranks run until they are there."""
        scheduler = self._scheduler
        wait = Wait(self._key, self.sequence, record, self._ranks, lambda _: None, _NO_TIMEOUT_S)
        participant = self._calling.participant_of_caller()
        for peer, tensor in receives.parts():
            wait.peer = self._ranks[peer]
            mail = scheduler.mail[self._key, peer, self._place]

            def is_there(mail: deque[Letter] = mail) -> bool:
                self._drop_skipped(mail)
                return bool(mail) and (mail[0].sequence, mail[0].fingerprint) == (self.sequence, record.fingerprint)

            scheduler.wait_until(participant, is_there, wait)
            arrived = mail.popleft().content
            assert arrived.numel() == tensor.numel(), (
                f"{record.description}: {arrived.numel()} bytes came from rank {wait.peer}, expected {tensor.numel()}"
            )
            tensor.copy_(arrived)
        self._check_unexpected(record.description)

    def break_off(self, record: ExchangeRecord, error: BaseException) -> None:
        """Fails the communicator."""
        self.failure = self.failure or error

    def fail(self, error: BaseException) -> None:
        """Fails the communicator, and tells the others why: for what happened in one that works with it."""
        self.failure = self.failure or error
        self.report(error)

    def _refuse(self, error: BaseException) -> None:
        self.sequence += 1
        text = f"{type(error).__name__}: {error}"
        self._scheduler.refused.setdefault((self._key, self.sequence), (self._rank, text))
        self._skip()

    def _skip(self) -> None:
        self._skipped = self.sequence

    def _drop_skipped(self, mail: deque[Letter]) -> None:
        while mail and mail[0].sequence <= self._skipped:
            mail.popleft()

    def _check_unexpected(self, description: str) -> None:
        """Raises MismatchError where a rank has sent this one what no exchange of it has expected so far.

        All ranks are told so, in this exchange or before the next: those that sent it may wait for nobody.
        """
        for peer in self._others:
            mail = self._scheduler.mail.get((self._key, peer, self._place))
            if mail is None:
                continue
            self._drop_skipped(mail)
            if mail and mail[0].sequence <= self.sequence:
                sent = mail[0]
                text = (
                    f"ranks disagree at exchange {sent.sequence}: rank {self._ranks[peer]} sent rank {self._rank} "
                    f"a message of {sent.description}, which it does not expect: it runs {description}; all ranks must "
                    f"{MUST}"
                )
                self._scheduler.disagreed.setdefault(self._key, (sent.sequence, text))
        self._check_agreed()

    def _check_agreed(self) -> None:
        sequence, text = self._scheduler.disagreed.get(self._key, (self.sequence + 1, ""))
        if sequence <= self.sequence:
            raise MismatchError(text)

    def barrier(self) -> None:
        """Returns when every rank of the communicator has called it."""
        self._queue.drain()
        self._check_usable("a barrier")
        self._barriers += 1
        key = f"{self._key}/{self._barriers}"
        self._scheduler.arrived[key] += 1
        arrived = self._scheduler.arrived
        self._scheduler.wait_until(self._owner, lambda: arrived[key] == len(self._ranks))
        self._check_left_over("a barrier")

    def _check_left_over(self, description: str) -> None:
        try:
            self._check_unexpected(description)
        except MismatchError as error:
            self.failure = self.failure or error
            raise

    def settle(self) -> None:
        """Returns when all that was issued has run; raises what nobody has seen, messages to this rank too."""
        super().settle()
        if self.failure is None:
            self._check_left_over("the end of its program")

    def set_timeout(self, seconds: float) -> None:
        """Changes nothing: when every rank thread waits, each is told at once."""
        self._check_usable(f"a timeout of {seconds:g} s")

    def _disconnect(self, reason: BaseException) -> None:
        self._scheduler.end(self._key)

    def _interrupt(self, reason: BaseException) -> None:
        self._scheduler.end(self._key)
        self._turns.interrupt(WorldError("the communicator was aborted"))

    def leave(self) -> None:
        """Ends the communicator's queue; what was issued fails."""
        self._end("aborted")
        self._turns.interrupt(WorldError("the communicator was aborted"))
        self._queue.close()

    def report(self, error: BaseException) -> None:
        """Reports to the other ranks that this rank takes part in no exchange any more, and why."""
        self._scheduler.reported.setdefault(self._key, (self._rank, f"{type(error).__name__}: {error}"))


class ThreadWorld:
    """The world of one rank thread."""

    def __init__(
        self, who: Identity, scheduler: TurnScheduler, costs: CostTable, hosts: Sequence[int] | None = None
    ) -> None:
        self.identity, self.costs, self._hosts = who, costs, hosts
        self._scheduler = scheduler
        self.flight = Flight(who.rank, who.size, None)
        self._communicators: dict[tuple[tuple[int, ...], ...], ThreadCommunicator] = {}
        self._closed = False

    def costs_for(self, device_type: str) -> CostTable:
        """The one cost table, for tensors on any device: rank threads copy from each other's memory."""
        return self.costs

    def hosts(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Number of the host of each of `ranks`: one for all of them, or those that the run was given."""
        return numbered([0 if self._hosts is None else self._hosts[rank] for rank in ranks])

    def communicator(
        self, ranks: Sequence[int], device_type: str = "cpu", inside: Sequence[int] = ()
    ) -> ThreadCommunicator:
        """The communicator of `ranks`: one for all types of devices, whose memory threads share."""
        if self._closed:
            raise WorldError("this world is closed; tritondt.comm.world.current() is the one that follows")
        members, around = tuple(sorted(ranks)), tuple(sorted(inside))
        found = self._communicators.get((members, around))
        if found is None:
            name = f"ranks {','.join(map(str, members))}"
            if around:
                name = f"{name} inside {','.join(map(str, around))}"
            # Which one of this name, as others may have made more of them: store.rendezvous does it for processes.
            key = f"{name}/{self._scheduler.num_ended[name] + 1}"
            context = CommunicatorContext(name, key, members, self.identity.rank, self.flight, environment.compares())
            outer = self.communicator(around) if around else None
            found = self._communicators[members, around] = ThreadCommunicator(context, self._scheduler, outer)
            if outer is not None:
                outer.contain(found)
        return found

    def set_timeout(self, ranks: Sequence[int], device_type: str, seconds: float) -> None:
        """Changes nothing: when every rank thread waits, each is told at once."""
        self.communicator(ranks, device_type).set_timeout(seconds)

    def inherited(self) -> World:
        """The world of a forked child: it refuses everything."""
        return InheritedWorld(self.identity.rank, self._communicators.values())

    def successor(self) -> "ThreadWorld":
        """A new world of the same rank threads, without communicators."""
        return ThreadWorld(self.identity, self._scheduler, self.costs, self._hosts)

    def report(self, error: BaseException) -> None:
        """Reports to the other ranks why this rank takes part in nothing any more; the first failure counts."""
        for communicator in self._communicators.values():
            communicator.report(error)

    def close(self) -> None:
        """Ends all communicators; a collective call."""
        self._closed = True
        for communicator in self._communicators.values():
            communicator.close()

    def settle(self) -> None:
        """Ends the queues when all that was issued has run."""
        for communicator in self._communicators.values():
            communicator.settle()

    def abort(self) -> None:
        """Ends all communicators without the other ranks."""
        self._closed = True
        for communicator in self._communicators.values():
            communicator.abort()

    def leave(self) -> None:
        """Ends the queues of a rank whose thread ends."""
        for communicator in self._communicators.values():
            communicator.leave()


def _guard_devices() -> None:
    """Lets torch look for CUDA on this thread, before there are others.

    The first fake tensors of a CUDA build without a GPU replace torch's guard of devices, and where several threads
    are there, it crashes (SIGSEGV in ensureCUDADeviceGuardSet: 4 of 4 programs on 2.11, none on 2.12, 2.14 and 2.15).
    """
    if torch.__version__ < "2.12":
        torch._C._ensureCUDADeviceGuardSet()


def run_ranks(
    size: int, body: Callable[[int], Result], *, costs: CostTable | None = None, hosts: Sequence[int] | None = None
) -> list[Result]:
    """Runs `body(rank)` on `size` rank threads and returns the results in rank order.

    With `hosts`, the number of each rank's host, redistributions run as between such hosts.

    Each rank has a default generator to itself, seeded as this process's, which stays as it is. Raises the exception of
    the first rank that failed by itself, the lowest where several did.

    >>> run_ranks(3, lambda rank: rank * rank)
    [0, 1, 4]
    """
    _guard_devices()
    logs.set_up()
    scheduler, generation = TurnScheduler(size), identity.new_generation()
    table = CostTable(ranks_per_host=size) if costs is None else costs
    results: list[Result | None] = [None] * size
    seed, random_state = torch.initial_seed(), torch.default_generator.get_state()

    def run(rank: int) -> None:
        who, participant = Identity(generation, rank, size), scheduler.participants[rank]
        registry.enter(who, ThreadWorld(who, scheduler, table, hosts))
        participant.may_run.acquire()
        torch.default_generator.manual_seed(seed)
        for hook in on_started:
            hook(rank)
        error: BaseException | None = None
        try:
            with identity.assumed(who):
                results[rank] = _run_rank(who, participant, body)
        except BaseException as raised:  # noqa: BLE001  whatever ended the rank is raised by run_ranks
            error = raised
        finally:
            scheduler.finish(participant, error)

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    scheduler.begin()
    for thread in threads:
        thread.join()
    torch.default_generator.set_state(random_state)
    errors = [participant.error for participant in scheduler.participants if participant.error is not None]
    if errors:
        raise next((error for error in errors if not isinstance(error, PeerError)), errors[0])
    return results  # type: ignore[return-value]


def _run_rank(who: Identity, participant: Participant, body: Callable[[int], Result]) -> Result:
    """Runs a rank's body; the rank's queues end with it, whether it returns or raises.

    Its backward passes run in the rank's own thread: on a GPU they would run in autograd's, which is in no world.
    """
    try:
        with torch.autograd.set_multithreading_enabled(False):
            result = body(participant.rank)
        world = registry.find(who)
        if isinstance(world, ThreadWorld):
            world.settle()
        return result
    except BaseException as error:
        participant.error = error  # for those who hear of it while the queues end
        raise
    finally:
        world = registry.leave(who)
        if isinstance(world, ThreadWorld):
            world.leave()
