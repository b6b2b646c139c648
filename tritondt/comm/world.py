"""Who owns which communicator: one world per initialisation of torch.distributed, or per rank thread.

A communicator is made on first use, by exactly the ranks in it, under a store prefix of our own. It never goes
through new_group, whose counters diverge when only some ranks call it.
"""

import hashlib
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tritondt import environment, identity
from tritondt._C import Watchdog
from tritondt.comm import registry
from tritondt.comm.communicator import Communicator
from tritondt.comm.costs import default_costs
from tritondt.comm.flight import Flight
from tritondt.comm.gloo import GlooCommunicator
from tritondt.comm.membership import Membership
from tritondt.comm.registry import World
from tritondt.comm.sockets import SocketCommunicator
from tritondt.comm.watch import Watch
from tritondt.errors import WorldError
from tritondt.identity import Identity
from tritondt.mesh import Mesh, canonical_mesh
from tritondt.planning.cost import CostTable

_MAX_NAMED = 16


class ProcessWorld:
    """Ranks that are processes, connected through the store of torch.distributed's default group."""

    def __init__(self, who: Identity) -> None:
        self.identity = who
        self._timeout = environment.timeout()
        store: Any = dist.distributed_c10d._get_default_store()
        # Ranks count the worlds they have made in this store, so that a second one finds no keys of the first.
        number = dist.PrefixStore("tritondt", store).add(f"worlds/{who.rank}", 1)
        self._store = dist.PrefixStore(f"tritondt/{number}", store)
        self._watch = Watch(dist.PrefixStore(f"tritondt/{number}", store.clone()), who.rank)
        self._transport, self._compares = environment.transport(), environment.compares()
        self.flight = Flight(who.rank, who.size, self._flight_directory())
        self._watchdog = _watching(self.flight)
        self._communicators: dict[tuple[int, ...], Communicator] = {}
        self._making = threading.Lock()
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

    def communicator(self, ranks: Sequence[int]) -> Communicator:
        """The communicator of these ranks; the first call is collective among them."""
        if self._closed:
            raise WorldError("this world is closed; initialise torch.distributed again to make a new one")
        key = tuple(sorted(ranks))
        found = self._communicators.get(key)
        if found is None:
            with self._making:
                found = self._communicators[key] = self._connected(_name_of(key), key)
        return found

    def _connected(self, name: str, ranks: tuple[int, ...]) -> Communicator:
        made = Membership(
            name=name,
            ranks=ranks,
            rank=self.identity.rank,
            store=self._store,
            timeout=self._timeout,
            compares=self._compares,
            flight=self.flight,
            watch=self._watch,
            watchdog=self._watchdog,
        )
        return GlooCommunicator(made) if self._transport == "gloo" else SocketCommunicator(made)

    def _end(self) -> None:
        self._communicators.clear()
        self._watch.close()
        self._watchdog.close()
        self.flight.leave()

    def report(self, error: BaseException) -> None:
        """Tells all ranks that this one has failed for good, and writes its flight record."""
        self.flight.write(f"{type(error).__name__}: {error}")
        self._watch.report_everywhere(error)

    def close(self) -> None:
        """Ends all communicators; a collective call."""
        self._closed = True
        try:
            for communicator in self._communicators.values():
                communicator.close()
        finally:
            self._end()

    def abort(self) -> None:
        """Ends all communicators without the others."""
        self._closed = True
        for communicator in self._communicators.values():
            communicator.abort()
        self._end()

    def successor(self) -> None:
        """None: the next world of this process is made on first use."""


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
    current().communicator(canonical_mesh(mesh).ranks).set_timeout(seconds)


_making = threading.Lock()


def current() -> World:
    """The world of the calling thread, made on first use."""
    who = identity.current()
    found = registry.find(who)
    if found is None:
        with _making:
            found = registry.find(who)
            if found is None:
                made = ProcessWorld(who)
                registry.enter(who, made)
                _report_uncaught(made)
                return made
    return found


def close() -> None:
    """Ends the calling thread's world, if it has one: a collective call, before destroy_process_group.

    Waits for all that was issued, and raises the failure of what nobody has waited for.
    """
    found = registry.end(identity.current())
    if found is not None:
        found.close()


def abort() -> None:
    """Ends the calling thread's world without the others, after an error; whoever waits in it is woken.

    What is still under way fails with WorldError. Where all ranks call it, the next collective call of each makes a new
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
        found.abort()
        following = found.successor()
        if following is not None:
            registry.enter(who, following)


def _report_uncaught(world: ProcessWorld) -> None:
    """Lets an uncaught exception reach the others before this process ends."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if registry.find(world.identity) is world:
            try:
                world.report(error)
            except RuntimeError as gone:
                sys.stderr.write(f"tritondt: the other ranks could not be told ({gone})\n")
        before(kind, error, trace)

    sys.excepthook = hook
