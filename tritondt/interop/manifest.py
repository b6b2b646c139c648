"""Manifest of a checkpoint: the size and the checksum of each of its files, and a checksum of its own.

A checkpoint without a manifest was never whole. Checksums are BLAKE2b of 128 bits: 0.9 GB/s on one core where this was
written, which is what a disk gives.
"""

import json
import os
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from tritondt.errors import CheckpointError

NAME = "manifest.json"
_FORMAT = "tritondt checkpoint 1"
_BLOCK_BYTES, _DIGEST_BYTES = 1 << 20, 16


class FileRecord(NamedTuple):
    """Size and checksum of a file."""

    num_bytes: int
    checksum: str


def record(path: Path) -> FileRecord:
    """The record of a file as it is read now; OSError where it cannot be read."""
    digest, num_bytes = blake2b(digest_size=_DIGEST_BYTES), 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            num_bytes += len(block)
    return FileRecord(num_bytes, digest.hexdigest())


def write(folder: Path, files: Mapping[str, FileRecord]) -> None:
    """Writes the manifest of a folder, and has the system put it and the folder's entries on the disk."""
    content = {"format": _FORMAT, "files": files}
    with (folder / NAME).open("x") as file:
        json.dump({"content": content, "checksum": _digest(content)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    sync_entries(folder)


def sync_entries(folder: Path) -> None:
    """Has the system put the entries of a folder on the disk: what was made, renamed or removed in it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(folder: Path) -> dict[str, FileRecord]:
    """The records of a checkpoint's files by name; CheckpointError where the manifest is not as it was written."""
    path = folder / NAME
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(
            f"{folder} is no whole checkpoint: its manifest cannot be read ({error.strerror}: {path.name})"
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not as it was written: it is no JSON ({error})") from error
    content = found.get("content") if isinstance(found, dict) else None
    if not isinstance(content, dict) or found.get("checksum") != _digest(content):
        raise CheckpointError(f"{path} is not as it was written: its checksum is another one")
    if content.get("format") != _FORMAT:
        raise CheckpointError(f"{path} has the format {content.get('format')!r}; this version reads {_FORMAT!r}")
    return {name: FileRecord(*entry) for name, entry in content["files"].items()}


def _digest(content: Mapping[str, Any]) -> str:
    return blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=_DIGEST_BYTES).hexdigest()


def check_sizes(folder: Path, files: Mapping[str, FileRecord]) -> None:
    """Raises CheckpointError for the first file that is not there or has another size, without reading any."""
    for name, expected in files.items():
        try:
            num_bytes = (folder / name).stat().st_size
        except OSError as error:
            raise CheckpointError(f"{folder / name} cannot be read: {error.strerror}") from error
        if num_bytes != expected.num_bytes:
            raise CheckpointError(
                f"{folder / name} has {num_bytes} bytes; {expected.num_bytes} were written when it was saved"
            )


def check_contents(folder: Path, files: Mapping[str, FileRecord], names: Iterable[str]) -> None:
    """Raises CheckpointError for the first of the named files whose bytes are others than those that were written."""
    for name in names:
        try:
            found = record(folder / name)
        except OSError as error:
            raise CheckpointError(f"{folder / name} cannot be read: {error.strerror}") from error
        if found != files[name]:
            raise CheckpointError(
                f"{folder / name} is not as it was written: its checksum is {found.checksum}, that of what was saved "
                f"{files[name].checksum}"
            )
