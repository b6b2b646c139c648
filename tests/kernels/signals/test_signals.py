"""The reference of signals: what it publishes, what it waits for, what ends a wait, and what is refused."""

import re
import subprocess
import sys
import threading
import weakref

import pytest
import torch

from tritondt.kernels.signals import HostSignals, Signal, Stop, signal_table

CPU = torch.device("cpu")
# Only a signal that never comes meets it.
LIMIT_S = 60.0
# Long enough that a wait which does not wait has ended, on a machine that does other things too.
MOMENT_S = 0.05


def zeros(count):
    return torch.zeros(count, dtype=torch.int64)


def no_stop():
    return Stop(torch.zeros(1, dtype=torch.int32), zeros(1))


def signals(words, counters, step=1):
    """A signal of each element."""
    return [Signal(word.data_ptr(), counter.data_ptr(), step) for word, counter in zip(words, counters, strict=True)]


def word_of(count, fingerprint):
    """As int64, whose sign is the count's upper bit."""
    return (count << 32 | fingerprint) - (count >> 31 << 64)


class Running:
    """A table's run in a thread."""

    def __init__(self, table):
        self._thread = threading.Thread(target=table.run, daemon=True)
        self._thread.start()

    def is_waiting(self):
        self._thread.join(MOMENT_S)
        return self._thread.is_alive()

    def end(self):
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()


def test_publishing_counts_and_writes_the_count_above_the_fingerprint():
    words, counters = zeros(3), torch.tensor([0, 41, -1])
    table = HostSignals(signals(words, counters), [], 0xFFFF_FFFF, no_stop())
    table.run()
    assert counters.tolist() == [1, 42, 0]
    assert words.tolist() == [word_of(count, 0xFFFF_FFFF) for count in (1, 42, 0)]
    table.run()
    assert counters.tolist() == [2, 43, 1]
    assert words.tolist() == [word_of(count, 0xFFFF_FFFF) for count in (2, 43, 1)]


def test_a_word_has_room_for_32_bits_of_the_count():
    words, counters = zeros(3), torch.tensor([2**31 - 1, 2**32 - 1, 2**63 - 1])
    HostSignals(signals(words, counters), [], 5, no_stop()).run()
    assert words.tolist() == [-(1 << 63) + 5, 5, 5]
    assert counters.tolist() == [2**31, 2**32, -(2**63)]


def test_without_a_step_the_present_count_is_signalled_again():
    words, counters = zeros(2), torch.tensor([7, 7])
    table = HostSignals(signals(words[:1], counters[:1], 0), signals(words[:1], counters[1:], 0), 3, no_stop())
    table.run()
    table.run()
    assert (words[0].item(), counters.tolist()) == (word_of(7, 3), [7, 7])


def test_what_is_published_counts_before_what_is_awaited():
    """A counter may be on both sides, and a word too."""
    words, counters = zeros(1), zeros(1)
    HostSignals(signals(words, counters), signals(words, counters, 0), 3, no_stop()).run()
    assert counters.tolist() == [1]


def test_nothing_to_signal():
    signal_table([], [], 0, no_stop(), CPU).run()


def test_two_threads_play_ping_pong():
    rounds = 40
    words, counters, stop, board = zeros(2), zeros(4), no_stop(), []
    ping, pong = signals(words, counters[:2]), signals(words, counters[2:])
    serve = signal_table(ping[:1], [], 9, stop, CPU)
    take = signal_table([], ping[1:], 9, stop, CPU)
    wait, answer = signal_table([], pong[:1], 9, stop, CPU), signal_table(pong[1:], [], 9, stop, CPU)

    def other():
        for _ in range(rounds):
            wait.run()
            board.append("pong")
            answer.run()

    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    for _ in range(rounds):
        board.append("ping")
        serve.run()
        take.run()
    thread.join(LIMIT_S)
    assert board == ["ping", "pong"] * rounds
    assert counters.tolist() == [rounds] * 4


def test_all_that_is_awaited_must_come():
    words, counters = zeros(3), torch.tensor([4, 0, 9])
    running = Running(HostSignals([], signals(words, counters), 6, no_stop()))
    words[0], words[2] = word_of(5, 6), word_of(10, 6)
    assert running.is_waiting()
    assert counters.tolist() == [4, 0, 9]
    words[1] = word_of(1, 6)
    running.end()
    assert counters.tolist() == [5, 1, 10]


@pytest.mark.parametrize("other", [word_of(3, 6), word_of(5, 6), word_of(4, 7), word_of(4, 0), 4, 6])
def test_another_count_or_fingerprint_is_not_taken(other):
    words, counters = torch.tensor([other]), torch.tensor([3])
    running = Running(HostSignals([], signals(words, counters), 6, no_stop()))
    assert running.is_waiting()
    words[0] = word_of(4, 6)
    running.end()
    assert counters.tolist() == [4]


@pytest.mark.parametrize("reason", [1, -1])
def test_the_stop_word_ends_a_wait_and_leaves_the_counters(reason):
    words, counters, stop = zeros(3), zeros(3), no_stop()
    table = HostSignals(signals(words[:1], counters[:1]), signals(words[1:], counters[1:]), 6, stop)
    running = Running(table)
    words[1] = word_of(1, 6)
    assert running.is_waiting()
    stop.asked[0] = reason
    running.end()
    assert stop.met.item() == 1
    assert counters.tolist() == [1, 0, 0]
    assert words.tolist() == [word_of(1, 6), word_of(1, 6), 0]
    # Later ones publish nothing, and wait for nothing.
    table.run()
    assert counters.tolist() == [1, 0, 0]
    assert words.tolist() == [word_of(1, 6), word_of(1, 6), 0]
    # What has come has come.
    words[2] = word_of(1, 6)
    table.run()
    assert counters.tolist() == [1, 1, 1]


def test_a_stop_that_met_no_wait_holds_nothing_back():
    words, counters, stop = zeros(1), zeros(1), no_stop()
    stop.asked[0] = 1
    HostSignals(signals(words, counters), [], 6, stop).run()
    assert (words.tolist(), counters.tolist(), stop.met.item()) == ([word_of(1, 6)], [1], 0)


def test_a_table_keeps_the_stop_word():
    stop = no_stop()
    seen = [weakref.ref(word) for word in stop]
    table = HostSignals([], [], 6, stop)
    del stop
    assert all(word() is not None for word in seen)
    del table
    assert [word() for word in seen] == [None, None]


GOOD = Signal(64, 128, 1)


@pytest.mark.parametrize(
    ("published", "awaited", "fingerprint", "stop", "sentence"),
    [
        ([GOOD, GOOD._replace(word=0)], [], 0, no_stop(), "the word of published signal 1 is at address 0; "),
        ([], [GOOD._replace(word=12)], 0, no_stop(), "the word of awaited signal 0 is at address 12; "),
        ([], [GOOD._replace(word=-8)], 0, no_stop(), "the word of awaited signal 0 is at address -8; "),
        ([GOOD._replace(counter=0)], [], 0, no_stop(), "the counter of published signal 0 is at address 0; "),
        ([], [GOOD._replace(counter=68)], 0, no_stop(), "the counter of awaited signal 0 is at address 68; "),
    ],
)
def test_addresses_that_are_refused(published, awaited, fingerprint, stop, sentence):
    with pytest.raises(ValueError, match=f"^{sentence}an address is a positive multiple of 8$"):
        signal_table(published, awaited, fingerprint, stop, CPU)


@pytest.mark.parametrize(
    ("published", "awaited", "fingerprint", "stop", "sentence"),
    [
        ([GOOD._replace(step=2)], [], 0, no_stop(), "the step of published signal 0 is 2; a step is 0 or 1"),
        ([], [GOOD._replace(step=-1)], 0, no_stop(), "the step of awaited signal 0 is -1; a step is 0 or 1"),
        (
            [GOOD, GOOD._replace(word=72, counter=136), GOOD._replace(word=80)],
            [],
            0,
            no_stop(),
            "published signals 0 and 2 have one counter, at address 128; each has its own",
        ),
        (
            [],
            [GOOD, GOOD._replace(counter=136)],
            0,
            no_stop(),
            "awaited signals 0 and 1 have one word, at address 64; each has its own",
        ),
        ([GOOD], [GOOD], -1, no_stop(), "the fingerprint is -1; a fingerprint is 0 to 4294967295"),
        ([], [], 2**32, no_stop(), "the fingerprint is 4294967296; a fingerprint is 0 to 4294967295"),
        (
            [],
            [],
            0,
            Stop(zeros(1), zeros(1)),
            "the stop word 'asked' is torch.int64 of shape (1,); it is torch.int32 and has one element",
        ),
        (
            [],
            [],
            0,
            no_stop()._replace(met=zeros(2)),
            "the stop word 'met' is torch.int64 of shape (2,); it is torch.int64 and has one element",
        ),
    ],
)
def test_signals_that_are_refused(published, awaited, fingerprint, stop, sentence):
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        HostSignals(published, awaited, fingerprint, stop)


@pytest.mark.parametrize("device", ["meta", "xpu"])
def test_other_devices_have_none(device):
    sentence = rf"^a table of signals on {device}; there are tables for cpu and for cuda$"
    with pytest.raises(ValueError, match=sentence):
        signal_table([], [], 0, no_stop(), torch.device(device))


def test_triton_is_left_alone_until_a_device_needs_it():
    code = (
        "import sys, torch\n"
        "came_with_torch = 'triton' in sys.modules\n"
        "from tritondt.kernels.signals import Stop, signal_table\n"
        "stop = Stop(torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64))\n"
        "signal_table([], [], 0, stop, torch.device('cpu')).run()\n"
        "assert came_with_torch or 'triton' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=150)
