"""Kernels compiled for GPUs that are not there, and what can be read off the result."""

import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tritondt.kernels.gpu.box_table import mode
from tritondt.kernels.gpu.cast_boxes import NO_SCALES, READ_AS, DtypePair
from tritondt.kernels.gpu.copy_boxes import copy_kernel
from tritondt.kernels.gpu.device_table import compiler_options
from tritondt.kernels.gpu.pieces import Kind
from tritondt.kernels.gpu.reduce_slots import ELEMENTS, reduce_kernel
from tritondt.kernels.gpu.scales import scale_kernel
from tritondt.kernels.gpu.tuning import Choice, choose

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# Two loads of 8 bytes side by side are one instruction too.
_WIDE = r"{}\.global(\.\w+)*\.(v4\.b32|v2\.b64)"


class Compiled(NamedTuple):
    """A kernel for one architecture: instructions that move 16 bytes, registers, and words spilled to the stack."""

    ptx: str
    wide_loads: int
    wide_stores: int
    registers: int
    spilled_bytes: int


def compile_copy(kind: Kind, width: int, num_dims: int, architecture: int, *more: tuple[Kind, int]) -> Compiled:
    """The copy kernel as it is launched for pieces of one mode, or of several."""
    choice = choose("default", "copy", width, num_dims)
    modes = _modes((kind, width), *more)
    constants = {"NUM_POINTERS": 2, "NUM_DIMS": num_dims, "MODES": modes, "BLOCK": choice.block}
    return _compile(copy_kernel, constants, architecture, choice, {})


def compile_cast(
    source: str,
    target: str,
    kind: Kind,
    lanes: int,
    num_dims: int,
    architecture: int,
    *more: tuple[Kind, int],
    scales: int = NO_SCALES,
) -> Compiled:
    """The cast kernel as it is launched for pieces of so many elements at a time, or for several such modes."""
    kernel = DtypePair(source, target).kernel(scales)
    choice = choose("default", kernel.name, lanes, num_dims)
    constants = {
        "NUM_POINTERS": 4 if scales else 2,
        "NUM_DIMS": num_dims,
        "MODES": _modes((kind, lanes), *more),
        "BLOCK": choice.block,
        **kernel.constants,
    }
    return _compile(kernel.function, constants, architecture, choice, kernel.options)


def compile_scale(source: str, target: str, kind: Kind, lanes: int, num_dims: int, architecture: int) -> Compiled:
    """The kernel that finds the scales of boxes that become fp8."""
    choice = choose("default", "cast", lanes, num_dims)
    constants = {
        "NUM_POINTERS": 4,
        "NUM_DIMS": num_dims,
        "MODES": 1 << mode(kind, lanes),
        "BLOCK": choice.block,
        "SOURCE": source,
        "TARGET": target,
        "READ": READ_AS[source],
    }
    return _compile(scale_kernel, constants, architecture, choice, {})


def compile_reduction(
    dtype: str, op: str, kind: Kind, width: int, num_dims: int, architecture: int, *, divides: bool = False
) -> Compiled:
    """The reduction kernel as it is launched for five slots or more."""
    choice = choose("default", f"reduce {ELEMENTS[dtype].primitive_bitwidth // 8}", width, num_dims)
    constants = {
        "NUM_POINTERS": 2,
        "NUM_DIMS": num_dims,
        "MODES": 1 << mode(kind, width),
        "BLOCK": choice.block,
        "UNROLL": 4,
        "ELEMENT": ELEMENTS[dtype],
        "DTYPE": dtype,
        "OP": op,
        "DIVIDES": divides,
    }
    return _compile(reduce_kernel, constants, architecture, choice, {"enable_fp_fusion": False})


def _modes(*pieces: tuple[Kind, int]) -> int:
    """A bit for the mode of each kind of piece."""
    return sum({1 << mode(*piece) for piece in pieces})


def _compile(
    kernel: Any, constants: dict[str, Any], architecture: int, choice: Choice, options: Mapping[str, Any]
) -> Compiled:
    arguments = dict.fromkeys(kernel.arg_names, "i32") | {
        "table": "*i64",
        "pointers": ("i64",) * constants["NUM_POINTERS"],
    }
    signature = {name: "constexpr" if name in constants else arguments[name] for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    # The table starts at a multiple of 16, as all that the allocator gives does.
    source = ASTSource(kernel, signature, places, {(0,): [["tt.divisibility", 16]]})
    options = compiler_options(options, constants["NUM_DIMS"], choice)
    made = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    ptx = made.asm["ptx"]
    usage = _resource_usage(made.asm["cubin"])
    wide_loads, wide_stores = (len(re.findall(_WIDE.format(instruction), ptx)) for instruction in ("ld", "st"))
    return Compiled(ptx, wide_loads, wide_stores, usage["REG"], usage["STACK"] + usage["LOCAL"])


def _resource_usage(cubin: bytes) -> dict[str, int]:
    """What the assembler says that a kernel takes."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(TOOLS / "cuobjdump"), "--dump-resource-usage", file.name]
        completed = subprocess.run(command, capture_output=True, check=True, timeout=150)
    found = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", completed.stdout.decode()))
    assert len(found) == 3, completed.stdout.decode() + completed.stderr.decode()
    return {name: int(value) for name, value in found.items()}
