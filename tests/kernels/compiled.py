"""Kernels compiled for GPUs that are not there, and what can be read off the result."""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tritondt.kernels.gpu.device_table import Form, Kernel
from tritondt.kernels.gpu.instructions import disassembled
from tritondt.kernels.gpu.tuning import DEFAULT, choose

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
    sass: str


def compile_kernel(
    kernel: Kernel, modes: int, num_dims: int, architecture: int, num_pointers: int = 8, device_name: str = DEFAULT
) -> Compiled:
    """A kernel as it is launched for a class of modes, by default on a GPU that nobody has tuned for."""
    choice = choose(device_name, kernel.name, kernel.width, num_dims)
    form = Form(modes, num_dims, num_pointers, choice.block)
    constants, function = form.constants(kernel), kernel.function
    arguments = dict.fromkeys(function.arg_names, "i32") | {
        "table": "*i64",
        "pointers": ("i64",) * constants["NUM_POINTERS"],
    }
    signature = {name: "constexpr" if name in constants else arguments[name] for name in function.arg_names}
    places = {(function.arg_names.index(name),): value for name, value in constants.items()}
    # The table starts at a multiple of 16, as all that the allocator gives does.
    source = ASTSource(function, signature, places, {(0,): [["tt.divisibility", 16]]})
    options = kernel.compiled_with(num_dims, choice.num_warps, architecture)
    made = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    ptx = made.asm["ptx"]
    usage = _resource_usage(made.asm["cubin"])
    wide_loads, wide_stores = (len(re.findall(_WIDE.format(instruction), ptx)) for instruction in ("ld", "st"))
    return Compiled(
        ptx, wide_loads, wide_stores, usage["REG"], usage["STACK"] + usage["LOCAL"], disassembled(made.asm["cubin"])
    )


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
