"""NCCL's names for torch's dtypes and reductions, and the refusal of those that NCCL lacks."""

import zlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tritondt.errors import TransportError


class PreMulSum(NamedTuple):
    """The sum of terms, each times a factor: a number, or a tensor of one element on the device."""

    factor: float | torch.Tensor


class Reduced(NamedTuple):
    """Elements that NCCL reduces: `num` of its dtype for one of torch's."""

    dtype: str
    num: int
    op: str | PreMulSum


_DTYPES = {
    getattr(torch, name): (name, 1)
    for name in (
        *("int8", "uint8", "int32", "uint32", "int64", "uint64"),
        *("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"),
    )
} | {torch.complex64: ("float32", 2), torch.complex128: ("float64", 2), torch.bool: ("uint8", 1)}
_OPS = {"SUM": "sum", "AVG": "avg", "PRODUCT": "product", "MIN": "min", "MAX": "max", "PREMUL_SUM": "premul_sum"}
# Of the bytes 0 and 1: or, and.
_OF_BOOL = {"sum": "max", "product": "min", "min": "min", "max": "max"}


def number_of(op: Any) -> int:
    """torch's number of a reduction, whatever its factor is.

    It is a ReduceOp's hash: pybind's enums take half a microsecond to say as much.

    >>> import torch.distributed as dist
    >>> number_of(dist.ReduceOp(dist.ReduceOp.MAX)) == dist.ReduceOp.MAX.value
    True
    """
    return hash(op)


PRE_MUL_SUM = dist.ReduceOp.PREMUL_SUM.value


def op_name(op: Any) -> str:
    """The name of a reduction of torch.distributed in messages.

    >>> import torch.distributed as dist
    >>> op_name(dist.ReduceOp.SUM), op_name(dist.ReduceOp(dist.ReduceOp.BAND))
    ('sum', 'band')
    """
    return _kind_of(op).lower()


def _kind_of(op: Any) -> str:
    kind = getattr(op, "op", op)  # of a ReduceOp; what is given may be its kind alone
    return str(kind.name)


def check_reduced(dtype: torch.dtype, op: Any) -> None:
    """Raises TransportError where NCCL does not reduce elements of `dtype` by `op`."""
    name, allowed = op_name(op), _allowed(dtype) if dtype in _DTYPES else []
    if name not in allowed:
        raise refusal_of_op(dtype, name, allowed, _DTYPES, "NCCL")


def refusal_of_op(
    dtype: torch.dtype, name: str, allowed: Iterable[str], dtypes: Iterable[torch.dtype], carrier: str
) -> TransportError:
    """The error where a `carrier` that reduces such `dtypes`, by `allowed` ops, is asked for another op or dtype.

    >>> print(refusal_of_op(torch.bool, "avg", ["min", "max"], [torch.bool], "NCCL"))
    the op avg on bool was asked for; allowed is min and max
    """
    known = list(dtypes)
    if dtype not in known:
        return TransportError(
            f"a reduction of {text_of(dtype)} was asked for; {carrier} reduces {_listed(map(text_of, known))}"
        )
    why = ""
    if name == "avg" and not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool):
        why = ": a mean of whole numbers is none; reduce by sum and divide, or reduce .float()"
    return TransportError(f"the op {name} on {text_of(dtype)} was asked for; allowed is {_listed(allowed)}{why}")


def _allowed(dtype: torch.dtype) -> list[str]:
    if dtype.is_complex:
        return ["sum", "avg", "premul_sum"]
    if dtype is torch.bool:
        return list(_OF_BOOL)
    return [name for name in _OPS.values() if name not in ("avg", "premul_sum") or dtype.is_floating_point]


def reduced(dtype: torch.dtype, op: Any) -> Reduced:
    """NCCL's dtype, count and op for one element of `dtype`; TransportError where NCCL does not reduce such by `op`.

    >>> import torch.distributed as dist
    >>> reduced(torch.complex64, dist.ReduceOp.SUM)
    Reduced(dtype='float32', num=2, op='sum')
    >>> reduced(torch.bool, dist.ReduceOp.SUM).op
    'max'
    """
    check_reduced(dtype, op)
    name, num = _DTYPES[dtype]
    known = _OPS[_kind_of(op)]
    if known == "premul_sum":
        return Reduced(name, num, PreMulSum(op.__getstate__()[1]))
    return Reduced(name, num, _OF_BOOL[known] if dtype is torch.bool else known)


def text_of(dtype: torch.dtype) -> str:
    """The name of a dtype in messages.

    >>> text_of(torch.float32)
    'float32'
    """
    return str(dtype).removeprefix("torch.")


def _listed(names: Any) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}"


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
