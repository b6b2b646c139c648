"""The error of the benchmarks."""

from tritondt.cli.user_error import UserError


class BenchmarkError(UserError):
    """A benchmark that cannot be made as it was asked for, or a side that ran something else than the case."""
