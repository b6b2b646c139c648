"""Notes that ranks compare before an exchange under TRITONDT_DEBUG=1, and the error where they differ."""

import hashlib
import re
import struct
from collections.abc import Mapping
from typing import NamedTuple

from tritondt.comm.communicator import Role
from tritondt.errors import MismatchError

# Every note has this length, so that ranks that differ in everything else still understand each other.
NOTE_BYTES = 512
_FORMAT = struct.Struct(f"<Q8sB{NOTE_BYTES - 17}s")
NOTES_FINGERPRINT = 0x636F6D70  # of the exchange of notes itself
MUST = "redistribute the same tensors in the same order"
_ROLES: tuple[Role, ...] = ("", "source", "target", "both")
# Files that a program makes as it runs, whose names may differ from rank to rank.
_GENERATED = re.compile(r"<|.*torchinductor_")


def digest(text: str, num_bytes: int) -> bytes:
    """Hash of a text, BLAKE2b in `num_bytes` bytes: equal in all processes, which `hash` is not.

    >>> digest("S0 -> R", 8).hex()
    'd5be5e6b742014d7'
    """
    return hashlib.blake2b(text.encode(), digest_size=num_bytes).digest()


class Note(NamedTuple):
    """A rank's next exchange: its fingerprint, its text, a digest of the program's line, and the rank's role.

    A line that is empty is not known, and not compared.
    """

    fingerprint: int
    description: str
    line: bytes = b""
    role: Role = ""


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
    (Note(fingerprint=7, description='step 1 of 1', line=b'', role=''), 512)
    """
    return _FORMAT.pack(note.fingerprint, note.line, _ROLES.index(note.role), note.description.encode())


def read_note(content: bytes) -> Note:
    """The note that `write_note` wrote."""
    fingerprint, line, role, description = _FORMAT.unpack(content)
    text = description.rstrip(b"\0").decode(errors="ignore")
    return Note(fingerprint, text, line if any(line) else b"", _ROLES[role])


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
    if len({note.fingerprint for note in notes.values()}) == 1:
        if _have_fitting_lines(notes):
            return None
        must = f"{must}, from the same lines"
    return MismatchError(
        f"ranks disagree at exchange {sequence}: {_clauses(notes)}; nothing was moved, and all ranks must {must}"
    )


def _have_fitting_lines(notes: Mapping[int, Note]) -> bool:
    """Whether ranks of one role have asked from one line, and those of both from that of either."""
    lines = {role: {note.line for note in notes.values() if note.role == role and note.line} for role in _ROLES}
    return max(map(len, lines.values())) <= 1 and len(set[bytes]().union(*lines.values())) <= 2


def _clauses(notes: Mapping[int, Note]) -> str:
    ranks_of: dict[tuple[int, bytes], list[int]] = {}
    for rank, note in sorted(notes.items()):
        ranks_of.setdefault((note.fingerprint, note.line), []).append(rank)
    return "; ".join(f"{_ranks_text(ranks)} {notes[ranks[0]].description}" for ranks in ranks_of.values())


class PastLines:
    """The lines from which those that give and those that take have asked for equal exchanges so far.

    Either may have lines of their own. Where the lines of two exchanges change sides, the two were asked for in
    swapped order, and each side was given what belongs to the other exchange.
    """

    def __init__(self) -> None:
        self._sequences: dict[tuple[int, bytes, bytes], int] = {}

    def swapped(self, sequence: int, notes: Mapping[int, Note], must: str = MUST) -> MismatchError | None:
        """The error where this exchange and one before have swapped lines, the same on every rank; else None.

        >>> lines = PastLines()
        >>> notes = {0: Note(7, "S0 -> R at a.py:1", b"1", "source"), 1: Note(7, "S0 -> R at a.py:2", b"2", "target")}
        >>> print(lines.swapped(3, notes))
        None
        >>> notes = {0: Note(7, "S0 -> R at a.py:2", b"2", "source"), 1: Note(7, "S0 -> R at a.py:1", b"1", "target")}
        >>> print(lines.swapped(4, notes))
        ranks disagree at exchange 4: rank 0 runs S0 -> R at a.py:2; rank 1 runs S0 -> R at a.py:1; in exchange 3 it \
was the other way round, so that either was given what the other exchange moves, and all ranks must redistribute the \
same tensors in the same order
        """
        found = {role: {note.line for note in notes.values() if note.role == role and note.line} for role in _ROLES}
        if len(found["source"]) != 1 or len(found["target"]) != 1 or found["source"] == found["target"]:
            return None
        (source,), (target,) = found["source"], found["target"]
        fingerprint = next(iter(notes.values())).fingerprint
        self._sequences.setdefault((fingerprint, source, target), sequence)
        before = self._sequences.get((fingerprint, target, source))
        if before is None:
            return None
        return MismatchError(
            f"ranks disagree at exchange {sequence}: {_clauses(notes)}; in exchange {before} it was the other way "
            f"round, so that either was given what the other exchange moves, and all ranks must {must}"
        )


def _ranks_text(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} runs"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]} run"
