"""Random bits of a part's elements: a function of a key and of the element's position in the global tensor.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), with the place as its counter. So
every rank computes the bits of what it holds, and they are the same whatever the layout.
"""

from collections.abc import Sequence

import torch

from tritondt._C import write_random_words
from tritondt.sharding.intervals import Region

_LOW = 0xFFFFFFFF
_NUM_ROUNDS = 10


def random_words(
    region: Region, shape: Sequence[int], key: int, lane: int, device: torch.device | None = None
) -> torch.Tensor:
    """64 random bits, as int64, for each element of `region` of a tensor of `shape`, row by row.

    `key` has 64 bits. `lane`, 0 or 1, says which half of the generator's 128 bits to take. On the CPU it is a C++
    function, which takes 8 ns an element; elsewhere it is some 90 operators of torch.

    >>> whole, part = (random_words((interval,), (9,), key=7, lane=0) for interval in (((0, 9),), ((4, 6),)))
    >>> part.equal(whole[4:6])
    True
    """
    if device is not None and device.type != "cpu":
        return _by_operators(_positions(region, shape, device), key, lane)
    lengths = [sum(stop - start for start, stop in intervals) for intervals in region]
    words = torch.empty(lengths, dtype=torch.int64)
    write_random_words(region, shape, key, lane, words.data_ptr(), torch.get_num_threads())
    return words


def _positions(region: Region, shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """The position of each element in the global tensor, row by row."""
    positions = torch.zeros((), dtype=torch.int64, device=device)
    for intervals, length in zip(region, shape, strict=True):
        held = [torch.arange(start, stop, device=device) for start, stop in intervals]
        indices = torch.cat(held) if held else torch.empty(0, dtype=torch.int64, device=device)
        positions = (positions * length)[..., None] + indices
    return positions


def _by_operators(counter: torch.Tensor, key: int, lane: int) -> torch.Tensor:
    """Philox by operators on int64 that hold 32 bits each; products wrap around, which keeps their bits."""
    first, second = counter & _LOW, (counter >> 32) & _LOW
    third = fourth = torch.zeros_like(counter)
    low_key, high_key = key & _LOW, key >> 32 & _LOW
    for _ in range(_NUM_ROUNDS):
        left, right = first * 0xD2511F53, third * 0xCD9E8D57
        first, second = ((right >> 32) & _LOW) ^ second ^ low_key, right & _LOW
        third, fourth = ((left >> 32) & _LOW) ^ fourth ^ high_key, left & _LOW
        low_key, high_key = (low_key + 0x9E3779B9) & _LOW, (high_key + 0xBB67AE85) & _LOW
    return first | (second << 32) if lane == 0 else third | (fourth << 32)
