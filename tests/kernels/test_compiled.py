"""The kernels as the compiler makes them for Ampere (sm_80), Hopper (sm_90) and Blackwell (sm_100, 120): wide, without
spills.

Each is compiled in the forms that tables need: one kernel for all widths of runs; of copies one more for aligned runs,
and one for tiles.
"""

import itertools
import json
import re
from typing import NamedTuple

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import triton

from tests.kernels.compiled import compile_kernel
from tritondt.kernels.gpu.ahead_of_time import kernels
from tritondt.kernels.gpu.cast_boxes import DIVIDES, MULTIPLIES, NO_SCALES, DtypePair
from tritondt.kernels.gpu.copy_boxes import copies
from tritondt.kernels.gpu.fp8_tables import scale_finding
from tritondt.kernels.gpu.reduce_slots import reductions
from tritondt.kernels.gpu.specialization import ALL_TILES, COPY_RUNS, DIMS, SHORT_ROWS, WIDE_RUNS
from tritondt.kernels.gpu.tuning import DEFAULT, PATH, choose
from tritondt.kernels.reduction_dtypes import DTYPES

FEW = DIMS[0]
MAX_REGISTERS = 64
SIZES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}
REDUCTIONS = [(dtype, op) for dtype, found in DTYPES.items() for op in found.ops]
ALL_ARCHITECTURES = [80, 90, 100, 120]


class Assembled(NamedTuple):
    """What an assembler makes of copies of few dims: of wide runs on sm_90, and of tiles."""

    wide_registers: int
    wide_spilled_bytes: int
    tile_registers: int


# The copies were tuned with Triton 3.6 and 3.7. A bound (maxnreg) does not bring their registers back: at 56 all four
# spill 48 to 64 bytes of wide runs, at 72 that of 3.9 spills 120 of tiles.
TUNED = Assembled(56, 0, 72)
LATER = {(3, 8): Assembled(64, 8, 72), (3, 9): Assembled(64, 0, 80)}
MAJOR, MINOR, *_ = map(int, re.findall(r"\d+", triton.__version__))
ASSEMBLED = LATER.get(min((MAJOR, MINOR), max(LATER)), TUNED)


def assert_lean(compiled, num_dims=FEW, most=MAX_REGISTERS, spilled=0):
    assert compiled.spilled_bytes == spilled
    if num_dims <= FEW:
        assert compiled.registers <= most


def units_per_thread(num_dims):
    """Of a copy, as tuned."""
    choice = choose("default", "copy", 16, num_dims)
    return choice.block // (32 * choice.num_warps)


@pytest.mark.parametrize("architecture", [90, 100])
@pytest.mark.parametrize("num_dims", DIMS[:2])
def test_wide_runs(num_dims, architecture):
    compiled = compile_kernel(copies(), WIDE_RUNS, num_dims, architecture)
    is_few_on_hopper = (num_dims, architecture) == (FEW, 90)
    assert_lean(compiled, num_dims, most=72, spilled=ASSEMBLED.wide_spilled_bytes if is_few_on_hopper else 0)
    units = units_per_thread(num_dims)
    assert compiled.wide_loads == compiled.wide_stores == units
    assert len(re.findall(r"st\.global", compiled.ptx)) == units
    if is_few_on_hopper:
        assert compiled.registers <= ASSEMBLED.wide_registers


@pytest.mark.parametrize("architecture", [90, 100])
@pytest.mark.parametrize("num_dims", DIMS[:2])
def test_wide_units_stay_wide_beside_narrow_ones(num_dims, architecture):
    compiled = compile_kernel(copies(), COPY_RUNS, num_dims, architecture)
    assert_lean(compiled, num_dims)
    # Half a tile at a time of few dims; blocks of shifted runs and of gathered rows are written 16 bytes at a time.
    assert compiled.wide_loads == units_per_thread(num_dims) // (2 if num_dims == FEW else 1)
    assert compiled.wide_stores >= compiled.wide_loads + 8
    assert "st.shared" not in compiled.ptx
    for name in ("v2.b32", "b32", "b16", "b8"):
        assert re.search(rf"ld\.global(\.\w+)*\.{name}", compiled.ptx)
        assert re.search(rf"st\.global(\.\w+)*\.{name}", compiled.ptx)


@pytest.mark.parametrize("architecture", [80, 90, 100, 120])
def test_short_rows(architecture):
    """Blocks of rows of words, of two bytes and of bytes, of one box and of several, two per thread at a time."""
    compiled = compile_kernel(copies(), SHORT_ROWS, FEW, architecture)
    assert_lean(compiled)
    assert compiled.wide_stores == compiled.wide_loads + 6 * 2
    assert "st.shared" not in compiled.ptx


@pytest.mark.parametrize("architecture", [90, 100])
@pytest.mark.parametrize("num_dims", DIMS[:2])
def test_tiles(num_dims, architecture):
    compiled = compile_kernel(copies(), ALL_TILES, num_dims, architecture)
    assert_lean(compiled, num_dims, most=ASSEMBLED.tile_registers)
    # Of 2, 4 and 8 bytes a thread; of bytes a tile holds fewer than 16 per thread.
    assert compiled.wide_loads == compiled.wide_stores == (10 if num_dims == FEW else 5)


@pytest.mark.in_ci(9)
@pytest.mark.parametrize("architecture", ALL_ARCHITECTURES)
@pytest.mark.parametrize(("dtype", "op"), REDUCTIONS)
def test_reductions(dtype, op, architecture):
    kernel = reductions(dtype, op)
    compiled = compile_kernel(kernel, kernel.modes[0], FEW, architecture)
    bound = kernel.registers.get(architecture // 10, MAX_REGISTERS)
    assert_lean(compiled, most=96 if DTYPES[dtype].itemsize == 1 else bound)
    # The first slot, and four more in the loop.
    assert compiled.wide_loads == 5 * compiled.wide_stores > 0
    assert "fma" not in compiled.ptx
    assert "ftz" not in compiled.ptx
    precise = "f64" if dtype in ("float64", "complex128") else "f32"
    divisions = {f"div.rn.{precise}"} if op == "sum" and DTYPES[dtype].divides else set()
    assert set(re.findall(r"\bdiv\.[.\w]*f\d\d", compiled.ptx)) == divisions


@pytest.mark.in_ci(3)
@pytest.mark.parametrize("architecture", [90, 100])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_reductions_of_more_dims(dtype, architecture):
    kernel = reductions(dtype, "sum")
    compiled = compile_kernel(kernel, kernel.modes[0], DIMS[1], architecture)
    assert_lean(compiled, DIMS[1])
    assert compiled.wide_loads == 5 * compiled.wide_stores > 0


@pytest.mark.in_ci(9)
@pytest.mark.parametrize("architecture", ALL_ARCHITECTURES)
@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(SIZES, 2)))
def test_casts(source, target, architecture):
    sizes = (SIZES[source], SIZES[target])
    kernel = DtypePair(source, target).kernel(NO_SCALES)
    compiled = compile_kernel(kernel, kernel.modes[0], FEW, architecture)
    assert_lean(compiled, most=kernel.registers.get(architecture // 10, MAX_REGISTERS))
    assert "ftz" not in compiled.ptx
    # Units per thread; those of half the elements have 16 bytes too, on the wider side, and so on.
    units = choose("default", kernel.name, kernel.width, FEW).block // 256
    words = sum(lanes * max(sizes) // 16 for lanes in (1, 2, 4, 8) if lanes <= kernel.width and lanes * max(sizes) > 15)
    assert sorted((compiled.wide_loads, compiled.wide_stores)) == [units, units * words]
    assert (compiled.wide_loads > compiled.wide_stores) == (sizes[0] > sizes[1])


@pytest.mark.in_ci(5)
@pytest.mark.parametrize("architecture", ALL_ARCHITECTURES)
@pytest.mark.parametrize("fp8", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("wide", ["float32", "bfloat16", "float16"])
def test_casts_to_and_from_fp8(wide, fp8, architecture):
    there, back = DtypePair(wide, fp8).kernel(DIVIDES), DtypePair(fp8, wide).kernel(MULTIPLIES)
    kernels = (there, back, scale_finding(DtypePair(wide, fp8)))
    found = [compile_kernel(kernel, kernel.modes[0], FEW, architecture) for kernel in kernels]
    for kernel, compiled in zip(kernels, found, strict=True):
        assert_lean(compiled, most=kernel.registers.get(architecture // 10, MAX_REGISTERS))
        assert "ftz" not in compiled.ptx
    # A unit of 16 elements, and those of fewer that fill 16 bytes of the wider dtype.
    wide_words = 4 + 2 + 1 if wide == "float32" else 2 + 1
    assert [(each.wide_loads, each.wide_stores) for each in found] == [
        (wide_words, 1),
        (1, wide_words),
        (wide_words, 0),
    ]


@pytest.mark.parametrize(
    "kernel",
    [
        pytest.param(reductions("float32", "sum"), id="float32 sum"),
        *(
            pytest.param(kernel, id=name, marks=pytest.mark.extended)
            for name, kernel in {
                "bfloat16 sum": reductions("bfloat16", "sum"),
                "float16 sum": reductions("float16", "sum"),
                "int8 max": reductions("int8", "max"),
                "int8 min": reductions("int8", "min"),
                "bfloat16 to float64": DtypePair("bfloat16", "float64").kernel(NO_SCALES),
                "float16 to float64": DtypePair("float16", "float64").kernel(NO_SCALES),
                "scales of float32": scale_finding(DtypePair("float32", "float8_e4m3fn")),
            }.items()
        ),
    ],
)
def test_a_bound_of_an_architecture_ends_spills_there(kernel):
    """Within the bound of all others, or without one, each spills 8 or 16 bytes on sm_120."""
    compiled = compile_kernel(kernel, kernel.modes[0], FEW, 120)
    assert_lean(compiled, most=kernel.registers[12])


# The architectures of the devices that kernels were tuned on.
ARCHITECTURES = {"NVIDIA H200": 90}


@pytest.mark.extended
@pytest.mark.parametrize("device_name", ARCHITECTURES)
def test_choices_that_were_tuned_for_a_device_spill_nowhere(device_name):
    """Choices of older kernels may: in blocks of 1024, casts spilled up to 96 bytes within 64 registers."""
    recorded = json.loads(PATH.read_text())
    assert set(recorded) == {DEFAULT, *ARCHITECTURES}
    tuned = {(name, entry["width"]) for name, entries in recorded[device_name].items() for entry in entries}
    chosen = [kernel for kernel in kernels() if (kernel.name, kernel.width) in tuned]
    assert {(kernel.name, kernel.width) for kernel in chosen} == tuned
    for kernel, modes in [(one, modes) for one in chosen for modes in one.modes]:
        compiled = compile_kernel(kernel, modes, FEW, ARCHITECTURES[device_name], device_name=device_name)
        assert compiled.spilled_bytes == 0, (kernel.constants, modes)
