"""Signals between the ranks of one host whose memory is mapped into each other.

A rank that has written into its peers' memory publishes: it writes a count into a word of theirs. A peer that is to
read awaits: it looks at its word until that holds the count which it expects. Each counts by itself.
"""

import ctypes
import importlib
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from tritondt.kernels.device_types import ByDeviceType

# Between two looks of the host at the words: less than a message takes, and enough for other threads to go on.
_PAUSE_S = 20e-6
# Of a word, beside the count.
FINGERPRINT_BITS = 32


class Signal(NamedTuple):
    """A word in mapped memory, the counter of this rank that says what it holds next, and the counter's step.

    `word` and `counter` are addresses of int64; `step` is 1, or 0 to signal the counter's present value.
    """

    word: int
    counter: int
    step: int


class Stop(NamedTuple):
    """The words that end waits: `asked`, one int32 in the host's memory, and `met`, one int64 on the device.

    Somebody on the host sets the first to end all waits, once; whatever wait it has ended sets the second, after which
    nothing is published, and nothing is packed that has `met` for its gate.
    """

    asked: torch.Tensor
    met: torch.Tensor


class SignalTable(Protocol):
    """Signals prepared once and run many times."""

    def run(self) -> None:
        """Publishes, then waits for what it awaits; see `signal_table`."""


class HostSignals:
    """Signals between threads or processes on the CPU, and the reference of those on a GPU.

    Arguments and errors are those of `signal_table`; `device` and `by_store` are for DeviceSignals, which this one
    stands in for. `run` returns when all signals have come or a stop is asked for. Other processors than x86 may show
    what was written before a word after the word, unless both sides hold a lock around.
    """

    def __init__(
        self,
        published: Sequence[Signal],
        awaited: Sequence[Signal],
        fingerprint: int,
        stop: Stop,
        device: torch.device | str = "cpu",
        by_store: bool = False,
    ) -> None:
        check_signals(published, awaited, fingerprint, stop)
        self._published, self._awaited = tuple(published), tuple(awaited)
        self._fingerprint, self._stop = fingerprint, stop  # keeps the memory of its words

    def run(self) -> None:
        """Publishes unless a wait was stopped before, then waits."""
        met = _at(self._stop.met.data_ptr())
        if not met.value:
            publish([signal.word for signal in self._published], self._counted(self._published))
        counts = [_at(signal.counter).value + signal.step for signal in self._awaited]
        contents = [self._content(count) for count in counts]
        if await_all([signal.word for signal in self._awaited], contents, self._stop.asked.data_ptr()):
            met.value = 1
            return
        for signal, count in zip(self._awaited, counts, strict=True):
            _at(signal.counter).value = count

    def _counted(self, signals: Sequence[Signal]) -> list[int]:
        """Counts on, and returns what the words are to hold."""
        for signal in signals:
            _at(signal.counter).value += signal.step
        return [self._content(_at(signal.counter).value) for signal in signals]

    def _content(self, count: int) -> int:
        """The content of a word for a count: as many bits of the count as there is room for."""
        return ctypes.c_int64(count << FINGERPRINT_BITS | self._fingerprint).value


def publish(words: Sequence[int], contents: Sequence[int]) -> None:
    """Writes each content to the int64 at its address; the reference of `gpu.signals.publish`.

    >>> word = torch.zeros(1, dtype=torch.int64)
    >>> publish([word.data_ptr()], [7])
    >>> word.item()
    7
    """
    for word, content in zip(words, contents, strict=True):
        _at(word).value = content


def await_all(words: Sequence[int], contents: Sequence[int], asked: int) -> int:
    """Waits until the int64 at each address is its content; the reference of `gpu.signals.await_all`.

    Returns 0, or how many words are missing when the int32 at the address `asked` is not 0.

    >>> word, asked = torch.tensor([7]), torch.ones(1, dtype=torch.int32)
    >>> [await_all([word.data_ptr()], [content], asked.data_ptr()) for content in (7, 8)]
    [0, 1]
    """
    stop = ctypes.c_int32.from_address(asked)
    while missing := sum(_at(word).value != content for word, content in zip(words, contents, strict=True)):
        if stop.value:
            return missing
        time.sleep(_PAUSE_S)
    return 0


def _at(address: int) -> ctypes.c_int64:
    return ctypes.c_int64.from_address(address)


def _device_signals(
    published: Sequence[Signal],
    awaited: Sequence[Signal],
    fingerprint: int,
    stop: Stop,
    device: torch.device,
    by_store: bool,
) -> SignalTable:
    """Signals of Triton's kernel. Triton is imported with the first: it takes 0.3 s, and the CPU never needs it."""
    module = importlib.import_module("tritondt.kernels.gpu.signals")
    table: SignalTable = module.DeviceSignals(published, awaited, fingerprint, stop, device, by_store)
    return table


Maker = Callable[[Sequence[Signal], Sequence[Signal], int, Stop, torch.device, bool], SignalTable]
signal_makers = ByDeviceType[Maker](cpu=HostSignals, cuda=_device_signals)


def signal_table(
    published: Sequence[Signal],
    awaited: Sequence[Signal],
    fingerprint: int,
    stop: Stop,
    device: torch.device,
    by_store: bool = False,
) -> SignalTable:
    """Table of signals for words and counters in memory of `device`, cpu or cuda, or mapped there.

    A run does, on a GPU in one launch on the current stream:

    1. Unless a wait was stopped before: of each published signal the counter goes up by its step, and the word is
       written, the count above the fingerprint. Who sees the word sees all that was written before it, on this stream.
    2. It waits until each awaited word equals the count that is its counter plus its step, above the fingerprint. Then
       these counters go up by their steps. When `stop.asked` is set while one is missing, it sets `stop.met` instead.

    `fingerprint` (32 bits, unsigned) tells exchanges apart: ranks that run different ones wait for each other, and the
    watcher of the ranks asks for a stop, in memory of the host that the device can read. `by_store` has a GPU write and
    read words by st.release.sys and ld.acquire.sys in place of atomics, for peers whose memory has no native atomics:
    all peers that share words take the same. The memory that the addresses point at, and the stop words, must outlive
    all runs and all CUDA graphs that have captured a run.

    Raises ValueError for an address that is not a positive multiple of 8, for two signals of one side that share a word
    or a counter, for a step that is not 0 or 1, for a fingerprint of more bits, for other stop words, and for any
    other device.

    Example: rank 0 tells rank 1 that it has written, and waits for the answer, in one process.

    >>> words, counters = torch.zeros(2, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    >>> stop = Stop(torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64))
    >>> here, there = [
    ...     [Signal(words[at].data_ptr(), counters[2 * rank + at].data_ptr(), step=1) for at in range(2)]
    ...     for rank in range(2)
    ... ]
    >>> cpu = torch.device("cpu")
    >>> signal_table(here[:1], [], 7, stop, cpu).run()
    >>> signal_table(there[1:], there[:1], 7, stop, cpu).run()  # answers, and has already been told
    >>> signal_table([], here[1:], 7, stop, cpu).run()
    >>> words.tolist() == [1 << 32 | 7] * 2, counters.tolist()
    (True, [1, 1, 1, 1])
    """
    found = signal_makers.get(device.type)
    if found is None:
        raise ValueError(f"a table of signals on {device}; there are tables for cpu and for cuda")
    return found(published, awaited, fingerprint, stop, device, by_store)


def check_signals(published: Sequence[Signal], awaited: Sequence[Signal], fingerprint: int, stop: Stop) -> None:
    """Checks that hold for every table of signals; ValueError as `signal_table` says.

    >>> stop = Stop(torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64))
    >>> check_signals([Signal(64, 12, 1)], [], 0, stop)
    Traceback (most recent call last):
    ValueError: the counter of published signal 0 is at address 12; an address is a positive multiple of 8
    """
    for side, signals in (("published", published), ("awaited", awaited)):
        for number, signal in enumerate(signals):
            for name, address in (("word", signal.word), ("counter", signal.counter)):
                if address <= 0 or address % 8:
                    raise ValueError(
                        f"the {name} of {side} signal {number} is at address {address}; "
                        "an address is a positive multiple of 8"
                    )
            if signal.step not in (0, 1):
                raise ValueError(f"the step of {side} signal {number} is {signal.step}; a step is 0 or 1")
        _check_distinct(side, "word", [signal.word for signal in signals])
        _check_distinct(side, "counter", [signal.counter for signal in signals])
    if not 0 <= fingerprint < 1 << FINGERPRINT_BITS:
        raise ValueError(f"the fingerprint is {fingerprint}; a fingerprint is 0 to {(1 << FINGERPRINT_BITS) - 1}")
    for name, word, dtype in (("asked", stop.asked, torch.int32), ("met", stop.met, torch.int64)):
        if word.dtype != dtype or word.numel() != 1:
            found = f"{word.dtype} of shape {tuple(word.shape)}"
            raise ValueError(f"the stop word {name!r} is {found}; it is {dtype} and has one element")


def _check_distinct(side: str, name: str, addresses: Sequence[int]) -> None:
    """Refuses what signals share that a GPU runs at once, in no order."""
    seen = dict[int, int]()
    for number, address in enumerate(addresses):
        first = seen.setdefault(address, number)
        if first != number:
            raise ValueError(
                f"{side} signals {first} and {number} have one {name}, at address {address}; each has its own"
            )
