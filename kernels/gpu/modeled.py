"""Costs of packs and unpacks of columns by models, without a GPU: bytes of memory by a cache, instructions by count."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from triton.runtime.driver import driver

from tritondt.kernels.boxes import CopyBox
from tritondt.kernels.gpu import instructions
from tritondt.kernels.gpu.ahead_of_time import Architecture
from tritondt.kernels.gpu.box_table import mode
from tritondt.kernels.gpu.cache_model import H200, Cache, Traffic, traffic
from tritondt.kernels.gpu.copy_boxes import copies
from tritondt.kernels.gpu.device_table import Form, compile_form
from tritondt.kernels.gpu.gathers import gathers
from tritondt.kernels.gpu.loop_nest import coalesce, copy_nest
from tritondt.kernels.gpu.pieces import Kind, Piece, copy_pieces
from tritondt.kernels.gpu.specialization import DIMS, POINTERS
from tritondt.kernels.gpu.tuning import DEFAULT, choose

NUM_RANKS = 7
RUN_BYTES = (16, 64, 256, 1024, 4096)
_MATRIX_BYTES = 64 << 20
_UNITS = (4, 2, 1)


class Columns(NamedTuple):
    """A matrix whose columns are packed into a message for each rank, of rows of about `run_bytes`, or unpacked."""

    itemsize: int
    run_bytes: int
    packs: bool

    def boxes(self, num_bytes: int) -> list[CopyBox]:
        """Parts that differ by one column at most, of a matrix of about so many bytes."""
        columns = self.run_bytes // self.itemsize * NUM_RANKS + 3
        rows = num_bytes // (columns * self.itemsize)
        found, start = [], 0
        for number in range(NUM_RANKS):
            size = columns // NUM_RANKS + (number < columns % NUM_RANKS)
            sides = [(start, (columns, 1)), (start * rows, (size, 1))]
            (source, source_strides), (target, target_strides) = sides if self.packs else reversed(sides)
            found.append(CopyBox(0, 0, source, target, self.itemsize, (rows, size), source_strides, target_strides))
            start += size
        return found


def cases() -> Iterator[Columns]:
    """Words and units of two bytes, rows of every length, both ways."""
    for itemsize in (4, 2):
        for run_bytes in RUN_BYTES:
            yield from (Columns(itemsize, run_bytes, packs) for packs in (True, False))


def pieces_of(boxes: Sequence[CopyBox]) -> list[Piece]:
    """Pieces as a table of copies has them, of tensors that start at multiples of 16 bytes."""
    gathered, left = gathers([coalesce(copy_nest(number, box)) for number, box in enumerate(boxes)])
    return [*gathered, *(piece for nest in left for piece in copy_pieces(nest))]


def modeled_traffic(case: Columns, scale: int = 1) -> Traffic:
    """Traffic of 64 MiB on an H200, or of everything a `scale`th as large, which bands have to be, too."""
    block = max(choose(DEFAULT, "copy", 16, DIMS[0]).block // scale, 16)
    pieces = pieces_of(case.boxes(_MATRIX_BYTES // scale))
    return traffic(pieces, block, Cache(H200.num_bytes // scale), scale=scale)


def counted(architecture: int) -> Iterator[tuple[Kind, int, instructions.Count]]:
    """Instructions of each kind of gathered rows, compiled for an architecture such as 90, by its unit in bytes."""
    stand_in: Any = Architecture(architecture)
    driver.set_active(stand_in)
    choice = choose(DEFAULT, "copy", 16, DIMS[0])
    for kind in (Kind.GATHERED, Kind.JOINED):
        for unit in _UNITS:
            form = Form(1 << mode(kind, unit), DIMS[0], POINTERS[0], choice.block)
            compiled = compile_form(copies(), form, choice.num_warps, torch.int64, (1, 1, 1), (1, 1, 1))
            yield kind, unit, instructions.count(instructions.disassembled(compiled.asm["cubin"]))
