"""The test double of libcuda, built and told by a test what to be: how many devices, which of them reach each other.

cuda = FakeCuda(build())
driver = CudaDriver(str(cuda.path))     # the same library, and the same devices
"""

import ctypes
import fcntl
import functools
import os
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
FOLDER = Path(__file__).parent
SOURCES = sorted(map(str, FOLDER.glob("*.cpp")))
FLAGS = ["-std=c++17", "-O1", "-shared", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"]


def header_folder() -> Path | None:
    """The folder of cuda.h in the triton package, which is not imported; None where there is none."""
    found = find_spec("triton")
    if found is None or found.origin is None:
        return None
    folder = Path(found.origin).parent / "backends" / "nvidia" / "include"
    return folder if (folder / "cuda.h").exists() else None


def build(*, old: bool = False) -> Path:
    """The double, built where its source has changed; one process at a time builds. An `old` one is before CUDA 11.4.

    Raises FileNotFoundError where there is no cuda.h, or no g++.
    """
    include = header_folder()
    if include is None:
        raise FileNotFoundError("the test double of libcuda needs cuda.h of the triton package, which is not installed")
    folder = REPOSITORY / "build" / "fake_cuda"
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / ("libcuda_old.so.1" if old else "libcuda.so.1")
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        written = max(path.stat().st_mtime for path in FOLDER.iterdir() if path.suffix in (".cpp", ".h", ".py"))
        if not library.exists() or library.stat().st_mtime < written:
            _compile(library, written, ["-isystem", str(include), *(["-DFAKE_CUDA_OLD"] if old else [])])
    return library


def _compile(library: Path, written: float, options: list[str]) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        draft = Path(folder) / library.name
        command = ["g++", *FLAGS, *options, "-Wl,-z,defs", f"-Wl,-soname,{library.name}", *SOURCES, "-o", str(draft)]
        built = subprocess.run(command, capture_output=True, text=True, check=False)
        if built.returncode != 0:
            raise RuntimeError(f"the test double of libcuda was not built:\n{built.stdout}{built.stderr}")
        os.utime(draft, (written, written))  # as old as what was compiled, which may be saved again meanwhile
        draft.replace(library)


@functools.cache
def load(path: Path) -> ctypes.CDLL:
    """The library at a path, by its functions: those of the driver, and what the double adds to be told by a test."""
    library = ctypes.CDLL(str(path))
    library.fakeCudaFail.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_int]
    return library


class FakeCuda:
    """What a test asks of a built double in this process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._library = load(path)
        self._failing: set[str] = set()

    def live(self) -> int:
        """How many handles, reservations and mappings there are."""
        return int(self._library.fakeCudaLive())

    def fail(self, name: str, n: int, result: int) -> None:
        """Has the n-th call of a function from here on return `result`, and do nothing."""
        self._failing.add(name)
        self._library.fakeCudaFail(name.encode(), n, result)

    def set_devices(self, n: int) -> None:
        self._library.fakeCudaDevices(n)

    def set_peer(self, device: int, peer: int, can: bool) -> None:
        """Whether `device` reaches memory of `peer`; it does until it is said not to."""
        self._library.fakeCudaPeer(device, peer, int(can))

    def set_atomics(self, device: int, peer: int, can: bool) -> None:
        """Whether `device` has atomics in memory of `peer`; it has until it is said not to."""
        self._library.fakeCudaAtomics(device, peer, int(can))

    def set_attribute(self, device: int, attribute: int, value: int) -> None:
        """What cuDeviceGetAttribute tells; 1 until it is said."""
        self._library.fakeCudaAttribute(device, attribute, value)

    def call(self, name: str, *arguments: object) -> int:
        """What a function of the driver returns, called as it is, without `CudaDriver`."""
        return int(getattr(self._library, name)(*arguments))

    def reset(self) -> None:
        """Sets back what a test has set of failures; devices, peers and attributes are the test's."""
        for name in self._failing:
            self._library.fakeCudaFail(name.encode(), 0, 0)
        self._failing.clear()
