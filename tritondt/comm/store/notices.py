"""Notices that ranks of a communicator leave in the store: who failed first, what each waits for and refuses."""

import json
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from tritondt.comm.store.client import PATIENCE_S, StoreClient

Result = TypeVar("Result")


class Failed(NamedTuple):
    """The rank that failed, and its error's text; with `is_refusal` it takes no part in one exchange, and goes on."""

    rank: int
    error: str
    is_refusal: bool = False


class Waiting(NamedTuple):
    """Notice of a rank that waits in exchange number `sequence` of a communicator."""

    sequence: int
    fingerprint: int
    description: str


class Notices:
    """The notices of one rank; `key` names a communicator. Of failures the first counts: others follow from it.

    SilentStoreError where the store takes longer than `patience_s` to answer.
    """

    def __init__(self, client: StoreClient, rank: int, patience_s: float = PATIENCE_S) -> None:
        self._client, self._rank, self._patience_s = client, rank, patience_s

    def report(self, key: str, sequence: int, error: BaseException, *, is_refusal: bool = False) -> None:
        """Reports that this rank failed at exchange `sequence`, or refuses it."""
        self._report(_failed_key(key, sequence), error, is_refusal=is_refusal)

    def report_for_good(self, key: str, error: BaseException) -> None:
        """Reports that this rank takes part in no exchange any more."""
        self._report(_failed_key(key, "all"), error)

    def _report(self, key: str, error: BaseException, *, is_refusal: bool = False) -> None:
        text = json.dumps(Failed(self._rank, f"{type(error).__name__}: {error}", is_refusal))
        self._call(lambda store: store.compare_set(key, "", text))

    def failure(self, key: str, sequence: int) -> Failed | None:
        """Another rank's failure in exchange `sequence`, or for good."""
        for which in (sequence, "all"):
            text = self._read(_failed_key(key, which))
            if text is not None:
                found = Failed(*json.loads(text))
                if found.rank != self._rank:
                    return found
        return None

    def publish(self, key: str, waiting: Waiting) -> None:
        """Publishes what this rank waits for."""
        self._call(lambda store: store.set(_waiting_key(key, self._rank), json.dumps(waiting)))

    def waiting(self, key: str, ranks: tuple[int, ...]) -> dict[int, Waiting]:
        """The last published waits of other ranks, by rank."""
        texts = {rank: self._read(_waiting_key(key, rank)) for rank in ranks if rank != self._rank}
        return {rank: Waiting(*json.loads(text)) for rank, text in texts.items() if text is not None}

    def say_awaited(self, text: str) -> None:
        """Says for whom this rank waits, and where, to ranks that have no part in it; "" for nobody."""
        self._call(lambda store: store.set(_awaited_key(self._rank), text))

    def awaited_by(self, rank: int) -> str:
        """For whom a rank has said that it waits, in any communicator; "" for nobody."""
        return self._read(_awaited_key(rank)) or ""

    def refuse(self, key: str, sequence: int) -> None:
        """Notes that this rank takes no part in operation `sequence`."""
        self._call(lambda store: store.set(_refused_key(key, sequence, self._rank), "1"))

    def all_refuse(self, key: str, sequence: int, ranks: tuple[int, ...]) -> bool:
        """Whether all of `ranks` have said that they take no part in operation `sequence`."""
        keys = [_refused_key(key, sequence, rank) for rank in ranks]
        return self._call(lambda store: store.check(keys))

    def not_refusing(self, key: str, sequence: int, ranks: tuple[int, ...]) -> list[int]:
        """Members of `ranks` that have not said that they take no part in operation `sequence`."""
        return [rank for rank in ranks if not self.all_refuse(key, sequence, (rank,))]

    def _read(self, key: str) -> str | None:
        return self._call(lambda store: store.get(key).decode() if store.check([key]) else None)

    def _call(self, function: Callable[[dist.Store], Result]) -> Result:
        return self._client.call(function, self._patience_s)


def _failed_key(key: str, which: int | str) -> str:
    return f"{key}/failed/{which}"


def _refused_key(key: str, sequence: int, rank: int) -> str:
    return f"{key}/refused/{sequence}/{rank}"


def _awaited_key(rank: int) -> str:
    return f"awaited/{rank}"


def _waiting_key(key: str, rank: int) -> str:
    return f"{key}/waiting/{rank}"
