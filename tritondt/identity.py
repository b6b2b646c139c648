"""Identity of the calling thread: its rank, and the world of that rank.

A world lasts from one initialisation of torch.distributed to the next; each has a generation of its own, so
that nothing made in one is taken for part of another. Thread ranks declare theirs with `assumed`. Caches of what was
made in a world (meshes, specs, plans, communicators) register here, so that nothing of it outlives the world.
"""

import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch.distributed as dist

from tritondt import environment
from tritondt.errors import WorldError


@dataclass(frozen=True, slots=True)
class Identity:
    """Rank `rank` of `size` in the world of a generation, which is a number within this process only."""

    generation: int
    rank: int
    size: int


class _Assumed(threading.local):
    identity: Identity | None = None
    is_alone: bool = False


_assumed = _Assumed()
_generations = count(1)
_lock = threading.Lock()
_on_end: list[Callable[[], object]] = []
_known: dict[int, tuple["weakref.ref[Any]", Identity]] = {}


def new_generation() -> int:
    """A number that no other world of this process has."""
    return next(_generations)


def on_end(forget: Callable[[], object]) -> None:
    """Calls `forget` whenever a world has ended, for caches that keep meshes, specs or communicators."""
    _on_end.append(forget)


def forget_ended() -> None:
    """Lets all caches forget what was made in a world that has ended."""
    for forget in _on_end:
        forget()


@contextmanager
def assumed(identity: Identity) -> Iterator[None]:
    """Context in which the calling thread is a rank of its own."""
    before, _assumed.identity = _assumed.identity, identity
    try:
        yield
    finally:
        _assumed.identity = before


@contextmanager
def without_others() -> Iterator[None]:
    """Context in which no other rank takes part, so that nobody is told of errors: a step without memory, say."""
    before, _assumed.is_alone = _assumed.is_alone, True
    try:
        yield
    finally:
        _assumed.is_alone = before


def is_alone() -> bool:
    """Whether no other rank takes part in what the calling thread does."""
    return _assumed.is_alone


def is_assumed() -> bool:
    """Whether the calling thread is a rank of its own, which shares the process with other ranks."""
    return _assumed.identity is not None


def current() -> Identity:
    """The calling thread's identity; WorldError where torch.distributed is not initialised."""
    assumed_here = _assumed.identity
    if assumed_here is not None:
        return assumed_here
    group = dist.group.WORLD
    if group is None:
        raise WorldError(_no_world())
    found = _known.get(id(group))
    if found is not None and found[0]() is group:
        return found[1]
    if dist.get_backend(group) == "threaded":
        raise WorldError(
            "torch.distributed is initialised on 'threaded', where ranks are threads of torch's tests "
            "(MultiThreadedTestCase); a world needs a process for each rank, and tests on threads run as "
            "tritondt.comm.transports.threads.run_ranks(size, body)"
        )
    with _lock:
        identity = Identity(new_generation(), dist.get_rank(), dist.get_world_size())
        _known.clear()
        _known[id(group)] = (weakref.ref(group), identity)
        return identity


def _no_world() -> str:
    command = environment.launch_command()
    otherwise = "" if command is None else f", or with {command} (HOST is that of rank 0),"
    return (
        f"there is no world: torch.distributed is not initialised; start the program with torchrun{otherwise} and call "
        "torch.distributed.init_process_group('gloo') first"
    )


_inherited: "weakref.ref[Any] | None" = None


def is_inherited() -> bool:
    """Whether torch.distributed was initialised by a process from which this one was forked."""
    return _inherited is not None and dist.is_initialized() and dist.group.WORLD is _inherited()


def _after_fork() -> None:
    global _inherited, _lock
    _lock = threading.Lock()
    if dist.is_available() and dist.is_initialized():
        _inherited = weakref.ref(dist.group.WORLD)
        # Kept beyond the end of this process: its destructor joins threads that are not here (torch 2.13: SIGSEGV).
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(dist.group.WORLD))


os.register_at_fork(after_in_child=_after_fork)
