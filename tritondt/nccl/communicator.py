"""A rank's part in a communicator of NCCL, by tensors: its making of others, its end, groups, ops and memory."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch

from tritondt._C import NcclCallConfig, NcclCommunicator, NcclLibrary
from tritondt.errors import ArgumentError, PeerError
from tritondt.errors.arguments import checked_class
from tritondt.nccl.calls import Call, dtype_name, raw_call
from tritondt.nccl.collectives import Collectives
from tritondt.nccl.memory import Buffer, Window

Options = Mapping[str, int | str]
# NCCL's flags of a window: symmetric memory of all ranks, or of each alone.
_SYMMETRIC, _NOT_SYMMETRIC = 1, 0


@checked_class
class Communicator(Collectives):
    """One rank of a communicator of NCCL; `init`, `join`, `bootstrap` and other communicators make one.

    As a context manager it ends by `close`, or by `abort` where the block raises. Calls go into a stream and return at
    once; tensors must stay unchanged until the stream has passed them. A call that NCCL refuses raises NcclError. A
    function that the loaded version lacks raises NcclUnsupportedError with the version that has it.

    A communicator with the option {"blocking": 0} may continue in the background after every call: call `wait` before
    the next one. Any thread may call; calls run one at a time, and `abort` ends the wait of another thread.

    An example that needs a GPU:

    >>> with init([library().unique_id()], num_ranks=1, rank=0) as communicator:  # doctest: +SKIP
    ...     communicator.all_reduce(torch.ones(4, device="cuda"))
    """

    def __init__(self, native: NcclCommunicator, library: NcclLibrary) -> None:
        super().__init__(native)
        self.library = library
        self._is_over = self._is_revoked = False

    @property
    def native(self) -> NcclCommunicator:
        """The communicator of the extension, whose calls take addresses and counts."""
        return self._native

    @property
    def rank(self) -> int:
        """This rank, from 0."""
        return self._native.rank

    @property
    def num_ranks(self) -> int:
        """Ranks in all."""
        return self._native.num_ranks

    @property
    def device(self) -> int:
        """The number of the CUDA device, as NCCL knows it."""
        return self._native.device

    @property
    def is_blocking(self) -> bool:
        """Whether calls return once the host's part is done; see the option "blocking"."""
        return self._native.is_blocking

    def split(self, color: int | None, key: int = 0, options: Options | None = None) -> "Communicator | None":
        """Makes a communicator of the ranks of each color, ordered by key and then by rank; returns None for the color
        None.

        Collective. `options` are fields of ncclConfig_t; those of this communicator by default. Source: NCCL's
        documentation of ncclCommSplit (2.18).
        """
        made = self._native.split(color, key, options)
        return None if made is None else Communicator(made, self.library)

    def shrink(self, excluded: Sequence[int], options: Options | None = None, *, abort: bool = False) -> "Communicator":
        """Makes a communicator of all ranks but the excluded ones, numbered anew.

        Collective among the remaining ranks; the excluded ones, which may be dead, do not call it. `abort` first ends
        operations in progress, as after an error. Source: NCCL's documentation of ncclCommShrink (2.27).
        """
        return Communicator(self._native.shrink(list(excluded), options, abort), self.library)

    def grow(self, num_ranks: int, unique_id: bytes | None = None, options: Options | None = None) -> "Communicator":
        """Makes a communicator of `num_ranks` from these ranks and new ones that call `join`.

        Collective among all of them. `unique_id` is the one from `grow_id` on the rank that made it, and None on the
        others. Source: NCCL's documentation of ncclCommGrow (2.29).
        """
        return Communicator(self._native.grow(num_ranks, unique_id, options), self.library)

    def grow_id(self) -> bytes:
        """The 128 bytes for ranks that call `join`; made by one rank, once for each `grow` (2.29).

        Not collective. Source: NCCL's documentation of ncclCommGetUniqueId.
        """
        return self._native.grow_id()

    def poll(self) -> bool:
        """Whether the communicator is ready for another call.

        Not collective; it never waits. Raises NcclError for a failure in the background, on this rank or another.
        Source: NCCL's documentation of ncclCommGetAsyncError (2.4).
        """
        return self._native.poll()

    def wait(self, timeout_s: float) -> bool:
        """Waits until the communicator is ready for another call; False when `timeout_s` seconds are over.

        Not collective; it waits for the host's part of calls, not for the stream. Raises NcclError as `poll` does.
        """
        return self._native.wait(timeout_s)

    def close(self, timeout_s: float = 300.0) -> None:
        """Ends the communicator once all issued operations have run; may be called once.

        Collective, except after `revoke`. If other ranks do not arrive within `timeout_s` seconds, a nonblocking
        communicator is aborted and raises PeerError. Source: NCCL's documentation of ncclCommFinalize and
        ncclCommDestroy (2.14).
        """
        if self._is_over:
            return
        if not self._is_revoked:
            self._native.finalize()
            if not self._native.wait(timeout_s):
                self.abort()
                raise PeerError(f"the other ranks did not end this communicator within {timeout_s:g} s; it was aborted")
        self._is_over = True
        self._native.destroy()

    def abort(self) -> None:
        """Ends all operations in progress, and the communicator; may be called from any thread, and repeatedly.

        Not collective, but a rank that does not call it hangs. Source: NCCL's documentation of ncclCommAbort (2.4).
        """
        self._is_over = True
        self._native.abort()

    def revoke(self) -> None:
        """Ends all operations in progress; afterwards the communicator takes only `split`, `shrink` and `close`.

        Not collective, but every rank must call it. Source: NCCL's documentation of ncclCommRevoke (2.28.7).
        """
        self._native.revoke()
        self._is_revoked = True

    def __enter__(self) -> "Communicator":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abort()

    def group(self, calls: Sequence[Call], *, stream: Any = None, config: NcclCallConfig | None = None) -> None:
        """Starts calls together, like NCCL's groups: messages that meet must be in one group.

        Args:
            calls: The calls of this rank, in any order.
            stream: A torch.cuda.Stream or its handle; the current stream of the tensors' device by default.
            config: Options of this group, which `library.call_config({"max_ctas": 4})` makes (2.31).

        Raises ValueError, before anything is started, for tensors that do not fit. Source: NCCL's documentation of
        ncclGroupStart.
        """
        self._issue(calls, stream, config)

    def simulate(self, calls: Sequence[Call]) -> float | None:
        """Microseconds that NCCL estimates for the collectives of a group, without running it; None without an
        estimate.

        Collective if the group has collectives: they are simulated on a child communicator, which is then ended,
        because NCCL keeps simulated calls queued. Messages have no estimate. Blocking communicators only. Source:
        NCCL's documentation of ncclGroupSimulateEnd (2.22).
        """
        return self._native.simulate([raw_call(call, self.num_ranks) for call in calls])

    @contextlib.contextmanager
    def pre_mul_sum(self, factor: float | torch.Tensor, dtype: torch.dtype) -> Iterator[int]:
        """An op that sums terms times a factor: returns its number, for the `op` of calls within the block.

        Not collective. A tensor factor has one element of `dtype`, and is read on the device when the op is used.
        Source: NCCL's documentation of ncclRedOpCreatePreMulSum (2.11).
        """
        if isinstance(factor, torch.Tensor):
            if (factor.numel(), factor.dtype) != (1, dtype):
                raise ArgumentError(f"a factor of {factor.numel()} {factor.dtype} was given; it must be one {dtype}")
            number = self._native.pre_mul_sum_on_device(factor.data_ptr(), dtype_name(dtype))
        else:
            number = self._native.pre_mul_sum(factor, dtype_name(dtype))
        try:
            yield number
        finally:
            if not self._is_over:
                self._native.destroy_op(number)

    def register_buffer(self, tensor: torch.Tensor) -> Buffer:
        """Registers memory that NCCL may use in place until the buffer is closed, for collectives without copies.

        Not collective. The tensor should come from `empty` or `memory_pool`. Source: NCCL's documentation of
        ncclCommRegister (2.19).
        """
        return Buffer(self._native, self._native.register_buffer(tensor.data_ptr(), tensor.nbytes), tensor)

    def register_window(self, tensor: torch.Tensor, *, is_symmetric: bool = True, timeout_s: float = 300.0) -> Window:
        """Maps memory of all ranks, of one size, for `Window.put`; symmetric memory by default.

        Collective. The tensor must come from `empty` or `memory_pool`. `timeout_s` is for a nonblocking communicator,
        which is waited for. Raises NcclUnsupportedError where these ranks cannot share memory. Source: NCCL's
        documentation of ncclCommWindowRegister (2.27).
        """
        flags = _SYMMETRIC if is_symmetric else _NOT_SYMMETRIC
        handle = self._native.register_window(tensor.data_ptr(), tensor.nbytes, flags, timeout_s)
        return Window(self._native, handle, tensor)
