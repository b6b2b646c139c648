"""Test doubles of transports, NCCL devices and makers of tables, put in place by `doubled`."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TypeVar

import torch

from tritondt.comm.communicator import Communicator
from tritondt.comm.member import ProcessContext
from tritondt.comm.transports import table
from tritondt.kernels import tables
from tritondt.kernels.device_types import ByDeviceType
from tritondt.process_group import stream
from tritondt.process_group.stream import NcclDevice


class Unchanged:
    """An argument of `doubled` that leaves an entry as it is; None takes the entry away."""


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
    """Other makers of communicators, NCCL devices and tables for a type of device, within the block.

    They hold in all threads of this process; what was made before stays as it is.

        with doubled("cpu", table_maker=TritonMaker()):
            ...
    """
    with ExitStack() as stack:
        _replace(stack, table.makers, device_type, transport)
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
