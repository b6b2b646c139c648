"""Start of NCCL communicators: ranks exchange the unique id through the store, and none waits for ever for another."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from tritondt import environment
from tritondt._C import NcclCommunicator, NcclError, NcclLibrary
from tritondt.comm.member import ProcessContext
from tritondt.comm.nccl.streams import Streams
from tritondt.errors import PeerError, TransportError

Result = TypeVar("Result")


def join_nccl(context: ProcessContext, library: NcclLibrary, streams: Streams) -> NcclCommunicator:
    """This rank's NCCL communicator, which all ranks of `context` make together within its timeout.

    Raises PeerError where some do not come, TransportError where NCCL cannot make it.
    """
    context.watch.prepare(streams.ignore_captures)
    place = context.place
    store, timeout = dist.PrefixStore(context.key, context.store), context.timeout
    try:
        if place == 0:
            store.set("nccl", library.unique_id().hex())
        store.wait(["nccl"], timeout)
        unique_id = bytes.fromhex(store.get("nccl").decode())
    except RuntimeError as error:
        raise PeerError(
            f"rank {context.rank} could not meet rank {context.ranks[0]} to make {context.name}: {error}"
        ) from error

    def join() -> NcclCommunicator:
        streams.bind_thread()
        return library.init([unique_id], len(context.ranks), place, environment.nccl_options())

    try:
        return within(timeout, join)
    except TimeoutError:
        raise PeerError(
            f"rank {context.rank} waited {timeout.total_seconds():g} s for all of ranks {context.ranks} to join in NCCL"
        ) from None
    except NcclError as error:
        raise TransportError(f"rank {context.rank} could not make {context.name} in NCCL: {error}") from error


def within(timeout: timedelta, make: Callable[[], Result]) -> Result:
    """The result of `make`; TimeoutError where it takes longer than `timeout`, in a thread that is left to itself."""
    outcome: list[Result | BaseException] = []

    def run() -> None:
        try:
            outcome.append(make())
        except BaseException as error:  # noqa: BLE001  the caller raises it
            outcome.append(error)

    thread = threading.Thread(target=run, name="tritondt-nccl", daemon=True)
    thread.start()
    thread.join(timeout.total_seconds())
    if not outcome:
        raise TimeoutError
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]
