"""Who owns which communicator: one world per initialisation of torch.distributed, or per rank thread.

A communicator is made on first use, by exactly the ranks in it, under a store prefix of our own. It never goes
through new_group, whose counters diverge when only some ranks call it.
"""

import atexit
import hashlib
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tritondt import environment, identity
from tritondt._C import Watchdog
from tritondt.comm import registry
from tritondt.comm.communicator import Communicator
from tritondt.comm.forked import InheritedWorld
from tritondt.comm.member import ProcessContext
from tritondt.comm.monitor.flight import Flight
from tritondt.comm.monitor.watch import Watch
from tritondt.comm.nccl.library import nccl_library
from tritondt.comm.nccl.streams import CudaStreams
from tritondt.comm.registry import World
from tritondt.comm.store.client import StoreClient
from tritondt.comm.store.host import StoreHost
from tritondt.comm.store.rendezvous import Rendezvous
from tritondt.comm.transports.gloo import GlooCommunicator
from tritondt.comm.transports.nccl import NcclCommunicator
from tritondt.comm.transports.sockets import SocketCommunicator
from tritondt.device_types import ByDeviceType
from tritondt.errors import TransportError, WorldError
from tritondt.identity import Identity
from tritondt.planning.cost import CostTable
from tritondt.sharding.mesh import Mesh, canonical_mesh

_MAX_NAMED = 16


class Part(Protocol):
    """What ends with a world."""

    def close(self) -> None:
        """Ends it; a collective call."""

    def abort(self) -> None:
        """Ends it without the others."""


def _ended() -> WorldError:
    return WorldError("this world is closed; tritondt.comm.world.current() is the one that follows")


class ProcessWorld:
    """Ranks that are processes, connected through the store of torch.distributed's default group."""

    def __init__(self, who: Identity) -> None:
        self.identity = who
        self._timeout = environment.timeout()
        store: Any = dist.distributed_c10d._get_default_store()
        self._store = dist.PrefixStore("tritondt", store)
        self._home = StoreHost(store)
        self._line = StoreClient(dist.PrefixStore("tritondt", store.clone()), self._home)
        self._watch = Watch(self._line, who.rank)
        environment.transport()  # what is not allowed is refused now, on all ranks
        self._compares = environment.compares()
        self.flight = Flight(who.rank, who.size, self._flight_directory())
        self._watchdog = _watching(self.flight)
        self._communicators: dict[tuple[tuple[int, ...], str], Communicator] = {}
        self._parts: dict[str, Part] = {}
        self._meetings: list[Rendezvous] = []
        self._making = threading.Lock()
        self._home.tell(self._store, who.rank)
        self.costs = self._agreed(default_costs(who.size))
        self._closed = False

    def _agreed(self, own: CostTable) -> CostTable:
        """The table of whichever rank came first: all ranks read one, and none waits for one that never comes."""
        return CostTable.from_json(self._store.compare_set("costs", "", own.to_json()).decode())

    def _flight_directory(self) -> Path:
        """Where this world's ranks on this machine write: as the environment says, or in a temporary folder."""
        given = environment.flight_directory()
        if given is not None:
            return Path(given)
        own = f"{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}"
        return Path(tempfile.gettempdir()) / "tritondt-flight" / self._store.compare_set("flight", "", own).decode()

    def communicator(self, ranks: Sequence[int], device_type: str = "cpu") -> Communicator:
        """The communicator of these ranks for tensors on such devices; the first call is collective among them."""
        if self._closed:
            raise _ended()
        key = (tuple(sorted(ranks)), device_type)
        found = self._communicators.get(key)
        if found is None:
            with self._making:
                found = self._communicators.get(key)
                if found is None:
                    found = self._communicators[key] = self._connected(*key)
        return found

    def _connected(self, ranks: tuple[int, ...], device_type: str) -> Communicator:
        make = transports.get(device_type)
        if make is None:
            raise TransportError(
                f"a communicator for tensors on {device_type} was asked for; there are transports for "
                f"{' and '.join(transports)}"
            )
        name = _name_of(ranks) if device_type == "cpu" else f"{_name_of(ranks)} on {device_type}"
        return make(self.join(name, ranks, self._timeout))

    def join(self, name: str, ranks: tuple[int, ...], timeout: timedelta) -> ProcessContext:
        """This rank's part in what `ranks` make together; returns when all have come, PeerError where some do not."""
        if self._closed:
            raise _ended()
        meeting = Rendezvous(self._line, name, ranks, timeout.total_seconds())
        self._meetings.append(meeting)
        meeting.gather(self.identity.rank)
        self._line.call(self._home.ask, timeout.total_seconds())
        return ProcessContext(
            name=name,
            key=meeting.key,
            ranks=ranks,
            rank=self.identity.rank,
            store=self._store,
            timeout=timeout,
            compares=self._compares,
            flight=self.flight,
            watch=self._watch,
            watchdog=self._watchdog,
        )

    def keep(self, name: str, part: Part) -> None:
        """Ends `part`, which was made of a membership of this name, with this world."""
        self._parts[name] = part

    @property
    def is_closed(self) -> bool:
        """Whether it has ended."""
        return self._closed

    def report(self, error: BaseException) -> None:
        """Tells the others why this rank takes part in nothing any more; RuntimeError where they cannot be told."""
        for meeting in self._meetings:
            self._watch.report_for_good(meeting.key, error)

    def close(self) -> None:
        """Ends all communicators; a collective call."""
        self._closed = True
        try:
            self._end_meetings()  # before the others are met: the store may leave with one of them
            # In an order that all ranks share, whichever they used first: closing waits for the others.
            for _, communicator in sorted(self._communicators.items()):
                communicator.close()
            for _, part in sorted(self._parts.items()):
                part.close()
        finally:  # what could not be closed with the others
            self.abort()

    def abort(self) -> None:
        """Ends all communicators without the others."""
        self._closed = True
        self._end_meetings()
        for communicator in self._communicators.values():
            communicator.abort()
        self._communicators.clear()
        for part in self._parts.values():
            part.abort()
        self._parts.clear()
        self._watch.close()
        self._line.close()
        self._watchdog.close()
        self.flight.leave()

    def _end_meetings(self) -> None:
        for meeting in self._meetings:
            with suppress(RuntimeError):  # without the store there is no next one
                meeting.end()
        self._meetings.clear()

    def inherited(self) -> World:
        """What a forked child gets in its place."""
        return InheritedWorld(self.identity.rank, self._communicators.values())

    def successor(self) -> None:
        """None: the next world of this process is made on first use."""


def _on_cpu(member: ProcessContext) -> Communicator:
    return GlooCommunicator(member) if environment.transport() == "gloo" else SocketCommunicator(member)


def _on_gpu(member: ProcessContext) -> Communicator:
    device = torch.device("cuda", torch.cuda.current_device())
    return NcclCommunicator(member, nccl_library(), CudaStreams(device))


# What makes communicators, by the type of the devices that tensors are on.
transports = ByDeviceType[Callable[[ProcessContext], Communicator]](cpu=_on_cpu, cuda=_on_gpu)


def _name_of(ranks: tuple[int, ...]) -> str:
    """What a communicator is called in the store, in flight records and nowhere else; short for any number of ranks.

    >>> _name_of((0, 1, 4))
    'ranks 0,1,4'
    >>> _name_of(tuple(range(4096)))
    'ranks 0..4095 (8e1963b0c9811425)'
    """
    if len(ranks) <= _MAX_NAMED:
        return "ranks " + ",".join(map(str, ranks))
    return f"ranks {ranks[0]}..{ranks[-1]} ({hashlib.blake2b(repr(ranks).encode(), digest_size=8).hexdigest()})"


def _watching(flight: Flight) -> Watchdog:
    """The watchdog of a world; on SIGUSR1 it writes the flight record, unless the program has other plans for that."""
    made = Watchdog()
    flight.prepare()
    made.dump_on_signal(signal.SIGUSR1, flight.recorder, flight.path_text)
    return made


def set_timeout(mesh: "Mesh | DeviceMesh", seconds: float) -> None:
    """How long this rank waits for others of `mesh` from now on; at first TRITONDT_TIMEOUT, or 300 s.

    WorldError for what is no number above 0.
    """
    if not seconds > 0:
        raise WorldError(f"a timeout of {seconds!r} s was asked for; allowed is a number above 0")
    found = canonical_mesh(mesh)
    current().communicator(found.ranks, found.device_type).set_timeout(seconds)


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
                found = InheritedWorld(who.rank, ()) if identity.is_inherited() else ProcessWorld(who)
                registry.enter(who, found)
                _watch_for_the_end()
    return found


def close() -> None:
    """Ends the calling thread's world, if it has one: a collective call, before destroy_process_group.

    Waits for all that was issued, and raises the failure of what nobody has waited for.
    """
    who = identity.current()
    found = registry.end(who)
    if found is not None:
        try:
            found.close()
        finally:
            _follow(who, found)


def abort() -> None:
    """Ends the calling thread's world without the others, after an error; whoever waits in it is woken.

    The others are told why: what is raised in them names this rank and the error that is being handled here. What is
    still under way fails with WorldError. Where all ranks call it, the next collective call of each makes a new
    world of the same ranks, on which distributed tensors can be used as before.

        try:
            train_step()
        except T.errors.PeerError:
            T.abort()
            restore_checkpoint()
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
    """Lets an uncaught exception reach the others before this process ends, and ends its world with it."""
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
    atexit.register(_end_all)


def _worlds_of_process() -> list[ProcessWorld]:
    return [world for world in registry.worlds() if isinstance(world, ProcessWorld)]


def _end_all() -> None:
    """Ends what was not closed: no thread of it runs while Python is finalised, no folder without records stays."""
    for world in _worlds_of_process():
        registry.end(world.identity)
        world.abort()


def default_costs(world_size: int) -> CostTable:
    """The built-in prices, and those of the environment in place of them; WorldError where those are none."""
    per_host, given = environment.ranks_per_host(), environment.costs()
    table = CostTable(ranks_per_host=world_size if per_host is None else per_host)
    if given is None:
        return table
    try:
        return table.with_json(given)
    except ValueError as error:
        raise WorldError(
            f"TRITONDT_COSTS={given!r} is set, but {error}; allowed are fields of tritondt.planning.cost.CostTable as "
            'a JSON object, such as {"network": {"bandwidth": 1e8}}'
        ) from error
