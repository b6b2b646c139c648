"""Local positions of global indices on a sharded dim."""

import torch

from tritondt.kernels.memory import has_memory
from tritondt.sharding.intervals import Intervals


def positions_among(held: Intervals, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions of global `indices` among the rows that a rank holds, laid end to end, and a mask of the missing ones.

    Indices that the rank does not hold get position 0.

    >>> positions_among(((2, 4), (8, 10)), torch.tensor([3, 5, 8]))
    (tensor([1, 0, 2]), tensor([False,  True, False]))
    """
    if len(held) == 1:
        ((start, stop),) = held
        missing = (indices < start) | (indices >= stop)
        return (indices - start).masked_fill_(missing, 0), missing
    starts, stops, offsets, passed = [], [], [], 0
    for start, stop in held:
        starts.append(start)
        stops.append(stop)
        offsets.append(passed - start)
        passed += stop - start
    bounds = torch.tensor([starts, stops, offsets], dtype=indices.dtype, device=indices.device)
    place = torch.bucketize(indices, bounds[0], right=True) - 1
    missing = (place < 0) | (indices >= bounds[1][place])
    return (indices + bounds[2][place]).masked_fill_(missing, 0), missing


def check_indices(indices: torch.Tensor, length: int, what: str) -> None:
    """Raises IndexError for indices outside [0, length), on devices where looking costs no waiting.

    A graph of torch.compile raises RuntimeError where it runs.
    """
    if indices.device.type != "cpu":
        return
    if not has_memory(indices):
        allowed = f"{what} is out of range: allowed are 0..{length - 1 if isinstance(length, int) else 'length - 1'}"
        torch._assert_async(((indices >= 0) & (indices < length)).all(), allowed)
    elif indices.numel():
        low, high = (int(bound) for bound in torch.aminmax(indices))
        if low < 0 or high >= length:
            raise IndexError(f"{what} {low if low < 0 else high} is out of range: allowed are 0..{length - 1}")
