"""Memory that NCCL knows: registered buffers, and windows that other ranks write to."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import torch

from tritondt._C import NcclCommunicator, NcclError
from tritondt.nccl.calls import raw_parts, stream_handle


class _Registered(ABC):
    """Memory registered with a communicator until `close`, or the end of a `with` block."""

    def __init__(self, native: NcclCommunicator, handle: int, tensor: torch.Tensor) -> None:
        self._native, self._handle, self.tensor = native, handle, tensor
        self._is_over = False

    @property
    def handle(self) -> int:
        """NCCL's number for the registration."""
        return self._handle

    def close(self) -> None:
        """Deregisters the memory; once, and before the communicator ends and the memory is freed."""
        if not self._is_over:
            self._is_over = True
            self._deregister()

    @abstractmethod
    def _deregister(self) -> None:
        """Tells NCCL that the memory is no longer registered."""

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        with contextlib.suppress(NcclError):  # the error on its way says why
            self.close()


class Buffer(_Registered):
    """Memory that NCCL may use in place (user buffer registration, NCCL 2.19).

    `Communicator.register_buffer` makes one, which keeps its tensor alive. Source: NCCL's documentation of
    ncclCommRegister.

    An example that needs a GPU:

    >>> with communicator.register_buffer(empty((4096,), torch.float32, "cuda")) as buffer:  # doctest: +SKIP
    ...     communicator.all_reduce(buffer.tensor)
    """

    def _deregister(self) -> None:
        self._native.deregister_buffer(self._handle)


class Window(_Registered):
    """Memory of all ranks of a communicator, which NCCL maps into each of them (NCCL 2.27).

    `Communicator.register_window` makes one; the tensor is kept alive as long. Collectives on tensors inside it may run
    faster. `put` and `wait_signals` write to other ranks' windows without their participation (NCCL 2.29), in streams
    that are torch.cuda.Stream or handles, by default the current one of the window's device. Source: NCCL's
    documentation of ncclCommWindowRegister.

    An example that needs two GPUs, for a rank and its peer:

    >>> with communicator.register_window(empty((4096,), torch.float32, "cuda")) as window:  # doctest: +SKIP
    ...     window.put([(peer, window.tensor[2048:], 0)])
    ...     window.wait_signals({peer: 1})
    """

    def put(
        self, puts: Sequence[tuple[int, torch.Tensor, int]], *, signal: int = 0, context: int = 0, stream: Any = None
    ) -> None:
        """Writes tensors into the windows of peers, each as (peer, tensor, offset in bytes), and then sends a signal to
        each.

        Not collective: a peer does nothing, but may wait for the signal. Tensors must lie in this or another window of
        the same communicator; NCCL refuses others with NcclError. For a tensor without elements only the signal is
        sent. `signal` and `context` are numbers below the options num_rma_sig and num_rma_ctx. Raises
        NcclUnsupportedError before NCCL 2.29. Source: NCCL's documentation of ncclPutSignal.
        """
        raw = [
            (peer, address, count * tensor.itemsize, offset)
            for peer, tensor, offset in puts
            for address, count in raw_parts("put", [tensor])
        ]
        self._native.put(raw, self._handle, stream_handle(stream, self.tensor), signal, context)

    def wait_signals(
        self, num_signals: Mapping[int, int], *, signal: int = 0, context: int = 0, stream: Any = None
    ) -> None:
        """Makes the stream wait until each peer has sent the given number of signals.

        Not collective. Raises NcclUnsupportedError before NCCL 2.29. Source: NCCL's documentation of ncclWaitSignal.
        """
        self._native.wait_signals(list(num_signals.items()), stream_handle(stream, self.tensor), signal, context)

    def peer_pointers(self, offset: int = 0) -> torch.Tensor:
        """Addresses of a byte of every rank's window, by rank, for kernels that read and write there.

        int64 of shape (num_ranks,) on the window's device; `offset` counts bytes from the window's start. 0 stands for
        a rank whose memory this GPU cannot load from: NCCL reaches those of one host, or of one NVLink domain. Not
        collective. The host waits for a copy to the device, so call it once, not at every launch. The addresses are
        valid until the window is closed. The kernels that use them must order accesses themselves, with `publish` and
        `await_all` of `tritondt.kernels.gpu.signals`. The window must be symmetric, as `register_window` makes it by
        default. Raises ValueError for an offset outside of the window, NcclUnsupportedError before NCCL 2.29. Source:
        NCCL's documentation of ncclGetPeerDevicePointer.

        An example that needs two GPUs:

        >>> pointers = window.peer_pointers()  # doctest: +SKIP
        >>> kernel[(1,)](pointers, window.tensor)  # reads (pointers + peer) as tl.pointer_type  # doctest: +SKIP
        """
        self._check_offset(offset)
        found = self._native.peer_pointers(self._handle, offset)
        return torch.tensor(found, dtype=torch.int64).to(self.tensor.device)

    def multimem_pointer(self, offset: int = 0) -> int:
        """The address of a byte of all ranks' windows at once: what `multimem` instructions store to, or sum.

        `offset` counts bytes from the window's start. Not collective; holds until the window is closed. Raises
        ValueError for an offset outside of the window, NcclUnsupportedError before NCCL 2.29 and where the GPUs have
        no multimem (NVLink SHARP). Source: NCCL's documentation of ncclGetLsaMultimemDevicePointer.

        An example that needs GPUs with NVLink SHARP:

        >>> address = window.multimem_pointer()  # doctest: +SKIP
        """
        self._check_offset(offset)
        return self._native.multimem_pointer(self._handle, offset)

    def _check_offset(self, offset: int) -> None:
        if not 0 <= offset < self.tensor.nbytes:
            raise ValueError(
                f"byte {offset} of a window was asked for; it has {self.tensor.nbytes} bytes, counted from 0"
            )

    def _deregister(self) -> None:
        self._native.deregister_window(self._handle)
