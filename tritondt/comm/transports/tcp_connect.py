"""TCP connections between all pairs of ranks of a communicator, which exchange their addresses through the store."""

import json
import secrets
import socket
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from tritondt import environment
from tritondt.errors import PeerError

_PLACE_BYTES = 4
_TOKEN_BYTES = 16
_GREETING_S = 2.0


class _Address(NamedTuple):
    """The address at which a rank listens, with the name of its machine and a token that only ranks of the job know."""

    host: str
    port: int
    machine: str
    token: str


def connect(store: dist.Store, ranks: Sequence[int], place: int, timeout: timedelta) -> list[socket.socket | None]:
    """Sockets to all `ranks`, None at this rank's own `place`; a collective call.

    Every rank calls those before it and is called by those behind it. Ranks of one machine use its loopback
    interface. Raises PeerError for the rank that does not come within `timeout`.
    """
    sockets: list[socket.socket | None] = [None] * len(ranks)
    try:
        _connect_all(sockets, store, ranks, place, timeout)
    except BaseException:
        for found in sockets:
            if found is not None:
                found.close()
        raise
    for found in sockets:
        if found is not None:
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            found.setblocking(False)
    return sockets


def _connect_all(
    sockets: list[socket.socket | None], store: dist.Store, ranks: Sequence[int], place: int, timeout: timedelta
) -> None:
    with socket.create_server(("", 0), backlog=max(len(ranks), 128)) as server:
        server.settimeout(timeout.total_seconds())
        own = _Address(_own_host(), server.getsockname()[1], _machine(), secrets.token_hex(_TOKEN_BYTES))
        store.set(f"address/{place}", json.dumps(own))
        for other in range(place):
            sockets[other] = _call(store, other, ranks, place, own.machine, timeout)
        while any(sockets[other] is None for other in range(place + 1, len(ranks))):
            caller = _answer(server, own, sockets, ranks, place)
            if caller is not None:
                sockets[caller[0]] = caller[1]


def _call(
    store: dist.Store, other: int, ranks: Sequence[int], place: int, machine: str, timeout: timedelta
) -> socket.socket:
    try:
        store.wait([f"address/{other}"], timeout)
        address = _Address(*json.loads(store.get(f"address/{other}")))
        host = "127.0.0.1" if address.machine == machine else address.host
        found = socket.create_connection((host, address.port), timeout.total_seconds())
        found.sendall(bytes.fromhex(address.token) + place.to_bytes(_PLACE_BYTES, "little"))
    except (OSError, RuntimeError) as error:
        limit = f"{timeout.total_seconds():.0f} s"
        raise PeerError(
            f"rank {ranks[place]} could not connect to rank {ranks[other]} within {limit}: {error}"
        ) from error
    return found


def _answer(
    server: socket.socket, own: _Address, sockets: Sequence[socket.socket | None], ranks: Sequence[int], place: int
) -> tuple[int, socket.socket] | None:
    """The next caller's place and socket, or None for one that does not know the token."""
    try:
        found, _ = server.accept()
    except OSError as error:
        missing = [ranks[other] for other in range(place + 1, len(ranks)) if sockets[other] is None]
        raise PeerError(
            f"rank {ranks[place]} waited {server.gettimeout():.0f} s for ranks {missing} to connect: {error}"
        ) from error
    try:
        found.settimeout(_GREETING_S)
        greeting = found.recv(_TOKEN_BYTES + _PLACE_BYTES, socket.MSG_WAITALL)
    except OSError:  # a stranger that says nothing or hangs up; a rank greets as soon as it is connected
        greeting = b""
    if not secrets.compare_digest(greeting[:_TOKEN_BYTES], bytes.fromhex(own.token)):
        found.close()
        return None
    return int.from_bytes(greeting[_TOKEN_BYTES:], "little"), found


def _own_host() -> str:
    """The address at which other machines reach this one: that of the route to the job's master."""
    master = environment.master_address()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Connecting a datagram socket sends nothing; it only chooses the route.
            probe.connect((master or socket.gethostname(), 9))
            return str(probe.getsockname()[0])
        except OSError:  # the name does not resolve: fine for ranks of one machine, the others will say so
            return "127.0.0.1"


def _machine() -> str:
    """A name that two processes share where they share a kernel."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()}/{boot.read_text().strip() if boot.exists() else ''}"
