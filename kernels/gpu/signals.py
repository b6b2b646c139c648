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
        by_store: bool = False,
    ) -> None:
        check_signals(published, awaited, fingerprint, stop)
        block = triton.next_power_of_2(max(_FEWEST_LANES, len(published), len(awaited)))
        # Triton has 64 bits for an argument of 2**31, and a kernel of its own: it is given all as signed numbers.
        signed = fingerprint - (fingerprint >> 31 << 32)
        self._device = resolved(torch.device(device), signal_kernel)
        self._number = self._device.index if self._device.type == "cuda" else None
        # The interpreter takes no PTX; to memory of the host an exchange is the same.
        further = (signed, len(published), len(awaited), block, by_store and self._number is not None)
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
def signal_kernel(
    rows,
    asked,
    met,
    fingerprint,
    num_published,
    num_awaited,
    BLOCK: tl.constexpr,
    BY_STORE: tl.constexpr,
):
    """Publishes the signals of the first rows, then awaits those of the others; up to BLOCK each."""
    low = fingerprint.to(tl.uint32).to(tl.int64)
    publish_rows(rows, met, low, num_published, BLOCK, BY_STORE)
    # What one lane has counted another may await.
    tl.debug_barrier()
    await_rows(rows + num_published * ROW, asked, met, low, num_awaited, BLOCK, BY_STORE)


@triton.jit
def publish(words, contents, inside, BY_STORE: tl.constexpr = False):
    """Writes `contents` to the int64 words at `words`, for peers that await them; a call for Triton's kernels.

    A peer that has seen a word by `await_all` sees all that was written before: by this program, by earlier launches of
    the stream, and by every peer that this program has awaited itself. Writes of other programs of the launch are not
    among these. Where peers are to read them as well, the last program publishes, which a counter with acq_rel at gpu
    scope finds.

    Args:
        words: pointers to int64 in any memory that this GPU can write to, the peers' as well, (BLOCK,).
        contents: int64, (BLOCK,). A word must not be written again before its awaiter has seen it.
        inside: int1, (BLOCK,); nothing is written elsewhere.
        BY_STORE: writes by st.release.sys, which is compiled only, and not interpreted. Else by an atomic exchange,
            which peers' memory must be native to: NVLink carries it, and PCIe may not.

    An example that needs two GPUs, where `peers` are pointers of `Window.peer_pointers` to a word each:

    >>> publish(peers, contents, peer < num_peers)  # doctest: +SKIP
    """
    # What the other threads have written is before this thread's release.
    tl.debug_barrier()
    if BY_STORE:
        tl.inline_asm_elementwise(
            "{ .reg .pred %inside; setp.ne.s32 %inside, $3, 0; @%inside st.release.sys.global.b64 [$1], $2;"
            " mov.u32 $0, 0; }",
            "=r,l,l,r",
            [words.to(tl.int64), contents, inside.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.atomic_xchg(words, contents, mask=inside, sem="release", scope="sys")


@triton.jit
def await_all(words, contents, inside, asked, BY_STORE: tl.constexpr = False):
    """Waits until the int64 words at `words` are `contents`, and returns 0; a call for Triton's kernels.

    This program then sees all that was written before each word was published. Where a stop is asked for while words
    are missing, it ends within some turns and returns how many: what they stand for must not be read then.

    Programs that wait keep their place on the GPU. So whoever publishes must have run, or have a place for sure: a
    launch before, or the first program of this one.

    Args:
        words: pointers to int64 in this GPU's own memory, (BLOCK,).
        contents: int64, (BLOCK,), for which each word is looked at: a word that has gone past it is awaited for ever.
        inside: int1, (BLOCK,); words elsewhere are not looked at.
        asked: pointer to an int32 that this GPU can read; all waits end once the host has made it other than 0. A
            pinned tensor of the host's is one.
        BY_STORE: looks by ld.acquire.sys, for words that peers publish so; compiled only, and not interpreted.

    An example that needs two GPUs:

    >>> if await_all(words + lane, contents, lane < num_peers, asked) == 0:  # doctest: +SKIP
    ...     rows = tl.load(peers_rows)
    """
    count = tl.sum(inside.to(tl.int32))
    missing = count
    is_waiting = missing > 0
    lanes = tl.arange(0, words.shape[0])
    turn = 0
    while is_waiting:
        if BY_STORE:
            found = tl.inline_asm_elementwise(
                "{ .reg .pred %inside; .reg .b64 %found; setp.ne.s32 %inside, $2, 0; mov.b64 %found, 0;"
                " @%inside ld.acquire.sys.global.b64 %found, [$1]; mov.b64 $0, %found; }",
                "=l,l,r",
                [words.to(tl.int64), inside.to(tl.int32)],
                dtype=tl.int64,
                is_pure=False,
                pack=1,
            )
        else:
            # The sum of a word and 0 is a load with an order, which `tl.load` does not have.
            found = tl.atomic_add(words, 0, mask=inside, sem="acquire", scope="sys")
        missing = tl.sum((inside & (found != contents)).to(tl.int32))
        turn += 1
        is_waiting = (missing > 0) & (tl.sum(_asked(asked, lanes, turn)) == 0)
    # What one thread has acquired the others may read.
    tl.debug_barrier()
    return missing


@triton.jit
def publish_rows(rows, met, low, count, BLOCK: tl.constexpr, BY_STORE: tl.constexpr):
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
    publish(words, (nexts << 32) | low, inside, BY_STORE)


@triton.jit
def await_rows(rows, asked, met, low, count, BLOCK: tl.constexpr, BY_STORE: tl.constexpr):
    """Waits until each row's word is the next count of its counter, above `low`; then the counters go on by one step.

    Where a stop is asked for while one is missing, it ends within some turns, notes so, and the counters stay.
    """
    lanes = tl.arange(0, BLOCK)
    inside = lanes < count
    words, counters, nexts = _row_of_lane(rows, lanes, inside)
    missing = await_all(words, (nexts << 32) | low, inside, asked, BY_STORE)
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
    """The word that asks for a stop, as one lane reads it at some turns, and zeros in other lanes and turns.

    The lanes add it up: were each to read it, they could part from each other.
    """
    is_reader = (lanes == 0) & (turn % TURNS == 0)
    return tl.load(asked + lanes * 0, mask=is_reader, other=0, volatile=True)
