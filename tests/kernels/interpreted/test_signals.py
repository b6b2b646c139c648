"""The kernel of signals, interpreted, against the reference: words and counters, bit for bit."""

import random
import threading
import time

import pytest
import torch
import triton
import triton.language as tl

from tritondt.kernels import signals as reference
from tritondt.kernels.gpu.signals import DeviceSignals, await_all, publish
from tritondt.kernels.signals import HostSignals, Signal, Stop, signal_makers, signal_table

# Only a signal that never comes meets it.
LIMIT_S = 60.0
# Long enough for the kernel to have begun to look.
MOMENT_S = 0.1
CASES = 90
TABLES = (HostSignals, DeviceSignals)
CPU = torch.device("cpu")


def stop_words(asked=0, met=0):
    return Stop(torch.tensor([asked], dtype=torch.int32), torch.tensor([met]))


def word_of(count, fingerprint):
    return torch.tensor([count]) << 32 | fingerprint


class Side:
    """Signals and what they point at."""

    def __init__(self, words, counters, steps):
        self.words, self.counters = words, counters
        self.signals = list(map(Signal, addresses(words), addresses(counters), steps))

    def numbers(self):
        return self.words.tolist(), self.counters.tolist()


def addresses(numbers):
    return [numbers.data_ptr() + 8 * place for place in range(len(numbers))]


def random_side(draw, count, arrives_with=None):
    """Any words and counters; or words that have come, of a fingerprint."""
    steps = [draw.randrange(2) for _ in range(count)]
    counters = torch.tensor(
        [draw.choice((0, 1, 2**31 - 1, 2**32 - 1, draw.randrange(-(2**63), 2**63 - 1))) for _ in range(count)],
        dtype=torch.int64,
    )
    words = torch.tensor([draw.randrange(-(2**63), 2**63) for _ in range(count)], dtype=torch.int64)
    if arrives_with is not None:
        words = counters + torch.tensor(steps, dtype=torch.int64) << 32 | arrives_with
    return Side(words, counters, steps)


def random_case(seed):
    """Two sides, the fingerprint and the stop word: all has come, or it is stopped and one is missing."""
    draw = random.Random(seed)
    fingerprint = draw.choice((0, 1, 2**31 - 1, 2**31, 2**32 - 1, draw.randrange(2**32)))
    published, awaited = draw.choice(((1, 1), (0, 3), (3, 0), (7, 7), (32, 31), (33, 5), (5, 70)))
    sides = random_side(draw, published), random_side(draw, awaited, fingerprint)
    is_stopped = draw.random() < 0.4
    if is_stopped and awaited and draw.random() < 0.7:
        sides[1].words[draw.randrange(awaited)] ^= 1 << draw.randrange(63)
    asked = draw.choice((1, -1, 2**31 - 1)) if is_stopped else 0
    return sides, fingerprint, stop_words(asked, int(draw.random() < 0.2))


@pytest.mark.in_core(CASES)
@pytest.mark.parametrize("seed", range(CASES))
def test_random_signals(seed):
    found = []
    for table in TABLES:
        sides, fingerprint, stop = random_case(seed)
        published, awaited = (side.signals for side in sides)
        table(published, awaited, fingerprint, stop, CPU).run()
        found.append([*(side.numbers() for side in sides), stop.met.item()])
    assert found[0] == found[1]


def test_cases_are_of_every_kind():
    cases = [random_case(seed) for seed in range(CASES)]
    assert {(bool(stop.asked), len(sides[1].words) > 32, number >= 2**31) for sides, number, stop in cases} == {
        (is_stopped, is_wide, is_high)
        for is_stopped in (False, True)
        for is_wide in (False, True)
        for is_high in (False, True)
    }


def test_what_is_published_counts_before_what_is_awaited():
    """A counter may be on both sides, in different lanes, and a word too."""
    for table in TABLES:
        side = Side(torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), (1, 1, 1))
        again = [signal._replace(step=0) for signal in reversed(side.signals)]
        table(side.signals, again, 5, stop_words(), CPU).run()
        assert side.numbers() == ([1 << 32 | 5] * 3, [1] * 3)


class Running:
    """A run of the kernel in a thread; nothing else may be interpreted meanwhile."""

    def __init__(self, table):
        self._thread = threading.Thread(target=table.run, daemon=True)
        self._thread.start()
        time.sleep(MOMENT_S)
        assert self._thread.is_alive()

    def end(self):
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()


@pytest.mark.parametrize("fingerprint", [7, 2**31, 2**32 - 1])
def test_a_peer_publishes_while_the_kernel_looks(fingerprint):
    count, stop = 40, stop_words()
    words, ours, theirs = (torch.zeros(count, dtype=torch.int64) for _ in range(3))
    awaited, published = Side(words, ours, [1] * count), Side(words, theirs, [1] * count)
    early = HostSignals(published.signals[:-1], [], fingerprint, stop)
    late = HostSignals(published.signals[-1:], [], fingerprint, stop)
    table = DeviceSignals([], awaited.signals, fingerprint, stop, CPU)
    for round_number in range(1, 4):
        running = Running(table)
        early.run()
        time.sleep(MOMENT_S)
        assert ours.tolist() == [round_number - 1] * count
        late.run()
        running.end()
        assert ours.tolist() == theirs.tolist() == [round_number] * count


def test_ping_pong_with_the_reference():
    rounds, stop = 10, stop_words()
    words, ours, theirs = (torch.zeros(2, dtype=torch.int64) for _ in range(3))
    here, there = Side(words, ours, (1, 1)).signals, Side(words, theirs, (1, 1)).signals
    table = DeviceSignals(here[:1], here[1:], 2**32 - 1, stop, CPU)
    wait = HostSignals([], there[:1], 2**32 - 1, stop)
    answer = HostSignals(there[1:], [], 2**32 - 1, stop)

    def other():
        for _ in range(rounds):
            wait.run()
            answer.run()

    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    for _ in range(rounds):
        table.run()
    thread.join(LIMIT_S)
    assert ours.tolist() == theirs.tolist() == [rounds] * 2


def test_the_stop_word_ends_a_wait():
    stop = stop_words()
    published = Side(torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), (1, 1))
    awaited = Side(word_of(1, 8).repeat(2), torch.zeros(2, dtype=torch.int64), (1, 1))
    awaited.words[1] = word_of(1, 9)  # another exchange's
    table = DeviceSignals(published.signals, awaited.signals, 8, stop, CPU)
    running = Running(table)
    ends_at = time.monotonic() + LIMIT_S
    while not published.words.all() and time.monotonic() < ends_at:  # the first launch takes long on a busy machine
        time.sleep(MOMENT_S)
    told = published.numbers()
    assert told == ([1 << 32 | 8] * 2, [1, 1])
    stop.asked[0] = -1
    running.end()
    table.run()
    assert (published.numbers(), awaited.counters.tolist(), stop.met.item()) == (told, [0, 0], 1)


def test_nothing_to_signal():
    DeviceSignals([], [], 0, stop_words(), CPU).run()


def test_what_the_reference_refuses():
    with pytest.raises(ValueError, match=r"^the word of awaited signal 0 is at address 4; an address is a positive"):
        DeviceSignals([], [Signal(4, 8, 1)], 0, stop_words(), CPU)


def test_the_table_of_cuda_is_the_kernels():
    with signal_makers.replaced("cpu", signal_makers["cuda"]):
        table = signal_table([], [], 0, stop_words(), CPU)
    assert type(table) is DeviceSignals


@triton.jit
def own_kernel(published, awaited, contents, asked, missing, num_published, num_awaited, BLOCK: tl.constexpr):  # noqa: N803
    """A kernel of a user's: addresses of words in two tensors, and what they are to hold."""
    lanes = tl.arange(0, BLOCK)
    contents = tl.load(contents + lanes)
    words = tl.load(published + lanes).to(tl.pointer_type(tl.int64))
    publish(words, contents, lanes < num_published)
    words = tl.load(awaited + lanes).to(tl.pointer_type(tl.int64))
    tl.store(missing, await_all(words, contents, lanes < num_awaited, asked))


def addresses_of(words, block):
    return torch.tensor([*addresses(words), *[0] * (block - len(words))])


@pytest.mark.in_core(4)
@pytest.mark.parametrize("come", [8, 5])
@pytest.mark.parametrize(("num_published", "num_awaited"), [(3, 8), (8, 0)])
def test_functions_for_own_kernels_are_the_references(num_published, num_awaited, come):
    block, found = 8, []
    contents = torch.arange(block) * (2**40 + 1) + 1
    asked = torch.tensor([int(come < num_awaited)], dtype=torch.int32)
    for is_reference in (False, True):
        published, awaited = torch.zeros(block, dtype=torch.int64), torch.where(torch.arange(block) < come, contents, 0)
        missing = torch.tensor([-1], dtype=torch.int32)
        if is_reference:
            reference.publish(addresses(published)[:num_published], contents.tolist()[:num_published])
            words = addresses(awaited)[:num_awaited], contents.tolist()[:num_awaited]
            missing[0] = reference.await_all(*words, asked.data_ptr())
        else:
            tensors = (addresses_of(published, block), addresses_of(awaited, block), contents, asked, missing)
            own_kernel[(1,)](*tensors, num_published, num_awaited, block)
        found.append((published.tolist(), awaited.tolist(), missing.item()))
    assert found[0] == found[1]
    assert found[0][0] == [*contents.tolist()[:num_published], *[0] * (block - num_published)]
    assert found[0][2] == max(num_awaited - come, 0)
