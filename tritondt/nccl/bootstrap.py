"""The making of communicators: the library, unique ids, and how ranks come to share one."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tritondt._C import NcclCommunicator, NcclLibrary
from tritondt.comm.daemons import within
from tritondt.comm.nccl.library import installed_path, nccl_library
from tritondt.errors import ArgumentError, PeerError, WorldError
from tritondt.errors.arguments import checked
from tritondt.nccl.communicator import Communicator

Options = Mapping[str, int | str]
_TIMEOUT = timedelta(seconds=300)

_ID_BYTES = 128  # NCCL_UNIQUE_ID_BYTES


@checked
def library(path: str | None = None) -> NcclLibrary:
    """The NCCL of this process, or the one at `path`.

    Without a path: the one that TRITONDT_NCCL_SO names, or that torch has loaded, or of an installed nvidia-nccl
    package. Not collective. Raises NcclError where there is none, NcclUnsupportedError where it is older than 2.18.

    The library has `version` ("2.32.3"), `version_code` (23203), `path`, `origin`, `has(function)`, `symbols()` with
    the version that brought each function, `unique_id()` (128 bytes), `allocate`, `free` and `call_config(options)`.

    An example that needs NCCL:

    >>> library().version  # doctest: +SKIP
    '2.32.3'
    """
    return nccl_library() if path is None else NcclLibrary(path, installed_path())


@checked
def init(
    unique_ids: Sequence[bytes],
    num_ranks: int,
    rank: int,
    *,
    library: NcclLibrary | None = None,
    options: Options | None = None,
) -> Communicator:
    """Makes a communicator of `num_ranks` ranks; a collective call, which returns once all ranks have arrived if the
    communicator is blocking.

    Args:
        unique_ids: Ids that one rank got from `library.unique_id()`, alike on all ranks; several of them make a large
            communicator faster (2.23).
        num_ranks: Ranks in all.
        rank: This rank, from 0.
        library: NCCL; that of the process by default.
        options: Fields of ncclConfig_t by snake-case names, as {"blocking": 0, "max_ctas": 4}.

    The device is the thread's current one. Raises ValueError for an invalid rank, id or option, NcclUnsupportedError
    for an option of a later version, NcclError for a call that NCCL refuses. Source: NCCL's documentation of
    ncclCommInitRankConfig (2.14) and ncclCommInitRankScalable (2.23).

    An example that needs a GPU:

    >>> init([library().unique_id()], num_ranks=1, rank=0).close()  # doctest: +SKIP
    """
    found = nccl_library() if library is None else library
    return Communicator(found.init(list(unique_ids), num_ranks, rank, options), found)


@checked
def join(
    unique_id: bytes,
    num_ranks: int,
    rank: int,
    *,
    library: NcclLibrary | None = None,
    options: Options | None = None,
) -> Communicator:
    """Joins the communicator that other ranks make with `Communicator.grow`; collective; NCCL 2.29.

    Args:
        unique_id: The id that `Communicator.grow_id` gave to one of the others.
        num_ranks: Ranks of the grown communicator.
        rank: This rank in it, from the number of those that grow on.
        library: NCCL; that of the process by default.
        options: Fields of ncclConfig_t, as for `init`.

    Raises as `init` does. Source: NCCL's documentation of ncclCommGrow.

    An example that needs a GPU:

    >>> join(unique_id, num_ranks=3, rank=2).close()  # doctest: +SKIP
    """
    found = nccl_library() if library is None else library
    return Communicator(found.join(unique_id, num_ranks, rank, options), found)


@checked
def bootstrap(
    over: Any = None,
    *,
    rank: int | None = None,
    num_ranks: int | None = None,
    name: str = "nccl",
    timeout: timedelta = _TIMEOUT,
    library: NcclLibrary | None = None,
    options: Options | None = None,
) -> Communicator:
    """Makes a communicator of the ranks of a process group, or of ranks that share a store; a collective call.

    Args:
        over: A process group of torch.distributed (the default group where None), or a store.
        rank: This rank, from 0; only with a store.
        num_ranks: Ranks in all; only with a store.
        name: The key in the store, a new one for each communicator; only with a store.
        timeout: How long ranks wait for each other.
        library: NCCL; that of the process by default.
        options: Fields of ncclConfig_t, as for `init`.

    Raises WorldError where torch.distributed is not initialized, PeerError where some ranks do not arrive in time,
    ValueError for a name that the store already has, and the errors of `init`.

    An example that needs a GPU, and init_process_group before:

    >>> with bootstrap() as communicator:  # doctest: +SKIP
    ...     communicator.all_reduce(torch.ones(4, device="cuda"))
    """
    found = nccl_library() if library is None else library
    if isinstance(over, dist.Store):
        if rank is None or num_ranks is None:
            raise ArgumentError(f"a store was given with rank {rank} of {num_ranks}; it needs rank and num_ranks")
        unique_id = _id_of_store(over, name, rank, timeout, found)
    else:
        if rank is not None or num_ranks is not None:
            raise ArgumentError(f"rank {rank} of {num_ranks} was given with a process group, which knows both")
        rank, num_ranks, unique_id = _id_of_group(over, found)
    return Communicator(_joined(found, unique_id, num_ranks, rank, timeout, options), found)


def _id_of_store(store: dist.Store, name: str, rank: int, timeout: timedelta, found: NcclLibrary) -> bytes:
    """The unique id that rank 0 has put into a store."""
    if rank == 0:
        own = found.unique_id().hex()
        if store.compare_set(name, "", own).decode() != own:
            raise ArgumentError(f"the store has {name!r} already; each communicator needs a name of its own")
        return bytes.fromhex(own)
    try:
        store.wait([name], timeout)
    except RuntimeError as error:
        raise PeerError(f"rank {rank} waited {timeout.total_seconds():g} s for rank 0 to set {name!r}") from error
    return bytes.fromhex(store.get(name).decode())


def _id_of_group(group: Any, found: NcclLibrary) -> tuple[int, int, bytes]:
    """This rank and the number of ranks of a group, and the unique id of its first."""
    if not dist.is_initialized():
        raise WorldError("a communicator was asked for over torch.distributed; call init_process_group first")
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise WorldError("a communicator was asked for over a process group that this rank is not in")
    # As a tensor: torch needs NumPy, which may not be there, to broadcast an object.
    told = torch.frombuffer(bytearray(found.unique_id() if rank == 0 else _ID_BYTES), dtype=torch.uint8)
    over: Any = dist.group.WORLD if group is None else group
    if not any(device.type == "cpu" for device in over._device_types):
        told = told.to("cuda")
    dist.broadcast(told, group=group, group_src=0)
    return rank, num_ranks, bytes(told.tolist())


def _joined(
    found: NcclLibrary, unique_id: bytes, num_ranks: int, rank: int, timeout: timedelta, options: Options | None
) -> NcclCommunicator:
    """This rank's part in NCCL's own bootstrap, which has no timeout: a thread waits for it."""
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def join_others() -> NcclCommunicator:
        if device is not None:
            torch.cuda.set_device(device)
        return found.init([unique_id], num_ranks, rank, options)

    try:
        return within(timeout, join_others, "tritondt-nccl")
    except TimeoutError:
        raise PeerError(
            f"rank {rank} waited {timeout.total_seconds():g} s for all of {num_ranks} ranks to join in NCCL"
        ) from None
