"""The world of a rank that is a process: its communicators, and what else is made and ended with them.

A communicator is made on first use, by exactly the ranks in it, under a store prefix of our own. It never goes
through new_group, whose counters diverge when only some ranks call it.
"""

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from tritondt import environment, logs
from tritondt._C import Watchdog
from tritondt.comm.communicator import Communicator
from tritondt.comm.forked import InheritedWorld
from tritondt.comm.member import ProcessContext
from tritondt.comm.monitor.comparison import digest
from tritondt.comm.monitor.flight import Flight
from tritondt.comm.monitor.flight_folder import FlightFolder, TemporaryFlightFolder
from tritondt.comm.monitor.watch import Watch
from tritondt.comm.nccl import aborts
from tritondt.comm.registry import World, numbered
from tritondt.comm.secret import Secret
from tritondt.comm.store import presence, starts
from tritondt.comm.store.client import StoreClient
from tritondt.comm.store.host import StoreHost
from tritondt.comm.store.rendezvous import Rendezvous
from tritondt.comm.transports import table as transport_table
from tritondt.comm.transports.interfaces import asked_filter
from tritondt.comm.transports.ordered import OrderedCommunicator
from tritondt.errors import TransportError, WorldError
from tritondt.identity import Identity
from tritondt.kernels import memory
from tritondt.planning import prices
from tritondt.planning.cost import CostTable
from tritondt.version import VERSION

# Ranks of a communicator, the type of their devices, and the ranks of a wider one that it is inside of.
_Key = tuple[tuple[int, ...], str, tuple[int, ...]]
_MAX_NAMED = 16
# By identity, keys of communicators of worlds that ended while the store was silent, which has not counted their end.
_uncounted: dict[Identity, set[str]] = {}
# How long a process that ends waits for what is under way on a device.
_LEAVE_S = 2.0


class Part(Protocol):
    """A resource that ends with its world."""

    def close(self) -> None:
        """Ends the resource; a collective call."""

    def abort(self) -> None:
        """Ends the resource without the other ranks, and waits for nothing."""

    def end_with_process(self, limit_s: float) -> None:
        """Ends the resource with the process, which waits at most so many seconds."""


def _ended() -> WorldError:
    return WorldError("this world is closed; tritondt.comm.world.current() is the one that follows")


class ProcessWorld:
    """Ranks that are processes, connected through the store of torch.distributed's default group."""

    def __init__(self, who: Identity) -> None:
        self.identity = who
        self._has_refused = False
        self._timeout = environment.timeout()
        for other in _uncounted.keys() - {who}:  # of another store
            del _uncounted[other]
        store: Any = dist.distributed_c10d._get_default_store()
        starts.check_keys(store)
        self._store, self._presence = dist.PrefixStore("tritondt", store), presence.of_group(store)
        presence.announce(self._presence, who.rank)
        self._store_host = StoreHost(store)
        asked: Any = store.clone()
        self._store_client = StoreClient(
            dist.PrefixStore("tritondt", asked), self._store_host, presence.of_group(asked)
        )
        self._watch = Watch(self._store_client, who.rank)
        self._watch.begin_world()
        self._check_version()
        asked_filter()  # what is not allowed is refused now, on all ranks
        transport_table.check_settings()
        self._costs = self._agreed(default_costs(who.size))
        memory.pool.most_bytes = environment.pool_bytes()
        self._compares = environment.compares()
        logs.set_up()
        self.flight = Flight(who.rank, who.size, self._flight_folder())
        self._watchdog = _watching(self.flight)
        self._communicators: dict[_Key, Communicator] = {}
        self._timeouts: dict[tuple[tuple[int, ...], str], float] = {}  # by ranks and device type, the latest last
        self._hosts: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._parts: dict[str, Part] = {}
        self._rendezvous: list[Rendezvous] = []
        # One for each: two threads may make two communicators in one order here, and in the other one elsewhere.
        self._making: dict[_Key, threading.Lock] = {}
        self._store_host.announce(self._store, who.rank)
        self._closed = False
        logs.world.info("rank %d: world of %d ranks made, timeout %s", who.rank, who.size, self._timeout)

    def _check_version(self) -> None:
        """WorldError where the rank that came first has another version: its plans and messages may be others."""
        own = json.dumps((self.identity.rank, VERSION))
        first, theirs = json.loads(self._store.compare_set("version", "", own))
        if theirs != VERSION:
            raise WorldError(
                f"rank {self.identity.rank} on {socket.gethostname()} runs tritondt {VERSION}, and rank {first} runs "
                f"{theirs}; all ranks must plan alike: install one version on all hosts"
            )

    def _agreed(self, own: dict[str, CostTable]) -> dict[str, CostTable]:
        """Cost tables of the rank that came first: all ranks read the same, and none waits for one that never comes.

        Built-in prices may differ, as hosts of 3 and 5 ranks do. WorldError where TRITONDT_COSTS does.
        """
        given = environment.costs()
        asked = None if given is None else json.loads(given)
        text = json.dumps((self.identity.rank, asked, prices.to_json(own)))
        first, theirs, tables = json.loads(self._store.compare_set("costs", "", text))
        if theirs != asked:
            raise WorldError(
                f"rank {self.identity.rank} on {socket.gethostname()} has {_setting_of(asked)}, and rank {first} came "
                f"first with {_setting_of(theirs)}; all ranks must plan alike until the process group ends: set "
                "TRITONDT_COSTS alike on all hosts, or on none"
            )
        return prices.from_json(tables)

    @property
    def costs(self) -> CostTable:
        """The cost table that all ranks share, for tensors on the CPU."""
        return self._costs["cpu"]

    def costs_for(self, device_type: str) -> CostTable:
        """The cost table that all ranks share, for tensors on such devices; the CPU's for a type without prices."""
        return self._costs.get(device_type, self._costs["cpu"])

    def _flight_folder(self) -> FlightFolder:
        """Folder of the flight records of this world's ranks on this machine: the environment's, or a temporary one."""
        given = environment.flight_directory()
        if given is not None:
            return FlightFolder(Path(given))
        own = f"{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}"
        return TemporaryFlightFolder(self._store.compare_set("flight", "", own).decode())

    def hosts(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Number of the host of each of `ranks`, by what these say of themselves in the store, in that order.

        Nobody is asked where the launcher has started all ranks of the world on one host. Raises PeerError where some
        have not initialised torch.distributed within the timeout.
        """
        key = tuple(ranks)
        found = self._hosts.get(key)
        if found is None:
            machines = [""] * len(key)
            if environment.ranks_per_host() != self.identity.size:
                machines = presence.machines(self._store_client, self.identity.rank, key, self._timeout)
            found = self._hosts[key] = numbered(machines)
        return found

    def communicator(self, ranks: Sequence[int], device_type: str = "cpu", inside: Sequence[int] = ()) -> Communicator:
        """The communicator of `ranks` for tensors on such devices; the first call is collective among them.

        One `inside` a wider communicator is apart from that of the same ranks by themselves: what runs on it is in the
        order of the wider one.
        """
        if self._closed:
            raise _ended()
        key = (tuple(sorted(ranks)), device_type, tuple(sorted(inside)))
        found = self._communicators.get(key)
        if found is None:
            with self._making.setdefault(key, threading.Lock()):
                found = self._communicators.get(key)
                if found is None:
                    found = self._communicators[key] = self._connected(*key)
        return found

    def set_timeout(self, ranks: Sequence[int], device_type: str, seconds: float) -> None:
        """Sets how long this rank waits in exchanges of `ranks`, or of some of them, from now on; waits for nobody.

        Of several that were asked for, the latest counts.
        """
        if self._closed:
            raise _ended()
        asked = tuple(sorted(ranks))
        self._timeouts.pop((asked, device_type), None)
        self._timeouts[asked, device_type] = seconds
        for key, communicator in tuple(self._communicators.items()):
            is_own = key == (asked, device_type, ())  # one that has failed says so
            if is_own or (_is_of(key, asked, device_type) and communicator.is_usable):
                communicator.set_timeout(seconds)

    def _connected(self, ranks: tuple[int, ...], device_type: str, inside: tuple[int, ...]) -> Communicator:
        make = transport_table.maker(device_type)
        name = _name_of(ranks) if device_type == "cpu" else f"{_name_of(ranks)} on {device_type}"
        if inside:
            name = f"{name} inside {_name_of(inside)}"
        around = self.communicator(inside, device_type) if inside else None
        with self.joining(name, ranks, self._timeout) as context:
            made = make(context)
            if isinstance(around, OrderedCommunicator) and isinstance(made, OrderedCommunicator):
                around.contain(made)
        for (asked, asked_type), timeout_s in reversed(self._timeouts.items()):
            if _is_of((ranks, device_type, inside), asked, asked_type):
                made.set_timeout(timeout_s)
                break
        logs.world.info(
            "rank %d: %s for tensors on %s made of ranks %s",
            self.identity.rank,
            type(made).__name__,
            device_type,
            ranks,
        )
        return made

    @contextmanager
    def joining(self, name: str, ranks: tuple[int, ...], timeout: timedelta) -> Iterator[ProcessContext]:
        """This rank's part in a communicator of `ranks`, when all have come, for a body that makes the communicator.

        PeerError where some do not come, WorldError where this rank has no secret, or another one than the rank that
        came first. The others, who wait for this rank, hear what is raised here or in the body.
        """
        if self._closed:
            raise _ended()
        rendezvous = self._rendezvous_of(name, ranks, timeout.total_seconds())
        secret = self._shown(rendezvous)
        rendezvous.gather(self.identity.rank)
        with self._made_of(rendezvous, secret, name, ranks, timeout) as context:
            yield context

    @contextmanager
    def entering(self, name: str, ranks: tuple[int, ...], timeout: timedelta) -> Iterator[ProcessContext]:
        """The same of what ranks make apart, each when it first needs it: waits for nobody."""
        if self._closed:
            raise _ended()
        rendezvous = self._rendezvous_of(name, ranks, timeout.total_seconds())
        with self._made_of(rendezvous, self._shown(rendezvous), name, ranks, timeout) as context:
            yield context

    @contextmanager
    def _made_of(
        self,
        rendezvous: Rendezvous,
        secret: Secret | None,
        name: str,
        ranks: tuple[int, ...],
        timeout: timedelta,
    ) -> Iterator[ProcessContext]:
        """The context of a rendezvous; the others hear what the body raises."""
        try:
            yield self._context(rendezvous, secret, name, ranks, timeout)
        except BaseException as error:
            self._watch.report(rendezvous.key, None, error)
            raise

    def _rendezvous_of(self, name: str, ranks: tuple[int, ...], timeout_s: float) -> Rendezvous:
        """The rendezvous of a communicator, in which this rank takes part."""
        try:
            uncounted = _uncounted.get(self.identity, ())
            made = Rendezvous(self._store_client, name, ranks, timeout_s, uncounted)
        except BaseException as error:  # before there is a key under which it could be reported
            presence.refuse(self._presence, self.identity.rank, error)
            self._has_refused = True
            raise
        if self._has_refused:
            presence.take_part(self._presence, self.identity.rank)
            self._has_refused = False
        made.raise_missed(self.identity.rank)
        self._rendezvous.append(made)
        return made

    def _shown(self, rendezvous: Rendezvous) -> Secret | None:
        """This rank's secret, which the rank that came first has, too."""
        rank = self.identity.rank
        try:
            content = environment.secret()
            secret = None if content is None else Secret(content)
            rendezvous.agree(rank, "" if secret is None else secret.mark(rendezvous.key))
        except WorldError as error:
            rendezvous.refuse(rank, error)
            raise
        return secret

    def _context(
        self,
        rendezvous: Rendezvous,
        secret: Secret | None,
        name: str,
        ranks: tuple[int, ...],
        timeout: timedelta,
    ) -> ProcessContext:
        self._store_client.call(self._store_host.look_up, timeout.total_seconds())
        return ProcessContext(
            name=name,
            key=rendezvous.key,
            ranks=ranks,
            rank=self.identity.rank,
            store=self._store,
            client=self._store_client,
            timeout=timeout,
            compares=self._compares,
            flight=self.flight,
            watch=self._watch,
            watchdog=self._watchdog,
            secret=secret,
        )

    def keep(self, name: str, part: Part) -> None:
        """Ends `part`, which was made of the context `name`, with this world."""
        self._parts[name] = part

    def forget(self, name: str) -> None:
        """Leaves it to the caller to end the part of that name."""
        self._parts.pop(name, None)

    @property
    def timeout(self) -> timedelta:
        """Time that this rank waits for others where nothing else was asked for."""
        return self._timeout

    @property
    def is_closed(self) -> bool:
        """Whether the world has ended."""
        return self._closed

    def report(self, error: BaseException) -> None:
        """Reports to the other ranks why this rank takes part in nothing any more; RuntimeError where it cannot."""
        for rendezvous in self._rendezvous:
            self._watch.report_for_good(rendezvous.key, error)

    def close(self) -> None:
        """Ends all communicators; a collective call."""
        self._closed = self._watch.is_world_ending = True
        logs.world.info("rank %d: world of %d ranks closes", self.identity.rank, self.identity.size)
        try:
            self._end_rendezvous()  # before the others are met: the store may leave with one of them
            # In an order that all ranks share, whichever they used first: closing waits for the others.
            for _, communicator in sorted(self._communicators.items()):
                communicator.close()
            for _, part in sorted(self._parts.items()):
                part.close()
        finally:  # what could not be closed with the others
            self.abort()

    def abort(self) -> None:
        """Ends all communicators without the other ranks; TransportError where NCCL does not end one in time.

        Aborts of NCCL are begun together: one may wait for what only another one ends.
        """
        self._closed = True
        self._end_rendezvous()
        for communicator in self._communicators.values():
            communicator.begin_abort()
        for part in self._parts.values():
            part.abort()
        for communicator in self._communicators.values():
            communicator.abort()
        self._let_go()
        unfinished = aborts.settle()
        if unfinished is not None:
            raise TransportError(unfinished)

    def end_with_process(self) -> None:
        """Ends all communicators with the process: what is under way on a device has a moment, and is then aborted."""
        self._closed = True
        self._end_rendezvous()
        for resource in (*self._communicators.values(), *self._parts.values()):
            resource.end_with_process(_LEAVE_S)
        self._let_go()
        unfinished = aborts.settle()
        if unfinished is not None:
            sys.stderr.write(f"tritondt: {unfinished}\n")

    def _let_go(self) -> None:
        self._communicators.clear()
        self._parts.clear()
        self._watch.close()
        self._store_client.close()
        self._watchdog.close()
        self.flight.leave()

    def _end_rendezvous(self) -> None:
        for rendezvous in self._rendezvous:
            try:
                rendezvous.end()
            except RuntimeError:  # a store behind a link that is down may answer the next world
                _uncounted.setdefault(self.identity, set()).add(rendezvous.key)
        self._rendezvous.clear()

    def inherited(self) -> World:
        """The world of a forked child: it refuses everything."""
        return InheritedWorld(self.identity.rank, self._communicators.values())

    def successor(self) -> None:
        """None: the next world of this process is made on first use."""


_refusing = False


def make_world(who: Identity) -> ProcessWorld:
    """The world of this process; the others, who wait for this rank, hear why where it cannot be made."""
    global _refusing
    try:
        made = ProcessWorld(who)
    except BaseException as error:
        presence.refuse(_presence(), who.rank, error)
        _refusing = True
        raise
    if _refusing:
        presence.take_part(_presence(), who.rank)
        _refusing = False
    return made


def _presence() -> dist.Store:
    store: Any = dist.distributed_c10d._get_default_store()
    return presence.of_group(store)


def _is_of(key: _Key, ranks: tuple[int, ...], device_type: str) -> bool:
    """Whether all that a communicator runs on, or is inside of, are among `ranks`, on such devices.

    >>> _is_of(((2, 3), "cpu", ()), (0, 1, 2, 3), "cpu"), _is_of(((2, 3), "cpu", (0, 1, 2, 3)), (2, 3), "cpu")
    (True, False)
    """
    own, own_type, inside = key
    return own_type == device_type and set(inside or own).issubset(ranks)


def _setting_of(costs: Any) -> str:
    """TRITONDT_COSTS in an error message.

    >>> _setting_of({"max_peers": 9}), _setting_of(None)
    ('TRITONDT_COSTS={"max_peers": 9}', 'no TRITONDT_COSTS')
    """
    return "no TRITONDT_COSTS" if costs is None else f"TRITONDT_COSTS={json.dumps(costs)}"


def _name_of(ranks: tuple[int, ...]) -> str:
    """Name of a communicator in the store and in flight records, short for any number of ranks.

    >>> _name_of((0, 1, 4))
    'ranks 0,1,4'
    >>> _name_of(tuple(range(4096)))
    'ranks 0..4095 (8e1963b0c9811425)'
    """
    if len(ranks) <= _MAX_NAMED:
        return "ranks " + ",".join(map(str, ranks))
    return f"ranks {ranks[0]}..{ranks[-1]} ({digest(repr(ranks), 8).hex()})"


def _watching(flight: Flight) -> Watchdog:
    """The watchdog of a world; on SIGUSR1 it writes the flight record, unless the program handles that signal.

    WorldError where the system gives it no descriptor or no thread: exchanges would have no timeout.
    """
    flight.prepare()
    try:
        made = Watchdog()
        made.dump_on_signal(signal.SIGUSR1, flight.recorder, flight.path_text)
    except OSError as error:
        raise WorldError(
            f"rank {flight.recorder.rank} cannot watch over its exchanges: {error}; `ulimit -n` and `ulimit -u` say "
            "how many descriptors and processes this user may have"
        ) from error
    return made


def default_costs(world_size: int, ranks_per_host: int | None = None) -> dict[str, CostTable]:
    """Cost tables by the type of device: TRITONDT_COSTS over the built-in prices; WorldError where that is no table.

    `ranks_per_host` are of hosts that a plan is made for; without it those of the launcher count, or all.
    """
    per_host, given = ranks_per_host or environment.ranks_per_host(), environment.costs()
    environment.arena_bytes()  # what is not allowed is refused now, whether a transport needs it or not
    tables = transport_table.built_in_costs(world_size if per_host is None else per_host)
    if given is None:
        return tables
    try:
        return prices.with_prices(tables, given)
    except ValueError as error:
        raise WorldError(
            f"TRITONDT_COSTS={given!r} is set, but {error}; allowed are fields of tritondt.planning.cost.CostTable as "
            'a JSON object, such as {"network": {"bandwidth": 1e8}}, or those of a type of device, such as {"cuda": '
            '{"host": {"bandwidth": 3e11}}}'
        ) from error
