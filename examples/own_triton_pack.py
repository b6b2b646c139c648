"""A Triton pack kernel of one's own, for `bench redistribute --device cuda --against own_triton_pack:make`.

python examples/own_triton_pack.py, with TRITON_INTERPRET=1 where there is no GPU
PYTHONPATH=examples python -m tritondt bench redistribute --device cuda --sizes 4096x4096 --against own_triton_pack:make
"""

import os
from collections.abc import Callable, Sequence
from math import prod

import torch
import triton
import triton.language as tl

from tritondt.kernels.boxes import CopyBox

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
BLOCK = 1024


@triton.jit(do_not_specialize=("source", "target", "numel"))
def copy_box(source, target, loops, numel, WORD_BYTES: tl.constexpr, DIMS: tl.constexpr, BLOCK: tl.constexpr):
    """Copies BLOCK words of a box; `loops` holds its lengths, then the strides of the source and of the target."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_there = place < numel
    rest, source_offset, target_offset = place, place * 0, place * 0
    for number in tl.static_range(DIMS):
        dim = DIMS - 1 - number
        length = tl.load(loops + dim)
        source_offset += rest % length * tl.load(loops + DIMS + dim)
        target_offset += rest % length * tl.load(loops + 2 * DIMS + dim)
        rest = rest // length
    if WORD_BYTES == 1:
        word = tl.pointer_type(tl.int8)
    elif WORD_BYTES == 2:
        word = tl.pointer_type(tl.int16)
    elif WORD_BYTES == 4:
        word = tl.pointer_type(tl.int32)
    else:
        word = tl.pointer_type(tl.int64)
    words = tl.load(source.to(word) + source_offset, mask=is_there)
    tl.store(target.to(word) + target_offset, words, mask=is_there)


def of_8_bytes(box: CopyBox) -> CopyBox:
    """A box of words of 16 bytes as one of twice as many words of 8."""
    if box.itemsize < 16:
        return box
    source_strides, target_strides = (tuple(2 * n for n in each) for each in (box.source_strides, box.target_strides))
    places = box.source, box.target, 2 * box.source_offset, 2 * box.target_offset
    return CopyBox(*places, 8, (*box.lengths, 2), (*source_strides, 1), (*target_strides, 1))


def make(boxes: Sequence[CopyBox]) -> Callable[[Sequence[int], Sequence[int]], None]:
    """Function to copy boxes, given the addresses of sources and targets: made once an exchange, run many times."""
    found = [of_8_bytes(box) for box in boxes if 0 not in box.lengths]
    tables = [
        torch.tensor([*box.lengths, *box.source_strides, *box.target_strides], dtype=torch.int64, device=DEVICE)
        for box in found
    ]

    def copy(sources: Sequence[int], targets: Sequence[int]) -> None:
        for box, loops in zip(found, tables, strict=True):
            source = sources[box.source] + box.source_offset * box.itemsize
            target = targets[box.target] + box.target_offset * box.itemsize
            numel = prod(box.lengths)
            grid = (triton.cdiv(numel, BLOCK),)
            copy_box[grid](source, target, loops, numel, box.itemsize, len(box.lengths), BLOCK)

    return copy


if __name__ == "__main__":
    rows, columns = torch.arange(6, device=DEVICE).view(2, 3), torch.zeros(3, 2, dtype=torch.int64, device=DEVICE)
    box = CopyBox(0, 0, 0, 0, 8, lengths=(2, 3), source_strides=(3, 1), target_strides=(1, 2))
    make([box])([rows.data_ptr()], [columns.data_ptr()])
    print("transposed by the box:", columns.tolist())
