"""TRITONDT_DEBUG=1: ranks compare what they are about to run, through the store, before any of it runs."""

import json
import time
from collections.abc import Sequence
from typing import NamedTuple

from tritondt.comm.communicator import Role
from tritondt.comm.monitor.comparison import Note, PastLines, difference, digest_of_line
from tritondt.comm.store.client import StoreClient
from tritondt.comm.store.polling import await_others
from tritondt.errors import MismatchError, PeerError
from tritondt.process_group.operation import fingerprint_of

MUST = "call the same operations with the same sizes in the same order"


class Parts(NamedTuple):
    """Elements that a rank sends to every rank, and receives from every rank."""

    sends: tuple[int, ...] = ()
    receives: tuple[int, ...] = ()


class Compared(NamedTuple):
    """An operation that a rank has been asked for: its text, the program's line, the rank's role in it, its parts.

    Where a role is None, ranks may ask from any lines: nothing of theirs is moved.
    """

    text: str
    site: str
    role: Role | None
    parts: Parts


class Agreement:
    """One rank's part in the comparisons of a process group; `ranks` are the group's, as ranks of the world."""

    def __init__(self, store_client: StoreClient, ranks: Sequence[int], group_rank: int) -> None:
        self._store_client, self._ranks, self._own_rank = store_client, tuple(ranks), group_rank
        self._sequence, self._past_lines = 0, PastLines()

    def check(self, asked: Compared, timeout_s: float, refusal: str = "") -> None:
        """Returns when all ranks have come to the same operation.

        Raises MismatchError, on all ranks alike, where one has come to another, or does not send what another expects;
        PeerError where one does not come in time, or refuses.
        """
        self._sequence += 1
        own = json.dumps([*asked[:-1], refusal, *asked.parts])
        keys = [self._key(self._sequence, rank) for rank in range(len(self._ranks))]
        self._store_client.call(lambda store: store.set(keys[self._own_rank], own), timeout_s)
        self._await(keys, asked.text, timeout_s)
        notes = [json.loads(note) for note in self._store_client.call(lambda store: store.multi_get(keys), timeout_s)]
        if self._sequence > 1:  # all have come here, and so have read what was before
            old = self._key(self._sequence - 1, self._own_rank)
            self._store_client.call(lambda store: store.delete_key(old), timeout_s)
        self._judge(notes)

    def _judge(self, notes: list[list[object]]) -> None:
        refusals = {rank: str(note[3]) for rank, note in zip(self._ranks, notes, strict=True) if note[3]}
        own = self._ranks[self._own_rank]
        if refusals and own not in refusals:
            rank, why = next(iter(refusals.items()))
            raise PeerError(f"rank {rank} refused {notes[self._ranks.index(rank)][0]}: {why}")
        if refusals:
            return
        noted = {rank: _note(*note[:3]) for rank, note in zip(self._ranks, notes, strict=True)}  # type: ignore[arg-type]
        found = difference(self._sequence, noted, MUST) or self._past_lines.swapped(self._sequence, noted, MUST)
        found = found or unmatched(self._ranks, str(notes[0][0]), [Parts(*note[4:]) for note in notes])  # type: ignore[arg-type]
        if found is not None:
            raise found

    def _await(self, keys: list[str], text: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        if await_others(lambda: self._store_client.call(lambda store: store.check(keys), timeout_s), deadline):
            return
        there = [self._store_client.call(lambda store, key=key: store.check([key])) for key in keys]  # type: ignore[misc]
        missing = [rank for rank, is_there in zip(self._ranks, there, strict=True) if not is_there]
        raise PeerError(
            f"rank {self._ranks[self._own_rank]} waited {timeout_s:g} s for ranks {missing} to come to {text}"
        )

    def _key(self, sequence: int, group_rank: int) -> str:
        return f"{sequence}/{group_rank}"


def _note(text: str, site: str, role: Role | None) -> Note:
    line = b"" if role is None else digest_of_line(site)
    return Note(fingerprint_of(text), f"{text}, asked for at {site}", line, role or "")


def unmatched(ranks: Sequence[int], text: str, parts: Sequence[Parts]) -> MismatchError | None:
    """The error where a rank does not send what another expects of it.

    >>> print(unmatched((0, 1), "all_to_all", [Parts((1, 2), (1, 3)), Parts((3, 4), (9, 4))]))
    rank 0 sends 2 elements to rank 1 in all_to_all, which expects 9; nothing was moved
    """
    for source, own in enumerate(parts):
        for target, other in enumerate(parts):
            sent, expected = _at(own.sends, target), _at(other.receives, source)
            if sent != expected:
                return MismatchError(
                    f"rank {ranks[source]} sends {sent} elements to rank {ranks[target]} in {text}, which expects "
                    f"{expected}; nothing was moved"
                )
    return None


def _at(counts: Sequence[int], rank: int) -> int:
    return counts[rank] if counts else 0
