"""Tables of slots and the functions of signals, interpreted, against the reference: what they change, bit for bit."""

import random
import threading
import time

import pytest
import torch
import triton
import triton.language as tl

from tests.harness.doubled import doubled
from tests.kernels.signals.one_peer import Peers, stop_words
from tritondt.kernels import signals as reference
from tritondt.kernels.boxes import ReduceBox, Slot
from tritondt.kernels.gpu.device_table import DeviceTable
from tritondt.kernels.gpu.signals import await_all, publish
from tritondt.kernels.tables import CppMaker, TritonMaker, copy_table, reduce_table

# Only a signal that never comes meets it.
LIMIT_S = 60.0
# Long enough for the kernel to have begun to look.
MOMENT_S = 0.1
CASES = 60
CPU = torch.device("cpu")


def addresses(numbers):
    return [numbers.data_ptr() + 8 * place for place in range(len(numbers))]


def table_of(peers, maker, **flags):
    with doubled("cpu", table_maker=maker):
        return copy_table(peers.boxes(), CPU, peers.tensors(**flags))


def random_case(seed):
    """Peers of any counts, all of whom have come, or of whom one is missing and a stop is asked for."""
    draw = random.Random(seed)
    count = draw.choice((1, 3, 7, 40, 40))  # 40 take two launches
    counts = [draw.choice((0, 1, 2, 2**31 - 1, 2**32 - 1, draw.randrange(2**62))) for _ in range(count)]
    fingerprint = draw.choice((0, 1, 2**31 - 1, 2**31, 2**32 - 1, draw.randrange(2**32)))
    is_stopped, is_missing = draw.random() < 0.4, draw.random() < 0.7
    stop = stop_words(draw.choice((1, -1, 2**31 - 1)) if is_stopped else 0, int(draw.random() < 0.2))
    peers = Peers(counts, lands=draw.random() < 0.5, fingerprint=fingerprint, stop=stop)
    peers.slots += torch.arange(peers.slots.numel()).reshape(peers.slots.shape)
    for number in range(count):
        peers.come(number)
    if is_stopped and is_missing:
        peers.awaited[draw.randrange(count)] ^= 1 << draw.randrange(63)
    flags = {"awaits": draw.random() < 0.8, "publishes": draw.random() < 0.8}
    return peers, flags


@pytest.mark.in_core(20)
@pytest.mark.parametrize("seed", range(CASES))
def test_random_slots(seed):
    found = []
    for maker in (CppMaker(), TritonMaker()):
        peers, flags = random_case(seed)
        peers.run(table_of(peers, maker, **flags))
        found.append(peers.state())
    assert found[0] == found[1]


def test_cases_are_of_every_kind():
    cases = [random_case(seed) for seed in range(CASES)]
    kinds = {(bool(peers.stop.asked), peers.lands, len(peers.rows) > 32) for peers, _ in cases}
    assert kinds == {
        (stops, lands, many) for stops in (False, True) for lands in (False, True) for many in (False, True)
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_sums_of_slots(dtype):
    """A sum of this rank's term and of what lies in three slots, of different turns."""
    found = []
    for maker in (CppMaker(), TritonMaker()):
        peers = Peers([4, 5, 6], lands=True)
        terms = (torch.arange(4 * 2 * 8) % 11).reshape(4, 2, 8).to(getattr(torch, dtype))
        target = torch.zeros(8, dtype=terms.dtype)
        slot_bytes = 8 * terms.element_size()
        signals = peers.signals._replace(slot_bytes=slot_bytes)
        peers.counters[:, 1] = peers.counters[:, 0] % 2 * slot_bytes
        for number in range(3):
            peers.come(number)
        slots = peers.tensors()._replace(signals=signals, tensors=(1, 2, 3))
        box = ReduceBox(0, 0, (8,), (1,), tuple(Slot(number, 0, (1,)) for number in range(4)))
        with doubled("cpu", table_maker=maker):
            table = reduce_table([box], "sum", dtype, 1, CPU, slots)
        assert isinstance(table, DeviceTable) == isinstance(maker, TritonMaker)
        table.run([each.data_ptr() for each in terms], [target.data_ptr()], 1)
        expected = terms[0, 0] + terms[1, 0] + terms[2, 1] + terms[3, 0]
        assert torch.equal(target, expected)
        found.append(peers.state())
    assert found[0] == found[1]


@pytest.mark.parametrize("fingerprint", [7, 2**31, 2**32 - 1])
def test_a_peer_publishes_while_the_kernel_looks(fingerprint):
    peers = Peers([3] * 5, lands=True, fingerprint=fingerprint)
    table = table_of(peers, TritonMaker())
    for number in range(4):
        peers.come(number)
    thread = threading.Thread(target=peers.run, args=(table,), daemon=True)
    thread.start()
    time.sleep(MOMENT_S)
    assert thread.is_alive()
    assert peers.counters[:, 0].tolist() == [3] * 5
    peers.come(4)
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    assert peers.counters[:, 0].tolist() == [4] * 5


def test_the_stop_word_ends_a_wait():
    peers = Peers([3, 3], lands=True)
    peers.come(0)
    thread = threading.Thread(target=peers.run, args=(table_of(peers, TritonMaker()),), daemon=True)
    thread.start()
    time.sleep(MOMENT_S)
    assert thread.is_alive()
    peers.stop.asked[0] = -1
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    assert (peers.counters[:, 0].tolist(), peers.stop.met.item(), peers.ended.item()) == ([3, 3], 1, 0)


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
