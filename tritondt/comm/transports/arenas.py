"""Arenas that the ranks of a communicator map of each other, when all of them agree that they can.

A rank's arena is a memory file without a name. The others open it by its process and descriptor in /proc, which the
kernel allows to processes of the same user alone: nobody listens, and nobody can ask. All ranks say through the store
whether they have succeeded, so that either all exchange through arenas or none does.
"""

import os
import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

from tritondt import environment
from tritondt._C import Arena
from tritondt.comm.answers import Answers
from tritondt.comm.member import ProcessContext
from tritondt.comm.processes import machine, namespace

# What connects ranks takes a listener, an event and a selector; of a connection to each other rank one too many.
_DESCRIPTORS_OF_SOCKETS = 3


def share_arenas(
    context: ProcessContext,
    otherwise: str = "messages go over sockets",
    most_bytes: int | None = None,
    *,
    asks_for_arenas: bool,
) -> list[Arena] | None:
    """Arenas of all ranks of the communicator, by place, mapped here; None where sockets alone carry its messages.

    A collective call; ranks that ask for no arenas say so and wait for nobody. Raises PeerError where some do not come.
    """
    if len(context.ranks) > 1 and (not asks_for_arenas or _are_elsewhere(len(context.ranks))):
        Answers.of(context).tell("arena", {})
        return None
    return map_arenas(context, otherwise, most_bytes)


def map_arenas(context: ProcessContext, otherwise: str, most_bytes: int | None = None) -> list[Arena] | None:
    """Arenas of all ranks, as `share_arenas` gives them, where this rank asks for them whatever the environment says.

    Each has TRITONDT_ARENA_MB, or `most_bytes` where that is less. `otherwise` says in a warning how messages go where
    there are none. A collective call; None where a rank is alone, or some share no memory. Raises PeerError where some
    do not come.
    """
    if len(context.ranks) == 1:
        return None
    try:
        num_bytes = environment.arena_bytes()
        return _Sharing(context, otherwise).run(num_bytes if most_bytes is None else min(num_bytes, most_bytes))
    except BaseException as error:
        context.watch.report(context.key, None, error)
        raise


def _are_elsewhere(num_ranks: int) -> bool:
    """Whether so many ranks are certainly on several machines, so that none needs to hear what each of them says.

    Asked for by name, the transport is tried all the same: two launchers of one machine count their own ranks only.
    """
    per_host = environment.ranks_per_host()
    return per_host is not None and num_ranks > per_host and environment.transport() is None


class _Sharing:
    """One rank's part in sharing arenas, within the communicator's timeout."""

    def __init__(self, context: ProcessContext, otherwise: str) -> None:
        self._context, self._answers, self._otherwise = context, Answers.of(context), otherwise

    def run(self, num_bytes: int) -> list[Arena] | None:
        """The arenas of all ranks, `num_bytes` each, where all ranks have mapped all of them."""
        own, offer = self._made(num_bytes)
        if own is None:
            self._answers.tell("arena", offer)
            return None
        try:
            return self._answers.share(
                "arena", offer, lambda near: len(near) == len(self._context.ranks), partial(self._mapped, own)
            )
        finally:  # the others have it open, or never will
            own.close_descriptor()

    def _made(self, num_bytes: int) -> tuple[Arena | None, dict[str, Any]]:
        """This rank's arena, and what others need to know to map it: nothing where there is none."""
        try:
            here, own = _here(), Arena(num_bytes)
        except OSError as error:
            self._warn(error)
            return None, {}
        return own, {"here": here, "path": f"/proc/{os.getpid()}/fd/{own.descriptor}", "bytes": own.num_bytes}

    def _mapped(self, own: Arena, found: Mapping[int, Mapping[str, Any]]) -> list[Arena] | None:
        """The arenas of all ranks; None where one cannot be mapped."""
        try:
            arenas = [
                own if place == self._context.place else Arena(found[place]["path"], found[place]["bytes"])
                for place in range(len(found))
            ]
            _check_spare_descriptors(own, len(found) + _DESCRIPTORS_OF_SOCKETS)
            return arenas
        except (OSError, ValueError) as error:
            self._warn(error)
            return None

    def _warn(self, error: Exception) -> None:
        warnings.warn(
            f"rank {self._context.rank} cannot share memory with ranks {list(self._context.ranks)} ({error}); their "
            f"{self._otherwise}",
            RuntimeWarning,
            stacklevel=2,
        )


def _check_spare_descriptors(arena: Arena, count: int) -> None:
    """OSError where this process may not open so many more descriptors.

    Exchanges through arenas begin with connections, for which it is too late to choose another way.
    """
    spare: list[int] = []
    try:
        for _ in range(count):
            spare.append(os.dup(arena.descriptor))
    finally:
        for descriptor in spare:
            os.close(descriptor)


def _here() -> str:
    """Identity of machine, user and process namespace: equal for processes that may map each other's arenas."""
    return f"{machine()}/{os.geteuid()}/{namespace('pid')}"
