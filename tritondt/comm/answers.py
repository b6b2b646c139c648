"""Answers that the ranks of a communicator give each other through the store while the communicator is made."""

import json
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from tritondt.comm.member import ProcessContext
from tritondt.comm.store.client import PATIENCE_S, SilentStoreError, StoreClient, values
from tritondt.comm.store.polling import await_others
from tritondt.errors import PeerError

Result = TypeVar("Result")
Taken = TypeVar("Taken")


class Attempt(NamedTuple):
    """One time that a rank waits for others: until `deadline`, by time.monotonic, `timeout_s` from its beginning.

    `look` is called now and then with the places of ranks that are missing, and may raise what ends the waiting.
    """

    deadline: float
    timeout_s: float
    look: Callable[[Sequence[int]], object]

    @classmethod
    def of(cls, timeout_s: float, look: Callable[[Sequence[int]], object] = lambda _: None) -> "Attempt":
        """An attempt that begins now."""
        return cls(time.monotonic() + timeout_s, timeout_s, look)


class Answers:
    """One rank's part in what all ranks of a communicator tell each other, in one `attempt`, by their places."""

    def __init__(self, client: StoreClient, key: str, ranks: Sequence[int], place: int, attempt: Attempt) -> None:
        self._client, self._key, self._ranks, self._place = client, key, ranks, place
        self._attempt = attempt
        self._others = [other for other in range(len(ranks)) if other != place]

    @classmethod
    def of(cls, context: ProcessContext) -> "Answers":
        """Answers within the communicator's timeout, until a rank that is waited for has failed."""

        def look(missing: Sequence[int]) -> None:
            found = context.watch.failure(context.key, [context.ranks[place] for place in missing])
            if found is not None:
                raise PeerError(
                    f"rank {found.rank} failed while rank {context.rank} connected to ranks {list(context.ranks)}: "
                    f"{found.error}"
                )

        attempt = Attempt.of(context.timeout.total_seconds(), look)
        return cls(context.client, context.key, context.ranks, context.place, attempt)

    @property
    def left_s(self) -> float:
        """Seconds that are left of the attempt."""
        return max(self._attempt.deadline - time.monotonic(), 0.0)

    def tell(self, what: str, value: object) -> None:
        """Says something of this rank in the store."""
        text = json.dumps(value)
        self._call(lambda store: store.set(self._named(what, self._place), text))

    def of_others(self, what: str, among: Collection[int] | None = None) -> dict[int, Any]:
        """The answers of the others, or of those `among` them, by place, when all have answered.

        Raises PeerError where some do not answer in time, or the store does not.
        """
        others = [other for other in self._others if among is None or other in among]
        if not others:
            return {}
        keys = [self._named(what, other) for other in others]

        def missing() -> list[int]:
            return [other for other, key in zip(others, keys, strict=True) if not self._is_there([key])]

        if not await_others(lambda: self._is_there(keys), self._attempt.deadline, lambda: self.look(missing())):
            raise self.late(missing())
        found = self._call(lambda store: values(store, keys))
        return {other: json.loads(text) for other, text in zip(others, found, strict=True)}

    def share(
        self,
        what: str,
        offer: Mapping[str, Any],
        is_enough: Callable[[Mapping[int, Mapping[str, Any]]], bool],
        take: Callable[[Mapping[int, Mapping[str, Any]]], Taken | None],
    ) -> Taken | None:
        """The result of `take` for the offers of near ranks, by place, where each near rank has taken all of them.

        Near are ranks with the same values of "here" and "bytes", this one among them; nobody is near who offers {}.
        Returns None on all near ranks alike where they are not enough, or one of them has taken nothing.
        """
        self.tell(what, offer)
        if not offer:
            return None
        found = {self._place: offer, **self.of_others(what)}
        near = {
            place: found[place]
            for place in sorted(found)
            if found[place] and all(found[place].get(name) == offer[name] for name in ("here", "bytes"))
        }
        if not is_enough(near):
            return None
        taken = take(near)
        self.tell(f"{what}-taken", taken is not None)
        return taken if all(self.of_others(f"{what}-taken", near).values()) else None

    def look(self, missing: Sequence[int] = ()) -> None:
        """Raises what ends the waiting for ranks of the communicator, or for those `missing`, where something does."""
        self._attempt.look(missing)

    def come(self, where: str) -> None:
        """Says that this rank has come there, as soon as the store listens."""
        with suppress(RuntimeError):
            self._client.call(lambda store: store.set(self._named(where, self._place), ""))

    def have_come(self, where: str, others: Iterable[int]) -> bool:
        """Whether others have come there; true where the store has gone, for its process has ended and meets nobody."""
        keys = [self._named(where, other) for other in others]
        try:
            return self._client.call(lambda store: store.check(keys))
        except SilentStoreError:
            return False
        except RuntimeError:
            return True

    def late(self, missing: Iterable[int], attempt: Attempt | None = None) -> PeerError:
        """The error that names those who have not come in time, in `attempt` or else in that of the answers."""
        timeout_s = (attempt or self._attempt).timeout_s
        named = [self._ranks[other] for other in missing]
        return PeerError(f"rank {self._ranks[self._place]} waited {timeout_s:g} s for ranks {named} to connect")

    def _named(self, what: str, place: int) -> str:
        return f"{self._key}/{what}/{place}"

    def _is_there(self, keys: list[str]) -> bool:
        return self._call(lambda store: store.check(keys))

    def _call(self, function: Callable[[dist.Store], Result]) -> Result:
        try:
            return self._client.call(function, max(self._attempt.deadline - time.monotonic(), PATIENCE_S))
        except SilentStoreError as error:
            raise PeerError(f"{self.late(self._others)}, {self._client.silence(error)}") from error
