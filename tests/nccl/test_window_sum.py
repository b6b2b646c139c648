"""Sums in windows of NCCL: interpreted on four ranks over the double, and compiled, by multimem and without."""

import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.conftest import REPOSITORY
from tests.kernels.compiled import _resource_usage
from tritondt.kernels.gpu.reduce_slots import ELEMENTS
from tritondt.kernels.gpu.window_sum import MULTIMEM_DTYPES, OPTIONS, window_sum_kernel

TYPES = {"peers_at": "*i64", "words_at": "*i64", "counts": "*i64", "asked": "*i32", "met": "*i64", "multimem": "i64"}
RELEASE, ACQUIRE = r"st\.release\.sys", r"ld\.acquire\.sys"
LOAD, STORE, ALIASES = r"multimem\.ld_reduce\S+", r"multimem\.st\S+", r"fence\.proxy\.alias"
FORMS = {"float32": ("", ".v4.f32"), "bfloat16": (".acc::f32", ".v4.bf16x2"), "float16": (".acc::f32", ".v4.f16x2")}


def test_four_ranks_over_the_double() -> None:
    """In a process of its own, as Triton interprets: sums in the order of ranks, refusals, a peer that stays away."""
    command = [sys.executable, "-m", "tests.nccl.window_sums"]
    variables = os.environ | {"TRITON_INTERPRET": "1"}
    ran = subprocess.run(
        command, cwd=REPOSITORY, env=variables, capture_output=True, text=True, check=False, timeout=400
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def ptx_of(architecture: int, dtype: str, *, by_multimem: bool) -> str:
    """The kernel for 8 ranks as the compiler makes it, without spills."""
    constants = {
        "NUM_RANKS": 8,
        "LANES": 128,
        "ELEMENT": ELEMENTS[dtype],
        "DTYPE": dtype,
        "BLOCK": 256,
        "BY_MULTIMEM": by_multimem,
        "BY_STORE": True,
    }
    names = window_sum_kernel.arg_names
    signature = {name: "constexpr" if name in constants else TYPES.get(name, "i32") for name in names}
    places = {(names.index(name),): value for name, value in constants.items()}
    aligned = {(place,): [["tt.divisibility", 16]] for place in range(3)}
    source = ASTSource(window_sum_kernel, signature, places, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=OPTIONS)
    usage = _resource_usage(compiled.asm["cubin"])
    assert usage["STACK"] == usage["LOCAL"] == 0
    assert usage["REG"] <= 96
    ptx: str = compiled.asm["ptx"]
    return ptx


def places(pattern: str, ptx: str) -> list[int]:
    return [found.start() for found in re.finditer(pattern, ptx)]


@pytest.mark.in_core(1)
@pytest.mark.parametrize("dtype", MULTIMEM_DTYPES)
@pytest.mark.parametrize("architecture", [90, 100, 120])
def test_the_switch_adds_between_two_waits(architecture: int, dtype: str) -> None:
    ptx = ptx_of(architecture, dtype, by_multimem=True)
    wide, kind = FORMS[dtype]
    assert set(re.findall(LOAD, ptx)) == {f"multimem.ld_reduce.relaxed.sys.global.add{wide}{kind}"}
    assert set(re.findall(STORE, ptx)) == {f"multimem.st.relaxed.sys.global{kind}"}
    (first, second), (seen, seen_again) = places(RELEASE, ptx), places(ACQUIRE, ptx)
    loads, stores, (before, behind) = places(LOAD, ptx), places(STORE, ptx), places(ALIASES, ptx)
    assert first < seen < before < min(loads) < max(stores) < behind < second < seen_again
    assert len(loads) == len(stores) == 2  # 256 units on 128 threads
    barriers = places(r"\bbar\.sync", ptx)
    assert any(seen < barrier < before for barrier in barriers)
    assert any(behind < barrier < second for barrier in barriers)


@pytest.mark.in_core(1)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8", "float64"])
@pytest.mark.parametrize("architecture", [90, 80, 100, 120])
def test_peers_pointers_have_no_multimem(architecture: int, dtype: str) -> None:
    ptx = ptx_of(architecture, dtype, by_multimem=False)
    assert not places(r"multimem\.", ptx)
    assert len(re.findall(r"ld\.global\S*\.(?:v4\.b32|v2\.b64)", ptx)) >= 2
