"""What a process that was forked from a rank is told when it asks for communication.

The child has the parent's sockets but none of its threads, and two processes that speak as one rank would tear each
other's messages. It may use plain tensors and what the parent had gathered.
"""

import os

from tritondt.errors import WorldError


class ForkedError(WorldError):
    """Communication asked for in a process that was forked from a rank."""


def forked_error(rank: int) -> ForkedError:
    """The error of this process, which has just been forked."""
    return ForkedError(
        f"process {os.getpid()} was forked from rank {rank}, process {os.getppid()}, and cannot communicate in its "
        "place; use plain tensors in it, or start by spawn what has to communicate"
    )
