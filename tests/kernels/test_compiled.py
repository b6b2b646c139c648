"""The kernels as the compiler makes them for Hopper (sm_90) and Blackwell (sm_100): wide, without spills."""

import itertools
import re

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from tests.kernels.compiled import compile_cast, compile_copy, compile_reduction, compile_scale
from tritondt.kernels.gpu.cast_boxes import DIVIDES, MULTIPLIES
from tritondt.kernels.gpu.pieces import Kind
from tritondt.kernels.reduction_dtypes import DTYPES

MAX_REGISTERS = 64
SIZES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}


def assert_lean(compiled, num_dims):
    assert compiled.spilled_bytes == 0
    if num_dims <= 4:
        assert compiled.registers <= MAX_REGISTERS


@pytest.mark.parametrize("architecture", [90, 100])
@pytest.mark.parametrize("num_dims", range(1, 9))
def test_wide_runs(num_dims, architecture):
    compiled = compile_copy(Kind.RUNS, 16, num_dims, architecture)
    assert_lean(compiled, num_dims)
    # Every load and store of the 512 units, two per thread.
    assert compiled.wide_loads == compiled.wide_stores == 2
    assert len(re.findall(r"st\.global", compiled.ptx)) == 2


@pytest.mark.in_ci(17)
@pytest.mark.parametrize("architecture", [90, 100])
@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("num_dims", range(1, 9))
def test_narrow_runs(width, num_dims, architecture):
    compiled = compile_copy(Kind.RUNS, width, num_dims, architecture)
    assert_lean(compiled, num_dims)
    name = "v2.b32" if width == 8 else f"b{8 * width}"
    assert re.search(rf"ld\.global(\.\w+)*\.{name}", compiled.ptx)
    assert re.search(rf"st\.global(\.\w+)*\.{name}", compiled.ptx)
    assert compiled.wide_loads == compiled.wide_stores == 0


@pytest.mark.parametrize(("width", "architecture"), [(1, 90), (2, 90), (2, 100), (4, 90)])
@pytest.mark.parametrize("num_dims", [1, 2, 4, 8])
def test_groups(width, num_dims, architecture):
    assert_lean(compile_copy(Kind.GROUPS, width, num_dims, architecture), num_dims)


@pytest.mark.parametrize(("width", "architecture"), [(1, 90), (2, 90), (4, 90), (4, 100), (8, 90)])
@pytest.mark.parametrize("num_dims", [2, 4, 8])
def test_tiles(width, num_dims, architecture):
    assert_lean(compile_copy(Kind.TILES, width, num_dims, architecture), num_dims)
    wide = compile_copy(Kind.WIDE_TILES, width, num_dims, architecture)
    assert_lean(wide, num_dims)
    # Of bytes a tile holds fewer than 16 per thread.
    assert (wide.wide_loads > 0) == (wide.wide_stores > 0) == (width > 1)


@pytest.mark.parametrize("num_dims", [2, 4])
def test_wide_units_stay_wide_beside_narrow_ones(num_dims):
    compiled = compile_copy(Kind.RUNS, 16, num_dims, 90, (Kind.RUNS, 4), (Kind.GROUPS, 2), (Kind.RUNS, 1))
    assert_lean(compiled, num_dims)
    assert compiled.wide_loads == compiled.wide_stores == 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_wide_reductions(dtype):
    for op in DTYPES[dtype].ops:
        compiled = compile_reduction(dtype, op, Kind.RUNS, 16, 2, 90)
        assert_lean(compiled, 2)
        # The first slot, and four more in the loop.
        assert compiled.wide_loads == 5 * compiled.wide_stores > 0
        assert "fma" not in compiled.ptx
        assert "ftz" not in compiled.ptx


@pytest.mark.in_ci(9)
@pytest.mark.parametrize("architecture", [90, 100])
@pytest.mark.parametrize("num_dims", range(1, 9))
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_reductions_by_dims(dtype, num_dims, architecture):
    for kind, width in ((Kind.RUNS, 16), (Kind.RUNS, 4), (Kind.GROUPS, 4)):
        compiled = compile_reduction(dtype, "sum", kind, width, num_dims, architecture)
        assert_lean(compiled, num_dims)
        assert (compiled.wide_loads > 0) == (width == 16)
        if width == 16:
            assert compiled.wide_loads == 5 * compiled.wide_stores


@pytest.mark.parametrize("dtype", DTYPES)
def test_reductions_on_blackwell(dtype):
    compiled = compile_reduction(dtype, DTYPES[dtype].ops[0], Kind.RUNS, 16, 4, 100)
    assert_lean(compiled, 4)
    assert compiled.wide_loads == 5 * compiled.wide_stores > 0


@pytest.mark.parametrize("dtype", [dtype for dtype, found in DTYPES.items() if found.divides])
def test_averages_divide_once_and_correctly(dtype):
    compiled = compile_reduction(dtype, "sum", Kind.RUNS, 16, 2, 90, divides=True)
    precise = "f64" if dtype in ("float64", "complex128") else "f32"
    assert set(re.findall(r"\bdiv\.[.\w]*f\d\d", compiled.ptx)) == {f"div.rn.{precise}"}
    assert_lean(compiled, 2)


@pytest.mark.in_ci(13)
@pytest.mark.parametrize("architecture", [90, 100])
@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(SIZES, 2)))
def test_wide_casts(source, target, architecture):
    sizes = (SIZES[source], SIZES[target])
    lanes = 16 // min(sizes)
    # Units per thread, each of as many 16-byte words as its elements fill.
    units = 1 if target == "float64" else 2
    for num_dims in (2, 4):
        assert_lean(compile_cast(source, target, Kind.GROUPS, 1, num_dims, architecture), num_dims)
    for num_dims in (1, 2, 3, 4) if 8 in sizes else (1, 4):
        compiled = compile_cast(source, target, Kind.RUNS, lanes, num_dims, architecture)
        assert_lean(compiled, num_dims)
        assert compiled.wide_loads == units * lanes * sizes[0] // 16
        assert compiled.wide_stores == units * lanes * sizes[1] // 16
        assert "ftz" not in compiled.ptx


@pytest.mark.extended
@pytest.mark.in_ci(3)
@pytest.mark.parametrize("architecture", [90, 100])
@pytest.mark.parametrize("source", ["float32", "bfloat16", "float16"])
def test_casts_to_float64_by_widths(source, architecture):
    wide = 16 // SIZES[source]
    narrow = ((Kind.RUNS, wide // 2), (Kind.GROUPS, 1), (Kind.RUNS, 1))
    for num_dims in (3, 4, 8):
        assert_lean(compile_cast(source, "float64", Kind.GROUPS, 1, num_dims, architecture), num_dims)
        compiled = compile_cast(source, "float64", Kind.RUNS, wide, num_dims, architecture, *narrow)
        assert_lean(compiled, num_dims)
        assert compiled.wide_loads == 1


@pytest.mark.extended
@pytest.mark.parametrize("architecture", [90, 100])
@pytest.mark.parametrize(("source", "target"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_casts_by_dims(source, target, architecture):
    for num_dims in range(1, 9):
        wide = compile_cast(source, target, Kind.RUNS, 8, num_dims, architecture)
        assert_lean(wide, num_dims)
        assert (wide.wide_loads, wide.wide_stores) == ((4, 2) if source == "float32" else (2, 4))
    for num_dims in (2, 4):
        assert_lean(compile_cast(source, target, Kind.RUNS, 1, num_dims, architecture), num_dims)


@pytest.mark.in_ci(7)
@pytest.mark.parametrize("architecture", [90, 100])
@pytest.mark.parametrize("fp8", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("wide", ["float32", "bfloat16", "float16"])
def test_casts_to_and_from_fp8(wide, fp8, architecture):
    wide_bytes = 4 if wide == "float32" else 2
    for num_dims in (1, 4):
        there = compile_cast(wide, fp8, Kind.RUNS, 16, num_dims, architecture, scales=DIVIDES)
        back = compile_cast(fp8, wide, Kind.RUNS, 16, num_dims, architecture, scales=MULTIPLIES)
        scale = compile_scale(wide, fp8, Kind.RUNS, 16, num_dims, architecture)
        for compiled in (there, back, scale):
            assert_lean(compiled, num_dims)
            assert "ftz" not in compiled.ptx
        assert (there.wide_loads, there.wide_stores) == (wide_bytes, 1)
        assert (back.wide_loads, back.wide_stores) == (1, wide_bytes)
        assert (scale.wide_loads, scale.wide_stores) == (wide_bytes, 0)
