"""Steps that ranks take together through torch.distributed: what one raises, all raise."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist

from tritondt import identity
from tritondt.comm.objects import gather_objects
from tritondt.errors import CheckpointError

Result = TypeVar("Result")


class Together:
    """The ranks of a process group, of the default one for None; one process alone without torch.distributed."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        if identity.is_assumed():
            raise CheckpointError(
                "checkpoints were asked for by a rank that is a thread; torch.distributed.checkpoint knows "
                "processes only"
            )
        self.group = group
        self.is_alone = not dist.is_initialized()
        self.rank = 0 if self.is_alone else dist.get_rank(group)
        self.size = 1 if self.is_alone else dist.get_world_size(group)
        if self.rank < 0:
            raise CheckpointError(
                f"rank {dist.get_rank()} is not in the process group given for checkpoints; only its ranks may call"
            )

    def each(self, act: Callable[[], Result], doing: str) -> list[Result]:
        """The results of `act` on all ranks, in their order; CheckpointError on all of them where one raised.

        A collective call. `doing` follows "while" in the error.
        """
        error: Exception | None = None
        try:
            own: tuple[bool, Any] = True, act()
        except Exception as raised:  # noqa: BLE001  raised on all ranks
            error, own = raised, (False, _told(raised))
        found = [own] if self.is_alone else gather_objects(own, self.group)
        for rank, (is_good, result) in enumerate(found):
            if not is_good:
                text = result if self.size == 1 else f"rank {rank} failed while {doing}: {result}"
                raise CheckpointError(text) from error
        return [cast(Result, result) for _, result in found]

    def first(self, act: Callable[[], Result], doing: str) -> Result:
        """The result of `act`, which the first rank runs alone, on all ranks; a collective call as `each` is."""
        return cast(Result, self.each(lambda: act() if self.rank == 0 else None, doing)[0])


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
