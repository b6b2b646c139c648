"""Keys of its own for every start of the ranks, where torchrun holds the store.

The store outlives ranks that torchrun ends and starts again (torch 2.10 to 2.15), and with it all that they wrote: the
next ones find addresses of the dead, and neither torch's Gloo nor this package can connect. torchrun's number of
restarts tells starts apart on one machine only: machines that join later count their own. So rank 0 names each start,
and the others answer. Values that dead ranks have left are no answers: each process has a number drawn for it.
"""

import secrets
import time
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from tritondt import _importing, environment
from tritondt.comm.store import presence
from tritondt.comm.store.polling import await_others
from tritondt.errors import PeerError, WorldError

_LEADER = "tritondt/start"


def with_own_keys(found: Iterator[tuple[Any, int, int]]) -> Iterator[tuple[Any, int, int]]:
    """Stores, ranks and sizes as torch's rendezvous handler finds them, the stores of torchrun under own keys."""
    for store, rank, size in found:
        # Without a number of ranks, which remote procedure calls allow, there are none to agree with.
        own = own_keys(store, rank, size) if _is_of_torchrun(store) and size > 0 else store
        if size > 0:
            presence.announce_early(own, rank)
        yield own, rank, size


def _is_of_torchrun(store: Any) -> bool:
    port = environment.launcher_store_port()
    return port is not None and isinstance(store, dist.TCPStore) and store.port == port


def own_keys(store: Any, rank: int, size: int) -> Any:
    """The store under a prefix that only this start of `size` ranks has; collective, PeerError where some are late."""
    number, deadline = secrets.token_hex(8), time.monotonic() + store.timeout.total_seconds()
    name = _led(store, size, deadline) if rank == 0 else _followed(store, rank, size, number, deadline)
    return dist.PrefixStore(name, store)


def _led(store: Any, size: int, deadline: float) -> str:
    """The name that rank 0 gives to this start, once all others have answered to it."""
    name = f"{_LEADER}/{secrets.token_hex(8)}"
    store.set(_LEADER, name)
    answers = [_answer(name, rank) for rank in range(1, size)]
    if answers:
        if not await_others(lambda: store.check(answers), deadline):
            raise _late(store, 0, f"ranks {_without_answer(store, name, size)}")
        # To each its own answer: rank r is told no other's.
        store.multi_set([_confirmed(name, rank) for rank in range(1, size)], store.multi_get(answers))
    return name


def _followed(store: Any, rank: int, size: int, number: str, deadline: float) -> str:
    """The name of the start in which rank 0 has heard this process: one that died has left its name, and hears none."""
    name = ""

    def is_heard() -> bool:
        nonlocal name
        latest = store.get(_LEADER).decode() if store.check([_LEADER]) else ""
        if latest != name:
            store.set(_answer(latest, rank), number)
            name = latest
        confirmed = _confirmed(name, rank)
        return bool(name) and store.check([confirmed]) and store.get(confirmed).decode() == number

    if not await_others(is_heard, deadline):
        # Rank 0 waits for those without an answer to its name, too, or has given them up.
        missing = _without_answer(store, name, size) if name else []
        raise _late(store, rank, f"ranks {missing}, as rank 0 does" if missing else "rank 0")
    return name


def _without_answer(store: Any, name: str, size: int) -> list[int]:
    return [rank for rank in range(1, size) if not store.check([_answer(name, rank)])]


def _late(store: Any, rank: int, missing: str) -> PeerError:
    return PeerError(
        f"rank {rank} waited {store.timeout.total_seconds():g} s in init_process_group for {missing}; under torchrun "
        "all ranks import tritondt before init_process_group, or none"
    )


def _answer(name: str, rank: int) -> str:
    return f"{name}/answer/{rank}"


def _confirmed(name: str, rank: int) -> str:
    return f"{name}/confirmed/{rank}"


def check_keys(store: Any) -> None:
    """WorldError where the default group's store has keys of ranks that torchrun has started before these."""
    restarts = environment.num_restarts()
    if restarts and _importing.came_late and _is_of_torchrun(getattr(store, "underlying_store", None)):
        raise WorldError(
            f"torchrun has started these ranks again ({restarts}), and its store has what those before them wrote: "
            "import tritondt before init_process_group, which gives each start keys of its own"
        )
