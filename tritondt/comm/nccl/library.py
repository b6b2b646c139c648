"""The NCCL of a process: the one that the environment names, the one torch has loaded, or the one that is installed."""

import functools
import importlib.metadata

from tritondt import environment
from tritondt._C import NcclLibrary

# Both put their library at the same place: the one that was installed last has overwritten the other's.
_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
_PATH = "nvidia/nccl/lib/libnccl.so.2"


@functools.lru_cache(maxsize=1)
def nccl_library() -> NcclLibrary:
    """The NCCL of this process, from 2.18 on; the same one at every call.

    TRITONDT_NCCL_SO names a library, which is then used even beside another that torch has loaded. Otherwise it is
    the one in the process (`origin` "loaded"), which torch for CUDA brings, or the one of an installed nvidia-nccl
    package. Raises NcclError where there is none or it cannot be loaded, NcclUnsupportedError where it is too old.
    """
    return NcclLibrary(environment.nccl_path(), installed_path())


def installed_path() -> str | None:
    """Path of the library of an installed nvidia-nccl package, or None."""
    for package in _PACKAGES:
        try:
            path = importlib.metadata.distribution(package).locate_file(_PATH)
        except importlib.metadata.PackageNotFoundError:
            continue
        return str(path)
    return None
