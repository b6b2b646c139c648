"""Worlds, which own the communicators: one per initialisation of torch.distributed, or per rank thread."""

import atexit
import os
import sys
import threading
from contextlib import suppress
from functools import lru_cache
from types import TracebackType

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tritondt import identity
from tritondt.comm import registry
from tritondt.comm.fake_world import FakeWorld
from tritondt.comm.forked import InheritedWorld
from tritondt.comm.process_world import ProcessWorld, make_world
from tritondt.comm.registry import World
from tritondt.errors import WorldError
from tritondt.errors.arguments import checked
from tritondt.identity import Identity
from tritondt.sharding.mesh import Mesh, canonical_mesh


@checked
def set_timeout(mesh: "Mesh | DeviceMesh", seconds: float) -> None:
    """Sets the seconds that this rank waits for other ranks of `mesh` from now on; the default is TRITONDT_TIMEOUT, or
    300.

    It holds for exchanges along some axes of the mesh, too; of several calls, the latest counts. Not a collective call:
    ranks may wait for different times. WorldError for anything but a number above 0.

    >>> from tritondt.comm.transports.threads import run_ranks
    >>> from tritondt.sharding.mesh import Mesh
    >>> run_ranks(2, lambda rank: set_timeout(Mesh((2,)), 0.0))
    Traceback (most recent call last):
    tritondt.errors.WorldError: a timeout of 0.0 s was asked for; allowed is a number above 0
    >>> run_ranks(2, lambda rank: set_timeout(Mesh((2,)), 60.0))
    [None, None]
    """
    if not seconds > 0:
        raise WorldError(f"a timeout of {seconds!r} s was asked for; allowed is a number above 0")
    found = canonical_mesh(mesh)
    current().set_timeout(found.ranks, found.device_type, seconds)


_making = threading.Lock()


def _after_fork() -> None:
    global _making
    _making = threading.Lock()  # another thread of the parent may have it


os.register_at_fork(after_in_child=_after_fork)


def current() -> World:
    """The world of the calling thread, made on first use."""
    who = identity.current()
    found = registry.find(who)
    if found is None:
        with _making:
            found = registry.find(who)
            if found is None:
                _end_all()  # of a process group that was destroyed or replaced
                found = InheritedWorld(who.rank, ()) if identity.is_inherited() else _made(who)
                registry.enter(who, found)
                _watch_for_the_end()
    return found


def _made(who: Identity) -> World:
    """A new world of this process, by the backend of torch.distributed's default group."""
    return FakeWorld(who) if dist.get_backend() == "fake" else make_world(who)


def close() -> None:
    """Ends the calling thread's world, if it has one: a collective call, before destroy_process_group.

    Waits for all issued operations, and raises the failure of those that were never waited for.

    >>> import tritondt as T
    >>> from tritondt.comm.transports.threads import run_ranks
    >>> def body(rank):
    ...     whole = T.ones(2, device_mesh=T.Mesh((2,)), placements=[T.Shard(0)]).full_tensor()
    ...     close()
    ...     return whole.tolist()
    >>> run_ranks(2, body)
    [[1.0, 1.0], [1.0, 1.0]]
    """
    who = identity.current()
    found = registry.end(who)
    if found is not None:
        try:
            found.close()
        finally:
            _follow(who, found)


def abort() -> None:
    """Ends the calling thread's world without the other ranks, after an error, and wakes all threads that wait in it.

    The other ranks raise an error that names this rank and the error that is being handled here. An operation in
    progress fails with WorldError. Where all ranks call `abort`, the next collective call of each makes a new world of
    the same ranks, on which distributed tensors can be used as before.

    >>> import tritondt as T
    >>> from tritondt.comm.transports.threads import run_ranks
    >>> def body(rank):
    ...     x = T.ones(2, device_mesh=T.Mesh((2,)), placements=[T.Shard(0)])
    ...     try:
    ...         raise T.PeerError("as of a training step whose connection broke")
    ...     except T.PeerError:
    ...         abort()
    ...     return x.full_tensor().tolist()
    >>> run_ranks(2, body)
    [[1.0, 1.0], [1.0, 1.0]]
    """
    who = identity.current()
    found = registry.end(who)
    if found is not None:
        with suppress(RuntimeError):  # where the store does not answer, connections that close tell them
            found.report(sys.exc_info()[1] or WorldError("tritondt.abort() was called"))
        found.abort()
        _follow(who, found)


def _follow(who: Identity, ended: World) -> None:
    following = ended.successor()
    if following is not None:
        registry.enter(who, following)


@lru_cache(maxsize=1)
def _watch_for_the_end() -> None:
    """Installs hooks that report an uncaught exception to the other ranks, and end the worlds with the process."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        for world in _worlds_of_process():
            world.flight.write(f"{type(error).__name__}: {error}")
            try:
                world.report(error)
            except RuntimeError as gone:
                sys.stderr.write(f"tritondt: the other ranks could not be told ({gone})\n")
        before(kind, error, trace)

    sys.excepthook = hook
    atexit.register(_leave_all)


def _worlds_of_process() -> list[ProcessWorld]:
    return [world for world in registry.worlds() if isinstance(world, ProcessWorld)]


def _end_all() -> None:
    """Ends worlds that were not closed, without the other ranks."""
    for world in _worlds_of_process():
        registry.end(world.identity)
        world.abort()


def _leave_all() -> None:
    """Ends worlds that were not closed, with the process: no thread runs while Python is finalised, no folder stays.

    NCCL, whose aborts may hang, is left to the system where nothing is under way.
    """
    for world in _worlds_of_process():
        registry.end(world.identity)
        world.end_with_process()
