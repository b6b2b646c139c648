"""The part of a process group that is on NCCL: communicators made on first use, by the ranks that take part."""

import threading
from collections.abc import Callable, Hashable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from tritondt._C import GroupCalls, NcclCalls
from tritondt.comm import world
from tritondt.comm.process_world import ProcessWorld
from tritondt.comm.work import again
from tritondt.errors import WorldError
from tritondt.process_group.nccl_programs import GroupRank
from tritondt.process_group.operation import Operation, Request, merged
from tritondt.process_group.operations import OperationCache
from tritondt.process_group.stream import CollectiveStream, NcclDevice, P2PStream
from tritondt.process_group.work import Asked, NcclWork


class NcclGroup:
    """One rank's part in a process group on NCCL; `ranks` are the group's, as ranks of the world.

    `calls` put operations that were asked for before into the stream of all ranks, but for messages.
    """

    def __init__(
        self,
        name: str,
        ranks: tuple[int, ...],
        group_rank: int,
        nccl_device: NcclDevice,
        timeout: timedelta,
        calls: GroupCalls | None,
    ) -> None:
        self._name, self._ranks, self._group_rank, self._nccl_device = name, ranks, group_rank, nccl_device
        self._streams, self.timeout, self._calls = nccl_device.streams, timeout, calls
        self._making = threading.Lock()
        self._world: ProcessWorld | None = None
        self._stream: CollectiveStream | None = None
        self._p2p_streams: dict[tuple[int, int], P2PStream] = {}
        self._failure: BaseException | None = None
        self._is_raised = self._is_ended = False
        self._coalesced: list[Request] | None = None
        self._refused: list[BaseException] = []  # why, before there was a stream
        self._kept: list[str] = []  # names of what its world ends with it
        self.operations = OperationCache(GroupRank(group_rank, len(ranks)), self.device, nccl_device.library)
        if calls is not None:
            self.operations.on_clear = calls.forget

    def find(
        self, key_of: Callable[..., Hashable | None], tensors: Sequence[torch.Tensor], arguments: tuple[Any, ...]
    ) -> tuple[Asked, NcclCalls, str, int, int, int] | None:
        """The operation kept for a call, as `GroupCalls` takes it; None where Python has something to do each time."""
        found = self.operations.kept(key_of(*arguments), tensors)
        if found is None or found.native is None or found.stagings or found.waits_on_host:
            return None
        start, stop, _ = found.results.indices(len(tensors))
        asked = Asked(found, self._streams, self._note_raised)
        return asked, found.native, found.text, found.fingerprint, start, stop

    @property
    def device(self) -> torch.device:
        """The device whose tensors the group carries."""
        return self._nccl_device.streams.device

    def run(
        self,
        operation: Operation,
        tensors: Sequence[torch.Tensor],
        timeout_s: float,
        *,
        is_synchronous: bool = False,
    ) -> NcclWork | None:
        """Puts an operation of all ranks into their stream; None between `start_coalescing` and its end.

        A synchronous operation goes into the caller's stream.
        """
        if self._failure is not None:
            self._check_usable(operation.text)
        if self._coalesced is not None:
            self._coalesced.append(Request(operation, tensors))
            return None
        stream = self._stream_of_all()
        made = self._put(operation, tensors, timeout_s, stream, is_synchronous=is_synchronous)
        if self._calls is not None and not self._calls.is_open and self._failure is None:
            stream.open(self._calls, self.find, self._check_usable)
        return made

    def send(
        self, operation: Operation, tensors: Sequence[torch.Tensor], source: int, target: int, timeout_s: float
    ) -> NcclWork | None:
        """Puts a message between two ranks of the group, of which this is one, into their stream; None as for `run`."""
        self._check_usable(operation.text)
        if self._coalesced is not None:
            self._coalesced.append(Request(operation, tensors))
            return None
        return self._put(operation, tensors, timeout_s, self._p2p_stream(source, target))

    def peer_of_message(self, source: int, target: int) -> int:
        """The other rank's number in the communicator that will carry a message between two ranks of the group."""
        if self._coalesced is not None:
            return target if self._group_rank == source else source
        # The communicator of a P2PStream has two ranks, in the order of the world.
        return int(self._ranks[source] < self._ranks[target]) ^ int(self._group_rank == target)

    def refuse(self, error: BaseException) -> None:
        """Tells the others that this rank takes no part in their next operation, and why."""
        if self._failure is not None:
            return
        if self._stream is None:
            self._refused.append(error)
        else:
            self._stream.refuse(error)

    def start_coalescing(self) -> None:
        """Holds back the operations that are asked for from now on."""
        self._close_calls()
        if self._coalesced is not None:
            raise WorldError("coalescing was started within coalescing; end the one before")
        self._coalesced = []

    def end_coalescing(self) -> NcclWork | None:
        """Puts the operations held back into the stream as one group; None where there were none."""
        coalesced, self._coalesced = self._coalesced, None
        if coalesced is None:
            raise WorldError("coalescing was ended that was not started")
        return self.run(*merged(coalesced), self.timeout.total_seconds()) if coalesced else None

    def _put(
        self,
        operation: Operation,
        tensors: Sequence[torch.Tensor],
        timeout_s: float,
        into: CollectiveStream | P2PStream,
        *,
        is_synchronous: bool = False,
    ) -> NcclWork:
        site = self._current_world().flight.recorder.site()
        work = NcclWork(operation, tensors, self._streams, self._note_raised, site, timeout_s)
        work.is_synchronous = is_synchronous
        into.put(work, tensors)
        if self._failure is not None:
            self._check_usable(operation.text)  # at once: nobody need wait for the work to hear of it
        return work

    def _close_calls(self) -> None:
        if self._calls is not None:
            self._calls.close()

    def _note_raised(self) -> None:
        self._is_raised = True

    def _check_usable(self, text: str) -> None:
        """Raises what the group failed with, once, and WorldError with the reason from then on."""
        if self._failure is None:
            return
        if not self._is_ended and self._world is not None and self._world.is_closed:
            self._begin_again()
            return
        if not self._is_raised and not self._is_ended:
            self._is_raised = True
            raise again(self._failure) from self._failure
        raise WorldError(
            f"{text} was asked of a process group that {'ended' if self._is_ended else 'failed before'} "
            f"({self._failure}); make a new one, or, after a failure, call tritondt.abort() on every rank"
        ) from self._failure

    def _begin_again(self) -> None:
        """Forgets the streams of a world that has ended; the next operation makes them anew."""
        with self._making:
            self._stream, self._failure, self._is_raised = None, None, False
            self._p2p_streams.clear()
            self._refused.clear()

    def _current_world(self) -> ProcessWorld:
        if self._world is None or self._world.is_closed:
            found = world.current()
            if not isinstance(found, ProcessWorld):
                raise WorldError("a process group was used by a rank that is a thread; it connects processes")
            self._world = found
        return self._world

    def _stream_of_all(self) -> CollectiveStream:
        found = self._stream
        if found is None or (self._world is not None and self._world.is_closed):
            with self._making:
                found = self._stream = self._make_stream(self._name, self._ranks)
                for error in self._refused:
                    found.refuse(error)
                self._refused.clear()
        return found

    def _p2p_stream(self, source: int, target: int) -> P2PStream:
        if self._world is not None and self._world.is_closed:
            self._begin_again()
        with self._making:
            found = self._p2p_streams.get((source, target))
            if found is None:
                ends = (self._ranks[source], self._ranks[target])
                name = f"{self._name}: {ends[0]} to {ends[1]}"
                ranks = tuple(sorted(ends))
                found = P2PStream(name, partial(self._make_stream, name, ranks), self._nccl_device.streams)
                self._p2p_streams[source, target] = found
        return found

    def _make_stream(self, name: str, ranks: tuple[int, ...]) -> CollectiveStream:
        own_world = self._current_world()
        with own_world.joining(name, ranks, self.timeout) as context:
            made = CollectiveStream(context, self._nccl_device, self._fail)
        own_world.keep(name, made)
        self._kept.append(name)
        return made

    def _fail(self, error: BaseException) -> None:
        """Ends the group for what one of its communicators met."""
        self._close_calls()
        if self._failure is None:
            self._failure = error
        if self._stream is not None:
            self._stream.fail(error)
        for p2p_stream in list(self._p2p_streams.values()):
            p2p_stream.fail(error)

    def abort(self) -> None:
        """Ends the group without waiting for the others."""
        self._is_ended = True
        self._fail(self._failure or WorldError(f"{self._name} was aborted"))

    def close(self) -> None:
        """Waits for all that was issued, and ends the group."""
        self._is_ended = True
        self._close_calls()
        if self._failure is not None:
            return
        if self._stream is not None:
            self._stream.close()
        for _, p2p_stream in sorted(self._p2p_streams.items()):
            p2p_stream.close()
        if self._world is not None:
            for name in self._kept:  # else every group of a long run stays until the end of its world
                self._world.forget(name)
        self._failure = WorldError(f"{self._name} was destroyed")
