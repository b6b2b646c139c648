"""Slots between the ranks of one host whose memory is mapped into each other, and the words that say whose turn it is.

A rank that has written into a slot of a peer's memory publishes: it writes a count into a word of the peer's. A peer
that is to read awaits: it looks at its word until that holds the count which it expects. Each counts by itself.
"""

import ctypes
import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

# Between two looks of the host at the words: less than a message takes, and enough for other threads to go on.
_PAUSE_S = 20e-6
# Of a word, beside the count.
FINGERPRINT_BITS = 32
# Of a rank's counter: the count, and the bytes at which the slot of the next message lies behind the first slot.
COUNTER_BYTES = 16


class Stop(NamedTuple):
    """The words that end waits: `asked`, one int32 in the host's memory, and `met`, one int64 on the device.

    Somebody on the host sets the first to end all waits, once; whatever wait it has ended sets the second, after which
    nothing is moved through slots, and nothing is published.
    """

    asked: torch.Tensor
    met: torch.Tensor


class PeerSlots(NamedTuple):
    """The slots for messages from this rank to a peer, or from a peer to this rank.

    Addresses: of the first of the words that this rank awaits, one for each slot, of the first of those that it
    publishes, and of its counter of messages, two int64.
    """

    awaited: int
    published: int
    counter: int


class SlotSignals(NamedTuple):
    """One side of an exchange through slots: it awaits, moves, and publishes, for each peer.

    Message number n of a pair, from 0 on, takes slot n % `num_slots`, a power of 2; slots lie `slot_bytes` apart, and
    their words `word_bytes`. It awaits the count n + 1 - `lag`, 0 at least, above the 32 bits of `awaited`, and
    publishes n + 1 above those of `published`. `num_ended` is the address of an int32 in which a launch counts its
    programs; 0 between launches. With `by_store` words are written and read by st.release.sys and ld.acquire.sys in
    place of atomics, for peers whose memory has no native atomics: all peers that share words take the same.

    The memory that the addresses point at, and the stop words, must outlive all runs and all CUDA graphs that have
    captured a run.
    """

    peers: tuple[PeerSlots, ...]
    lag: int
    awaited: int
    published: int
    num_slots: int
    slot_bytes: int
    word_bytes: int
    num_ended: int
    stop: Stop
    by_store: bool = False


class SlotTensors(NamedTuple):
    """The place of a table among the tables of one side of an exchange through slots.

    `tensors` are the numbers of the table's sources, or with `are_targets` of its targets, that are first slots of the
    peers, in the order of `signals`: a run moves the slot whose turn it is. The first table of a side `awaits`, the
    last one `publishes`, and none of them does anything once a wait was stopped.
    """

    signals: SlotSignals
    tensors: tuple[int, ...]
    are_targets: bool
    awaits: bool = True
    publishes: bool = True


class _Moves(Protocol):
    """A table, as `tritondt.kernels.tables` has it."""

    def run(self, source_ptrs: list[int], target_ptrs: list[int], num_threads: int) -> None: ...

    @property
    def num_bytes(self) -> int: ...

    @property
    def num_boxes(self) -> int: ...


class HostSlotTable:
    """A table on the CPU that moves what lies in slots; the reference of those on a GPU.

    A run awaits, moves and publishes as `SlotSignals` says. Other processors than x86 may show what was written before
    a word after the word, unless both sides hold a lock around.
    """

    def __init__(self, table: _Moves, slots: SlotTensors) -> None:
        check_slots(slots)
        self._table, self._slots = table, slots  # keeps the memory of the stop words

    def run(self, source_ptrs: list[int], target_ptrs: list[int], num_threads: int) -> None:
        """Runs the table when everything awaited has come; nothing where a wait was stopped, now or before."""
        signals, met = self._slots.signals, _at(self._slots.signals.stop.met.data_ptr())
        counts = [_at(peer.counter).value for peer in signals.peers]
        if met.value:
            return
        if self._slots.awaits:
            expected = [max(count + 1 - signals.lag, 0) for count in counts]
            words = [self._word(peer.awaited, count) for peer, count in zip(signals.peers, counts, strict=True)]
            contents = [content_of(count, signals.awaited) for count in expected]
            if await_all(words, contents, signals.stop.asked.data_ptr()):
                met.value = 1
                return
        moved = list(target_ptrs if self._slots.are_targets else source_ptrs)
        for tensor, count in zip(self._slots.tensors, counts, strict=True):
            moved[tensor] += count % signals.num_slots * signals.slot_bytes
        sides = (source_ptrs, moved) if self._slots.are_targets else (moved, target_ptrs)
        self._table.run(*sides, num_threads)
        if self._slots.publishes:
            words = [self._word(peer.published, count) for peer, count in zip(signals.peers, counts, strict=True)]
            for peer, count in zip(signals.peers, counts, strict=True):
                _at(peer.counter).value = count + 1
                _at(peer.counter + COUNTER_BYTES // 2).value = (count + 1) % signals.num_slots * signals.slot_bytes
            publish(words, [content_of(count + 1, signals.published) for count in counts])

    @property
    def num_bytes(self) -> int:
        """Bytes that one run writes."""
        return self._table.num_bytes

    @property
    def num_boxes(self) -> int:
        """Number of boxes that hold anything."""
        return self._table.num_boxes

    def _word(self, first: int, count: int) -> int:
        signals = self._slots.signals
        return first + count % signals.num_slots * signals.word_bytes


def content_of(count: int, fingerprint: int) -> int:
    """The content of a word for a count: as many bits of the count as there is room for, above the fingerprint.

    >>> content_of(1, 7), content_of(2**32 + 1, 7)
    (4294967303, 4294967303)
    """
    return ctypes.c_int64(count << FINGERPRINT_BITS | fingerprint).value


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


def check_slots(slots: SlotTensors) -> None:
    """Checks that hold for every table of slots.

    Raises ValueError for an address that is not a positive multiple of 8, for two peers that share a word or a counter,
    for a fingerprint of more than 32 bits, for a number of slots that is no power of 2, for another number of tensors
    than of peers, and for other stop words.

    >>> stop = Stop(torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64))
    >>> signals = SlotSignals((PeerSlots(64, 128, 12),), 0, 0, 0, 2, 512, 128, 256, stop)
    >>> check_slots(SlotTensors(signals, (0,), are_targets=True))
    Traceback (most recent call last):
    ValueError: the counter of peer 0 is at address 12; an address is a positive multiple of 8
    """
    signals, stop = slots.signals, slots.signals.stop
    _check_addresses(signals.peers)
    _check_address("the count of ended programs", signals.num_ended)
    for fingerprint in (signals.awaited, signals.published):
        if not 0 <= fingerprint < 1 << FINGERPRINT_BITS:
            raise ValueError(f"the fingerprint is {fingerprint}; a fingerprint is 0 to {(1 << FINGERPRINT_BITS) - 1}")
    if signals.num_slots < 1 or signals.num_slots & (signals.num_slots - 1):
        raise ValueError(f"a peer has {signals.num_slots} slots; allowed is a power of 2")
    if len(slots.tensors) != len(signals.peers):
        raise ValueError(f"{len(slots.tensors)} tensors are slots of {len(signals.peers)} peers; each peer has one")
    for name, word, dtype in (("asked", stop.asked, torch.int32), ("met", stop.met, torch.int64)):
        if word.dtype != dtype or word.numel() != 1:
            found = f"{word.dtype} of shape {tuple(word.shape)}"
            raise ValueError(f"the stop word {name!r} is {found}; it is {dtype} and has one element")


def _check_addresses(peers: Sequence[PeerSlots]) -> None:
    """Refuses addresses that cannot be, and what peers share that a GPU looks at or writes at once, in no order."""
    for name in PeerSlots._fields:
        seen = dict[int, int]()
        for number, peer in enumerate(peers):
            address = getattr(peer, name)
            _check_address(f"the {_NAMES[name]} of peer {number}", address)
            first = seen.setdefault(address, number)
            if first != number:
                raise ValueError(f"peers {first} and {number} have one {_NAMES[name]}, at {address}; each has its own")


def _check_address(what: str, address: int) -> None:
    if address <= 0 or address % 8:
        raise ValueError(f"{what} is at address {address}; an address is a positive multiple of 8")


_NAMES = {"awaited": "awaited word", "published": "published word", "counter": "counter"}
