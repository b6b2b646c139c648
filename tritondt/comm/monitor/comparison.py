"""Notes that ranks compare before an exchange under TRITONDT_DEBUG=1, and the error where they differ."""

import hashlib
import struct
from collections.abc import Mapping
from typing import NamedTuple

from tritondt.errors import MismatchError

# Every note has this length, so that ranks that differ in everything else still understand each other.
NOTE_BYTES = 512
_FORMAT = struct.Struct(f"<Q{NOTE_BYTES - 8}s")
NOTES_FINGERPRINT = 0x636F6D70  # of the exchange of notes itself
MUST = "redistribute the same tensors in the same order"


def digest(text: str, num_bytes: int) -> bytes:
    """Hash of a text, BLAKE2b in `num_bytes` bytes: equal in all processes, which `hash` is not.

    >>> digest("S0 -> R", 8).hex()
    'd5be5e6b742014d7'
    """
    return hashlib.blake2b(text.encode(), digest_size=num_bytes).digest()


class Note(NamedTuple):
    """A rank's next exchange: its fingerprint, its text and the line of the program that asked for it."""

    fingerprint: int
    description: str


def write_note(note: Note) -> bytes:
    """A note in NOTE_BYTES bytes; a description that does not fit is cut.

    >>> read_note(write_note(Note(7, "step 1 of 1"))), len(write_note(Note(7, "x" * 5000)))
    (Note(fingerprint=7, description='step 1 of 1'), 512)
    """
    return _FORMAT.pack(note.fingerprint, note.description.encode())


def read_note(content: bytes) -> Note:
    """The note that `write_note` wrote."""
    fingerprint, description = _FORMAT.unpack(content)
    return Note(fingerprint, description.rstrip(b"\0").decode(errors="ignore"))


def difference(sequence: int, notes: Mapping[int, Note], must: str = MUST) -> MismatchError | None:
    """The error where the notes of ranks differ, the same on every rank; None where they agree.

    >>> notes = {0: Note(7, "S0 -> R"), 1: Note(7, "S0 -> R"), 2: Note(8, "S0 -> S1")}
    >>> print(difference(3, notes))
    ranks disagree at exchange 3: ranks 0 and 1 run S0 -> R; rank 2 runs S0 -> S1; nothing was moved, and all ranks \
must redistribute the same tensors in the same order
    """
    ranks_of: dict[int, list[int]] = {}
    for rank, note in sorted(notes.items()):
        ranks_of.setdefault(note.fingerprint, []).append(rank)
    if len(ranks_of) == 1:
        return None
    clauses = "; ".join(f"{_ranks_text(ranks)} {notes[ranks[0]].description}" for ranks in ranks_of.values())
    return MismatchError(
        f"ranks disagree at exchange {sequence}: {clauses}; nothing was moved, and all ranks must {must}"
    )


def _ranks_text(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} runs"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]} run"
