"""Test doubles in the place of what serves a type of device: `doubled`, the only door that they come in by."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TypeVar

import torch

from tritondt.comm import process_world
from tritondt.comm.communicator import Communicator
from tritondt.comm.member import ProcessContext
from tritondt.device_types import ByDeviceType
from tritondt.kernels import tables
from tritondt.process_group import stream
from tritondt.process_group.stream import NcclDevice


class Unchanged:
    """What `doubled` is given for what it leaves as it is; None takes away what is there."""


UNCHANGED = Unchanged()
Entry = TypeVar("Entry")


@contextmanager
def doubled(
    device_type: str,
    *,
    transport: Callable[[ProcessContext], Communicator] | Unchanged | None = UNCHANGED,
    nccl_device: Callable[[torch.device], NcclDevice] | Unchanged | None = UNCHANGED,
    table_maker: tables.Maker | Unchanged | None = UNCHANGED,
) -> Iterator[None]:
    """Within, these make the communicators, NCCL's libraries and streams, and the tables of a type of device.

    In all threads of this process; what was made before stays as it is.

        with doubled("cpu", table_maker=TritonMaker()):
            ...
    """
    with ExitStack() as stack:
        _replace(stack, process_world.transports, device_type, transport)
        _replace(stack, stream.nccl_devices, device_type, nccl_device)
        _replace(stack, tables.table_makers, device_type, table_maker)
        yield


def _replace(stack: ExitStack, entries: ByDeviceType[Entry], device_type: str, entry: Entry | Unchanged | None) -> None:
    if not isinstance(entry, Unchanged):
        stack.enter_context(entries.replaced(device_type, entry))


_kept = ExitStack()


def keep(double: AbstractContextManager[None]) -> None:
    """Enters a double that stays for as long as this process does."""
    _kept.enter_context(double)
