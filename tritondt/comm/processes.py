"""Processes of other ranks of a host, whose end shows at once, however they came to it."""

import os
import select
import socket
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

_NAMESPACES, _BOOT_ID = Path("/proc/self/ns"), Path("/proc/sys/kernel/random/boot_id")


def namespace(kind: str) -> str:
    """Identity of this process's namespace of a kind, such as net or pid; "" where the system does not tell.

    >>> namespace("none")
    ''
    """
    path = _NAMESPACES / kind
    if not path.exists():
        return ""
    found = path.stat()
    return f"{found.st_dev}:{found.st_ino}"


def machine() -> str:
    """Identity of kernel, network namespace and host name: equal for processes that share a loopback interface."""
    return f"{socket.gethostname()}/{_boot_id()}/{namespace('net')}"


def _boot_id() -> str:
    return _content(_BOOT_ID)


# Once, while there are descriptors: a process that has none left still looks whether those it waits for have ended.
@lru_cache(maxsize=8)
def _content(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""


def this_process() -> dict[str, Any]:
    """This process as others know it, fit for JSON: its number, the namespace that it has it in, and its machine.

    The namespace on another host is another one; it is "" where the system does not tell.
    """
    found = namespace("pid")
    host = _boot_id() if found else ""
    return {"number": os.getpid(), "namespace": f"{host}/{found}" if host else "", "machine": machine()}


class Processes:
    """Processes by a key, as `this_process` described them there, held by descriptors until they are closed.

    Processes of another namespace, or that this system does not let be held, are never known to have ended.

    >>> held = Processes({3: this_process()})
    >>> held.ended()
    []
    >>> held.close()
    """

    def __init__(self, described: Mapping[int, Mapping[str, Any]]) -> None:
        here = this_process()["namespace"]
        self._held: dict[int, int] = {}
        self._gone: list[int] = []  # had ended before
        for key, each in described.items():
            if not here or each["namespace"] != here:
                continue
            try:
                self._held[key] = os.pidfd_open(each["number"])
            except ProcessLookupError:
                self._gone.append(key)
            except OSError:  # Linux is older than 5.3, or this process has no descriptor left
                continue

    def ended(self) -> list[int]:
        """Keys of the processes that have ended."""
        held = list(self._held.items())
        if not held:
            return list(self._gone)
        poll = select.poll()
        for _, descriptor in held:
            poll.register(descriptor, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(0)}
        return [*self._gone, *(key for key, descriptor in held if descriptor in ready)]

    def close(self) -> None:
        """The end of the hold; a second call does nothing."""
        while self._held:
            os.close(self._held.popitem()[1])
