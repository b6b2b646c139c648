"""Our declarations of NCCL against its own header, by the compiler."""

import re
import shutil
import subprocess

import pytest

from tests.csrc.nccl.recording import FOLDER, REPOSITORY
from tests.csrc.nccl.wheel import find_nccl, find_version, versions

CSRC = REPOSITORY / "csrc"
# All that nccl.h wants of CUDA.
CUDA_RUNTIME = """#pragma once
#include <stddef.h>
struct CUstream_st;
struct CUevent_st;
typedef CUstream_st* cudaStream_t;
typedef CUevent_st* cudaEvent_t;
#define CUDART_VERSION 0
#define __CUDA_BF16_TYPES_EXIST__ 1
"""


@pytest.fixture(scope="session")
def header():
    """The text of the real nccl.h, and its version as a number."""
    return header_of(find_nccl())


def header_of(nccl):
    """The text of its nccl.h, with what its headers for device code declare for the host; the version as a number."""
    text = (nccl.include / "nccl.h").read_text()
    (version,) = re.findall(r"#define NCCL_VERSION_CODE (\d+)", text)
    # core.h up to 2.30, host.h later; both include device code, which needs CUDA's compiler.
    device = "".join(path.read_text() for path in sorted((nccl.include / "nccl_device").glob("*.h")))
    pattern = r"^NCCL_EXTERN_C (?:__host__ )?(ncclResult_t ncclGet\w+DevicePointer\([^)]*\);)"
    declared = re.findall(pattern, device, re.MULTILINE)
    used = [f'extern "C" {each}' for each in declared if "ncclMultimemHandle_t" not in each]
    return "\n".join([text, *used, ""]), int(version)


def functions():
    """Every function of csrc/nccl/api.h, with the version that brought it."""
    return [
        (name, int(since))
        for name, since in re.findall(r'nccl_,\s+"(\w+)",\s+(\d+)\}', (CSRC / "nccl" / "api.h").read_text())
    ]


def compile_check(folder, header, *flags):
    """Compiles the check against a header; returns the compiler's complaints."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    text, version = header
    (folder / "cuda_runtime.h").write_text(CUDA_RUNTIME)
    (folder / "cuda_fp16.h").write_text("")
    (folder / "nccl.h").write_text(text)
    checks = [f"FUNCTION({name});" for name, since in functions() if since <= version]
    source = folder / "check.cpp"
    source.write_text("\n".join(['#include "header_check.h"', *checks, "int main() { return wrong_sizes(); }", ""]))
    command = ["g++", "-std=c++17", "-O0", "-Wall", "-Wextra", "-Werror", f"-I{folder}", f"-I{CSRC}", f"-I{FOLDER}"]
    ran = subprocess.run([*command, source, *flags], capture_output=True, text=True, check=False)
    return ran.stderr


@pytest.mark.nccl
@pytest.mark.parametrize("version", versions())
def test_declarations_are_those_of_the_header(version, tmp_path):
    header = header_of(find_version(version))
    assert len(functions()) == 52
    rest = [CSRC / "nccl" / "config.cpp", CSRC / "nccl" / "api.cpp", "-ldl"]
    assert compile_check(tmp_path, header, *rest, "-o", tmp_path / "check") == ""
    assert subprocess.run([tmp_path / "check"], check=False).returncode == 0


# A header that differs, and what the compiler then says.
PLANTED = {
    "a value": ("ncclMax        = 2", "ncclMax        = 9", "ncclMax"),
    "the order of fields": ("int minCTAs;\n  int maxCTAs;", "int maxCTAs;\n  int minCTAs;", "ncclConfig_t.minCTAs"),
    "a default": ("NCCL_CONFIG_UNDEF_INT,                    /* blocking */", "1,", "ncclConfig_t.blocking"),
    "a parameter": (
        "ncclSend(const void* sendbuff, size_t count",
        "ncclSend(const void* sendbuff, int count",
        "ncclSend",
    ),
    "a constant": ("NCCL_SPLIT_NOCOLOR -1", "NCCL_SPLIT_NOCOLOR -2", "NCCL_SPLIT_NOCOLOR"),
}


@pytest.mark.nccl
@pytest.mark.parametrize("planted", list(PLANTED))
def test_the_check_finds_what_differs(header, tmp_path, planted):
    ours, theirs, named = PLANTED[planted]
    text, version = header
    assert ours in text
    complaints = compile_check(tmp_path, (text.replace(ours, theirs), version), "-fsyntax-only")
    assert re.search(rf"static assertion failed.*{re.escape(named)}", complaints, re.DOTALL), complaints
