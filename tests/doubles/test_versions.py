"""The double plays the NCCL of a version: what came later is not exported, or is refused."""

import ctypes
import importlib.metadata
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

from tests.doubles.fake_nccl.abi import NEWEST, PARAMETERS, UNDEFINED, Config
from tests.doubles.fake_nccl.library import FakeNccl, FakeNcclError, build
from tests.doubles.fake_nccl.tensors import ranks_of_process

DOUBLE = Path(__file__).parent / "fake_nccl"
FUNCTIONS = (DOUBLE / "interface" / "functions.def").read_text()
SINCE = {name: int(version) for name, version in re.findall(r"^FUNCTION\((\w+), (\d+)\)", FUNCTIONS, re.MULTILINE)}


@pytest.mark.parametrize("version", [21801, 22807, 23203])
def test_a_library_exports_what_its_version_has(version: int) -> None:
    library = FakeNccl(build(version))
    assert library.version() == version
    assert {name for name in SINCE if name in library} == {name for name in SINCE if SINCE[name] <= version}
    assert {name for name in PARAMETERS if name.startswith("nccl")} <= set(SINCE)


def test_a_version_set_later_refuses_what_came_after_it(nccl: FakeNccl) -> None:
    with ranks_of_process(nccl, 1) as (rank,):
        nccl.set(FAKE_NCCL_VERSION=22705)
        assert nccl.version() == 22705
        tensor = torch.ones(1)
        with pytest.raises(FakeNcclError, match=r"ncclAlltoAll came with 2\.28\.3, this double plays 2\.27\.5"):
            rank("ncclAlltoAll", tensor, tensor, 1)


def test_an_older_library_drops_fields_that_it_does_not_know(nccl: FakeNccl) -> None:
    nccl.set(FAKE_NCCL_VERSION=22807)
    with ranks_of_process(nccl, 1, Config(CTAPolicy=2, numRmaCtx=1, nvlsHostMode=1)) as (rank,):
        found = Config()
        nccl("fakeCommConfig", rank.communicator, ctypes.byref(found))
        assert (found.CTAPolicy, found.numRmaCtx, found.nvlsHostMode) == (2, UNDEFINED, UNDEFINED)


def test_results_have_texts_that_name_the_double(nccl: FakeNccl) -> None:
    assert nccl.error_string(6) == "fake NCCL: remote error"
    assert nccl.error_string(99) == "fake NCCL: unknown result"
    with pytest.raises(FakeNcclError, match="fake NCCL: ncclCommWindow=1 is not understood"):
        nccl.set(ncclCommWindow=1)


def header_folders() -> list[Path]:
    """Folders of nccl.h: of NCCL_INCLUDE, or of an installed package."""
    found = [Path(os.environ["NCCL_INCLUDE"])] if "NCCL_INCLUDE" in os.environ else []
    for package in ("nvidia-nccl-cu12", "nvidia-nccl-cu13"):
        try:
            files = importlib.metadata.files(package) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        found += [Path(str(file.locate())).parent for file in files if file.name == "nccl.h"]
    return found


def version_of(folder: Path) -> int:
    found = re.search(r"#define NCCL_VERSION_CODE (\d+)", (folder / "nccl.h").read_text())
    return int(found[1]) if found else 0


def test_declarations_are_those_of_a_real_header(tmp_path: Path) -> None:
    folders = [folder for folder in header_folders() if version_of(folder) >= NEWEST]
    if not folders:
        pytest.skip("no nvidia-nccl of 2.32.3 is installed; NCCL_INCLUDE can name the folder of an nccl.h")
    # What nccl.h needs of CUDA.
    (tmp_path / "cuda_runtime.h").write_text(
        "#include <stddef.h>\n#define CUDART_VERSION 0\n"
        "typedef struct CUstream_st* cudaStream_t;\ntypedef struct CUevent_st* cudaEvent_t;\n"
    )
    (tmp_path / "cuda_fp16.h").touch()
    source, includes = DOUBLE / "header_check" / "check_abi.cpp", (f"-I{tmp_path}", f"-I{folders[0]}")
    command = ["g++", "-std=c++17", "-fsyntax-only", *includes, str(source)]
    compiled = subprocess.run(command, capture_output=True, text=True, check=False)
    assert compiled.returncode == 0, compiled.stderr
