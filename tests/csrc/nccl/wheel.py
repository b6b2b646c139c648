"""Where real NCCLs lie: their libraries and headers, as wheels of nvidia-nccl have them."""

import os
import re
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tritondt.comm.nccl.library import installed_path

# What torch 2.11 brings, the first that lets two ranks share a GPU, and the newest that is declared.
VERSIONS = ("2.28.9", "2.30.7", "2.32.3")
FETCHED = Path(sys.prefix) / "nccl"


class Nccl(NamedTuple):
    """A wheel's library, the folder of its header, and the version that the header names."""

    library: Path
    include: Path
    version: str


def find_nccl() -> Nccl:
    """The one that TRITONDT_NCCL_SO names, that `make test` has fetched or that is installed; skips without one."""
    for found in _preferred():
        return found
    pytest.skip(f"no wheel of nvidia-nccl is installed, and none in {FETCHED}, where `make test` puts one")


def find_version(version: str) -> Nccl:
    """The one of a version; skips where there is none."""
    if version not in known():
        pytest.skip(
            f"no NCCL {version} was found; `make nccl` puts it into {FETCHED / version}, and NCCL_LIBRARIES can name a "
            "folder that has such a folder"
        )
    return known()[version]


@lru_cache(maxsize=1)
def known() -> dict[str, Nccl]:
    """All that were found, by version."""
    folders = [FETCHED, *([Path(os.environ["NCCL_LIBRARIES"])] if "NCCL_LIBRARIES" in os.environ else [])]
    paths = [path for folder in folders for path in sorted(folder.glob("*/nvidia/nccl/lib/libnccl.so.2"))]
    found = [*_preferred(), *(nccl for path in paths for nccl in _at(path))]
    return {nccl.version: nccl for nccl in reversed(found)}


def versions() -> list[str]:
    """Those of VERSIONS and all that were found, oldest first."""
    return sorted({*VERSIONS, *known()}, key=lambda version: [int(part) for part in version.split(".")])


def _preferred() -> Iterator[Nccl]:
    named = os.environ.get("TRITONDT_NCCL_SO")
    for path in (named, FETCHED / "nvidia" / "nccl" / "lib" / "libnccl.so.2", installed_path()):
        if path is not None:
            yield from _at(Path(path))


def _at(library: Path) -> Iterator[Nccl]:
    """The one whose library lies there, with a header beside it."""
    include = library.parents[1] / "include"
    if library.exists() and (include / "nccl.h").exists():
        parts = re.findall(r"#define NCCL_(?:MAJOR|MINOR|PATCH) (\d+)", (include / "nccl.h").read_text())
        yield Nccl(library, include, ".".join(parts))
