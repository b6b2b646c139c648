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
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from tritondt import identity
from tritondt.comm import registry
from tritondt.comm.communicator import Transfer, tag_of
from tritondt.comm.packed import Letter, PackedCommunicator
from tritondt.comm.watch import Wait, disagreement, failure_text
from tritondt.errors import PeerError, WorldError
from tritondt.identity import Identity
from tritondt.planning.cost import CostTable

Result = TypeVar("Result")


@dataclass
class _Rank:
    """What the scheduler knows of one rank."""

    may_run: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    ready: Callable[[], bool] | None = None
    wait: Wait | None = None
    done: bool = False
    error: BaseException | None = None


class Switchboard:
    """Whose turn it is, and the messages under way between the ranks of one run."""

    def __init__(self, size: int) -> None:
        self.ranks = [_Rank() for _ in range(size)]
        self.mail: dict[tuple[str, int, int, int], deque[torch.Tensor]] = defaultdict(deque)
        self.refused: dict[tuple[str, int], tuple[int, str]] = {}
        self.arrived: dict[str, int] = defaultdict(int)
        self.stuck = False

    def begin(self) -> None:
        """Gives the first rank its turn."""
        self.ranks[0].may_run.release()

    def finish(self, rank: int, error: BaseException | None) -> None:
        """Ends a rank and hands over."""
        self.ranks[rank].done, self.ranks[rank].error = True, error
        self._hand_over(rank)

    def wait_until(self, rank: int, ready: Callable[[], bool], wait: Wait | None) -> None:
        """Lets the others run until `ready()`; raises when it can no longer become so."""
        own = self.ranks[rank]
        while not ready():
            self._raise_if_refused(rank, wait)
            if self.stuck:
                raise self._why_stuck(rank, wait)
            own.ready, own.wait = (lambda: ready() or self._is_refused(wait)), wait
            self._hand_over(rank)
            own.may_run.acquire()
            own.ready = own.wait = None

    def _hand_over(self, rank: int) -> None:
        size = len(self.ranks)
        others = [self.ranks[(rank + step) % size] for step in range(1, size + 1)]
        for other in others:
            if not other.done and (other.ready is None or other.ready()):
                other.may_run.release()
                return
        self.stuck = True  # nobody can go on: wake one, which raises, and ending wakes the next
        for other in others:
            if not other.done:
                other.may_run.release()
                return

    def _is_refused(self, wait: Wait | None) -> bool:
        return wait is not None and (wait.name, wait.sequence) in self.refused

    def _raise_if_refused(self, rank: int, wait: Wait | None) -> None:
        if wait is not None and self._is_refused(wait):
            other, text = self.refused[wait.name, wait.sequence]
            raise PeerError(failure_text(other, rank, wait, text))

    def _why_stuck(self, rank: int, wait: Wait | None) -> PeerError:
        for number, other in enumerate(self.ranks):
            if other.error is not None and wait is not None:
                return PeerError(failure_text(number, rank, wait, f"{type(other.error).__name__}: {other.error}"))
        for number, other in enumerate(self.ranks):
            if wait is not None and other.wait is not None and number != rank:
                found = disagreement(
                    wait, rank, number, other.wait.name, other.wait.sequence, other.wait.fingerprint,
                    other.wait.description,
                )  # fmt: skip
                if found is not None:
                    return found
        return PeerError(
            f"rank {rank} waits for rank {wait.peer} in {wait.description}, which will never answer: every other "
            "rank waits or has ended"
            if wait is not None
            else f"rank {rank} waits at a barrier that not all ranks reach"
        )


class ThreadCommunicator(PackedCommunicator):
    """Rank threads that leave messages for each other on a switchboard."""

    def __init__(self, switchboard: Switchboard, ranks: Sequence[int], rank: int) -> None:
        super().__init__(ranks)
        self._switchboard, self._rank = switchboard, rank
        self._name = "ranks/" + "-".join(map(str, self._ranks))
        self._place = self._ranks.index(rank)
        self._barriers = 0
        self._closed = False

    def carry(
        self,
        transfer: Transfer,
        receives: Sequence[Letter],
        packed: Callable[[], Sequence[Letter]],
        meanwhile: Callable[[], None],
    ) -> None:
        """Leaves copies of what is sent, then collects what arrives."""
        if self._closed:
            raise WorldError(f"{transfer.description} was asked of a closed communicator")
        board, tag = self._switchboard, tag_of(transfer.fingerprint, self.sequence)
        wait = Wait(self._name, self.sequence, transfer.fingerprint, transfer.description, self._ranks, lambda: None)
        for peer, tensor in packed():
            board.mail[self._name, self._place, peer, tag].append(tensor.clone())
            self.traffic.sent_bytes += tensor.numel()
        meanwhile()
        for peer, tensor in receives:
            wait.peer = self._ranks[peer]
            slot = (self._name, peer, self._place, tag)
            mail = board.mail[slot]
            board.wait_until(self._rank, lambda mail=mail: bool(mail), wait)  # type: ignore[misc]
            arrived = mail.popleft()
            if not mail:  # tags seldom come again
                del board.mail[slot]
            assert arrived.numel() == tensor.numel(), (
                f"{transfer.description}: {arrived.numel()} bytes came from rank {wait.peer}, expected {tensor.numel()}"
            )
            tensor.copy_(arrived)
            self.traffic.received_bytes += tensor.numel()

    def refuse(self, error: BaseException) -> None:
        """Counts the exchange that this rank will not take part in, and tells the others why."""
        self.sequence += 1
        text = f"{type(error).__name__}: {error}"
        self._switchboard.refused[self._name, self.sequence] = (self._rank, text)

    def barrier(self) -> None:
        """Returns when every rank of the communicator has called it."""
        self._barriers += 1
        key = f"{self._name}/{self._barriers}"
        self._switchboard.arrived[key] += 1
        arrived = self._switchboard.arrived
        self._switchboard.wait_until(self._rank, lambda: arrived[key] == len(self._ranks), None)

    def close(self) -> None:
        """Waits for the others and refuses further use."""
        self.barrier()
        self._closed = True

    def abort(self) -> None:
        """Refuses further use."""
        self._closed = True


class ThreadWorld:
    """The world of one rank thread."""

    def __init__(self, who: Identity, switchboard: Switchboard, costs: CostTable) -> None:
        self.identity, self.costs = who, costs
        self._switchboard = switchboard
        self._communicators: dict[tuple[int, ...], ThreadCommunicator] = {}

    def communicator(self, ranks: Sequence[int]) -> ThreadCommunicator:
        """The communicator of these ranks."""
        key = tuple(sorted(ranks))
        found = self._communicators.get(key)
        if found is None:
            found = self._communicators[key] = ThreadCommunicator(self._switchboard, key, self.identity.rank)
        return found

    def close(self) -> None:
        """Ends all communicators; a collective call."""
        for communicator in self._communicators.values():
            communicator.close()


def run_ranks(size: int, body: Callable[[int], Result], *, costs: CostTable | None = None) -> list[Result]:
    """Runs `body(rank)` on `size` rank threads and returns the results in rank order.

    Raises the exception of the first rank that failed by itself, the lowest where several did.

    >>> run_ranks(3, lambda rank: rank * rank)
    [0, 1, 4]
    """
    switchboard, generation = Switchboard(size), identity.new_generation()
    table = CostTable(ranks_per_host=size) if costs is None else costs
    results: list[Result | None] = [None] * size

    def run(rank: int) -> None:
        who = Identity(generation, rank, size)
        registry.enter(who, ThreadWorld(who, switchboard, table))
        switchboard.ranks[rank].may_run.acquire()
        error: BaseException | None = None
        try:
            with identity.assumed(who):
                results[rank] = body(rank)
        except BaseException as raised:  # noqa: BLE001  whatever ended the rank is raised by run_ranks
            error = raised
        finally:
            registry.leave(who)
            switchboard.finish(rank, error)

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    switchboard.begin()
    for thread in threads:
        thread.join()
    errors = [rank.error for rank in switchboard.ranks if rank.error is not None]
    if errors:
        raise next((error for error in errors if not isinstance(error, PeerError)), errors[0])
    return results  # type: ignore[return-value]
