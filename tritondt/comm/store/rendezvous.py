"""Rendezvous of the ranks that make a communicator together, though each may have made it a different number of times.

A rank that failed before its first exchange, or was in no mesh so far, has made fewer than the others, so ranks cannot
count for themselves. The store counts how many communicators of a name have ended: whoever ends one ends it for all.
"""

import json
import time
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

import torch.distributed as dist

from tritondt.comm.store import presence
from tritondt.comm.store.client import StoreClient
from tritondt.comm.store.notices import Failed, Notices
from tritondt.comm.store.polling import await_others
from tritondt.errors import PeerError, WorldError

Result = TypeVar("Result")


class Rendezvous:
    """One making of the communicator `name` by `ranks`; `key` is its own among all makings.

    `uncounted` are keys of makings whose end this rank could not tell the store, which it is told now.
    """

    def __init__(
        self, client: StoreClient, name: str, ranks: Sequence[int], timeout_s: float, uncounted: Collection[str] = ()
    ) -> None:
        self._client, self._name, self._ranks, self._timeout_s = client, name, ranks, timeout_s
        self._number = self._num_ended() + 1
        while self.key in uncounted:
            self._asked(self._count)
            self._number = self._num_ended() + 1

    @property
    def key(self) -> str:
        """Name of this making in the store."""
        return f"{self._name}/{self._number}"

    def _num_ended(self) -> int:
        return int(self._asked(lambda store: store.get(self._ended) if store.check([self._ended]) else b"0"))

    def _asked(self, function: Callable[[dist.Store], Result]) -> Result:
        """The result of `function` within the rendezvous's timeout: the store may be slow when all come at once."""
        return self._client.call(function, self._timeout_s)

    @property
    def _ended(self) -> str:
        return f"{self._name}/ended"

    def agree(self, rank: int, mark: str) -> None:
        """Shows the mark of this rank's secret, "" without one; WorldError where the rank that came first has another.

        Before `gather`: the others, who wait there for this rank, hear of its error.
        """
        shown = json.dumps([rank, mark])
        first, theirs = json.loads(self._asked(lambda store: store.compare_set(f"{self.key}/secret", "", shown)))
        if theirs == mark:
            return
        if not mark:
            what = f"rank {rank} has no secret, and rank {first} has one"
        elif not theirs:
            what = f"rank {rank} has a secret, and rank {first} has none"
        else:
            what = f"rank {rank} has another secret than rank {first}"
        raise WorldError(f"{what}; set TRITONDT_SECRET or TRITONDT_SECRET_FILE to the same on all ranks, or on none")

    def refuse(self, rank: int, error: BaseException) -> None:
        """Tells the others, those that come later too, why this rank takes no part."""
        Notices(self._client, rank, self._timeout_s).report_for_good(self.key, error)
        refusal = json.dumps(Failed(rank, f"{type(error).__name__}: {error}"))
        self._asked(lambda store: store.compare_set(f"{self.key}/refusal", "", refusal))
        self._asked(lambda store: store.set(f"{self.key}/refused/{rank}", ""))

    def raise_missed(self, rank: int) -> None:
        """Raises PeerError, once, where the making before this one has ended by a refusal before this rank came.

        The others have left it and wait for nobody.
        """
        before = f"{self._name}/{self._number - 1}"
        refusal, here, refused = (f"{before}/{key}" for key in ("refusal", f"here/{rank}", f"refused/{rank}"))
        if self._number == 1 or not self._asked(lambda store: store.check([refusal])):
            return
        # Several ranks may refuse, of which the first is named: a rank that has refused itself knows why.
        if any(self._asked(lambda store, key=key: store.check([key])) for key in (here, refused)):  # type: ignore[misc]
            return
        failed = Failed(*json.loads(self._asked(lambda store: store.get(refusal))))
        self._asked(lambda store: store.set(here, ""))
        raise PeerError(f"rank {failed.rank} had refused to connect when rank {rank} came: {failed.error}")

    def gather(self, rank: int) -> None:
        """Returns when all ranks have come.

        Raises PeerError where some do not come in time, naming them, and as soon as one has given up, has refused to
        take part, or has ended.
        """
        here, notices = [self._here(other) for other in self._ranks], Notices(self._client, rank, self._timeout_s)
        self._asked(lambda store: store.set(self._here(rank), ""))

        def have_come() -> bool:
            if self._asked(lambda store: store.check(here)):
                return True
            self._raise(rank, notices.failure(self.key, 0))  # at every look: who refuses is not waited for
            return False

        deadline = time.monotonic() + self._timeout_s
        if not await_others(have_come, deadline, lambda: self._raise(rank, self._absent(notices))):
            late = PeerError(f"rank {rank} waited {self._timeout_s:g} s for ranks {self._missing()} to connect")
            notices.report_for_good(self.key, late)
            raise late

    def _raise(self, rank: int, failed: Failed | None) -> None:
        if failed is not None:
            self._asked(lambda _: presence.hear(self._client.presence, self._ranks))
            raise PeerError(
                f"rank {failed.rank} failed while rank {rank} waited for ranks {self._missing()} to connect: "
                f"{failed.error}"
            )

    def _absent(self, notices: Notices) -> Failed | None:
        """A rank that will not come, and why."""
        missing = self._missing()
        refused = self._asked(lambda _: presence.refusal(self._client.presence, missing))
        if refused is not None:  # until it has a world: nothing has ended here
            return refused
        refused = self._asked(lambda _: presence.group_refusal(self._client.presence, missing, self._name))
        if refused is not None:
            return refused
        gone = self._asked(lambda _: presence.ended(self._client.presence, missing))
        if gone is not None:  # which ranks of other hosts cannot see
            notices.report_for_good(self.key, PeerError(f"rank {gone.rank} does not come: {gone.error}"))
        return gone

    def _missing(self) -> list[int]:
        return [other for other in self._ranks if not self._has_come(other)]

    def _has_come(self, other: int) -> bool:
        return self._asked(lambda store: store.check([self._here(other)]))

    def _here(self, other: int) -> str:
        return f"{self.key}/here/{other}"

    def end(self) -> None:
        """Counts this making as ended, so that the next one of its name gets another key; once for all ranks."""
        self._client.call(self._count)

    def _count(self, store: dist.Store) -> None:
        before = "" if self._number == 1 else f"{self._number - 1}"
        store.compare_set(self._ended, before, f"{self._number}")
