"""The last operations of a rank, kept in memory and written when something goes wrong.

`python -m tritondt doctor flight DIR` reads what all ranks have written and says who waits for whom, and why.
"""

import os
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from tritondt._C import STATES, STEPS, FlightRecorder
from tritondt.comm.monitor.flight_folder import FlightFolder
from tritondt.comm.packing.messages import NO_SLICES, Slices
from tritondt.errors import PeerError

ISSUED, EXCHANGING, DONE, FAILED = map(STATES.index, ("issued", "exchanging", "done", "failed"))
# Steps of an exchange, by which its state follows.
PACK, SEND, KEEP, WAIT, UNPACK = map(STEPS.index, ("pack", "send", "keep", "wait", "unpack"))
# Files and folders of the package whose code is the user's: the commands, which are written like programs of others.
_PROGRAMS = {"cli", "__main__.py"}


class Flight:
    """The flight recorder of one rank; written to `folder`, or nowhere without one."""

    def __init__(self, rank: int, world_size: int, folder: FlightFolder | None) -> None:
        self.recorder = FlightRecorder(rank, world_size)
        self.recorder.set_internal(list(_internal_files()))
        self._folder = folder
        self._refusal: OSError | None = None  # why nothing is written

    @property
    def path(self) -> Path | None:
        """Path of the flight record; None where it is not written."""
        if self._folder is None or self._refusal is not None:
            return None
        return self._folder.path / f"rank-{self.recorder.rank}.json"

    @property
    def path_text(self) -> str:
        """Path of the flight record; empty where it is not written."""
        path = self.path
        return "" if path is None else str(path)

    def prepare(self) -> None:
        """Makes the folder of the flight records, where the watchdog writes at any time.

        Where it cannot be written, a warning says so once, and the rank goes on without records.
        """
        if self._folder is None:
            return
        try:
            self._folder.hold(self.recorder.rank)
        except OSError as error:
            self._refusal = error
            warnings.warn(
                f"rank {self.recorder.rank} writes no flight records: {error}; TRITONDT_FLIGHT_DIR names a folder for "
                "them",
                RuntimeWarning,
                stacklevel=2,
            )

    def leave(self) -> None:
        """Removes a temporary folder of flight records if nothing was written and no other rank uses it."""
        if self._folder is not None:
            self._folder.release()

    def write(self, reason: str) -> str:
        """Writes the flight record, and returns a clause for an error message that says where."""
        if self._folder is None:
            return ""
        if self._refusal is not None:
            return f"; no flight records are written ({self._refusal})"
        try:
            self._folder.make()
            self.recorder.dump(self.path_text, reason)
        except OSError as error:  # what went wrong before matters more
            return f"; the flight record could not be written ({error})"
        return f"; flight records: {self._folder.path}"

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


class PastExchange(NamedTuple):
    """An exchange that the recorder has kept: its fingerprint, and its text with the line that asked for it."""

    fingerprint: int
    text: str


@dataclass(slots=True)
class ExchangeRecord:
    """One exchange of a communicator, as messages and errors speak of it; used again for the same transfer.

    `fingerprint` and `text` are its transfer's, and `label` is the text as the flight recorder knows it. `key` and
    `ranks` are the communicator's, and `sends` and `receives` messages to places in it, where these are known. `site`
    is the line of the program that asked for it now, and `entry` the recorder's entry. `is_connected` says whether this
    rank has found that it is connected to all of the exchange's peers.
    """

    fingerprint: int
    text: str
    label: int
    recorder: FlightRecorder
    site: int = -1
    entry: int = -1
    is_connected: bool = False
    key: str = ""
    ranks: tuple[int, ...] = ()
    sends: Slices = NO_SLICES
    receives: Slices = NO_SLICES

    @property
    def description(self) -> str:
        """Text of the exchange, and the line of the program that asked for it."""
        return self.text if self.site < 0 else f"{self.text}, asked for at {self.recorder.site_text(self.site)}"

    def ran(self, sequence: int) -> PastExchange | None:
        """Exchange number `sequence` of the same communicator, before this one; None where it is not kept."""
        entries = self.recorder.entries()
        communicator = next((it["communicator"] for it in entries if it["number"] == self.entry), None)
        for it in reversed(entries):
            if (it["communicator"], it["sequence"]) == (communicator, sequence) and it["number"] < self.entry:
                site = "" if it["site"] is None else f", asked for at {it['site']}"
                return PastExchange(it["fingerprint"], f"{it['operation']}{site}")
        return None
