"""Kernels compiled on one machine for another's GPU, which they reach in one file.

    python -m tests.tools.gpu_kernels --architecture 90    # compiles and packs, as `make gpu-kernels` does
    python -m tests.tools.gpu_kernels --unpack             # unpacks into TRITON_CACHE_DIR, as `make gpu` does

The file is build/gpu_kernels.tar.xz. Triton finds a kernel by its sources, options, and a digest of Triton itself, so
both machines need the same wheel of Triton: the same version, for the same version of Python.
"""

import argparse
import hashlib
import io
import json
import os
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import triton
from triton.runtime.cache import triton_key

from tritondt.kernels.gpu.ahead_of_time import compile_all
from tritondt.kernels.gpu.tuning import PATH

REPOSITORY = Path(__file__).parents[2]
ARCHIVE = REPOSITORY / "build" / "gpu_kernels.tar.xz"
# Triton reads a kernel's metadata and its binary, and tests of compiled code read its PTX. Its intermediate forms are
# three quarters of the bytes.
_KEPT = (".json", ".cubin", ".ptx")
_GROUP = "__grp__"
_ORIGIN = "origin.json"


class Origin(NamedTuple):
    """The Triton that compiled kernels, and the architectures that they are for."""

    version: str
    python: str
    digest: str
    architectures: tuple[int, ...]


def origin(architectures: Sequence[int] = ()) -> Origin:
    """Origin of kernels that this Python compiles."""
    digest = hashlib.sha256(triton_key().encode()).hexdigest()[:16]
    return Origin(triton.__version__, ".".join(map(str, sys.version_info[:2])), digest, tuple(architectures))


def pack(cache: Path, archive: Path, made: Origin) -> int:
    """Writes the kernels of one of Triton's caches into a file that `unpack` reads, and returns their number.

    A group, Triton's list of a kernel's files, names them by absolute paths. The archive has their names alone.
    """
    count = 0
    partial = archive.with_suffix(".partial")
    with tarfile.open(partial, "w:xz") as tar:
        _add(tar, _ORIGIN, json.dumps(made._asdict()).encode())
        for group in sorted(cache.glob(f"*/{_GROUP}*.json")):
            folder = group.parent
            named = json.loads(group.read_bytes())["child_paths"]
            files = {name: Path(path).name for name, path in named.items() if Path(name).suffix in _KEPT}
            _add(tar, f"{folder.name}/{group.name}", json.dumps({"child_paths": files}).encode())
            for name in sorted(set(files.values())):
                _add(tar, f"{folder.name}/{name}", (folder / name).read_bytes())
            count += 1
    partial.replace(archive)
    return count


def unpack(archive: Path, cache: Path) -> tuple[Origin, int]:
    """Adds the kernels of a file to one of Triton's caches; their origin and number.

    A group is written after its files, and replaces none, so that Triton never reads half a kernel.
    """
    count = 0
    with tarfile.open(archive) as tar:
        members = [(name, tar.extractfile(name)) for name in tar.getnames()]
        contents = {name: file.read() for name, file in members if file is not None}
    found = json.loads(contents.pop(_ORIGIN))
    groups = {name for name in contents if Path(name).name.startswith(_GROUP)}
    for name in [*sorted(contents.keys() - groups), *sorted(groups)]:
        folder, content = cache / Path(name).parent.name, contents[name]
        if name in groups:
            named = json.loads(content)["child_paths"]
            content = json.dumps({"child_paths": {child: str(folder / named[child]) for child in named}}).encode()
            count += 1
        _write_new(folder / Path(name).name, content)
    return Origin(**{**found, "architectures": tuple(found["architectures"])}), count


def told(archive: Path, cache: Path) -> str:
    """Unpacks what came with the tree and says whether this machine's Triton takes it; raises SystemExit if not."""
    made, count = unpack(archive, cache)
    here = origin()
    if made.digest != here.digest:
        raise SystemExit(
            f"{archive.name} is of Triton {made.version} for Python {made.python}, and this is another build, "
            f"{here.version} for Python {here.python}, which compiles all {count} kernels again; make the file anew "
            f"with make gpu-kernels KERNELS_PYTHON=python{here.python} KERNELS_TRITON={here.version}"
        )
    kinds = ", ".join(f"sm_{architecture}" for architecture in made.architectures)
    return f"{count} kernels for {kinds} came with the tree, from this machine's Triton {here.version}"


def device_names() -> Iterator[str]:
    """Names of the devices that kernels have been tuned for, the default of all others among them."""
    yield from json.loads(PATH.read_text())


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    """Adds a file without an owner or a time, so that equal kernels are equal archives."""
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def _write_new(path: Path, content: bytes) -> None:
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_bytes(content)
    partial.replace(path)


def main(arguments: Sequence[str]) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.gpu_kernels", description=__doc__.partition("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--architecture", type=int, action="append", help="90 for H100 and H200; may be repeated")
    what.add_argument("--unpack", action="store_true", help="into TRITON_CACHE_DIR, and say whether Triton takes them")
    parser.add_argument("--archive", type=Path, default=ARCHIVE)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="kernels compiled at a time")
    given = parser.parse_args(arguments)
    cache = Path(os.environ["TRITON_CACHE_DIR"])
    if given.unpack:
        sys.stdout.write(told(given.archive, cache) + "\n")
        return 0
    started = time.monotonic()
    for architecture in given.architecture:
        for name in device_names():
            count = compile_all(architecture, given.jobs, name)
            sys.stdout.write(f"{count} kernels for sm_{architecture}, {name}: {time.monotonic() - started:.0f} s\n")
            sys.stdout.flush()
    count = pack(cache, given.archive, origin(given.architecture))
    size = given.archive.stat().st_size
    sys.stdout.write(f"{count} kernels in {given.archive}, {size / 1e6:.1f} MB\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
