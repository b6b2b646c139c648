"""The sockets as the transport of a command that measures them, or a part of what they do."""

import os

import click

from tritondt import environment

_NAME = "TRITONDT_TRANSPORT"


def choose_sockets(what: str) -> None:
    """Lets the ranks of this command use sockets where the environment names no transport.

    Raises UsageError where it names another one, of which `what` sees nothing.
    """
    if environment.transport() is None:
        os.environ[_NAME] = "sockets"
        click.get_current_context().call_on_close(lambda: os.environ.pop(_NAME, None))
    found = environment.transport()
    if found != "sockets":
        raise click.UsageError(f"{what} measures the sockets; {_NAME}={found} is set, allowed is sockets")
