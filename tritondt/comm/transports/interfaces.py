"""The addresses at which ranks of one host reach those of another, and what tells hosts apart.

Debian gives a host's own name the address 127.0.1.1, and containers often share a name, so neither a name nor the route
to it says where a host is: a loopback address is for ranks that share the loopback interface, and for nobody else.
"""

import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from tritondt import environment
from tritondt._C import interface_addresses
from tritondt.errors import WorldError

LOOPBACK = "127.0.0.1"
# Interfaces between containers of one host, whose addresses other hosts seldom reach: the last to be chosen.
_LOCAL_NAMES = ("docker", "veth", "virbr", "br-", "lxc", "cni", "podman")


@dataclass(frozen=True, slots=True)
class InterfaceFilter:
    """The interfaces that a variable names: by the beginnings of their names, or by whole ones; or all others."""

    names: tuple[str, ...] = ()
    is_exact: bool = False
    is_exclusion: bool = False

    @staticmethod
    def parse(text: str) -> "InterfaceFilter | None":
        """The filter that a list of names says, as NCCL_SOCKET_IFNAME does; None where it says none.

        >>> InterfaceFilter.parse("^docker,lo")
        InterfaceFilter(names=('docker', 'lo'), is_exact=False, is_exclusion=True)
        >>> InterfaceFilter.parse("=eth0")
        InterfaceFilter(names=('eth0',), is_exact=True, is_exclusion=False)
        """
        is_exclusion = text.startswith("^")
        text = text.removeprefix("^")
        is_exact = text.startswith("=")
        names = tuple(name.strip() for name in text.removeprefix("=").split(",") if name.strip())
        return InterfaceFilter(names, is_exact, is_exclusion) if names else None

    def chosen(self, addresses: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
        """The named ones of (interface, address), in the order of the names; the others, in theirs, for an exclusion.

        Of what one name fits, the interface that is called so comes first.

        >>> InterfaceFilter(("ib", "eth0")).chosen([("eth0", "10.0.0.1"), ("eth1", "10.0.1.1"), ("ib0", "10.1.0.1")])
        [('ib0', '10.1.0.1'), ('eth0', '10.0.0.1')]
        """
        found = [(self._place(interface), interface, address) for interface, address in addresses]
        if self.is_exclusion:
            return [(interface, address) for place, interface, address in found if place == len(self.names)]
        named = [item for item in found if item[0] < len(self.names)]
        named.sort(key=lambda item: (item[0], item[1] not in self.names))
        return [(interface, address) for _, interface, address in named]

    def _place(self, interface: str) -> int:
        """Position of the first name that an interface has; their number where it has none."""
        for place, name in enumerate(self.names):
            if interface == name or (not self.is_exact and interface.startswith(name)):
                return place
        return len(self.names)


def asked_filter() -> tuple[str, str, InterfaceFilter] | None:
    """The variable that names interfaces, its value and the filter; None where none is set. WorldError for no list."""
    for variable, text in environment.socket_interfaces():
        found = InterfaceFilter.parse(text)
        if found is None:
            raise WorldError(
                f"{variable}={text!r} is set; allowed is a list of interfaces or of beginnings of their names, such as "
                "eth,ib0, with = in front for whole names, and ^ in front of all for every interface but those"
            )
        return variable, text, found
    return None


def asked_interface() -> str | None:
    """Name of the interface for Gloo, None where it finds one itself, by its own variable or none.

    WorldError where a variable names none that this host has.
    """
    asked = asked_filter()
    if asked is None or asked[0] == "GLOO_SOCKET_IFNAME":
        return None
    variable, text, named = asked
    found = interface_addresses()
    chosen = named.chosen(found)
    if not chosen:
        raise WorldError(f"{variable}={text!r} names no interface of this host; there are {own_interfaces()}")
    return chosen[0][0]


def outer_addresses() -> list[str]:
    """This host's addresses that others may reach, the likeliest first; those of named interfaces, where some are."""
    asked, found = asked_filter(), interface_addresses()
    chosen = found if asked is None else asked[2].chosen(found)
    usable = [(name, address) for name, address in chosen if _is_reachable(address)]
    if asked is None or asked[2].is_exclusion:
        usable.sort(key=lambda item: item[0].startswith(_LOCAL_NAMES))
    return [address for _, address in sorted(usable, key=lambda item: ":" in item[1])]


def no_address() -> str:
    """Clause of an error message that says why no address of this host can be given to another one."""
    asked, has = asked_filter(), own_interfaces()
    if asked is None:
        return f"its interfaces have no address that another host could reach: {has}"
    return f"{asked[0]}={asked[1]!r} names no interface with an address that another host could reach; there are {has}"


def _is_reachable(address: str) -> bool:
    found = ip_address(address)
    return not (found.is_loopback or found.is_unspecified or (found.version == 6 and found.is_link_local))


def own_interfaces() -> str:
    """This host's interfaces and their addresses, in an error message."""
    try:
        return ", ".join(f"{name} {address}" for name, address in interface_addresses()) or "none"
    except OSError as error:  # as where this process has no descriptor left
        return f"interfaces that the system does not list ({error})"


def interface_of(address: str) -> str:
    """Name of the interface of this host that has an address; "" where none has.

    >>> interface_of("127.0.0.1")
    'lo'
    """
    return next((name for name, own in interface_addresses() if own == address), "")


def way_to(host: str) -> str:
    """Clause of an error message that says by which interface of this host an address was tried; "" for a loopback's.

    >>> way_to("127.0.0.1")
    ''
    """
    if ip_address(host).is_loopback:
        return ""
    found = interface_addresses()
    own = address_towards([host], [address for _, address in found])
    if own is not None:
        return f" from {interface_of(own)} {own}"
    return f", to which no interface of this host has a route; there are {own_interfaces()}"


def address_towards(names: Iterable[str], allowed: Sequence[str]) -> str | None:
    """The one of this host's `allowed` addresses that the system takes to the first of `names` it has a route to."""
    for name in names:
        for family in (socket.AF_INET, socket.AF_INET6):
            try:
                with socket.socket(family, socket.SOCK_DGRAM) as probe:
                    # Connecting a datagram socket sends nothing; it only chooses the route.
                    probe.connect((name, 9))
                    found = str(probe.getsockname()[0])
            except OSError:  # no such name, or no route: there are other ways to find an address
                continue
            if found in allowed:
                return found
    return None
