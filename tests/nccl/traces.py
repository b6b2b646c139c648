"""What ran on a device at which time, read from the traces that torch's profiler writes."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple


class Kernel(NamedTuple):
    """One launch; times in microseconds of the trace's clock."""

    name: str
    stream: int
    start_us: float
    end_us: float
    ctas: int

    @property
    def communicates(self) -> bool:
        """Whether it is NCCL's."""
        return self.name.startswith("nccl")


def kernels_of(trace: Mapping[str, Any]) -> list[Kernel]:
    """The kernels of a trace in Chrome's format, in the order of their start."""
    found = [
        Kernel(
            event["name"],
            event["args"]["stream"],
            event["ts"],
            event["ts"] + event["dur"],
            prod(event["args"]["grid"]),
        )
        for event in trace["traceEvents"]
        if event.get("cat") == "kernel"
    ]
    return sorted(found, key=lambda kernel: kernel.start_us)


def side_by_side(kernels: Sequence[Kernel]) -> list[tuple[Kernel, Kernel]]:
    """Every kernel of NCCL with those of computing on another stream that ran while it did."""
    return [
        (one, other)
        for one in kernels
        for other in kernels
        if one.communicates
        and not other.communicates
        and one.stream != other.stream
        and one.start_us < other.end_us
        and other.start_us < one.end_us
    ]
