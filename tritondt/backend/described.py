"""What operations are called in errors, records and comparisons: whatever must be the same on all ranks."""

import zlib
from collections.abc import Sequence
from typing import Any

import torch

from tritondt.backend.elements import op_name, text_of

_MOST_SIZES = 16


def described(
    kind: str, tensors: Sequence[torch.Tensor] = (), *, op: Any = None, root: int | None = None, is_even: bool = True
) -> str:
    """The text of an operation on `tensors`, whose sizes may differ from rank to rank unless it `is_even`.

    >>> import torch.distributed as dist
    >>> described("reduce", [torch.zeros(3, 2)], op=dist.ReduceOp.SUM, root=1)
    'reduce (sum) of 6 float32, root 1'
    >>> described("all_gather", [torch.zeros(3), torch.zeros(0)])
    'all_gather of 3 + 0 float32'
    >>> described("all_to_all", [torch.zeros(3), torch.zeros(0)], is_even=False)
    'all_to_all of float32'
    """
    how = "" if op is None else f" ({op_name(op)})"
    where = "" if root is None else f", root {root}"
    if len(tensors) == 1:  # nearly always, and this is on the way of every operation
        return f"{kind}{how} of {f'{tensors[0].numel()} ' if is_even else ''}{text_of(tensors[0].dtype)}{where}"
    return f"{kind}{how}{f' of {_elements(tensors, is_even)}' if tensors else ''}{where}"


def _elements(tensors: Sequence[torch.Tensor], is_even: bool) -> str:
    dtypes = " and ".join(dict.fromkeys(text_of(tensor.dtype) for tensor in tensors))
    if not is_even:
        return dtypes
    counts = [tensor.numel() for tensor in tensors]
    if len(counts) > _MOST_SIZES:
        return f"{len(counts)} tensors, {sum(counts)} {dtypes} in all (sizes {zlib.crc32(repr(counts).encode()):08x})"
    return f"{' + '.join(map(str, counts))} {dtypes}"
