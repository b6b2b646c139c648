"""One process beside the tests that has imported torch once, and forks what is asked of it.

    fork_server().fork("tests.harness.gloo_ranks:fork_ranks", environment, argument, descriptors)

Importing it costs a start of ranks 3 s of CPU, and CI starts some fifty. What is forked ends as any process does: it
falls out of the server's loop, runs the function, and comes to the end of the program.
"""

import functools
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

REPOSITORY = Path(__file__).parents[2]

# What the first view of a distributed tensor imports in every process, and assert_close.
_PRELOADED = (
    "pytest",
    "torch._dynamo",
    "torch.distributed.tensor",
    "tritondt.ops.families",
    "tests.harness.gloo_ranks",
)
_MAX_BYTES, _MAX_DESCRIPTORS = 1 << 17, 64


class Forked(NamedTuple):
    """What a forked process is to run, with the numbers that its descriptors have there."""

    function: Callable[..., None]
    argument: Any
    descriptors: list[int]


class ForkServer:
    """A process that forks others; it ends with the one that started it."""

    def __init__(self) -> None:
        self._socket, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from tests.harness import fork_server; fork_server.serve({its.fileno()})"],
                pass_fds=[its.fileno()],
                cwd=REPOSITORY,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])},
            )

    def fork(self, function: str, environment: Mapping[str, str], argument: Any, descriptors: Sequence[int]) -> None:
        """Lets a new process call `function` ("module:name") with the descriptors it gets and `argument`.

        Its environment is the one given. BrokenPipeError where the server has died.
        """
        message = json.dumps([function, dict(environment), argument]).encode()
        if len(message) > _MAX_BYTES or len(descriptors) > _MAX_DESCRIPTORS:
            raise ValueError(
                f"{len(message)} bytes and {len(descriptors)} descriptors were to be sent to a fork; allowed are "
                f"{_MAX_BYTES} and {_MAX_DESCRIPTORS}"
            )
        socket.send_fds(self._socket, [message], list(descriptors))


@functools.cache
def fork_server() -> ForkServer:
    """That of this process, started on first use."""
    return ForkServer()


def serve(number: int) -> None:
    """The life of the server, and then that of each process it forks."""
    os.dup2(2, 1)  # what ranks print must not mix with what a worker of pytest-xdist tells
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started it is asked to end, and ends it
    for module in _PRELOADED:
        importlib.import_module(module)
    with socket.socket(fileno=number) as requests:
        forked = _next_fork(requests)
    if forked is not None:
        forked.function(forked.descriptors, forked.argument)


def _next_fork(requests: socket.socket) -> Forked | None:
    """In each new process what it is to run; None in the server, when nobody will ask any more."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, _MAX_BYTES, _MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        if not message:
            return None
        if os.fork() == 0:
            break
        for descriptor in descriptors:
            os.close(descriptor)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    named, environment, argument = json.loads(message)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # found by the environment
    module, name = named.split(":")
    return Forked(getattr(importlib.import_module(module), name), argument, descriptors)
