"""Tables by the type of device: the transports, NCCL devices and makers of tables are entries of such."""

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
        """Puts another entry in place for a type of device until the block ends, in all threads; None for no entry."""
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
