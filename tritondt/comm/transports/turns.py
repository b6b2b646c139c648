"""Scheduling of rank threads that take turns, and the messages under way between them.

One thread runs at a time and hands over where it waits, so a run is deterministic and needs no timeouts. A participant
is a rank, or the queue of a rank's communicator. When every participant waits, each is told why.

Each rank has a default generator of the CPU to itself, as processes have: its state is taken along where the rank hands
over (2.5 us of a turn's 30), so that what one rank seeds or draws moves no other rank's numbers.
"""

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from tritondt.comm.monitor.watch import Wait, disagreement, failure_text, past_disagreement
from tritondt.comm.store.notices import Waiting
from tritondt.errors import MismatchError, PeerError, RefusalError


class Letter(NamedTuple):
    """A message under way, of exchange number `sequence`, with the exchange's fingerprint and text."""

    sequence: int
    fingerprint: int
    description: str
    content: torch.Tensor


@dataclass(eq=False)
class Participant:
    """A thread that takes turns; an idle one waits for work, not for a rank, and is not told that it waits in vain."""

    rank: int
    may_run: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    ready: Callable[[], bool] | None = None
    wait: Wait | None = None
    is_idle: bool = False
    is_hopeless: bool = False
    interruption: BaseException | None = None
    done: bool = False
    error: BaseException | None = None

    def can_run(self) -> bool:
        """Whether the thread would go on if it had the turn."""
        if self.done:
            return False
        return self.ready is None or self.interruption is not None or self.ready()


class TurnScheduler:
    """Turns of the participants of one run, and the messages under way between them."""

    def __init__(self, size: int) -> None:
        self._size, self.participants = size, [Participant(rank) for rank in range(size)]  # and later those of queues
        # By communicator and places of sender and receiver, in the order in which they were sent.
        self.mail: dict[tuple[str, int, int], deque[Letter]] = defaultdict(deque)
        self.disagreed: dict[str, tuple[int, str]] = {}  # since which exchange, for good, and how, by communicator
        self.refused: dict[tuple[str, int], tuple[int, str]] = {}
        self.num_ended: dict[str, int] = defaultdict(int)  # of communicators, by name
        self.reported: dict[str, tuple[int, str]] = {}  # for good, by communicator
        self.arrived: dict[str, int] = defaultdict(int)

    def begin(self) -> None:
        """Gives the first rank its turn."""
        self.participants[0].may_run.release()

    def join(self, rank: int) -> Participant:
        """One more participant of a rank; the thread starts by taking `may_run`."""
        made = Participant(rank)
        self.participants.append(made)
        return made

    def finish(self, participant: Participant, error: BaseException | None) -> None:
        """Ends a participant and hands over."""
        participant.done, participant.error = True, error
        self._hand_over(participant)

    def end(self, key: str) -> None:
        """Counts the communicator `key` as ended, so that the next of its name gets another key; once for all ranks."""
        name, _, number = key.rpartition("/")
        self.num_ended[name] = max(self.num_ended[name], int(number))

    def wait_until(
        self, participant: Participant, ready: Callable[[], bool], wait: Wait | None = None, *, is_idle: bool = False
    ) -> None:
        """Lets the other participants run until `ready()` is true; raises when it no longer can be."""
        while not ready():
            if participant.interruption is not None:
                raise participant.interruption
            self._raise_if_refused(participant, wait)
            if participant.is_hopeless:
                participant.is_hopeless = False
                raise self._why_hopeless(participant, wait)
            participant.ready = lambda: ready() or self._is_refused(wait) or self._has_disagreed(wait)
            participant.wait, participant.is_idle = wait, is_idle
            random_state = torch.default_generator.get_state()
            self._hand_over(participant)
            participant.may_run.acquire()
            torch.default_generator.set_state(random_state)
            participant.ready, participant.wait, participant.is_idle = None, None, False

    def _hand_over(self, participant: Participant) -> None:
        place, size = self.participants.index(participant), len(self.participants)
        others = [self.participants[(place + step) % size] for step in range(1, size + 1)]
        chosen = next((other for other in others if other.can_run()), None)
        if chosen is None:  # nobody can go on: tell one, whose raising lets others go on
            chosen = self._first_to_raise([other for other in others if not other.done and not other.is_idle])
            if chosen is None:
                return
            chosen.is_hopeless = True
        chosen.may_run.release()

    def _first_to_raise(self, waiting: list[Participant]) -> Participant | None:
        """The participant that waits in vain for sure: others may wait for what it does next."""
        waits = [other for other in waiting if other.wait is not None]
        over = [other for other in waits if other.wait is not None and self._is_over(other.wait.key)]
        # Whoever waits for a message knows the reason; who waits for such a one hears it from there.
        return next(iter(over or waits or waiting), None)

    def _is_over(self, key: str) -> bool:
        name, _, number = key.rpartition("/")
        return self.num_ended[name] >= int(number)

    def _is_refused(self, wait: Wait | None) -> bool:
        return wait is not None and (wait.key, wait.sequence) in self.refused

    def _has_disagreed(self, wait: Wait | None) -> bool:
        return wait is not None and wait.key in self.disagreed and wait.sequence >= self.disagreed[wait.key][0]

    def _raise_if_refused(self, participant: Participant, wait: Wait | None) -> None:
        if wait is not None and self._has_disagreed(wait):
            raise MismatchError(self.disagreed[wait.key][1])
        if wait is not None and self._is_refused(wait):
            other, text = self.refused[wait.key, wait.sequence]
            raise RefusalError(failure_text(other, participant.rank, wait, text))

    def _why_hopeless(self, participant: Participant, wait: Wait | None) -> PeerError:
        if wait is None:
            return PeerError(f"rank {participant.rank} waits at a barrier that not all ranks reach")
        known = self._failure(participant, wait)
        if known is not None:
            return PeerError(failure_text(known[0], participant.rank, wait, known[1]))
        for other in self.participants:
            if other.wait is not None and other.wait.key == wait.key and other.rank != participant.rank:
                theirs = Waiting(other.wait.sequence, other.wait.fingerprint, other.wait.description)
                mine = Waiting(wait.sequence, wait.fingerprint, wait.description)
                found = (
                    disagreement(wait, participant.rank, other.rank, wait.key, *theirs)
                    or past_disagreement(wait, participant.rank, other.rank, theirs)
                    or past_disagreement(other.wait, other.rank, participant.rank, mine)
                )
                if found is not None:
                    return found
        rank, awaited = participant.rank, f"rank {wait.peer} in {wait.description}"
        ended = [other.rank for other in self.participants[: self._size] if other.done and other.rank in wait.ranks]
        if ended:
            return PeerError(f"rank {ended[0]} has ended while rank {rank} waited for {awaited}")
        return PeerError(
            f"rank {rank} waits for {awaited}, which will never answer: every other rank waits or has ended"
        )

    def _failure(self, participant: Participant, wait: Wait) -> tuple[int, str] | None:
        """The rank that reported a failure, or ended with one, and the failure's text."""
        if wait.key in self.reported:
            return self.reported[wait.key]
        for other in self.participants:
            if other.error is not None:
                return other.rank, f"{type(other.error).__name__}: {other.error}"
        return None
