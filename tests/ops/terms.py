"""Terms that tell whether a reduction commutes with an operator, and the comparison of both orders."""

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, islice
from typing import Any, cast

import torch

import tritondt as T
from tritondt.comm.transports.threads import run_ranks
from tritondt.sharding.placement import REDUCE_OPS, ReduceOp
from tritondt.sharding.spec import element_kind, has_reduction

# A call of terms x, and of w: a function that makes a whole tensor of x's dtype, the same on every rank.
Call = Callable[[Any, Callable[..., Any]], Any]
SHAPE = (4, 4)

# Sums that cancel, wrap around and leave the range of shorter dtypes; factors whose parts do not multiply.
_PAIRS: Mapping[tuple[str, bool], Sequence[tuple[Any, Any]]] = {
    ("float", True): [(1000.3, -1000.0), (0.1, 0.2), (100.0, -99.0), (-3.5, 3.0), (-2.0, 0.0)],
    ("float", False): [(-0.5, -3.0), (1000.5, -0.25), (-7.0, 2.0), (3.0, 0.125), (-1.0, 0.0)],
    ("complex", True): [(1000.3 + 1j, -1000.0 - 2j), (0.1j, 0.2 + 3j), (-1j, 1.0 + 1j)],
    ("complex", False): [(1 + 2j, 2 - 1j), (-1j, 3.0 + 1j), (-2.0, 1j), (0.5 + 0.5j, 4 - 1j)],
    ("int", True): [(100, 100), (-128, -1), (127, 1), (3, -5), (-7, -6)],
    ("int", False): [(100, 3), (-7, -1), (64, 8), (-5, 3), (-128, 127), (0, -7)],
    ("bool", False): [(False, True), (True, True), (False, False), (True, False)],
}
# Terms of float16 may be larger than it can hold where those of their sum are not: what overflows stays so.
_SCALES = {torch.float16: 1 / 16}
# Beyond 16-bit floats; of wider ints, sums and products that wrap around.
_FAR = {torch.float32: (1e5, -99999.0), torch.int32: (2**31 - 1, 2**31 - 5), torch.int64: (2**63 - 1, 2**62)}


def terms_of(reduce_op: ReduceOp, dtype: torch.dtype) -> list[torch.Tensor]:
    """The terms of two ranks."""
    kind = element_kind(dtype)
    pairs = list(_PAIRS[kind, reduce_op in ("sum", "avg")])
    if dtype in _FAR:
        pairs.append(_FAR[dtype])
    rows = list(islice(cycle(pairs), SHAPE[0] * SHAPE[1]))
    wide = {"int": torch.int64, "float": torch.float64, "complex": torch.complex128, "bool": torch.bool}[kind]
    found = [torch.tensor([row[rank] for row in rows], dtype=wide).view(SHAPE) for rank in range(2)]
    return [(term * _SCALES[dtype] if dtype in _SCALES else term).to(dtype) for term in found]


def ops_of(dtype: torch.dtype) -> list[ReduceOp]:
    """The reductions that a dtype has."""
    return [op for op in REDUCE_OPS if has_reduction(op, dtype)]


def _factor(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Small numbers of both signs, none of them 0."""
    count = torch.Size(shape).numel()
    numbers = torch.tensor([(-2, 3, 1, -1, 2)[place % 5] for place in range(count)])
    return (numbers > 0 if dtype is torch.bool else numbers.to(dtype)).view(tuple(shape))


def _tensors(result: Any) -> list[torch.Tensor]:
    if isinstance(result, list | tuple):
        return [tensor for item in result for tensor in _tensors(item)]
    return [result] if isinstance(result, torch.Tensor) else []


class Comparison:
    """Comparison of reducing first with reducing last, for every call, on two ranks."""

    def __init__(
        self, calls: Mapping[str, Call], dtype: torch.dtype, reduce_ops: Sequence[ReduceOp] | None = None
    ) -> None:
        self.calls, self.dtype, self.reduce_ops = calls, dtype, reduce_ops or ops_of(dtype)
        self.passed: set[str] = set()
        self.wrong: list[str] = []
        run_ranks(2, self._compare)

    def _compare(self, rank: int) -> None:
        mesh = T.Mesh((2,))
        for reduce_op in self.reduce_ops:
            terms = terms_of(reduce_op, self.dtype)

            def distributed(reduce_op: ReduceOp = reduce_op, term: torch.Tensor = terms[rank]) -> T.DTensor:
                return T.DTensor.from_local(term.clone(), mesh, [T.Partial(reduce_op)])

            whole = distributed().full_tensor()
            for name, call in self.calls.items():
                self._compare_one(name, call, reduce_op, distributed, whole, rank)

    def _compare_one(
        self, name: str, call: Call, reduce_op: ReduceOp, make: Callable[[], T.DTensor], whole: torch.Tensor, rank: int
    ) -> None:
        def plain(*shape: int, dtype: torch.dtype = self.dtype) -> torch.Tensor:
            return _factor(shape, dtype)

        x = make()
        mesh = x.device_mesh

        def replicated(*shape: int, dtype: torch.dtype = self.dtype) -> torch.Tensor:
            return T.DTensor.from_local(_factor(shape, dtype), mesh)

        try:
            expected = _tensors(call(whole.clone(), plain))
        except (RuntimeError, NotImplementedError, TypeError):
            return  # torch has no kernel for this dtype
        try:
            with T.explicit_redistribution():
                found = _tensors(call(x, replicated))
        except T.ImplicitRedistributionError:
            return  # reduces first
        except T.TritondtError as error:
            self.wrong.append(f"{name} of P({reduce_op}) {self.dtype} raises {error}")
            return
        scale = max((_largest(cast(T.DTensor, item).to_local()) for item in found), default=0.0)
        for item, of in zip(found, expected, strict=True):
            text = _difference(cast(T.DTensor, item), of, self.dtype, scale)
            if rank == 0 and any(placement.is_partial() for placement in cast(T.DTensor, item).placements):
                self.passed.add(name)
            if rank == 0 and text:
                self.wrong.append(f"{name} of P({reduce_op}) {self.dtype}: {text}")


def _largest(term: torch.Tensor) -> float:
    if not (term.is_floating_point() or term.is_complex()) or not term.numel():
        return 0.0
    return float(term.to(torch.complex128).abs().nan_to_num(0, 0, 0).max())


def _difference(item: T.DTensor, expected: torch.Tensor, dtype: torch.dtype, scale: float) -> str:
    """What differs: anything of ints, and of floats more than the terms were rounded by."""
    found = item.full_tensor()
    if found.dtype is not expected.dtype or found.shape != expected.shape:
        return f"{found.dtype} {tuple(found.shape)}, expected {expected.dtype} {tuple(expected.shape)}"
    tolerance = 0.0
    if dtype.is_floating_point or dtype.is_complex:
        tolerance = 16 * torch.finfo(dtype).eps * max(scale, _largest(expected))
    if torch.equal(found.isnan(), expected.isnan()):
        wide = torch.complex128 if found.is_floating_point() or found.is_complex() else torch.int64
        away = (found.to(wide) - expected.to(wide)).abs().nan_to_num(0)
        if bool(((away <= tolerance) | (found == expected) | found.isnan()).all()):
            return ""
    return f"{item.placements} gives {found.flatten().tolist()}, expected {expected.flatten().tolist()}"
