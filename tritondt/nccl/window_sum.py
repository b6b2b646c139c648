"""Sums of all ranks' terms in a symmetric window, by the switch where there is multimem, else by peers' pointers."""

import importlib
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch

from tritondt._C import NcclUnsupportedError
from tritondt.comm.nccl.memory import empty
from tritondt.errors.arguments import checked_class
from tritondt.nccl.communicator import Communicator

_DTYPES = ("float32", "bfloat16", "float16", "float64", "int8", "uint8", "int16", "int32", "int64")
# Units of 16 bytes that a program adds at once.
_BLOCK = 256


@checked_class
class WindowSum:
    """A tensor on every rank that `run` replaces by the sum over all ranks, in one launch (NCCL 2.29).

    Made by all ranks of a communicator together, with one shape and dtype on all of them. `tensor` lies in a symmetric
    window: write this rank's term there, `run`, and read the sum. Each rank adds a share and writes it to all, so that
    all have the same bits. `by_multimem` says who adds: the switch (NVLink SHARP, multimem.ld_reduce), in an order of
    its own, or the ranks through peers' pointers, in the order of ranks; both round once, 16-bit floats from float32.
    Without it the switch does where it can. `num_programs`, 32 at most, bounds what of the GPU waits for peers.

    Raises ValueError for a dtype that is not added (multimem adds float32, bfloat16 and float16), for a tensor whose
    bytes are no multiple of 16, and where a rank is out of reach; NcclUnsupportedError before NCCL 2.29, and where
    `by_multimem` is True and the GPUs have none. Source: NCCL's documentation of ncclGetLsaMultimemDevicePointer, and
    of multimem in PTX.

    An example that needs two GPUs:

    >>> with WindowSum(communicator, (4096,), torch.bfloat16, "cuda") as terms:  # doctest: +SKIP
    ...     terms.tensor.copy_(gradient)
    ...     terms.run()
    """

    def __init__(
        self,
        communicator: Communicator,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        by_multimem: bool | None = None,
        num_programs: int = 32,
    ) -> None:
        module, signals = (
            importlib.import_module(f"tritondt.kernels.gpu.{name}") for name in ("window_sum", "signals")
        )
        name, device = str(dtype).removeprefix("torch."), torch.device(device)
        self._check(name, shape, dtype, num_programs, by_multimem, module.MULTIMEM_DTYPES, signals.MOST_PROGRAMS)
        resolved = importlib.import_module("tritondt.kernels.gpu.device_table").resolved
        resolved(device, module.window_sum_kernel)
        size, library = communicator.num_ranks, communicator.library
        self.tensor = empty(tuple(shape), dtype, device, library).zero_()
        words = empty((module.NUM_TURNS, num_programs, size), torch.int64, device, library).zero_()
        self._asked = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._met = torch.zeros(1, dtype=torch.int64, device=device)
        self._counts = torch.zeros(num_programs, dtype=torch.int64, device=device)
        if device.type == "cuda":  # nobody writes to words before they are zero
            torch.cuda.synchronize(device)
        with ExitStack() as undone:
            window, word_window = (
                undone.enter_context(communicator.register_window(each)) for each in (self.tensor, words)
            )
            self._peers, self._words = window.peer_pointers(), word_window.peer_pointers()
            if 0 in self._peers.tolist():
                raise ValueError(
                    f"the windows of ranks {self._out_of_reach()} are out of this GPU's reach; allowed are "
                    "ranks of one host or of one NVLink domain"
                )
            self.multimem = self._multimem(window, name in module.MULTIMEM_DTYPES, by_multimem)
            self._windows = undone.pop_all()
        elements = importlib.import_module("tritondt.kernels.gpu.reduce_slots").ELEMENTS
        num_units = self.tensor.nbytes // module.UNIT_BYTES
        lanes = signals.num_lanes(size, module.OPTIONS["num_warps"])
        by_store = device.type == "cuda"  # NCCL does not tell whether atomics are native between all
        self._constants = (size, lanes, elements[name], name, _BLOCK, self.multimem != 0, by_store)
        self._numbers = communicator.rank, num_units, self.multimem
        self._launch, self._options = module.window_sum_kernel[(num_programs,)], module.OPTIONS

    def run(self) -> None:
        """Replaces the tensor by the sum, on the current stream; collective, in the same order on all ranks.

        A CUDA graph can capture it. Where `stop` was called the tensor may hold anything.
        """
        words = self._words, self._counts, self._asked, self._met
        self._launch(self._peers, *words, *self._numbers, *self._constants, **self._options)

    def stop(self) -> None:
        """Ends all waits of this rank, those of later runs too: for a peer that does not come."""
        self._asked.fill_(1)

    @property
    def is_stopped(self) -> bool:
        """Whether a wait was ended by `stop`; waits for the current stream."""
        return bool(self._met.item())

    def close(self) -> None:
        """Ends the windows; collective, when all ranks have run to their end."""
        self._windows.close()

    def __enter__(self) -> "WindowSum":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._windows.__exit__(kind, error, trace)

    @staticmethod
    def _check(
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        num_programs: int,
        by_multimem: bool | None,
        multimem_dtypes: Sequence[str],
        most_programs: int,
    ) -> None:
        if name not in _DTYPES:
            raise ValueError(f"a sum of {name} in a window; allowed are {', '.join(_DTYPES)}")
        if by_multimem and name not in multimem_dtypes:
            raise ValueError(
                f"multimem has no sum of {name}; it adds {', '.join(multimem_dtypes)}: leave by_multimem out, and "
                f"peers' pointers add {name}"
            )
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        if num_bytes % 16 or not num_bytes:
            raise ValueError(f"a window of {num_bytes} bytes to be added; allowed is a positive multiple of 16")
        if not 1 <= num_programs <= most_programs:
            raise ValueError(f"{num_programs} programs for a sum in a window; allowed are 1 to {most_programs}")

    @staticmethod
    def _multimem(window: Any, is_added: bool, by_multimem: bool | None) -> int:
        """The address for multimem, 0 for peers' pointers."""
        if by_multimem is False or not is_added:
            return 0
        try:
            address: int = window.multimem_pointer()
        except NcclUnsupportedError:
            if by_multimem:
                raise
            return 0
        return address

    def _out_of_reach(self) -> list[int]:
        return [rank for rank, address in enumerate(self._peers.tolist()) if address == 0]
