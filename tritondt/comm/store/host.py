"""The process that holds the store of a job: its address, and its rank where it is one and has said so.

Rank 0 holds it where ranks start by themselves, the launcher under torchrun, and anybody where the program made it.
A store that does not answer is evidence that the process that holds it has stopped, so it matters which one that is.
"""

from pathlib import Path
from typing import Any

import torch.distributed as dist

_HOLDER = "holder of the store"
_LISTEN = "0A"  # as /proc/net/tcp writes it


class StoreHost:
    """The store's address and holder, in words that follow "and" or "nor does" in an error message."""

    def __init__(self, store: dist.Store) -> None:
        plain = _without_prefixes(store)
        self._address = f" at {plain.host}:{plain.port}" if isinstance(plain, dist.TCPStore) else ""
        self.is_here = isinstance(plain, dist.TCPStore) and _listens_here(plain.port)
        self.rank: int | None = None

    def __str__(self) -> str:
        """The store in an error message."""
        return f"the store{self._address}{'' if self.rank is None else f', which rank {self.rank} holds,'}"

    def announce(self, store: dist.Store, rank: int) -> None:
        """Publishes that this rank holds the store, if so; before the ranks' first rendezvous."""
        if self.is_here:
            self.rank = rank
            store.set(_HOLDER, str(rank))

    def look_up(self, store: dist.Store) -> None:
        """Looks up the rank that holds the store, if one has said so."""
        if self.rank is None and store.check([_HOLDER]):
            self.rank = int(store.get(_HOLDER))


def _listens_here(port: int) -> bool:
    """Whether this process accepts connections at `port`; False where the system does not say.

    The store itself tells it by `repr` alone, which asks for the names of its addresses: 5 s without a name server.
    """
    listening = set[str]()
    for table in (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6")):
        lines = table.read_text().splitlines()[1:] if table.exists() else []
        for _, local, _, state, *others in map(str.split, lines):
            if state == _LISTEN and int(local.rpartition(":")[2], 16) == port:
                listening.add(f"socket:[{others[5]}]")
    return bool(listening) and any(_target(descriptor) in listening for descriptor in Path("/proc/self/fd").iterdir())


def _target(descriptor: Path) -> str:
    try:
        return str(descriptor.readlink())
    except FileNotFoundError:  # closed meanwhile, as the one is with which the folder is read
        return ""


def _without_prefixes(store: Any) -> Any:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store
