"""Operations that this rank refused, and the agreement that the others refused them too.

Messages of NCCL have no tags, and Gloo tags those of a collective by how many it has run. Where a rank refuses an
operation that others have begun, they wait for its messages, and would take those of its next operation for them. So a
rank that has refused one sends nothing more before all ranks of the communicator have said that they refused it too.
"""

import time
from functools import cached_property
from typing import NamedTuple

from tritondt.comm.member import ProcessContext
from tritondt.comm.store.notices import Notices
from tritondt.errors import PeerError

_PAUSE_S = 0.02


class Refusal(NamedTuple):
    """An operation that this rank refused, by its number in the communicator, and why."""

    sequence: int
    reason: str


class Refusals:
    """The operations that one rank of a communicator has refused since it last agreed with the others: `open`.

    `why` is a clause that says why the transport cannot tell an operation from the next one.
    """

    def __init__(self, context: ProcessContext, why: str) -> None:
        self._context, self._why = context, why
        self.open: list[Refusal] = []

    @cached_property
    def _notices(self) -> Notices:
        return Notices(self._context.client, self._context.rank)

    def add(self, sequence: int, error: BaseException) -> None:
        """Notes that this rank takes no part in operation `sequence`; RuntimeError where the store does not answer."""
        self.open.append(Refusal(sequence, f"{type(error).__name__}: {error}"))
        self._notices.refuse(self._context.key, sequence)

    def settle(self) -> None:
        """Returns when all ranks have refused what this one has; PeerError where one took part, or does not say."""
        while self.open:
            self._settle(self.open[0])
            self.open.pop(0)

    def _settle(self, refusal: Refusal) -> None:
        context, limit_s = self._context, self._context.timeout.total_seconds()
        ends_at = time.monotonic() + limit_s
        while True:
            try:
                if self._notices.all_refuse(context.key, refusal.sequence, context.ranks):
                    return
                why = self._why_not(refusal)
            except RuntimeError as gone:
                why = f"the others cannot be asked whether they refused it too, {context.client.silence(gone)}"
            if why is None and time.monotonic() >= ends_at:
                why = (
                    f"ranks {self._notices.not_refusing(context.key, refusal.sequence, context.ranks)} have not said "
                    f"within {limit_s:g} s that they refused it too"
                )
            if why is not None:
                raise PeerError(
                    f"rank {context.rank} refused operation {refusal.sequence} of {context.name} ({refusal.reason}), "
                    f"and {why}; {self._why}, so nothing may follow what only some ranks refused"
                )
            time.sleep(_PAUSE_S)

    def _why_not(self, refusal: Refusal) -> str | None:
        """Clause that says which rank did not refuse what this one did, as far as the store knows at this moment."""
        context = self._context
        failed = self._notices.failure(context.key, 0)
        if failed is not None:
            return f"rank {failed.rank} failed: {failed.error}"
        # Before it waits in a later operation, a rank has said that it refused this one.
        waiting = self._notices.waiting(context.key, context.ranks)
        missing = self._notices.not_refusing(context.key, refusal.sequence, context.ranks)
        for rank in missing:
            if rank in waiting and waiting[rank].sequence >= refusal.sequence:
                return f"rank {rank} did not: it waits in {waiting[rank].description}"
        return None
