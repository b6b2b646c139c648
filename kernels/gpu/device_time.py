"""Times of work on a device, by the device's own clock."""

import statistics
from collections.abc import Callable

import torch

# The device is busy, 0.2 ms at 2 GHz, until the host has issued what is timed: 5 us a launch would count else.
_BUSY_CYCLES = 400_000


def device_seconds(run: Callable[[], None], *, repeats: int = 9, warmups: int = 2) -> float:
    """Median seconds between two events around `run`, on the current stream of the current CUDA device.

    The host's time to issue up to some forty launches does not count. Runs on less memory than the device's cache are
    timed with the cache warm.
    """
    for _ in range(warmups):
        run()
    times: list[float] = []
    for _ in range(repeats):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_BUSY_CYCLES)
        before.record()
        run()
        after.record()
        after.synchronize()
        times.append(before.elapsed_time(after) / 1e3)
    return float(statistics.median(times))
