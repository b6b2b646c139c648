"""The monitored barrier: one rank waits for all others in the store, and tells them who has not come."""

import json
import time
from collections.abc import Sequence

from tritondt.comm.store import presence
from tritondt.comm.store.client import StoreClient
from tritondt.comm.store.notices import Failed
from tritondt.comm.store.polling import await_others
from tritondt.errors import PeerError

# How much longer others wait for the one that names who is late.
_GRACE_S = 5.0


class MonitoredBarrier:
    """One rank's part in the monitored barriers of a process group; `ranks` are the group's, as ranks of the world.

    `client` asks a part of the store that is the group's own; in its `presence` ranks have said what they are.
    """

    def __init__(self, client: StoreClient, ranks: Sequence[int], group_rank: int) -> None:
        self._client, self._ranks, self._own = client, tuple(ranks), group_rank
        self._number = 0

    def wait(self, timeout_s: float, *, names_all: bool) -> None:
        """Returns when all ranks have come; PeerError, on all that have, where some do not: the first, or all of them.

        It is the first rank of the group that waits for the others, `timeout_s` seconds.
        """
        self._number += 1
        number = self._number
        self._client.call(lambda store: store.set(f"{number}/{self._own}", ""), timeout_s)
        if self._own != 0:
            self._hear(number, timeout_s)
            return
        error = self._late(number, timeout_s, names_all=names_all)
        said = json.dumps(None if error is None else str(error))
        self._client.call(lambda store: store.set(f"{number}/said", said), timeout_s)
        if error is not None:
            raise error

    def _absent(self, missing: list[int]) -> Failed | None:
        """One of the `missing` ranks that will not come, and why."""
        known = self._client.presence
        return presence.refusal(known, missing) or presence.ended(known, missing)

    def _late(self, number: int, timeout_s: float, *, names_all: bool) -> PeerError | None:
        """The error that names those who have not come in time, or have ended."""
        missing, gone = list(range(1, len(self._ranks))), list[Failed]()

        def have_come() -> bool:
            missing[:] = [each for each in missing if not self._has(f"{number}/{each}", timeout_s)]
            return not missing or bool(gone)

        def look() -> None:
            gone.extend(filter(None, [self._client.call(lambda _: self._absent(missing))]))

        if not await_others(have_come, time.monotonic() + timeout_s, look):
            named = [self._ranks[each] for each in (missing if names_all else missing[:1])]
            return PeerError(
                f"rank {self._ranks[0]} waited {timeout_s:g} s for {'ranks' if names_all else 'rank'} "
                f"{named if names_all else named[0]} in a monitored barrier"
            )
        if not missing:
            return None
        return PeerError(f"rank {self._ranks[gone[0].rank]} does not come to a monitored barrier: {gone[0].error}")

    def _hear(self, number: int, timeout_s: float) -> None:
        """Returns when the first rank says that all have come; raises what it says else."""
        deadline = time.monotonic() + timeout_s + _GRACE_S
        if not await_others(lambda: self._has(f"{number}/said", timeout_s), deadline):
            raise PeerError(
                f"rank {self._ranks[self._own]} waited {timeout_s + _GRACE_S:g} s for rank {self._ranks[0]} in a "
                "monitored barrier"
            )
        said = json.loads(self._client.call(lambda store: store.get(f"{number}/said"), timeout_s))
        if said is not None:
            raise PeerError(said)

    def _has(self, key: str, timeout_s: float) -> bool:
        return self._client.call(lambda store: store.check([key]), timeout_s)
