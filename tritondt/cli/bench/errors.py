"""The error of the benchmarks."""

from tritondt.errors import TritondtError


class BenchmarkError(TritondtError):
    """A benchmark that cannot be made as it was asked for, or a side that ran something else than the case."""
