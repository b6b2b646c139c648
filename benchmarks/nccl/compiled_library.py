"""Shared libraries of one C++ file, kept in build/."""

import os
import subprocess
import tempfile
from pathlib import Path


def compiled_library(source: Path, library: Path, *flags: str) -> Path:
    """The library, compiled where it is older than its source, or a header beside that.

    Several processes may ask at once, as ranks do: each finds a whole library or makes one, and the last one stays.
    """
    written = max(file.stat().st_mtime for file in (source, *source.parent.glob("*.h")))
    if not library.exists() or library.stat().st_mtime < written:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            draft = Path(folder) / library.name
            command = ["g++", "-std=c++17", "-O2", "-shared", "-fPIC", *flags, str(source), "-o", str(draft)]
            subprocess.run(command, check=True)
            os.utime(draft, (written, written))  # as old as what was compiled, which may be saved again meanwhile
            draft.replace(library)
    return library
