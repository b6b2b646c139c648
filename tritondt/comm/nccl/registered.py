"""Memory that is registered with a communicator once, and that collectives copy into and out of.

NCCL reads and writes registered memory where it lies, in other ranks' too: it reduces in the switch (NVLS), and from
2.27 on has kernels of few hops for symmetric windows. All ranks must then give it such memory, or none of them
(NCCL's user guide, user buffer registration), so that a plan decides it and no rank alone.
"""

from contextlib import suppress
from typing import Literal

import torch

from tritondt._C import NcclCommunicator, NcclError, NcclLibrary, NcclUnsupportedError
from tritondt.comm.nccl.memory import empty
from tritondt.errors import TransportError

_SYMMETRIC = 1  # NCCL_WIN_COLL_SYMMETRIC
_FIRST_WITH_WINDOWS = 22703


class RegisteredMemory:
    """Bytes of NCCL's allocation that are registered with a communicator until `close`, or until that is aborted.

    A symmetric window where the library and the devices have them (`kind` "window", 2.27), else a registered buffer
    ("buffer", 2.19). Made by all ranks of the communicator together, within `timeout_s`. TransportError where NCCL has
    neither, or refuses.
    """

    def __init__(
        self, native: NcclCommunicator, library: NcclLibrary, num_bytes: int, device: torch.device, timeout_s: float
    ) -> None:
        self._native = native
        self.kind: Literal["window", "buffer"] = "window"
        try:
            self._memory: torch.Tensor | None = empty((num_bytes,), torch.uint8, device, library)
            self._handle = self._register(self._memory, library, timeout_s)
        except NcclError as error:
            raise TransportError(
                f"{num_bytes} bytes were to be registered with NCCL for collectives, and were not: {error}; allowed "
                'are prices with "registered_bytes": 0 (TRITONDT_COSTS)'
            ) from error

    def _register(self, memory: torch.Tensor, library: NcclLibrary, timeout_s: float) -> int:
        if library.version_code >= _FIRST_WITH_WINDOWS:
            with suppress(NcclUnsupportedError):  # on all ranks alike, where they share no symmetric memory
                return self._native.register_window(memory.data_ptr(), memory.numel(), _SYMMETRIC, timeout_s)
        self.kind = "buffer"
        return self._native.register_buffer(memory.data_ptr(), memory.numel())

    def first(self, num_bytes: int) -> torch.Tensor:
        """The first bytes of the memory, the same place on every rank."""
        assert self._memory is not None, "memory was asked for that is registered no more"
        return self._memory[:num_bytes]

    def close(self) -> None:
        """Deregisters the memory and gives it back, while the communicator is there; once."""
        if self._memory is None:
            return
        if self.kind == "window":
            self._native.deregister_window(self._handle)
        else:
            self._native.deregister_buffer(self._handle)
        self._memory = None

    def give_back(self) -> None:
        """Gives the memory back after an abort of the communicator has returned, which ends its registrations."""
        self._memory = None
