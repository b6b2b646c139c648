"""A pack kernel of one's own, by torch's strided copies, for `bench redistribute --against own_pack:make`.

python examples/own_pack.py
PYTHONPATH=examples python -m tritondt bench redistribute --sizes 1024x1024 --against own_pack:make
"""

import ctypes
from collections.abc import Callable, Sequence

import torch

from tritondt.kernels.boxes import CopyBox

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def view(address: int, offset: int, lengths: Sequence[int], strides: Sequence[int], itemsize: int) -> torch.Tensor:
    """The elements of a box as a tensor, from the address of the first element of the tensor that they lie in."""
    last = sum((length - 1) * stride for length, stride in zip(lengths, strides, strict=True))
    memory = (ctypes.c_char * ((last + 1) * itemsize)).from_address(address + offset * itemsize)
    return torch.frombuffer(memory, dtype=WORDS[itemsize]).as_strided(tuple(lengths), tuple(strides))


def make(boxes: Sequence[CopyBox]) -> Callable[[Sequence[int], Sequence[int]], None]:
    """Function to copy boxes, given the addresses of sources and targets: made once an exchange, run many times."""
    found = [box for box in boxes if 0 not in box.lengths]

    def copy(sources: Sequence[int], targets: Sequence[int]) -> None:
        for box in found:
            source = view(sources[box.source], box.source_offset, box.lengths, box.source_strides, box.itemsize)
            target = view(targets[box.target], box.target_offset, box.lengths, box.target_strides, box.itemsize)
            target.copy_(source)

    return copy


if __name__ == "__main__":
    rows, columns = torch.arange(6).view(2, 3), torch.zeros(3, 2, dtype=torch.int64)
    box = CopyBox(0, 0, 0, 0, 8, lengths=(2, 3), source_strides=(3, 1), target_strides=(1, 2))
    make([box])([rows.data_ptr()], [columns.data_ptr()])
    print("transposed by the box:", columns.tolist())
