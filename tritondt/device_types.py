"""What serves the tensors of a type of device: transports, NCCL's devices and makers of tables are such entries."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

Entry = TypeVar("Entry")


class ByDeviceType(dict[str, Entry]):
    """Entries by the type of a torch.device ("cpu", "cuda"); tests replace them (tests/harness/doubled.py).

    >>> makers = ByDeviceType(cpu="C++")
    >>> with makers.replaced("cpu", "Triton"):
    ...     makers
    {'cpu': 'Triton'}
    >>> makers
    {'cpu': 'C++'}
    """

    @contextmanager
    def replaced(self, device_type: str, entry: Entry | None) -> Iterator[None]:
        """Has another entry for a type of device until the end, in all threads; None for no entry."""
        before = self.get(device_type)
        self._put(device_type, entry)
        try:
            yield
        finally:
            self._put(device_type, before)

    def _put(self, device_type: str, entry: Entry | None) -> None:
        if entry is None:
            self.pop(device_type, None)
        else:
            self[device_type] = entry
