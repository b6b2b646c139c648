"""Random bits by key and place: those of the paper, whoever computes them and whatever part is asked for."""

import pytest
import torch

import tritondt as T
from tritondt._C import write_random_words
from tritondt.ops.random.philox import _by_operators, _positions, random_words


def word(counter: int, key: int, lane: int) -> int:
    """Philox4x32-10 as the paper has it, on four numbers of 32 bits."""
    low = 0xFFFFFFFF
    words, keys = [counter & low, counter >> 32, 0, 0], [key & low, key >> 32]
    for _ in range(10):
        left, right = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
        words = [(right >> 32) ^ words[1] ^ keys[0], right & low, (left >> 32) ^ words[3] ^ keys[1], left & low]
        keys = [(keys[0] + 0x9E3779B9) & low, (keys[1] + 0xBB67AE85) & low]
    return words[2 * lane] | words[2 * lane + 1] << 32


def signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def test_the_known_answer():
    # Random123's table: counter 0 and key 0 give 6627e8d5 e169c58d bc57ac4c 9b00dbd8.
    assert [word(0, 0, lane) for lane in (0, 1)] == [0xE169C58D6627E8D5, 0x9B00DBD8BC57AC4C]
    assert random_words((), (), 0, 0).item() == signed(0xE169C58D6627E8D5)


@pytest.mark.parametrize("key", [0, 5, (1 << 64) - 3, 0x9E3779B97F4A7C15])
def test_every_form_gives_the_same_bits(key):
    region, shape = (((1, 2), (4, 6)), ((0, 5),), ((3, 4), (6, 9))), (7, 5, 9)
    for lane in (0, 1):
        found = random_words(region, shape, key, lane)
        places = _positions(region, shape, torch.device("cpu"))
        assert found.shape == places.shape == (3, 5, 4)
        assert found.flatten().tolist() == [signed(word(place, key, lane)) for place in places.flatten().tolist()]
        torch.testing.assert_close(_by_operators(places, key, lane), found, rtol=0, atol=0)


def test_counters_of_more_than_32_bits():
    start = (1 << 32) - 2
    found = random_words((((start, start + 4),),), (1 << 40,), 3, 1)
    assert found.tolist() == [signed(word(start + place, 3, 1)) for place in range(4)]


def test_threads_and_parts_change_nothing():
    shape = (3, 200_001)
    whole = random_words((((0, 3),), ((0, 200_001),)), shape, 11, 0)
    alone = torch.empty_like(whole)
    write_random_words((((0, 3),), ((0, 200_001),)), shape, 11, 0, alone.data_ptr(), 1)
    torch.testing.assert_close(alone, whole, rtol=0, atol=0)
    part = random_words((((1, 3),), ((5, 9), (100_000, 200_001))), shape, 11, 0)
    torch.testing.assert_close(part, torch.cat([whole[1:, 5:9], whole[1:, 100_000:]], 1), rtol=0, atol=0)
    assert random_words(((), ((0, 5),)), (3, 5), 1, 0).shape == (0, 5)


@pytest.mark.parametrize(
    ("region", "shape", "lane", "sentence"),
    [
        ((((0, 5),),), (4,), 0, "dim 0 of length 4 has no indices from 0 up to 5"),
        ((((3, 2),),), (4,), 0, "dim 0 of length 4 has no indices from 3 up to 2"),
        ((((0, 4),),), (4, 1), 0, "region has 1 dims, shape has 2"),
        ((((0, 4),),), (4,), 2, "lane is 2; it must be 0 or 1"),
    ],
)
def test_what_is_no_part_is_refused(region, shape, lane, sentence):
    words = torch.empty(8, dtype=torch.int64)
    with pytest.raises(ValueError, match=sentence):
        write_random_words(region, shape, 1, lane, words.data_ptr(), 1)


def test_layouts_give_the_regions_that_are_asked_for():
    layout = T.Layout((2,), [T.Shard(0, repeats=2)], (8, 3))
    whole = random_words((((0, 8),), ((0, 3),)), (8, 3), 2, 0)
    parts = [random_words(layout.region((rank,)), layout.shape, 2, 0) for rank in range(2)]
    torch.testing.assert_close(parts[1], whole[[2, 3, 6, 7]], rtol=0, atol=0)
    torch.testing.assert_close(parts[0], whole[[0, 1, 4, 5]], rtol=0, atol=0)
