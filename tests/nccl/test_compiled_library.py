"""Libraries that benchmarks compile are whole for every process that finds them."""

import os
import subprocess
import threading
import time
from pathlib import Path

import pytest

from benchmarks.nccl.compiled_library import compiled_library

# Stands for the compiler: writes half of the library, and the rest when it may.
_COMPILER = """#!/bin/sh
while [ "$1" != -o ]; do shift; done
printf half > "$2"
while [ ! -e {go_on} ]; do sleep 0.01; done
{end}
printf ' whole' >> "$2"
"""


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that lets the compiler go on."""
    go_on, program = tmp_path / "go_on", tmp_path / "g++"
    program.write_text(_COMPILER.format(go_on=go_on, end=""))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return go_on


def test_a_half_written_library_has_another_name(tmp_path: Path, compiler: Path):
    source, library = tmp_path / "source.cpp", tmp_path / "build" / "library.so"
    source.touch()
    thread = threading.Thread(target=compiled_library, args=(source, library))
    thread.start()
    try:
        while not (found := list(library.parent.glob("*/library.so"))) or found[0].stat().st_size < len("half"):
            time.sleep(0.01)
        assert not library.exists()
    finally:
        compiler.touch()
        thread.join()
    assert library.read_text() == "half whole"
    assert list(library.parent.iterdir()) == [library]
    os.utime(source, (0, 0))
    compiler.unlink()
    assert compiled_library(source, library) == library  # as it is newer than its source, without the compiler


def test_nothing_stays_of_what_does_not_compile(tmp_path: Path, compiler: Path):
    program = compiler.with_name("g++")
    program.write_text(_COMPILER.format(go_on=compiler, end="exit 1"))
    compiler.touch()
    source, library = tmp_path / "source.cpp", tmp_path / "build" / "library.so"
    source.touch()
    with pytest.raises(subprocess.CalledProcessError):
        compiled_library(source, library)
    assert list(library.parent.iterdir()) == []
