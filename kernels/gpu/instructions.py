"""Instructions that a compiled kernel takes for each byte it writes, counted in what the assembler made of it."""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import triton

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,5})\*/\s+(.*?) ;")
_BRANCH = re.compile(r"\bBRA (0x[0-9a-f]+)")
_WIDE_STORE_BYTES = 16


class Count(NamedTuple):
    """Instructions of a thread for a byte in the loop that writes, and for a whole tile before and behind it."""

    per_byte: float
    per_tile: int


def disassembled(cubin: bytes) -> str:
    """A compiled kernel as text, by the disassembler that Triton brings."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(_TOOLS / "cuobjdump"), "-sass", file.name]
        return subprocess.run(command, capture_output=True, check=True, timeout=150, text=True).stdout


def count(sass: str) -> Count:
    """Counts those of a kernel with one loop that writes 16 bytes at a time; ValueError where there is none.

    Loops that write nothing search a table, and run for large ones alone.

    >>> lines = ["MOV", "LDG", "STG.E.128 [R2], R4", "@P0 BRA 0x10", "EXIT"]
    >>> count("".join(f"/*{16 * number:04x}*/ {line} ;" for number, line in enumerate(lines)))
    Count(per_byte=0.1875, per_tile=2)
    """
    instructions = [(int(address, 16), text) for address, text in _INSTRUCTION.findall(sass)]
    instructions = [(address, text) for address, text in instructions if text != "NOP"]
    loops = []
    for address, text in instructions:
        branch = _BRANCH.search(text)
        if branch is not None and int(branch[1], 16) < address:
            loops.append([each for each in instructions if int(branch[1], 16) <= each[0] <= address])
    stores = [sum("STG.E.128" in text for _, text in loop) for loop in loops]
    writing = [(len(loop), number) for loop, number in zip(loops, stores, strict=True) if number]
    if not writing:
        raise ValueError("a kernel without a loop that writes 16 bytes at a time")
    length, num_stores = min(writing)
    searching = sum(len(loop) for loop, number in zip(loops, stores, strict=True) if not number)
    return Count(length / (num_stores * _WIDE_STORE_BYTES), len(instructions) - length - searching)
