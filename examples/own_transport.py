"""A transport of one's own: messages through Unix-domain sockets between the processes of a host.

torchrun --nproc-per-node 2 examples/own_transport.py
PYTHONPATH=examples TRITONDT_TRANSPORT=own_transport:PIPES torchrun --nproc-per-node 4 examples/redistribute.py
PYTHONPATH=examples TRITONDT_TRANSPORT=own_transport:PIPES python -m tritondt doctor
"""

import ctypes
import os
import select
import shutil
import socket
import struct
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

import tritondt as T
from tritondt.comm.answers import Answers
from tritondt.comm.communicator import tag_of
from tritondt.comm.member import ProcessContext
from tritondt.comm.monitor.flight import ExchangeRecord
from tritondt.comm.monitor.watch import Wait
from tritondt.comm.packing.messages import MessageBuffers
from tritondt.comm.transports.base import PackedCommunicator
from tritondt.comm.work import ThreadQueue

HEADER = struct.Struct("<IQ")  # what is exchanged, the same number on ranks that agree, and the length of the message
PLACE = struct.Struct("<I")
LOOK_MS = 1000


class PipeCommunicator(PackedCommunicator):
    """A communicator of ranks of one host, each connected to each; made by all of them together."""

    def __init__(self, context: ProcessContext) -> None:
        super().__init__(context, ThreadQueue())
        self._watch, self._timeout_s = context.watch, context.timeout.total_seconds()
        self._wait: Wait | None = None
        self._pipes = connected(context)
        self._bell, self._rope = socket.socketpair()  # wakes a thread that waits for others
        self._rope.setblocking(False)

    def start(self, record: ExchangeRecord, receives: MessageBuffers, sends: MessageBuffers) -> None:
        """Begins the wait for others, which the watch ends where somebody will not come."""
        self._wait = Wait(self._key, self.sequence, record, self._ranks, lambda _: self._ring(), self._timeout_s)
        self._watch.begin(self._wait)

    def finish(self, record: ExchangeRecord, receives: MessageBuffers, sends: MessageBuffers) -> None:
        """Sends and receives until all messages have gone and come."""
        tag = tag_of(record.fingerprint, self.sequence)
        moves = {(peer, select.POLLOUT): self._sending(peer, tag, part) for peer, part in sends.parts()}
        moves |= {(peer, select.POLLIN): self._receiving(peer, tag, part) for peer, part in receives.parts()}
        while moves:
            for peer, ready in self._ready(list(moves)):
                for event in (select.POLLIN, select.POLLOUT):
                    if (peer, event) in moves and ready & (event | select.POLLHUP | select.POLLERR):
                        self._advance(moves, peer, event)
        self._end_wait()

    def _ready(self, moves: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Peers whose pipes take or have bytes, with what poll says of them; raises why the wait is in vain."""
        poll, peers = select.poll(), {self._pipes[peer].fileno(): peer for peer, _ in moves}
        poll.register(self._bell, select.POLLIN)
        for descriptor, peer in peers.items():
            poll.register(descriptor, sum(event for other, event in moves if other == peer))
        wait = self._under_way()
        wait.suspects = tuple(self._ranks[peer] for peer in sorted(peers.values()))
        found = poll.poll(LOOK_MS)
        self._watch.look(wait)  # where the system gave the watch no thread
        self._check_usable(wait.description)  # another thread may have aborted
        if wait.reason is not None:
            raise self._flight.written_for(wait.reason)
        return [(peers[descriptor], ready) for descriptor, ready in found if descriptor in peers]

    def _advance(self, moves: dict[tuple[int, int], Iterator[None]], peer: int, event: int) -> None:
        try:
            if next(moves[peer, event], self) is self:
                del moves[peer, event]
        except OSError as error:
            wait, rank = self._under_way(), self._ranks[peer]
            wait.suspects = (rank,)
            text = f"rank {rank} closed its pipe while rank {self._rank} waited for it in {wait.description}; it has "
            raise self._flight.written_for(self._watch.broken(wait, f"{text}failed or left ({error})")) from error

    def _sending(self, peer: int, tag: int, content: torch.Tensor) -> Iterator[None]:
        yield from sent(self._pipes[peer], memoryview(HEADER.pack(tag, content.numel())))
        yield from sent(self._pipes[peer], bytes_of(content))

    def _receiving(self, peer: int, tag: int, content: torch.Tensor) -> Iterator[None]:
        header = bytearray(HEADER.size)
        yield from received(self._pipes[peer], memoryview(header))
        if HEADER.unpack(header) != (tag, content.numel()):  # before a byte of it reaches a tensor
            wait, rank = self._under_way(), self._ranks[peer]
            text = f"rank {rank} sent something else to rank {self._rank}, which runs {wait.description}; all ranks "
            raise self._flight.written_for(self._watch.disagreed(wait, f"{text}must {wait.must}"))
        yield from received(self._pipes[peer], bytes_of(content))

    def _under_way(self) -> Wait:
        assert self._wait is not None, "an exchange waits from its start to its end"
        return self._wait

    def _end_wait(self) -> None:
        wait, self._wait = self._wait, None
        if wait is not None:
            self._watch.end(wait)

    def break_off(self, record: ExchangeRecord, error: BaseException) -> None:
        """Tells the others, and disconnects: half of the exchange may have gone."""
        self._end_wait()
        if self.failure is None:
            self.failure = error
            self._watch.report(self._key, None, error)
        self._close_pipes()

    def set_timeout(self, seconds: float) -> None:
        """Sets how long an exchange may take from now on, in seconds."""
        self._check_usable(f"a timeout of {seconds:g} s")
        self._timeout_s = seconds

    def disown(self, error: T.WorldError) -> None:
        """Refuses all further use in a forked child, whose copies would hide the parent's end from its peers."""
        super().disown(error)
        self._close_pipes()

    def _refuse(self, error: BaseException) -> None:
        self.sequence += 1
        self._watch.report(self._key, self.sequence, error, is_refusal=True)

    def _interrupt(self, reason: BaseException) -> None:
        self._ring()

    def _disconnect(self, reason: BaseException) -> None:
        self._close_pipes()

    def _let_go(self) -> None:
        with self._turn:  # of a thread that has been woken, and lets go of them
            self._close_pipes()

    def _ring(self) -> None:
        with suppress(OSError):  # it has rung, or nobody waits any more
            self._rope.send(b"\0")

    def _close_pipes(self) -> None:
        for each in (*self._pipes.values(), self._bell, self._rope):
            each.close()


def connected(context: ProcessContext) -> dict[int, socket.socket]:
    """A socket to each other rank, by its place; PeerError where one fails, does not come, or is on another host."""
    answers, pipes = Answers.of(context), dict[int, socket.socket]()
    folder = Path(tempfile.mkdtemp(prefix="tritondt-pipes-"))  # of this user alone
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / "pipe"))
            listener.listen(len(context.ranks))
            listener.settimeout(LOOK_MS / 1000)
            answers.tell("pipe", str(folder / "pipe"))
            paths = answers.of_others("pipe")
            for place in range(context.place):
                pipes[place] = reached(context, place, paths[place])
            while missing := [place for place in range(len(context.ranks)) if place not in (*pipes, context.place)]:
                try:
                    pipe, _ = listener.accept()
                except TimeoutError:
                    late = [context.ranks[place] for place in missing]
                    answers.look(late)
                    if not answers.left_s:
                        raise T.PeerError(f"rank {context.rank} waited in vain for pipes of ranks {late}") from None
                    continue
                pipes[PLACE.unpack(pipe.recv(PLACE.size, socket.MSG_WAITALL))[0]] = pipe
    except BaseException:
        for pipe in pipes.values():
            pipe.close()
        raise
    finally:
        shutil.rmtree(folder)
    for pipe in pipes.values():
        pipe.setblocking(False)
    return pipes


def reached(context: ProcessContext, place: int, path: str) -> socket.socket:
    """A socket to the rank that listens at `path`."""
    pipe = socket.socket(socket.AF_UNIX)
    try:
        pipe.connect(path)
        pipe.sendall(PLACE.pack(context.place))
    except OSError as error:
        pipe.close()
        raise T.PeerError(
            f"rank {context.rank} cannot reach rank {context.ranks[place]} at {path} ({error}); pipes connect ranks of "
            "one host and one user, TRITONDT_TRANSPORT=sockets others"
        ) from error
    return pipe


def sent(pipe: socket.socket, content: memoryview) -> Iterator[None]:
    """Sends bytes, and yields where the pipe takes none."""
    while content:
        try:
            content = content[pipe.send(content) :]
        except BlockingIOError:
            yield


def received(pipe: socket.socket, content: memoryview) -> Iterator[None]:
    """Fills `content` with bytes of a pipe, and yields where it has none."""
    while content:
        try:
            count = pipe.recv_into(content)
        except BlockingIOError:
            yield
            continue
        if not count:
            raise ConnectionResetError("end of the pipe")
        content = content[count:]


def bytes_of(content: torch.Tensor) -> memoryview:
    """The memory of a tensor of bytes."""
    return memoryview((ctypes.c_char * content.numel()).from_address(content.data_ptr())).cast("B")


PIPES = T.Transport("pipes", ("cpu",), PipeCommunicator, crosses_hosts=False)

if __name__ == "__main__":
    T.register_transport(PIPES)
    os.environ["TRITONDT_TRANSPORT"] = "pipes"
    dist.init_process_group("gloo")
    mesh = T.init_device_mesh("cpu", (dist.get_world_size(),))
    rows = T.distribute_tensor(torch.arange(12.0).view(4, 3), mesh, [T.Shard(0)])
    columns = rows.redistribute(placements=[T.Shard(1)])
    if dist.get_rank() == 0:
        print("over pipes:", columns.to_local().tolist())
    T.close()
    dist.destroy_process_group()
