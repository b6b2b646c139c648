"""The reference of tables of slots: what it waits for, moves and publishes, what ends a wait, and what is refused."""

import re
import subprocess
import sys
import threading
import weakref

import pytest
import torch

from tests.kernels.signals.one_peer import ELEMENTS, NUM_SLOTS, Peers, stop_words, word_of
from tritondt.kernels.signals import PeerSlots, SlotTensors, Stop
from tritondt.kernels.tables import copy_table

CPU = torch.device("cpu")
# Only a signal that never comes meets it.
LIMIT_S = 60.0
# Long enough that a wait which does not wait has ended, on a machine that does other things too.
MOMENT_S = 0.05


def table_of(peers, **flags):
    return copy_table(peers.boxes(), CPU, peers.tensors(**flags))


class Running:
    """A table's run in a thread."""

    def __init__(self, peers):
        self._thread = threading.Thread(target=peers.run, args=(table_of(peers),), daemon=True)
        self._thread.start()

    def is_waiting(self):
        self._thread.join(MOMENT_S)
        return self._thread.is_alive()

    def end(self):
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()


def test_messages_take_slots_in_turns():
    """The first ones wait for nothing; each publishes the next count above the fingerprint in its slot's word."""
    peers = Peers([0], fingerprint=0xFFFF_FFFF)
    table = table_of(peers)
    for number in range(NUM_SLOTS):
        peers.rows += 100
        peers.run(table)
        assert torch.equal(peers.slots[0, number], peers.rows[0])
        assert peers.published[0, number, 0].item() == word_of(number + 1, 0xFFFF_FFFF)
        assert peers.counters.tolist() == [[number + 1, (number + 1) % NUM_SLOTS * 4 * ELEMENTS]]
    assert torch.equal(peers.slots[0, 0], peers.rows[0] - 100)


@pytest.mark.parametrize("lands", [False, True])
@pytest.mark.parametrize("count", [1, 2, 5, 2**31, 2**32 + 1, 2**62 + 3])
def test_all_peers_must_come(count, lands):
    """A word has room for 32 bits of the count."""
    peers = Peers([count, count + 1, count], lands=lands)
    if lands:
        peers.slots[:] = torch.arange(6.0).reshape(3, 2, 1)
    running = Running(peers)
    peers.come(0)
    peers.come(2)
    before = peers.state()
    assert running.is_waiting()
    assert peers.state() == before
    peers.come(1)
    running.end()
    assert peers.counters[:, 0].tolist() == [count + 1, count + 2, count + 1]
    for number in range(3):
        turn = (count + (number == 1)) % 2
        assert torch.equal(peers.slots[number, turn], peers.rows[number])
        said = word_of(count + 1 + (number == 1), 0 if lands else 7)
        assert peers.published[number, turn, 0].item() == said
        assert peers.published[number, 1 - turn, 0].item() == 0


@pytest.mark.parametrize("other", [word_of(3, 7), word_of(5, 7), word_of(4, 8), word_of(4, 0), 4, 7])
def test_another_count_or_fingerprint_is_not_taken(other):
    peers = Peers([3], lands=True)
    peers.awaited[0, 1, 0] = other
    running = Running(peers)
    assert running.is_waiting()
    peers.awaited[0, 1, 0] = word_of(4, 7)
    running.end()
    assert peers.counters[0, 0].item() == 4


@pytest.mark.parametrize("reason", [1, -1])
def test_the_stop_word_ends_a_wait_and_nothing_is_moved(reason):
    peers = Peers([4, 4])
    peers.come(0)
    running = Running(peers)
    assert running.is_waiting()
    before = peers.state()[:-2]
    peers.stop.asked[0] = reason
    running.end()
    assert peers.stop.met.item() == 1
    assert peers.state()[:-2] == before
    # Later ones move and publish nothing either, though everybody has come.
    peers.come(1)
    before = peers.state()
    peers.run(table_of(peers))
    assert peers.state() == before


def test_a_stop_that_met_no_wait_holds_nothing_back():
    peers = Peers([0], stop=stop_words(asked=1))
    peers.run(table_of(peers))
    assert (peers.counters[0, 0].item(), peers.stop.met.item()) == (1, 0)


def test_the_first_table_of_a_side_awaits_and_the_last_publishes():
    peers = Peers([2])
    peers.come(0)
    first, last = table_of(peers, publishes=False), table_of(peers, awaits=False)
    peers.run(first)
    assert peers.counters[0, 0].item() == 2
    peers.awaited.zero_()
    peers.run(last)
    assert peers.counters[0, 0].item() == 3


def test_a_table_keeps_the_stop_words():
    peers = Peers([0])
    table, seen = table_of(peers), [weakref.ref(word) for word in peers.stop]
    del peers
    assert all(word() is not None for word in seen)
    del table
    assert [word() for word in seen] == [None, None]


GOOD = PeerSlots(64, 128, 256)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"peers": (GOOD._replace(awaited=0),)}, "the awaited word of peer 0 is at address 0; an address is a "),
        ({"peers": (GOOD._replace(published=12),)}, "the published word of peer 0 is at address 12; an address is a "),
        ({"peers": (GOOD._replace(counter=-8),)}, "the counter of peer 0 is at address -8; an address is a positive "),
        ({"num_ended": 4}, "the count of ended programs is at address 4; an address is a positive multiple of 8"),
        ({"peers": (GOOD, GOOD._replace(published=192, counter=512))}, "peers 0 and 1 have one awaited word, at 64; "),
        ({"awaited": -1}, "the fingerprint is -1; a fingerprint is 0 to 4294967295"),
        ({"published": 2**32}, "the fingerprint is 4294967296; a fingerprint is 0 to 4294967295"),
        ({"num_slots": 3}, "a peer has 3 slots; allowed is a power of 2"),
        ({"peers": ()}, "1 tensors are slots of 0 peers; each peer has one"),
        (
            {"stop": Stop(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))},
            "the stop word 'asked' is torch.int64 of shape (1,); it is torch.int32 and has one element",
        ),
        (
            {"stop": stop_words()._replace(met=torch.zeros(2, dtype=torch.int64))},
            "the stop word 'met' is torch.int64 of shape (2,); it is torch.int64 and has one element",
        ),
    ],
)
def test_slots_that_are_refused(changes, sentence):
    peers = Peers([0])
    number = len(changes.get("peers", (GOOD,)))
    slots = SlotTensors(peers.signals._replace(**changes), tuple(range(1, 1 + (number or 1))), are_targets=True)
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
        copy_table(peers.boxes(), CPU, slots)


def test_triton_is_left_alone_until_a_device_needs_it():
    code = (
        "import sys, torch\n"
        "came_with_torch = 'triton' in sys.modules\n"
        "from tests.kernels.signals.one_peer import Peers\n"
        "from tritondt.kernels.tables import copy_table\n"
        "peers = Peers([0])\n"
        "peers.run(copy_table(peers.boxes(), torch.device('cpu'), peers.tensors()))\n"
        "assert came_with_torch or 'triton' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=150)
