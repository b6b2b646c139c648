"""The line of a user's program that a call came from."""

import traceback

_NOT_THE_USERS = ("torch", "tritondt")


def calling_line() -> str:
    """File and number of the innermost line of code that is neither torch's nor ours."""
    for frame, line in traceback.walk_stack(None):
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _NOT_THE_USERS:
            return f"{frame.f_code.co_filename}:{line}"
    return "no line of Python"
