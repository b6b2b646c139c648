"""Arenas in a symmetric window of NCCL, which maps memory of ranks for each other: of a host's, or an NVLink domain's.

Unproven on GPUs, and asked for by TRITONDT_SLOTS=windows alone. Slots and signals are those of `device_arenas`.
"""

import warnings

import torch

from tritondt import environment
from tritondt._C import NcclCommunicator, NcclLibrary, NcclUnsupportedError
from tritondt.comm.answers import Answers
from tritondt.comm.member import ProcessContext
from tritondt.comm.nccl.memory import empty
from tritondt.comm.nccl.streams import Stream
from tritondt.comm.processes import Processes
from tritondt.comm.transports.device_arenas import DeviceArenas
from tritondt.planning.slots import device_slots


class _Part:
    """Another rank's part of the window, mapped here as long as that is there."""

    def __init__(self, address: int) -> None:
        self.address = address

    def close(self) -> None:
        """Does nothing: the window ends as a whole."""


class _Window(_Part):
    """The window, and this rank's part of it, made by all ranks of the communicator together.

    The memory stays until `end` and `close`, or else to the end of the process: peers may write to it yet.
    """

    def __init__(self, native: NcclCommunicator, library: NcclLibrary, num_bytes: int, device: torch.device) -> None:
        self._native, self._memory, self._is_over = native, empty((num_bytes,), torch.uint8, device, library), False
        super().__init__(self._memory.data_ptr())
        _clear(self._memory)  # before anybody else can write to it

    def register(self, timeout_s: float) -> list[int]:
        """Addresses here of all ranks' parts, 0 for those out of reach; NcclUnsupportedError without a window."""
        self._handle = self._native.register_window(self.address, self._memory.numel(), timeout_s=timeout_s)
        _live.add(self)
        try:
            return self._native.peer_pointers(self._handle, 0)
        except NcclUnsupportedError:  # NCCL 2.27 and 2.28, on all ranks alike
            self.undo()
            raise

    def undo(self) -> None:
        """Ends a window that nobody has written to."""
        self._native.deregister_window(self._handle)
        self._is_over = True
        self.close()

    def end(self, stream: Stream) -> None:
        """Ends the window when all ranks have come here, behind all that they have put into `stream` before.

        Nobody awaits what peers write last into this rank's memory, so that all meet by a sum.
        """
        self._native.all_reduce(self.address, self.address, 1, "int64", "sum", stream.cuda_stream)
        stream.synchronize()
        self._native.deregister_window(self._handle)
        self._is_over = True

    def close(self) -> None:
        """Gives the memory back, where no rank writes to it any more."""
        if self._is_over and self in _live:
            _live.remove(self)
            del self._memory


_live: set[_Window] = set()


def share_windows(
    context: ProcessContext, native: NcclCommunicator, library: NcclLibrary, device: torch.device
) -> DeviceArenas | None:
    """Arenas of the ranks of a communicator whose memory a window of NCCL maps here, on any host.

    A collective call, after `share_device_arenas`; None where some do not ask for it (TRITONDT_SLOTS=windows), and,
    with a warning, where NCCL has no such window (2.29) or some reach nobody by it. PeerError where some do not come.
    """
    if len(context.ranks) == 1 or environment.slots() != "windows":
        return None
    try:
        answers, num_bytes = Answers.of(context), environment.arena_bytes()
        others = answers.of_others("device-arena")
        if any(other.get("window_bytes") != num_bytes for other in others.values()):
            return None
        window = _Window(native, library, num_bytes, device)
        try:
            pointers = window.register(context.timeout.total_seconds())
        except NcclUnsupportedError as error:
            _warn(context, str(error))
            return None
        places = [place for place, found in enumerate(pointers) if found]
        slots = device_slots(num_bytes, len(places))
        # All end the window together, and so all use it or none of them.
        reached = len(places) if slots.slot_bytes else 1
        answers.tell("device-window", reached)
        if min(reached, *answers.of_others("device-window").values()) == 1:
            window.undo()
            _warn(context, f"some of them reach nobody else, or {num_bytes} bytes have no slots for all")
            return None
        memories = {place: window if place == context.place else _Part(pointers[place]) for place in places}
        processes = Processes({place: others[place]["process"] for place in places if place != context.place})
        # NCCL does not tell whether atomics are native between all of them.
        return DeviceArenas(places, context.place, slots, memories, device, processes, by_store=True, end=window.end)
    except BaseException as error:
        context.watch.report(context.key, None, error)
        raise


def _warn(context: ProcessContext, why: str) -> None:
    warnings.warn(
        f"rank {context.rank} has no window of NCCL for slots with ranks {list(context.ranks)} ({why}); its messages "
        "go through NCCL",
        RuntimeWarning,
        stacklevel=3,
    )


def _clear(memory: torch.Tensor) -> None:
    """Sets memory to 0 and waits for that, in a stream of its own: others may have something that waits for a rank."""
    if memory.device.type != "cuda":
        memory.zero_()
        return
    stream = torch.cuda.Stream(memory.device)
    with torch.cuda.stream(stream):
        memory.zero_()
    stream.synchronize()
