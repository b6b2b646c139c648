"""The last operations of a rank, kept in memory and written when something goes wrong.

`python -m tritondt doctor flight DIR` reads what all ranks have written and says who waits for whom, and why.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from tritondt._C import STATES, FlightRecorder
from tritondt.errors import PeerError

PACKING, EXCHANGING, UNPACKING, DONE, FAILED = map(
    STATES.index, ("packing", "exchanging", "unpacking", "done", "failed")
)
# Files and folders of the package whose code is the user's: the commands, which are written like programs of others.
_PROGRAMS = {"cli", "__main__.py"}


class Flight:
    """The flight recorder of one rank; written to `directory`, or nowhere without one."""

    def __init__(self, rank: int, world_size: int, directory: Path | None) -> None:
        self.recorder = FlightRecorder(rank, world_size)
        self.recorder.set_internal(list(_internal_files()))
        self.path = None if directory is None else directory / f"rank-{rank}.json"
        # Keeps the folder for this rank while others of its machine leave.
        self._mark = None if directory is None else directory / f".rank-{rank}"

    @property
    def path_text(self) -> str:
        """Path of the flight record; empty where it is not written."""
        return "" if self.path is None else str(self.path)

    def prepare(self) -> None:
        """Makes the folder of the flight records, where the watchdog writes at any time."""
        while self._mark is not None:
            self._mark.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):  # another rank has just left, and removed it
                self._mark.touch()
                return

    def leave(self) -> None:
        """Removes the folder of the flight records if nothing was written and no other rank uses it."""
        if self._mark is not None:
            self._mark.unlink(missing_ok=True)
            with suppress(OSError):  # not empty, or another rank of this machine was faster
                self._mark.parent.rmdir()

    def write(self, reason: str) -> str:
        """Writes the flight record, and returns a clause for an error message that says where."""
        if self.path is None:
            return ""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.recorder.dump(str(self.path), reason)
        except OSError as error:  # what went wrong before matters more
            return f"; the flight record could not be written ({error})"
        return f"; flight records: {self.path.parent}"

    def written_for(self, error: PeerError) -> PeerError:
        """The error with a clause that says where the flight record has been written."""
        return type(error)(f"{error}{self.write(f'{type(error).__name__}: {error}')}")


def _internal_files() -> Iterator[str]:
    """Prefixes of the paths of files that call on the user's behalf: this package's, torch's, threading's."""
    package = Path(__file__).parents[2]
    for found in os.scandir(package):
        if found.name not in _PROGRAMS:
            yield found.path if found.is_file() else found.path + os.sep
    yield str(Path(torch.__file__).parent) + os.sep
    yield threading.__file__


@dataclass(slots=True)
class ExchangeRecord:
    """One exchange of a communicator, as messages and errors speak of it; used again for the same transfer.

    `fingerprint` and `text` are its transfer's, and `label` is the text as the flight recorder knows it; `site` is the
    line of the program that asked for it now, and `entry` the recorder's entry.
    """

    fingerprint: int
    text: str
    label: int
    recorder: FlightRecorder
    site: int = -1
    entry: int = -1

    @property
    def description(self) -> str:
        """Text of the exchange, and the line of the program that asked for it."""
        return self.text if self.site < 0 else f"{self.text}, asked for at {self.recorder.site_text(self.site)}"
