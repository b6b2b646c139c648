"""What grows in a process is found: memory, descriptors and threads, planted; what does not is not."""

import gc
import os
import threading
from collections.abc import Callable

import pytest

from tests.tools.flat import ALLOWED, Sample, growth, watched

NUM_STEPS = 12


def test_noise_is_no_growth():
    noise = [(number * 7919) % 5 for number in range(100)]
    assert growth([Sample(second, 2**29 + noise[second] * 2**20, 30 + noise[second], 8) for second in range(100)]) == []


def test_what_grows_only_at_first_is_no_growth():
    warm = [min(second, 30) for second in range(100)]
    assert growth([Sample(second, warm[second] * 2**23, warm[second], warm[second]) for second in range(100)]) == []


def _memory(kept: list[Callable[[], object]]) -> None:
    block = bytearray(b"x" * 4 * 2**20)
    kept.append(block.clear)


def _descriptors(kept: list[Callable[[], object]]) -> None:
    reader, writer = os.pipe()
    kept.extend([lambda: os.close(reader), lambda: os.close(writer)])


def _threads(kept: list[Callable[[], object]]) -> None:
    end = threading.Event()
    threading.Thread(target=end.wait, daemon=True).start()
    kept.append(end.set)


@pytest.mark.extended
@pytest.mark.parametrize("plant", [_memory, _descriptors, _threads])
def test_a_planted_leak_is_found(plant: Callable[[list[Callable[[], object]]], None]) -> None:
    kept: list[Callable[[], object]] = []
    gc.freeze()  # what other tests have left is not looked through for each of the samples: 10 s less

    def step(number: int) -> bool:
        plant(kept)
        return number + 1 < NUM_STEPS

    try:
        found = growth(watched(0.0, step))
    finally:
        gc.unfreeze()
        for give_back in kept:
            give_back()
    assert any(sentence.startswith(f"{plant.__name__[1:]} grew by ") for sentence in found), found
    assert len(found) <= len(ALLOWED)
