"""Notes that ranks compare before an exchange under TRITONDT_DEBUG=1, and the error where they differ."""

import hashlib
import re
import struct
from collections.abc import Mapping
from typing import NamedTuple

from tritondt.errors import MismatchError

# Every note has this length, so that ranks that differ in everything else still understand each other.
NOTE_BYTES = 512
_FORMAT = struct.Struct(f"<Q8s{NOTE_BYTES - 16}s")
NOTES_FINGERPRINT = 0x636F6D70  # of the exchange of notes itself
MUST = "redistribute the same tensors in the same order"
# Files that a program makes as it runs, whose names may differ from rank to rank.
_GENERATED = re.compile(r"<|.*torchinductor_")


def digest(text: str, num_bytes: int) -> bytes:
    """Hash of a text, BLAKE2b in `num_bytes` bytes: equal in all processes, which `hash` is not.

    >>> digest("S0 -> R", 8).hex()
    'd5be5e6b742014d7'
    """
    return hashlib.blake2b(text.encode(), digest_size=num_bytes).digest()


class Note(NamedTuple):
    """A rank's next exchange: its fingerprint, its text, and a digest of the program's line that must be equal."""

    fingerprint: int
    description: str
    line: bytes = b""


def digest_of_line(site: str) -> bytes:
    """Digest of a line of the program, given as "file:line (function)"; empty where it is no line of a file.

    Programs may lie in other folders on other hosts.

    >>> digest_of_line("/a/train.py:7 (main)") == digest_of_line("/b/train.py:7 (main)") != b""
    True
    >>> digest_of_line("<eval_with_key>.3:5 (forward)")
    b''
    """
    where = site.rpartition(" (")[0]
    return b"" if not where or _GENERATED.match(where) else digest(where.rpartition("/")[2], 8)


def write_note(note: Note) -> bytes:
    """A note in NOTE_BYTES bytes; a description that does not fit is cut.

    >>> read_note(write_note(Note(7, "step 1 of 1"))), len(write_note(Note(7, "x" * 5000)))
    (Note(fingerprint=7, description='step 1 of 1', line=b''), 512)
    """
    return _FORMAT.pack(note.fingerprint, note.line, note.description.encode())


def read_note(content: bytes) -> Note:
    """The note that `write_note` wrote."""
    fingerprint, line, description = _FORMAT.unpack(content)
    return Note(fingerprint, description.rstrip(b"\0").decode(errors="ignore"), line if any(line) else b"")


def difference(sequence: int, notes: Mapping[int, Note], must: str = MUST) -> MismatchError | None:
    """The error where the notes of ranks differ, the same on every rank; None where they agree.

    >>> notes = {0: Note(7, "S0 -> R"), 1: Note(7, "S0 -> R"), 2: Note(8, "S0 -> S1")}
    >>> print(difference(3, notes))
    ranks disagree at exchange 3: ranks 0 and 1 run S0 -> R; rank 2 runs S0 -> S1; nothing was moved, and all ranks \
must redistribute the same tensors in the same order
    >>> notes = {0: Note(7, "S0 -> R at a.py:1", b"1"), 1: Note(7, "S0 -> R at a.py:2", b"2")}
    >>> print(difference(3, notes))
    ranks disagree at exchange 3: rank 0 runs S0 -> R at a.py:1; rank 1 runs S0 -> R at a.py:2; nothing was moved, and \
all ranks must redistribute the same tensors in the same order, from the same lines
    """
    ranks_of: dict[tuple[int, bytes], list[int]] = {}
    for rank, note in sorted(notes.items()):
        ranks_of.setdefault((note.fingerprint, note.line), []).append(rank)
    if len(ranks_of) == 1:
        return None
    if len({note.fingerprint for note in notes.values()}) == 1:
        must = f"{must}, from the same lines"
    clauses = "; ".join(f"{_ranks_text(ranks)} {notes[ranks[0]].description}" for ranks in ranks_of.values())
    return MismatchError(
        f"ranks disagree at exchange {sequence}: {clauses}; nothing was moved, and all ranks must {must}"
    )


def _ranks_text(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} runs"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]} run"
