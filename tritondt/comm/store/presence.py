"""Ranks of a job as others know them before they are connected: their processes, and why one of them does not come.

A rank that has failed before it met the others in a communicator can report that under no communicator's key, and one
that was killed reports nothing. So each says which process it is, early, and why it cannot have a world, where that is
so; whoever waits for it looks.
"""

import json
import secrets
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from tritondt.comm.processes import Processes, this_process
from tritondt.comm.store.client import StoreClient, values
from tritondt.comm.store.notices import Failed
from tritondt.comm.store.polling import await_others
from tritondt.errors import PeerError

# Ranks that one look asks for: each takes two questions to the store.
_MOST_ASKED = 64
# Refusals of others that this rank has raised.
_heard: set[str] = set()
# Stands between the name of a process group and its part's, in the name of a communicator.
PART_OF_GROUP = " on "
# Prefixes of the store in which this process has said so before there was a group, whose keys get more of them.
_num_early_prefixes: int | None = None


def announce_early(store: dist.Store, rank: int) -> None:
    """Says which process this rank is in a store of which torch is about to make the default group."""
    global _num_early_prefixes
    _num_early_prefixes = len(_levels(store)) - 1
    announce(dist.PrefixStore("tritondt/ranks", store), rank)


def of_group(store: dist.Store) -> dist.Store:
    """The part of the default group's `store` in which its ranks say what they are; alike on all of them."""
    levels = _levels(store)
    early = _num_early_prefixes
    found = store if early is None or early >= len(levels) else levels[-1 - early]
    return dist.PrefixStore("tritondt/ranks", found)


def _levels(store: dist.Store) -> list[dist.Store]:
    """A store, and what is below each of its prefixes."""
    levels = [store]
    while isinstance(levels[-1], dist.PrefixStore):
        levels.append(levels[-1].underlying_store)
    return levels


def announce(store: dist.Store, rank: int) -> None:
    """Says in the store which process this rank is."""
    store.set(_process_key(rank), json.dumps(this_process()))


def refuse(store: dist.Store, rank: int, error: BaseException) -> None:
    """Says in the store why this rank takes part in nothing, until `take_part`."""
    store.set(_refusal_key(rank), json.dumps([secrets.token_hex(8), f"{type(error).__name__}: {error}"]))


def take_part(store: dist.Store, rank: int) -> None:
    """Takes back what `refuse` has said of this rank."""
    store.delete_key(_refusal_key(rank))


def refusal(store: dist.Store, ranks: Sequence[int]) -> Failed | None:
    """The first of `ranks` that has refused to take part since this was last asked, and why.

    Each refusal is told once: whoever has raised it, and tries again, waits for the rank to try again, too.
    """
    for rank in ranks[:_MOST_ASKED]:
        if store.check([_refusal_key(rank)]):
            token, text = json.loads(store.get(_refusal_key(rank)))
            if token not in _heard:
                _heard.add(token)
                return Failed(rank, text)
    return None


def hear(store: dist.Store, ranks: Sequence[int]) -> None:
    """Counts the refusals of `ranks` as told: this rank raises another error, of the same failure.

    Told later, in the world after, they would be taken for new ones.
    """
    while refusal(store, ranks) is not None:
        pass


def refuse_group(store: dist.Store, rank: int, group: str, error: BaseException) -> None:
    """Says in the store why this rank has no part in the process group of that name, which is never made again."""
    store.set(_group_key(rank, group), f"{type(error).__name__}: {error}")


def group_refusal(store: dist.Store, ranks: Sequence[int], name: str) -> Failed | None:
    """The first of `ranks` that has refused the process group that the communicator `name` is for, and why."""
    group, _, _ = name.partition(PART_OF_GROUP)
    if group == name:
        return None  # a mesh's
    for rank in ranks[:_MOST_ASKED]:
        if store.check([key := _group_key(rank, group)]):
            return Failed(rank, store.get(key).decode())
    return None


def ended(store: dist.Store, ranks: Sequence[int]) -> Failed | None:
    """The first of `ranks` on this host whose process has ended."""
    keys = {rank: _process_key(rank) for rank in ranks[:_MOST_ASKED]}
    described = {rank: json.loads(store.get(key)) for rank, key in keys.items() if store.check([key])}
    processes = Processes(described)
    try:
        found = processes.ended()
    finally:
        processes.close()
    return Failed(found[0], f"its process {described[found[0]]['number']} has ended") if found else None


def machines(client: StoreClient, rank: int, ranks: Sequence[int], timeout: timedelta) -> list[str]:
    """The machines of `ranks`, as these have announced them; PeerError where some of them fail, or do not in time."""
    timeout_s = timeout.total_seconds()
    keys = [_process_key(other) for other in ranks]

    def are_there(keys: list[str]) -> bool:
        return client.call(lambda _: client.presence.check(keys), timeout_s)

    def missing() -> list[int]:
        return [other for other, key in zip(ranks, keys, strict=True) if not are_there([key])]

    def look() -> None:
        late = missing()
        failed = client.call(lambda _: refusal(client.presence, late), timeout_s)
        if failed is not None:
            raise PeerError(f"rank {failed.rank} failed while rank {rank} waited for its machine: {failed.error}")

    if not await_others(lambda: are_there(keys), time.monotonic() + timeout_s, look):
        raise PeerError(
            f"rank {rank} waited {timeout_s:g} s for ranks {missing()} to say on which machines they are; they say "
            "it when they initialise torch.distributed, or first use tritondt"
        )
    found = client.call(lambda _: values(client.presence, keys), timeout_s)
    return [json.loads(text)["machine"] for text in found]


def _process_key(rank: int) -> str:
    return f"process/{rank}"


def _group_key(rank: int, group: str) -> str:
    return f"refusal/{rank}/{group}"


def _refusal_key(rank: int) -> str:
    return f"refusal/{rank}"
