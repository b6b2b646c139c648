"""Times of work on a device, by the device's own clock."""

import statistics
from collections.abc import Callable

import torch


def device_seconds(run: Callable[[], None], *, repeats: int = 9, warmups: int = 2) -> float:
    """Median seconds between two events around `run`, on the current stream of the current CUDA device.

    What is smaller than the device's cache is timed with the cache warm.
    """
    for _ in range(warmups):
        run()
    times: list[float] = []
    for _ in range(repeats):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        run()
        after.record()
        after.synchronize()
        times.append(before.elapsed_time(after) / 1e3)
    return float(statistics.median(times))
