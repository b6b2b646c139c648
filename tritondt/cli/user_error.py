"""Errors of what a user has asked for, or of a function of the user's own."""

from tritondt.errors import TritondtError


class UserError(TritondtError):
    """An error that says all a reader needs: a rank that raises it is shown without the package's own traceback."""


class BenchmarkError(UserError):
    """A benchmark that cannot be made as it was asked for, or a side that ran something else than the case."""
