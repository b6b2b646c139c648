"""Shared libraries of one C++ file, kept in build/."""

import os
import subprocess
from pathlib import Path


def compiled_library(source: Path, library: Path, *flags: str) -> Path:
    """The library, compiled where it is older than its source.

    Several processes may ask at once, as ranks do: each finds a whole library or makes one, and the last one stays.
    """
    if not library.exists() or library.stat().st_mtime < source.stat().st_mtime:
        library.parent.mkdir(parents=True, exist_ok=True)
        draft = library.with_name(f"{library.name}.{os.getpid()}")
        command = ["g++", "-std=c++17", "-O2", "-shared", "-fPIC", *flags, str(source), "-o", str(draft)]
        try:
            subprocess.run(command, check=True)
            draft.replace(library)
        finally:
            draft.unlink(missing_ok=True)
    return library
