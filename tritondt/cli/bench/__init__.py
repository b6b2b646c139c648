"""`bench`: timings of this library, interleaved in one run with those of the library it is compared to."""

from tritondt.cli.bench.command import redistribute

__all__ = ["redistribute"]
