"""The part of a process group that is on NCCL: communicators made on first use, by the ranks that take part."""

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import TypeVar

import torch

from tritondt.comm import world
from tritondt.comm.process_world import ProcessWorld
from tritondt.comm.work import again
from tritondt.errors import WorldError
from tritondt.process_group.nccl_calls import GroupRank
from tritondt.process_group.operation import Operation, Request, merged
from tritondt.process_group.operations import OperationCache
from tritondt.process_group.stream import CollectiveStream, NcclDevice, P2PStream
from tritondt.process_group.work import NcclWork

Kept = TypeVar("Kept", CollectiveStream, P2PStream)


class NcclGroup:
    """One rank's end of it; `ranks` are those of the world, in the order of the group."""

    def __init__(self, name: str, ranks: tuple[int, ...], place: int, carrier: NcclDevice, timeout: timedelta) -> None:
        self._name, self._ranks, self._place, self._carrier = name, ranks, place, carrier
        self._streams, self.timeout = carrier.streams, timeout
        self._making = threading.Lock()
        self._world: ProcessWorld | None = None
        self._lane: CollectiveStream | None = None
        self._channels: dict[tuple[int, int], P2PStream] = {}
        self._failure: BaseException | None = None
        self._is_told = self._is_ended = False
        self._gathered: list[Request] | None = None
        self.requests = OperationCache(GroupRank(place, len(ranks)), self.device, carrier.library)

    @property
    def device(self) -> torch.device:
        """Whose tensors it carries."""
        return self._carrier.streams.device

    def run(self, operation: Operation, tensors: Sequence[torch.Tensor], timeout_s: float) -> NcclWork | None:
        """Puts an operation of all ranks into their stream; None between `start_coalescing` and its end."""
        self._check_usable(operation.text)
        if self._gathered is not None:
            self._gathered.append(Request(operation, tensors))
            return None
        return self._put(operation, tensors, timeout_s, self._lane_of_all())

    def send(
        self, operation: Operation, tensors: Sequence[torch.Tensor], source: int, target: int, timeout_s: float
    ) -> NcclWork | None:
        """The same with a message between two places of the group, of which this is one."""
        self._check_usable(operation.text)
        if self._gathered is not None:
            self._gathered.append(Request(operation, tensors))
            return None
        return self._put(operation, tensors, timeout_s, self._channel(source, target))

    def peer_of_message(self, source: int, target: int) -> int:
        """What the other rank is called by the communicator that will carry a message between these places."""
        if self._gathered is not None:
            return target if self._place == source else source
        # A channel's communicator has two ranks, in the order of the world.
        return int(self._ranks[source] < self._ranks[target]) ^ int(self._place == target)

    def refuse(self, error: BaseException) -> None:
        """Tells the others that this rank takes no part in their next operation, and why."""
        if self._lane is not None and self._failure is None:
            self._lane.refuse(error)

    def start_coalescing(self) -> None:
        """Holds back what is asked for from now on."""
        if self._gathered is not None:
            raise WorldError("coalescing was started within coalescing; end the one before")
        self._gathered = []

    def end_coalescing(self) -> NcclWork | None:
        """Puts what was held back into the stream as one group; None where there was nothing."""
        gathered, self._gathered = self._gathered, None
        if gathered is None:
            raise WorldError("coalescing was ended that was not started")
        return self.run(*merged(gathered), self.timeout.total_seconds()) if gathered else None

    def _put(
        self,
        operation: Operation,
        tensors: Sequence[torch.Tensor],
        timeout_s: float,
        into: CollectiveStream | P2PStream,
    ) -> NcclWork:
        site = self._current_world().flight.recorder.site()
        work = NcclWork(operation, tensors, self._streams, self._told, site, timeout_s)
        into.put(work, tensors)
        self._check_usable(operation.text)  # at once: nobody need wait to be told
        return work

    def _told(self) -> None:
        self._is_told = True

    def _check_usable(self, text: str) -> None:
        """Raises what everything failed with, once; whoever comes later is told that it did."""
        if self._failure is None:
            return
        if not self._is_ended and self._world is not None and self._world.is_closed:
            self._begin_again()
            return
        if not self._is_told and not self._is_ended:
            self._is_told = True
            raise again(self._failure) from self._failure
        raise WorldError(
            f"{text} was asked of a process group that {'ended' if self._is_ended else 'failed before'} "
            f"({self._failure}); make a new one, or, after a failure, call tritondt.abort() on every rank"
        ) from self._failure

    def _begin_again(self) -> None:
        """Forgets what the world that has ended left; the next operation makes it anew."""
        with self._making:
            self._lane, self._failure, self._is_told = None, None, False
            self._channels.clear()

    def _current_world(self) -> ProcessWorld:
        if self._world is None or self._world.is_closed:
            found = world.current()
            if not isinstance(found, ProcessWorld):
                raise WorldError("a process group was used by a rank that is a thread; it connects processes")
            self._world = found
        return self._world

    def _lane_of_all(self) -> CollectiveStream:
        found = self._lane
        if found is None or (self._world is not None and self._world.is_closed):
            with self._making:
                found = self._lane = self._made(self._name, self._ranks)
        return found

    def _channel(self, source: int, target: int) -> P2PStream:
        if self._world is not None and self._world.is_closed:
            self._begin_again()
        with self._making:
            found = self._channels.get((source, target))
            if found is None:
                ends = (self._ranks[source], self._ranks[target])
                name = f"{self._name}: {ends[0]} to {ends[1]}"
                ranks = tuple(sorted(ends))
                found = P2PStream(name, lambda: self._made(name, ranks), self._carrier.streams)
                self._channels[source, target] = found
        return found

    def _made(self, name: str, ranks: tuple[int, ...]) -> CollectiveStream:
        within = self._current_world()
        made = CollectiveStream(within.join(name, ranks, self.timeout), self._carrier, self._fail)
        within.keep(name, made)
        return made

    def _fail(self, error: BaseException) -> None:
        """Ends all of it for what one of its communicators met."""
        if self._failure is None:
            self._failure = error
        if self._lane is not None:
            self._lane.fail(error)
        for channel in list(self._channels.values()):
            channel.fail(error)

    def abort(self) -> None:
        """Ends it without waiting for the others."""
        self._is_ended = True
        self._fail(self._failure or WorldError(f"{self._name} was aborted"))

    def close(self) -> None:
        """Waits for all that was issued, and ends it."""
        self._is_ended = True
        if self._failure is not None:
            return
        if self._lane is not None:
            self._lane.close()
        for _, channel in sorted(self._channels.items()):
            channel.close()
        self._failure = WorldError(f"{self._name} was destroyed")
