"""Start of NCCL communicators: ranks exchange the unique id through the store, and none waits for ever for another."""

import time
from datetime import timedelta

import torch

from tritondt import environment
from tritondt._C import NcclCommunicator, NcclError, NcclLibrary
from tritondt.comm.answers import Answers
from tritondt.comm.daemons import within
from tritondt.comm.member import ProcessContext
from tritondt.comm.nccl.streams import Streams, follow_in_graph
from tritondt.errors import PeerError, TransportError

# Each has buffers of some megabytes: of a large communicator not all need them.
_MOST_CONNECTED = 64
# Enough for the algorithm of large messages, a guess.
_COLLECTED_BYTES = 1 << 22
_PAUSE_S = 0.001
_never_over: list[torch.Tensor] = []


def join_nccl(context: ProcessContext, library: NcclLibrary, streams: Streams) -> NcclCommunicator:
    """This rank's NCCL communicator, which all ranks of `context` make together within its timeout.

    Raises PeerError where some do not come, TransportError where NCCL cannot make it.
    """
    context.watch.prepare(streams.ignore_captures)
    place, timeout, answers = context.place, context.timeout, Answers.of(context)
    if place == 0:
        unique_id = library.unique_id()
        answers.tell("nccl", unique_id.hex())
    else:
        unique_id = bytes.fromhex(answers.of_others("nccl", [0])[0])

    def join() -> NcclCommunicator:
        streams.bind_thread()
        made = library.init([unique_id], len(context.ranks), place, environment.nccl_options())
        if streams.connects_late:
            connect(made, place, len(context.ranks), streams, timeout)
        return made

    try:
        return within(timeout, join, "tritondt-nccl", answers.look)
    except TimeoutError:
        raise PeerError(
            f"rank {context.rank} waited {timeout.total_seconds():g} s for all of ranks {context.ranks} to join in NCCL"
        ) from None
    except NcclError as error:
        raise TransportError(f"rank {context.rank} could not make {context.name} in NCCL: {error}") from error


def connect(native: NcclCommunicator, place: int, size: int, streams: Streams, timeout: timedelta) -> None:
    """Exchanges a byte with the nearest ranks, and runs each collective twice, by which ranks connect.

    NCCL connects two ranks, or those of a ring or a tree, in the first call that needs it, and the host waits there: an
    abort meanwhile would free what that call works on. Here nobody aborts yet. TimeoutError where it does not end in
    time.
    """
    near = min(_MOST_CONNECTED // 2, size - 1)
    peers = sorted({(place + step) % size for step in range(-near, near + 1)} - {place})
    if not peers:
        return
    memory = torch.empty(2 * max(size, _COLLECTED_BYTES), dtype=torch.uint8, device=streams.device)
    stream, ends_at = streams.make(), time.monotonic() + timeout.total_seconds()
    follow_in_graph(stream, streams.current())
    first = memory.data_ptr()
    sends, receives = (
        [(peer, first + side * len(peers) + number, 1) for number, peer in enumerate(peers)] for side in (0, 1)
    )
    native.exchange(sends, receives, stream.cuda_stream)
    _collect(native, size, (first, first + memory.numel() // 2), stream.cuda_stream)
    end = stream.record_event()
    while not end.query():
        if time.monotonic() >= ends_at:
            _never_over.append(memory)  # it may be written to yet
            raise TimeoutError
        time.sleep(_PAUSE_S)


def _collect(native: NcclCommunicator, size: int, halves: tuple[int, int], stream: int) -> None:
    """Runs the collectives of few bytes and of many, for which NCCL takes other algorithms."""
    source, target = halves
    for num_bytes in (1, max(_COLLECTED_BYTES // size, 1)):
        native.all_gather(source, target, num_bytes, "uint8", stream)
        native.reduce_scatter(source, target, num_bytes, "uint8", "sum", stream)
        native.all_reduce(source, target, num_bytes * size, "uint8", "sum", stream)
