"""NCCLs for tests: those that let ranks share a GPU, and the one that torch and we use in a process.

    python -m tests.nccl.libraries    # ends with 0 where torch and we use that one, told to by the environment

torch looks for its library along sys.path, so that a folder laid out as a wheel (FOLDER/nvidia/nccl/lib) that stands
first on PYTHONPATH gives it that one. With LD_PRELOAD a process has two: torch maps its own beside it. And
torch.cuda.nccl.version() tells what torch was compiled with, not what it has loaded.
"""

import ctypes
import functools
import os
import subprocess
import sys
from pathlib import Path

import torch

from tests.csrc.nccl.wheel import FETCHED
from tritondt import environment
from tritondt._C import NcclError, NcclLibrary
from tritondt.comm.nccl.library import nccl_library

# The first that lets two ranks share a GPU.
SHARING = 23007
_IN_WHEEL = Path("nvidia/nccl/lib")


@functools.cache
def libraries() -> list[NcclLibrary]:
    """The one that is used unless told otherwise, where there is one, then those of NCCL_LIBRARIES and .venv/nccl."""
    folders = [Path(os.environ["NCCL_LIBRARIES"])] if os.environ.get("NCCL_LIBRARIES") else []
    paths = [
        path
        for folder in (*folders, FETCHED)
        for pattern in (f"*/{_IN_WHEEL}/libnccl.so.2", f"{_IN_WHEEL}/libnccl.so.2")
        for path in sorted(folder.glob(pattern))
    ]
    found = [NcclLibrary(str(path)) for path in paths]
    try:
        return [nccl_library(), *found]
    except NcclError:
        if environment.nccl_path() is not None:
            raise
        return found  # neither torch nor a package brings one


def variables_for(path: str) -> dict[str, str]:
    """Environment variables by which torch and we use the library at a path, of a folder laid out as a wheel.

    ValueError where it lies in none, so that torch would not find it.
    """
    folder = Path(path).parent
    root = Path(*folder.parts[: -len(_IN_WHEEL.parts)])
    if folder != root / _IN_WHEEL:
        raise ValueError(f"the NCCL at {path} was asked for; torch finds one in FOLDER/{_IN_WHEEL}/libnccl.so.2 alone")
    before = [found for found in (os.environ.get("PYTHONPATH"),) if found]
    repository = str(Path(__file__).parents[2])
    return {"TRITONDT_NCCL_SO": path, "PYTHONPATH": os.pathsep.join([str(root), repository, *before])}


def mapped() -> list[str]:
    """Paths of the NCCLs that this process has loaded."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return sorted({line.split()[-1] for line in lines if "/libnccl.so" in line})


def torchs_version() -> int:
    """What the library that torch has loaded says of itself, as 23007; OSError where it has loaded none."""
    loaded = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    version = ctypes.c_int()
    status = loaded.ncclGetVersion(ctypes.byref(version))
    assert status == 0, status
    return version.value


def check_shared(ours: NcclLibrary) -> None:
    """Raises RuntimeError where torch and we do not use one library; both are asked."""
    theirs, found = torchs_version(), mapped()
    if theirs != ours.version_code or len(found) != 1:
        raise RuntimeError(
            f"torch uses NCCL {theirs} and we use {ours.version_code} ({ours.path}), loaded are {found}; they must "
            "share one"
        )


def sharing_library() -> str:
    """The path of an NCCL that lets ranks share a GPU; empty where there is none."""
    return next((library.path for library in libraries() if library.version_code >= SHARING), "")


def why_not_shared() -> str | None:
    """The reason why torch and we cannot be asked for such a library here, if there is one; no GPU is needed."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} has no CUDA, and so no NCCL"
    return None if sharing_library() else "no NCCL from 2.30.7 on was found; NCCL_LIBRARIES names a folder of them"


def main() -> int:
    """The exit status: 0 where a process that is told to use such a library has it for torch and for us."""
    reason = why_not_shared()
    if reason is not None:
        sys.stderr.write(reason + "\n")
        return 1
    program = "from tests.nccl import libraries; libraries.check_shared(libraries.nccl_library())"
    variables = {**os.environ, **variables_for(sharing_library())}
    return subprocess.run([sys.executable, "-c", program], env=variables, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
