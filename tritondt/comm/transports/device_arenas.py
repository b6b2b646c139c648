"""Arenas on GPUs that the ranks of a host map of each other, for messages that are packed where they are unpacked.

Every rank says through the store on which host and GPU it is, passes a descriptor of its memory to the ranks of its
host (`device_memory`), and says whether it has mapped theirs: all of a host that ask for it and have memory to share
exchange through arenas, or none of them does. Ranks of other hosts, and messages longer than a slot, are NCCL's.
"""

import contextlib
import ctypes
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from tritondt import environment
from tritondt.comm.answers import Answers
from tritondt.comm.device_memory.descriptors import DescriptorSwap
from tritondt.comm.device_memory.driver import CudaDriver, MappedMemory
from tritondt.comm.member import ProcessContext
from tritondt.comm.nccl.streams import Stream
from tritondt.comm.processes import Processes, machine, namespace, this_process
from tritondt.errors import TransportError
from tritondt.kernels.signals import COUNTER_BYTES, FINGERPRINT_BITS, PeerSlots, SlotSignals, Stop
from tritondt.planning.slots import NUM_SLOTS, WORD_BYTES, DeviceSlots, device_slots

# What ranks of a host have said of themselves, by place, and their memory.
_Near = tuple[Mapping[int, Mapping[str, Any]], dict[int, MappedMemory]]


class Memory(Protocol):
    """Memory of a device, mapped here."""

    @property
    def address(self) -> int:
        """Where it is mapped."""
        ...

    def close(self) -> None:
        """Unmaps it."""
        ...


def _do_nothing(stream: Stream) -> None: ...


class DeviceArenas:
    """Arenas of the ranks at `places` of a communicator, by place, one of which is this rank's `place`.

    Counts of what this rank has packed and unpacked are in memory of its own, where only its stream reads and writes
    them: whatever a CUDA graph replays counts as well.
    """

    def __init__(
        self,
        places: Sequence[int],
        place: int,
        slots: DeviceSlots,
        memories: Mapping[int, Memory],
        device: torch.device,
        processes: Processes | None = None,
        *,
        by_store: bool = False,
        end: Callable[[Stream], object] = _do_nothing,
    ) -> None:
        """`by_store` where atomics of some rank are not native in another one's memory; alike on all of them.

        `end`, collective, is called with the communicator's stream before that is ended, and before `close`.
        """
        self._processes, self._by_store, self.end = processes or Processes({}), by_store, end
        self.places, self.slots = tuple(places), slots
        self._number, self._place, self._device, self._memories = self.places.index(place), place, device, memories
        self.address = memories[place].address
        # The first is read by kernels that wait, where the host can write to it whatever the device does. It does so by
        # its address, as who asks for a stop may be in any mode of torch.
        self._stop = Stop(
            torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda"),
            torch.zeros(1, dtype=torch.int64, device=device),
        )
        self._asked = ctypes.c_int32.from_address(self._stop.asked.data_ptr())
        # Counters of what goes to each place and comes from there, and a word for the programs of a launch.
        num_counters = 2 * len(self.places) * COUNTER_BYTES // 8
        self._counters = torch.zeros(num_counters + 1, dtype=torch.int64, device=device)
        self._num_ended = self._counters.data_ptr() + 8 * num_counters
        self._is_open = True

    def slots_at(self, place: int) -> int:
        """Address of this rank's first slot in the arena of the rank at `place`."""
        return self._memories[place].address + self.slots.start(self._number, 0)

    def slots_of(self, place: int) -> int:
        """Address of the first slot of the rank at `place` in this rank's own arena."""
        return self.address + self.slots.start(self.places.index(place), 0)

    def leaving(self, targets: Sequence[int], fingerprint: int) -> SlotSignals:
        """Signals of what packs for `targets`.

        Each message waits until its target has unpacked the one that was in its slot before, `NUM_SLOTS` messages ago.
        """
        peers = [
            PeerSlots(
                self.address + self.slots.unpacked_word(self.places.index(place), 0),
                self._memories[place].address + self.slots.packed_word(self._number, 0),
                self._counter(place, is_sent=True),
            )
            for place in targets
        ]
        return self._signals(peers, NUM_SLOTS, 0, fingerprint % (1 << FINGERPRINT_BITS))

    def arriving(self, sources: Sequence[int], fingerprint: int) -> SlotSignals:
        """Signals of what unpacks what `sources` have packed."""
        peers = [
            PeerSlots(
                self.address + self.slots.packed_word(self.places.index(place), 0),
                self._memories[place].address + self.slots.unpacked_word(self._number, 0),
                self._counter(place, is_sent=False),
            )
            for place in sources
        ]
        return self._signals(peers, 0, fingerprint % (1 << FINGERPRINT_BITS), 0)

    def _signals(self, peers: Sequence[PeerSlots], lag: int, awaited: int, published: int) -> SlotSignals:
        sizes = NUM_SLOTS, self.slots.slot_bytes, WORD_BYTES
        return SlotSignals(
            tuple(peers), lag, awaited, published, *sizes, self._num_ended, self._stop, by_store=self._by_store
        )

    def stop(self) -> None:
        """Ends all waits that are in a stream, and those put there later; what they would have let pass is not done."""
        self._asked.value = 1

    def close(self) -> None:
        """Unmaps all arenas, when nothing that reads or writes them is in a stream; once.

        TransportError where the driver refuses one; the others are unmapped.
        """
        if self._is_open:
            self._is_open = False
            self._processes.close()
            _close_all(self._memories)

    def ended(self) -> list[int]:
        """Places of the ranks whose processes have ended, as far as this one can see."""
        return self._processes.ended() if self._is_open else []

    def abandon(self) -> None:
        """Leaves all arenas mapped, and what signals count, to the end of the process: something may use them yet."""
        if self._is_open:
            self._is_open = False
            self._processes.close()
            self.stop()
            _abandoned.append(self)

    def _counter(self, place: int, *, is_sent: bool) -> int:
        """Address of the counter of messages for another rank, or from it."""
        return self._counters.data_ptr() + COUNTER_BYTES * (2 * self.places.index(place) + is_sent)


_abandoned: list[DeviceArenas] = []


def share_device_arenas(
    context: ProcessContext, number: int, device: torch.device, driver: Callable[[], CudaDriver] = CudaDriver
) -> DeviceArenas | None:
    """Arenas of this host's ranks of a communicator, on device `number` of CUDA, for tensors on `device`.

    A collective call; None where this rank is alone on its host, asks for none (TRITONDT_SLOTS), or where some of
    them cannot map each other's memory. Raises PeerError where some do not come.
    """
    if len(context.ranks) == 1:
        return None
    try:
        asked = environment.slots()
        if asked != "1":
            offer = {"window_bytes": environment.arena_bytes(), "process": this_process()}
            Answers.of(context).tell("device-arena", offer if asked == "windows" else {})
            return None
        return _Sharing(context, driver(), number, device).run()
    except BaseException as error:
        context.watch.report(context.key, None, error)
        raise


class _Sharing:
    """One rank's part in sharing arenas on GPUs, within the communicator's timeout."""

    def __init__(self, context: ProcessContext, driver: CudaDriver, number: int, device: torch.device) -> None:
        self._context, self._driver, self._number, self._device = context, driver, number, device
        self._answers, self._place = Answers.of(context), context.place

    def run(self) -> DeviceArenas | None:
        """The arenas of all ranks of the host, where all of them have mapped all of them."""
        with contextlib.ExitStack() as undone, DescriptorSwap() as swap:
            made = self._made()
            if made is None:
                self._answers.tell("device-arena", {})
                return None
            own, descriptor = made
            undone.callback(own.close)
            undone.callback(os.close, descriptor)
            asked = environment.arena_bytes()
            offer: dict[str, Any] = {"here": _here(), "bytes": asked, "device": self._driver.identity(self._number)}
            offer |= {"mapped_bytes": own.num_bytes, "process": this_process(), "swap": swap.told}  # whole pages

            def take(near: Mapping[int, Mapping[str, Any]]) -> _Near | None:
                told = {place: each["swap"] for place, each in near.items() if place != self._place}
                descriptors = swap.swap(descriptor, told, self._place, self._answers.left_s, self._answers.look)
                memories = self._mapped(near, descriptors)
                undone.callback(_close_all, memories)
                return None if memories is None else (near, memories)

            def is_enough(near: Mapping[int, Mapping[str, Any]]) -> bool:
                return len(near) > 1 and device_slots(asked, len(near)).slot_bytes > 0

            found = self._answers.share("device-arena", offer, is_enough, take)
            if found is None:
                return None
            near, memories = found
            slots, all_memories = device_slots(asked, len(near)), {self._place: own, **memories}
            atomics = all(self._driver.has_atomics(self._number, each["device"]) for each in near.values())
            self._answers.tell("device-atomics", atomics)
            by_store = not (atomics and all(self._answers.of_others("device-atomics", near).values()))
            processes = Processes({place: near[place]["process"] for place in memories})
            undone.callback(processes.close)
            arenas = DeviceArenas(
                tuple(near), self._place, slots, all_memories, self._device, processes, by_store=by_store
            )
            undone.pop_all()  # what was made stays, but for the descriptor
            os.close(descriptor)
            return arenas

    def _made(self) -> tuple[MappedMemory, int] | None:
        """Memory of this rank, and its descriptor; None where its device has none to share."""
        if not self._driver.can_share(self._number):
            return None
        try:
            return self._driver.allocate(self._number, environment.arena_bytes())
        except TransportError as error:
            self._warn(error)
            return None

    def _mapped(
        self, near: Mapping[int, Mapping[str, Any]], descriptors: Mapping[int, int]
    ) -> dict[int, MappedMemory] | None:
        """Memory of the others, by place; None where this rank's device does not reach all of it."""
        memories = dict[int, MappedMemory]()
        try:
            for place, descriptor in descriptors.items():
                if not self._driver.can_access(self._number, near[place]["device"]):
                    raise TransportError(
                        f"its GPU does not reach that of rank {self._context.ranks[place]}, or CUDA_VISIBLE_DEVICES "
                        "hides it"
                    )
                memories[place] = self._driver.map(self._number, descriptor, near[place]["mapped_bytes"])
        except BaseException as error:
            _close_all(memories)
            if isinstance(error, TransportError):
                self._warn(error)
                return None
            raise
        finally:
            for descriptor in descriptors.values():
                os.close(descriptor)
        return memories

    def _warn(self, error: TransportError) -> None:
        warnings.warn(
            f"rank {self._context.rank} cannot share memory of its GPU with ranks {list(self._context.ranks)} "
            f"({error}); its messages go through NCCL",
            RuntimeWarning,
            stacklevel=2,
        )


def _close_all(memories: Mapping[int, Memory] | None) -> None:
    """Unmaps all; TransportError afterwards where the driver refused some."""
    refusals = []
    for memory in (memories or {}).values():
        try:
            memory.close()
        except TransportError as error:
            refusals.append(str(error))
    if refusals:
        raise TransportError("; ".join(refusals))


def _here() -> str:
    """Identity of machine, user and network namespace: equal for processes that can pass each other descriptors."""
    return f"{machine()}/{os.geteuid()}/{namespace('net')}"
