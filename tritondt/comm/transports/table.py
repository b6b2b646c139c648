"""The transports between processes, by name: what makes their communicators, and what else depends on which it is.

A transport is one entry. The world makes communicators and prices by it, `plan --transport` and `doctor` list it, and
TRITONDT_TRANSPORT names it. docs/own_transport.md says how to write one.
"""

import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from tritondt import environment
from tritondt.comm.transports.interfaces import asked_interface
from tritondt.errors import TransportError, WorldError
from tritondt.errors.arguments import check_types, checked, checked_class
from tritondt.kernels.device_types import ByDeviceType
from tritondt.planning import prices
from tritondt.planning.cost import CostTable

if TYPE_CHECKING:
    from tritondt.comm.communicator import Communicator
    from tritondt.comm.member import ProcessContext

Connect = Callable[["ProcessContext"], "Communicator"]


def _as_built_in(table: CostTable) -> CostTable:
    return table


def _nothing() -> None:
    """Refuses no settings."""


@checked_class
@dataclass(frozen=True)
class Transport:
    """A way for processes to exchange messages, and everything that the rest of the package needs to know about it.

    `name` is a word for TRITONDT_TRANSPORT. A `communicator`, a class that is called with a ProcessContext, carries
    tensors on `device_types`. If `connect` is given, all ranks of a new communicator call it instead. Either may be
    named as MODULE:ATTRIBUTE, which is imported when ranks first connect. `price` turns the built-in cost table of a
    device type into the transport's own. `check` raises WorldError for settings that the transport cannot work with,
    before any other rank is met. Ranks whose transports have the same `wire` (by default `name`) understand each other.
    A transport that does not cross hosts is skipped where ranks are on several. With `groups_share_memory`, groups of
    the backend move CPU tensors through shared memory. The communicators of one that `knows_hosts` carry messages
    inside a host by the links there, whichever other ranks they have: stages inside hosts then need none of their own.

    >>> from tritondt.comm.transports.sockets import SocketCommunicator
    >>> Transport("my-sockets", ("cpu",), SocketCommunicator).wire
    'my-sockets'
    """

    name: str
    device_types: tuple[str, ...]
    communicator: type[Any] | str
    connect: Connect | str | None = None
    price: Callable[[CostTable], CostTable] = _as_built_in
    check: Callable[[], object] = _nothing
    wire: str = ""
    crosses_hosts: bool = True
    groups_share_memory: bool = False
    knows_hosts: bool = False

    def __post_init__(self) -> None:
        check_types(type(self).__init__, **vars(self))
        if not self.name or any(each in self.name for each in ":, "):
            raise WorldError(
                f"a transport got the name {self.name!r}; allowed is a word without colons, commas and spaces"
            )
        if not self.device_types:
            raise WorldError(f'transport {self.name!r} carries tensors on no type of device; allowed is ("cpu",)')
        object.__setattr__(self, "wire", self.wire or self.name)

    @cached_property
    def communicator_class(self) -> type[Any]:
        """The class of communicators."""
        found: type[Any] = _imported(self.communicator)
        return found

    def connected(self, context: "ProcessContext") -> "Communicator":
        """Makes this rank's communicator; collective over its ranks."""
        made: Communicator = _imported(self.connect or self.communicator)(context)
        return made


def _imported(place: Any) -> Any:
    if not isinstance(place, str):
        return place
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute)


# In the order of registration: the first that carries tensors on a type of device is the default there.
_table: dict[str, Transport] = {}
# What makes communicators, by the type of the devices that tensors are on.
makers = ByDeviceType[Connect]()


@checked
def register_transport(transport: Transport) -> None:
    """Registers a transport by name, as a value for TRITONDT_TRANSPORT, on all ranks, before a world exists.

    Not a collective call. WorldError where another transport has the name.

    >>> from tritondt.comm.transports.sockets import SocketCommunicator
    >>> register_transport(Transport("gloo", ("cpu",), SocketCommunicator))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    tritondt.errors.WorldError: transport 'gloo' is registered already; allowed is another name than gloo,
    nccl, ... and sockets
    """
    found = _table.setdefault(transport.name, transport)
    if found != transport:
        raise WorldError(f"transport {transport.name!r} is registered already; allowed is another name than {_names()}")
    for device_type in transport.device_types:
        makers.setdefault(device_type, partial(_connected, device_type))


def transports() -> tuple[Transport, ...]:
    """All transports, in the order in which they were registered; that of TRITONDT_TRANSPORT is one of them."""
    asked()
    return tuple(_table.values())


def named(name: str, setting: str = "the transport") -> Transport:
    """The transport of that name, or the one that MODULE:NAME names, which is registered; else WorldError."""
    found = _table.get(name)
    if found is None:
        module, colon, attribute = name.partition(":")
        if not (module and colon and attribute):
            raise WorldError(f"{setting}={name!r} is set; allowed are {_names('MODULE:NAME of your own')}")
        found = _of_module(f"{setting}={name!r} is set", module, attribute)
    return found


def asked() -> Transport | None:
    """The transport that TRITONDT_TRANSPORT names, None where that is not set; WorldError where there is none such."""
    name = environment.transport()
    return None if name is None else named(name, "TRITONDT_TRANSPORT")


def chosen(device_type: str) -> Transport:
    """The transport for tensors on a type of device; TransportError where there is none."""
    found = asked()
    for transport in [*_table.values()] if found is None else [found, *_table.values()]:
        if device_type in transport.device_types:
            return transport
    raise _without_transport(device_type)


def _of_module(setting: str, module: str, attribute: str) -> Transport:
    """The transport that an attribute of a module is, registered where it has not been."""
    try:
        found: object = getattr(importlib.import_module(module), attribute, None)
    except ImportError as error:
        raise WorldError(f"{setting}, but module {module!r} cannot be imported: {error}") from error
    if not isinstance(found, Transport):
        raise WorldError(
            f"{setting}, but {attribute!r} of module {module!r} is {found!r}; allowed is a tritondt.Transport"
        )
    register_transport(found)
    return found


def _names(*more: str) -> str:
    *names, last = (*sorted(_table), *more)
    return f"{', '.join(names)} and {last}"


def check_settings() -> None:
    """Raises WorldError for settings that a chosen transport cannot work with."""
    for transport in dict.fromkeys(map(chosen, makers)):
        transport.check()


def built_in_costs(ranks_per_host: int) -> dict[str, CostTable]:
    """Prices by the type of device, of the transports that are chosen, for so many ranks on each host."""
    tables = prices.built_in(ranks_per_host)
    return {name: chosen(name).price(tables.get(name, tables["cpu"])) for name in {**tables, **makers}}


def maker(device_type: str) -> Connect:
    """Maker of communicators for tensors on a type of device; TransportError where there is no transport for it."""
    asked()  # which may be the first for that type
    found = makers.get(device_type)
    if found is None:
        raise _without_transport(device_type)
    return found


def _without_transport(device_type: str) -> TransportError:
    return TransportError(
        f"a communicator for tensors on {device_type} was asked for; there are transports for {' and '.join(makers)}"
    )


def _connected(device_type: str, context: "ProcessContext") -> "Communicator":
    """The communicator of the chosen transport; WorldError where the rank that came first has chosen another wire."""
    transport = chosen(device_type)
    own = json.dumps([context.rank, transport.wire])
    key = f"{context.key}/messages"
    found = context.client.call(lambda store: store.compare_set(key, "", own), context.timeout.total_seconds())
    rank, first = json.loads(found)
    if first != transport.wire:
        raise WorldError(
            f"rank {rank} exchanges messages of {context.name} over {first}, rank {context.rank} over "
            f"{transport.wire}; set TRITONDT_TRANSPORT alike on all ranks"
        )
    return transport.connected(context)


def _in_shared_memory(table: CostTable) -> CostTable:
    return prices.in_shared_memory(table, environment.arena_bytes())


def _in_slots(table: CostTable) -> CostTable:
    return prices.in_slots(table, environment.arena_bytes()) if environment.packs_into_peers() else table


# By name, so that `plan` asks for prices without torch, which communicators import.
_SOCKETS, _ROOM = "shared memory or sockets", "tritondt.comm.transports"

for _built_in in (
    Transport(
        "shared-memory",
        ("cpu",),
        f"{_ROOM}.shared_memory:SharedMemoryCommunicator",
        f"{_ROOM}.shared_memory:connect",
        _in_shared_memory,
        wire=_SOCKETS,
        crosses_hosts=False,
        groups_share_memory=True,
    ),
    Transport(
        "sockets",
        ("cpu",),
        f"{_ROOM}.sockets:SocketCommunicator",
        f"{_ROOM}.shared_memory:connect_without_arenas",
        wire=_SOCKETS,
    ),
    Transport("gloo", ("cpu",), f"{_ROOM}.gloo:GlooCommunicator", check=asked_interface, wire="Gloo"),
    Transport(
        "nccl",
        ("cuda",),
        f"{_ROOM}.nccl:NcclCommunicator",
        f"{_ROOM}.nccl:connect",
        _in_slots,
        wire="NCCL",
        knows_hosts=True,
    ),
):
    register_transport(_built_in)
