"""Signals between GPUs of one host, published and awaited on a stream: one launch of one warp, a lane per signal.

The counts are in device memory, so that a CUDA graph that has captured the launch counts on at each replay.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from tritondt.kernels.gpu.device_table import Shared, resolved
from tritondt.kernels.gpu.side_by_side import Started
from tritondt.kernels.signals import Signal, Stop, check_signals

# One program: who awaits must not wait for programs that have no place to run. One warp: nothing is to be shared.
_GRID = (1, 1, 1)
_NUM_WARPS = 1
_FEWEST_LANES = 32
# Whether a stop is asked for lies in the host's memory, from where it takes about a microsecond: between two readings
# what is awaited is looked at so often.
TURNS = tl.constexpr(64)
# Numbers in a signal's row: its word, its counter, its step.
ROW = tl.constexpr(len(Signal._fields))


class DeviceSignals(Started):
    """Signals on a device, prepared once and run many times; the counterpart of HostSignals.

    Arguments and errors are those of `tritondt.kernels.signals.signal_table`; ValueError too for tensors on the CPU
    outside of Triton's interpreter. A run is one launch, and uploads and allocates nothing.
    """

    def __init__(
        self,
        published: Sequence[Signal],
        awaited: Sequence[Signal],
        fingerprint: int,
        stop: Stop,
        device: torch.device | str,
    ) -> None:
        check_signals(published, awaited, fingerprint, stop)
        block = triton.next_power_of_2(max(_FEWEST_LANES, len(published), len(awaited)))
        # Triton has 64 bits for an argument of 2**31, and a kernel of its own: it is given all as signed numbers.
        signed = fingerprint - (fingerprint >> 31 << 32)
        further = (signed, len(published), len(awaited), block)
        self._device = resolved(torch.device(device), signal_kernel)
        self._number = self._device.index if self._device.type == "cuda" else None
        self._rows = _Rows([number for signal in (*published, *awaited) for number in signal], stop, self._device)
        if self._number is None:
            self._arguments: tuple[Any, ...] = (self._rows.values, stop.asked, stop.met, *further)
            self._compile(further)
            return
        self._arguments = (self._rows.values.data_ptr(), stop.asked.data_ptr(), stop.met.data_ptr(), *further)
        with torch.cuda.device(self._device):
            self._compile(further)
        torch.cuda.current_stream(self._device).synchronize()  # other streams may run it next

    def run(self) -> None:
        """Launches on the device's current stream."""
        if self._number is None:
            self._start(self._arguments, None)
        elif torch._C._cuda_getDevice() != self._number:
            with torch.cuda.device(self._device):
                self._start(self._arguments, self._rows.read_by_current_stream())
        else:
            self._start(self._arguments, self._rows.read_by_current_stream())

    def _compile(self, further: tuple[int, ...]) -> None:
        """Compiles for the current device."""
        tensors = self._rows.values, torch.int32, torch.int64
        compiled = signal_kernel.warmup(*tensors, *further, grid=_GRID, num_warps=_NUM_WARPS)
        self._prepare(signal_kernel, compiled, _GRID)


class _Rows(Shared):
    """Rows of signals, and the stop words, which stay as long as they do."""

    def __init__(self, numbers: Sequence[int], stop: Stop, device: torch.device) -> None:
        super().__init__(numbers, torch.int64, device)
        self.stop = stop


# As of the stop words, which need not start at a multiple of 16, nothing is to be assumed of the numbers.
@triton.jit(do_not_specialize=("asked", "met", "fingerprint", "num_published", "num_awaited"))
def signal_kernel(rows, asked, met, fingerprint, num_published, num_awaited, BLOCK: tl.constexpr):
    """Publishes the signals of the first rows, then awaits those of the others; up to BLOCK each."""
    low = fingerprint.to(tl.uint32).to(tl.int64)
    publish(rows, met, low, num_published, BLOCK)
    # What one lane has counted another may await.
    tl.debug_barrier()
    await_all(rows + num_published * ROW, asked, met, low, num_awaited, BLOCK)


@triton.jit
def publish(rows, met, low, count, BLOCK: tl.constexpr):
    """Writes the next count of each row's counter to the counter and, above `low`, to the word.

    Nothing where a wait of this rank was stopped before: what would be told of is not right.

    The release is at system scope, for peers on other devices: it covers what earlier launches of the stream wrote, as
    they had ended when this one began.
    """
    lanes = tl.arange(0, BLOCK)
    inside = lanes < count
    words, counters, nexts = _row_of_lane(rows, lanes, inside)
    inside &= tl.load(met) == 0
    tl.store(counters, nexts, mask=inside)
    tl.atomic_xchg(words, (nexts << 32) | low, mask=inside, sem="release", scope="sys")


@triton.jit
def await_all(rows, asked, met, low, count, BLOCK: tl.constexpr):
    """Waits until each row's word is the next count of its counter, above `low`; then the counters go on by one step.

    Where a stop is asked for while one is missing, it ends within some turns, notes so, and the counters stay.
    """
    lanes = tl.arange(0, BLOCK)
    inside = lanes < count
    words, counters, nexts = _row_of_lane(rows, lanes, inside)
    expected = (nexts << 32) | low
    missing = count
    is_waiting = missing > 0
    turn = lanes
    while is_waiting:
        # The sum of a word and 0 is a load with an order, which `tl.load` does not have.
        found = tl.atomic_add(words, 0, mask=inside, sem="acquire", scope="sys")
        missing = tl.sum((inside & (found != expected)).to(tl.int32))
        turn += 1
        is_waiting = (missing > 0) & (tl.sum(_asked(asked, lanes, turn)) == 0)
    tl.store(counters, nexts, mask=inside & (missing == 0))
    tl.store(met + lanes * 0, (lanes + 1).to(tl.int64), mask=(lanes == 0) & (missing > 0))


@triton.jit
def _row_of_lane(rows, lanes, inside):
    """Pointers to each lane's word and counter, and the counter's next value."""
    row = rows + lanes * ROW
    words = tl.load(row, mask=inside, other=0).to(tl.pointer_type(tl.int64))
    counters = tl.load(row + 1, mask=inside, other=0).to(tl.pointer_type(tl.int64))
    steps = tl.load(row + 2, mask=inside, other=0)
    return words, counters, tl.load(counters, mask=inside, other=0) + steps


@triton.jit
def _asked(asked, lanes, turn):
    """What one lane reads of whether a stop is asked for, at some turns, and zeros in the others.

    They add it up: were each to read it, they could part from each other.
    """
    is_reader = (lanes == 0) & (turn % TURNS == 0)
    return tl.load(asked + lanes * 0, mask=is_reader, other=0, volatile=True)
