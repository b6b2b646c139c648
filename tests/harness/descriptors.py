"""Targets of this process's open descriptors, read while other threads open and close some."""

import time
from collections import Counter
from pathlib import Path

_FOLDER = Path("/proc/self/fd")
_LISTENING = "0A"
_SETTLE_S = 30.0


def open_targets() -> list[str]:
    """Names, as the kernel writes them, of what is open: without those that were closed while they were listed.

    One of these is the descriptor by which the folder is read.
    """
    return [target for path in tuple(_FOLDER.iterdir()) if (target := _target(path)) is not None]


def kept_targets() -> list[str]:
    """The open targets without connections of others to a server in this process, as torch's store on rank 0 is.

    Other ranks open and close those when they please, and the server's thread notices later. A server is known by its
    port, at which this process still listens; tritondt's own ports are closed once the ranks are connected.
    """
    targets = open_targets()
    accepted = _accepted(set(targets))
    return [target for target in targets if target not in accepted]


def beyond(before: Counter[str]) -> list[str]:
    """The kept targets' kinds that are more than before, once nothing is about to be closed any more: after 30 s."""
    end = time.monotonic() + _SETTLE_S
    while (found := kinds() - before) and time.monotonic() < end:
        time.sleep(0.05)
    return [f"{kind}: {count} more than {before[kind]}" for kind, count in found.items()]


def kinds() -> Counter[str]:
    """How many of the kept targets are sockets, pipes, files of a name and so on."""
    return Counter(target.partition("[")[0] for target in kept_targets())


def _accepted(own: set[str]) -> set[str]:
    """Sockets, of those in `own`, with the local port of a socket in `own` that listens."""
    sockets = []
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            target = f"socket:[{fields[9]}]"
            if target in own:
                sockets.append((target, fields[1].rpartition(":")[2], fields[3] == _LISTENING))
    ports = {port for _, port, listens in sockets if listens}
    return {target for target, port, listens in sockets if port in ports and not listens}


def _target(descriptor: Path) -> str | None:
    try:
        return str(descriptor.readlink())
    except FileNotFoundError:
        return None
