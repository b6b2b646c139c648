"""Signals between GPUs whose memory is mapped into each other: awaited and published by the launches that move data.

The counts are in device memory, so that a CUDA graph that has captured a launch counts on at each replay.
"""

from collections.abc import Sequence

import triton
import triton.language as tl

from tritondt.kernels.signals import FINGERPRINT_BITS, PeerSlots, SlotTensors

# Whether a stop is asked for lies in the host's memory, from where it takes about a microsecond: between two readings
# what is awaited is looked at so often.
TURNS = tl.constexpr(64)
# Numbers before those of the pointers, and of a peer.
HEAD = tl.constexpr(11)
ROW = tl.constexpr(len(PeerSlots._fields))
COUNT_BITS = tl.constexpr(FINGERPRINT_BITS)
# Programs that wait keep their place on the GPU, and all of a launch wait for peers. So many, one for each of a quarter
# of an H100's processors, leave the others to whatever a peer may be waiting for; it is the most that NCCL takes, too.
MOST_PROGRAMS = 32
# Lanes of a warp, for each of which a peer is looked at.
_WARP = 32


def num_lanes(num_peers: int, num_warps: int) -> int:
    """Lanes of a launch's words: one for each thread at least, so that no word is published by two of them.

    >>> num_lanes(7, 4), num_lanes(130, 4)
    (128, 256)
    """
    lanes: int = triton.next_power_of_2(max(_WARP * num_warps, num_peers))
    return lanes


def signal_cells(
    slots: SlotTensors, pointers: Sequence[tuple[bool, int]], num_pointers: int, *, awaits: bool, publishes: bool
) -> list[int]:
    """Numbers that a launch of a table reads behind the table's own.

    `pointers` are those of the launch, as whether each is of a target and which; the kernel takes `num_pointers`. To
    those of slots belongs the address of the bytes to be added, to others 0.
    """
    signals = slots.signals
    offsets = dict(zip(slots.tensors, (peer.counter + 8 for peer in signals.peers), strict=True))
    added = [offsets.get(number, 0) if is_target == slots.are_targets else 0 for is_target, number in pointers]
    stop, num_peers = signals.stop, len(signals.peers)
    return [
        *(stop.asked.data_ptr(), stop.met.data_ptr(), signals.num_ended),
        *(signals.awaited, signals.published, signals.lag, signals.num_slots, signals.slot_bytes, signals.word_bytes),
        *(num_peers * (awaits and slots.awaits), num_peers * (publishes and slots.publishes)),
        *(added + [0] * (num_pointers - len(added))),
        *(number for peer in signals.peers for number in peer),
    ]


@triton.jit
def slots_are_ready(signals, NUM_POINTERS: tl.constexpr, NUM_LANES: tl.constexpr, BY_STORE: tl.constexpr):
    """Waits until the slots of a launch may be moved, and returns 1; 0 where a wait is stopped, or was before.

    Each program waits for itself. Its threads then see all that the peers did before they published: the writes of
    what is to be read, or the reads of what is to be written over.
    """
    met = tl.load(signals + 1).to(tl.pointer_type(tl.int64))
    is_ready = tl.load(met) == 0
    num_awaited = tl.load(signals + 9).to(tl.int32)
    if is_ready & (num_awaited > 0):
        lanes = tl.arange(0, NUM_LANES)
        inside = lanes < num_awaited
        peers = signals + HEAD + NUM_POINTERS + lanes * ROW
        counts, places = _turns(signals, peers, inside)
        words = tl.load(peers, mask=inside, other=0) + places
        contents = (tl.maximum(counts + 1 - tl.load(signals + 5), 0) << COUNT_BITS) | tl.load(signals + 3)
        asked = tl.load(signals).to(tl.pointer_type(tl.int32))
        missing = await_all(words.to(tl.pointer_type(tl.int64)), contents, inside, asked, BY_STORE)
        is_ready = missing == 0
        if missing > 0:
            tl.store(met, 1)
    return is_ready


@triton.jit
def publish_slots(signals, NUM_POINTERS: tl.constexpr, NUM_LANES: tl.constexpr, BY_STORE: tl.constexpr):
    """Has the last program of a launch publish that its slots are moved; nothing where a wait was stopped.

    The order of memory, by the names of PTX: what a program's threads have moved is before its bar.sync, which is
    before its atom.acq_rel.gpu of the count of programs. The last program's atom.acq_rel.gpu reads what those of all
    others wrote, so that what they moved is before its bar.sync, and that before the atom.release.sys, or
    st.release.sys, of each word. A peer reads the word by atom.acquire.sys, or ld.acquire.sys, and its bar.sync lets
    its other threads see the same. Each pair has a scope with both of its threads, and causality order is made of such
    pairs whatever their scopes, so that no fence.acq_rel.sys is needed in every program.

    The count is 0 again when the launch ends: launches of one stream, and replays of graphs, begin with 0.
    """
    num_published = tl.load(signals + 10).to(tl.int32)
    if num_published > 0:
        ended = tl.load(signals + 2).to(tl.pointer_type(tl.int32))
        tl.debug_barrier()
        before = tl.atomic_add(ended, 1, sem="acq_rel", scope="gpu")
        if before == tl.num_programs(0) - 1:
            tl.store(ended, 0)
            lanes = tl.arange(0, NUM_LANES)
            is_open = tl.load(tl.load(signals + 1).to(tl.pointer_type(tl.int64))) == 0
            # One comparison of lanes: Triton 3.9 interprets a mask of lanes and one number as integers, and refuses it.
            inside = lanes < tl.where(is_open, num_published, 0)
            peers = signals + HEAD + NUM_POINTERS + lanes * ROW
            counts, places = _turns(signals, peers, inside)
            counters = tl.load(peers + 2, mask=inside, other=0).to(tl.pointer_type(tl.int64))
            next_offsets = ((counts + 1) & (tl.load(signals + 6) - 1)) * tl.load(signals + 7)
            tl.store(counters, counts + 1, mask=inside)
            tl.store(counters + 1, next_offsets, mask=inside)
            words = tl.load(peers + 1, mask=inside, other=0) + places
            contents = ((counts + 1) << COUNT_BITS) | tl.load(signals + 4)
            publish(words.to(tl.pointer_type(tl.int64)), contents, inside, BY_STORE)


@triton.jit
def _turns(signals, peers, inside):
    """Each lane's count of messages, and the bytes between its first word and that of the slot whose turn it is."""
    counters = tl.load(peers + 2, mask=inside, other=0).to(tl.pointer_type(tl.int64))
    counts = tl.load(counters, mask=inside, other=0)
    return counts, (counts & (tl.load(signals + 6) - 1)) * tl.load(signals + 8)


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
def _asked(asked, lanes, turn):
    """The word that asks for a stop, as one lane reads it at some turns, and zeros in other lanes and turns.

    The lanes add it up: were each to read it, they could part from each other.
    """
    # One comparison of lanes, as in `publish_slots`.
    is_reader = lanes + turn % TURNS == 0
    return tl.load(asked + lanes * 0, mask=is_reader, other=0, volatile=True)
