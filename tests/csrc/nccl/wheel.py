"""Where a real NCCL lies: its library and its header, as a wheel of nvidia-nccl has them."""

import os
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tritondt.comm.nccl_library import installed_path


class Nccl(NamedTuple):
    """A wheel's library and the folder of its header."""

    library: Path
    include: Path


def find_nccl():
    """The one that TRITONDT_NCCL_SO names, that `make test` has fetched or that is installed; skips without one."""
    fetched = Path(sys.prefix) / "nccl" / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    for path in (os.environ.get("TRITONDT_NCCL_SO"), fetched, installed_path()):
        if path is None:
            continue
        library = Path(path)
        found = Nccl(library, library.parents[1] / "include")
        if found.library.exists() and (found.include / "nccl.h").exists():
            return found
    pytest.skip(f"no wheel of nvidia-nccl is installed, and none in {sys.prefix}/nccl, where `make test` puts one")
