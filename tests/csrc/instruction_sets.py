"""Prints a digest of what tables make of fixed inputs, with a set of instructions: its name is the argument."""

import hashlib
import itertools
import sys

import torch

from tests.csrc.drawing import random_bits, random_floats
from tritondt import _C
from tritondt.kernels.boxes import CastBox, CopyBox, ReduceBox, Slot

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
WIDE = (torch.float32, torch.bfloat16, torch.float16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
OPS = ("sum", "product", "max", "min")


def name(dtype):
    return str(dtype).removeprefix("torch.")


def values(dtype):
    """Every value of a narrow dtype; of a wide one, values and bits of all kinds. An odd number of them."""
    integer = {1: torch.uint8, 2: torch.int16}.get(dtype.itemsize)
    if integer is None:
        return random_floats(100_003, dtype)
    return torch.arange(2 ** (8 * dtype.itemsize) + 3, dtype=torch.int32).to(integer).view(dtype)


def results():
    """Tensors, one per table."""
    for source, target in itertools.permutations(FLOATS, 2):
        x, into = values(source), torch.empty(len(values(source)), dtype=target)
        box = CastBox(0, 0, 0, 0, (len(x),), (1,), (1,))
        _C.CastTable([box], name(source), name(target)).run([x.data_ptr()], [into.data_ptr()], 1)
        yield into
    for wide, narrow in itertools.product(WIDE, FP8):
        x, codes, scales = values(wide), torch.empty(len(values(wide)), dtype=narrow), torch.empty(1)
        box = CastBox(0, 0, 0, 0, (len(x),), (1,), (1,))
        quantize = _C.QuantizeTable([box], name(wide), name(narrow))
        quantize.run([x.data_ptr()], [codes.data_ptr()], scales.data_ptr(), 1)
        back, every = torch.empty(259, dtype=wide), values(narrow)
        box = box._replace(lengths=(len(every),))
        dequantize = _C.DequantizeTable([box], name(narrow), name(wide))
        dequantize.run([every.data_ptr()], [back.data_ptr()], scales.data_ptr(), 1)
        yield from (codes, scales, back)
    for dtype, op in itertools.product(FLOATS, OPS):
        slots = torch.stack([values(dtype).roll(13 * k) for k in range(5)])
        into, length = torch.empty(slots.shape[1], dtype=dtype), slots.shape[1]
        boxes = [ReduceBox(0, 0, (length,), (1,), tuple(Slot(0, k * length, (1,)) for k in range(5)))]
        _C.ReduceTable(boxes, op, name(dtype), 1).run([slots.data_ptr()], [into.data_ptr()], 1)
        yield into
    yield from packed_and_unpacked()
    yield past_the_cache()


def packed_and_unpacked():
    """Columns of peers, some in one line with the next, as bytes; so many that they are written past the cache."""
    widths, rows = (513, 1, 64, 300, 2050, 70), 11_700
    columns = sum(widths)
    x = random_bits(rows * columns, torch.uint8)
    packed, back = torch.empty_like(x), torch.empty_like(x)
    starts = [0, *itertools.accumulate(widths)]
    boxes = [
        CopyBox(0, 0, start, rows * start, 1, (rows, width), (columns, 1), (width, 1))
        for start, width in zip(starts, widths, strict=False)
    ]
    _C.CopyTable(boxes).run([x.data_ptr()], [packed.data_ptr()], 1)
    backward = [
        CopyBox(0, 0, box.target_offset, box.source_offset, 1, box.lengths, box.target_strides, box.source_strides)
        for box in boxes
    ]
    _C.CopyTable(backward).run([packed.data_ptr()], [back.data_ptr()], 2)
    if not torch.equal(back, x):
        raise AssertionError("what was packed and unpacked is not what it was")
    yield packed


def past_the_cache():
    """A cast that begins and ends within a line."""
    x = random_floats(4_200_001, torch.float32)
    into = torch.zeros(len(x) + 3, dtype=torch.float64)
    box = CastBox(0, 0, 0, 2, (len(x),), (1,), (1,))
    _C.CastTable([box], "float32", "float64").run([x.data_ptr()], [into.data_ptr()], 2)
    return into


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    _C.limit_instructions(sys.argv[1])
    digest = hashlib.sha256()
    for made in results():
        digest.update(made.view(torch.uint8).numpy().tobytes())
    sys.stdout.write(digest.hexdigest() + "\n")
