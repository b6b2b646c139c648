"""What the ranks of a communicator say to each other through the store while it is made."""

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from tritondt.comm.member import ProcessContext
from tritondt.comm.monitor.watch import INTERVAL_S
from tritondt.comm.store.client import PATIENCE_S, values
from tritondt.errors import PeerError

Result = TypeVar("Result")

# How often a rank looks what others have said: often at first, when all come at once.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.1


class Answers:
    """One rank's part in what all ranks of a communicator tell each other, within the communicator's timeout."""

    def __init__(self, context: ProcessContext) -> None:
        self._context = context
        self._deadline = time.monotonic() + context.timeout.total_seconds()
        self._others = [other for other in range(len(context.ranks)) if other != context.place]

    @property
    def left_s(self) -> float:
        """Seconds that are left of the communicator's timeout."""
        return max(self._deadline - time.monotonic(), 0.0)

    def tell(self, what: str, value: object) -> None:
        """Says something of this rank in the store."""
        text, key = json.dumps(value), f"{self._context.key}/{what}/{self._context.place}"
        self._call(lambda store: store.set(key, text))

    def of_others(self, what: str, among: Collection[int] | None = None) -> dict[int, Any]:
        """What the others have said, or those `among` them, by place, when all have; PeerError where some do not."""
        others = [other for other in self._others if among is None or other in among]
        keys = {other: f"{self._context.key}/{what}/{other}" for other in others}
        pause, next_look = _FIRST_PAUSE_S, time.monotonic() + INTERVAL_S
        while not self._call(lambda store: store.check(list(keys.values()))):
            now = time.monotonic()
            if now >= self._deadline:
                raise self._late(keys)
            if now >= next_look:
                self.look(self._missing(keys))
                next_look = now + INTERVAL_S
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        found = self._call(lambda store: values(store, list(keys.values())))
        return {other: json.loads(text) for other, text in zip(keys, found, strict=True)}

    def _call(self, function: Callable[[dist.Store], Result]) -> Result:
        return self._context.client.call(function, max(self._deadline - time.monotonic(), PATIENCE_S))

    def look(self, missing: Sequence[int] = ()) -> None:
        """Raises PeerError where another rank of the communicator has failed, or one of those that are `missing`."""
        found = self._context.watch.failure(self._context.key, missing)
        if found is not None:
            raise PeerError(
                f"rank {found.rank} failed while rank {self._context.rank} connected to ranks "
                f"{list(self._context.ranks)}: {found.error}"
            )

    def _late(self, keys: Mapping[int, str]) -> PeerError:
        return PeerError(
            f"rank {self._context.rank} waited {self._context.timeout.total_seconds():g} s for ranks "
            f"{self._missing(keys)} to connect"
        )

    def _missing(self, keys: Mapping[int, str]) -> list[int]:
        """Ranks whose keys are not there."""
        return [
            self._context.ranks[other]
            for other, key in keys.items()
            if not self._call(lambda store, key=key: store.check([key]))  # type: ignore[misc]
        ]
