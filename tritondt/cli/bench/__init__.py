"""`bench`: timings of this library, interleaved in one run with what they are compared to."""

from tritondt.cli.bench.command import redistribute

__all__ = ["redistribute"]
