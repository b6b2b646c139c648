"""Ports for programs that are told one before they listen on it."""

import random
import socket
from contextlib import suppress
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST, _FIRST_GIVEN = 10_000, 32_768


def free_port() -> int:
    """A port of the loopback interface on which nothing listens, below those that the system gives away by itself.

    Between this answer and the listening a program may import torch for a minute; a port that the system chose would
    by then be some other connection's now and then.
    """
    given = int(_RANGE.read_text().split()[0]) if _RANGE.exists() else _FIRST_GIVEN
    for port in random.SystemRandom().sample(range(_FIRST, max(given, _FIRST + 2000)), 100):
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"100 ports from {_FIRST} to {given} that were tried are all taken")
