"""Kernels compiled on one machine are found by Triton in another folder, and another Triton's are told apart."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from tests.tools import gpu_kernels
from tests.tools.gpu_kernels import Origin, device_names, origin, pack, unpack

# Compiles one kernel for a GPU that is not there, and prints how many files of which kinds came of it.
_COMPILES = """
import torch
from triton.runtime.driver import driver
from tritondt.kernels.gpu.ahead_of_time import Architecture, compilations
from tritondt.kernels.gpu.device_table import compile_form
driver.set_active(Architecture(90))
kernel, form, num_warps = compilations()[0]
made = compile_form(kernel, form, num_warps, torch.int64, (1, 1, 1), (1, 1, 1))
print(sorted(made.asm))
"""


def compiled(cache: Path) -> str:
    variables = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    variables.pop("TRITON_INTERPRET", None)
    return subprocess.run(
        [sys.executable, "-c", _COMPILES], env=variables, check=True, capture_output=True, text=True, timeout=300
    ).stdout


def files(cache: Path) -> set[str]:
    return {str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file()}


@pytest.mark.extended
def test_a_kernel_that_travelled_is_not_compiled_again(tmp_path: Path) -> None:
    here, archive, there = tmp_path / "here", tmp_path / "kernels.tar.xz", tmp_path / "there"
    assert "ttir" in compiled(here)
    assert pack(here, archive, origin([90])) == 1
    shutil.rmtree(here)
    made, count = unpack(archive, there)
    assert (made, count) == (origin([90]), 1)
    before = files(there)
    # A kernel compiled anew would have intermediate forms, which were left behind.
    assert "ttir" not in compiled(there)
    assert files(there) == before


def planted(folder: Path, name: str = "one") -> Path:
    """A cache with a kernel as Triton writes it."""
    kernel = folder / "key"
    kernel.mkdir(parents=True)
    children = {f"{name}.{kind}": str(kernel / f"{name}.{kind}") for kind in ("json", "cubin", "ptx", "ttir")}
    for path in children.values():
        Path(path).write_text(f"content of {Path(path).name}")
    (kernel / f"__grp__{name}.json").write_text(json.dumps({"child_paths": children}))
    return folder


def test_groups_name_the_files_of_the_folder_they_were_unpacked_into(tmp_path: Path) -> None:
    archive, there = tmp_path / "kernels.tar.xz", tmp_path / "there"
    pack(planted(tmp_path / "here"), archive, origin([90, 100]))
    assert unpack(archive, there) == (origin([90, 100]), 1)
    named = json.loads((there / "key" / "__grp__one.json").read_text())["child_paths"]
    assert named == {f"one.{kind}": str(there / "key" / f"one.{kind}") for kind in ("json", "cubin", "ptx")}
    assert (there / "key" / "one.cubin").read_text() == "content of one.cubin"
    assert files(there) == {f"key/one.{kind}" for kind in ("json", "cubin", "ptx")} | {"key/__grp__one.json"}


def test_a_cache_keeps_the_kernels_that_it_has(tmp_path: Path) -> None:
    archive, there = tmp_path / "kernels.tar.xz", planted(tmp_path / "there")
    (there / "key" / "one.cubin").write_text("compiled there")
    pack(planted(tmp_path / "here"), archive, origin([90]))
    unpack(archive, there)
    assert (there / "key" / "one.cubin").read_text() == "compiled there"


def test_nothing_is_written_outside_the_cache(tmp_path: Path) -> None:
    archive, cache = tmp_path / "kernels.tar.xz", tmp_path / "cache"
    with tarfile.open(archive, "w:xz") as tar:
        gpu_kernels._add(tar, "origin.json", json.dumps(origin([90])._asdict()).encode())
        gpu_kernels._add(tar, "../../outside/escaped.cubin", b"anything")
    unpack(archive, cache)
    assert files(tmp_path) == {"kernels.tar.xz", "cache/outside/escaped.cubin"}


def test_kernels_of_another_build_of_triton_are_named(tmp_path: Path) -> None:
    archive, here = tmp_path / "kernels.tar.xz", origin()
    pack(planted(tmp_path / "here"), archive, Origin("3.6.0", "3.9", "another", (90,)))
    with pytest.raises(SystemExit) as told:
        gpu_kernels.told(archive, tmp_path / "cache")
    assert str(told.value) == (
        f"kernels.tar.xz is of Triton 3.6.0 for Python 3.9, and this is another build, {here.version} for Python "
        f"{here.python}, which compiles all 1 kernels again; make the file anew with make gpu-kernels "
        f"KERNELS_PYTHON=python{here.python} KERNELS_TRITON={here.version}"
    )
    pack(planted(tmp_path / "anew"), archive, origin([90]))
    found = gpu_kernels.told(archive, tmp_path / "cache")
    assert found == f"1 kernels for sm_90 came with the tree, from this machine's Triton {here.version}"


def test_kernels_are_compiled_for_each_tuned_device() -> None:
    assert {"default", "NVIDIA H200"} <= set(device_names())
