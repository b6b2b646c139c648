"""A program on one device, twice: as it is, and on a twin whose every rounding is made a few bits worse.

How far the twin comes off is a bound for what another order of additions may change (Monte Carlo arithmetic): it goes
through all later statements and backward passes as a rounding error does, with no analysis of any operator. Where the
arithmetic is exact nothing is disturbed, and values are compared exactly.
"""

from collections.abc import Collection, Iterable, Sequence
from math import isfinite, prod
from typing import Any

import torch
import torch.nn.functional as F

from tests.programs.places import OneDevice
from tests.programs.soundness import graph_nodes
from tests.programs.statements import Call, Statement, compiled

# Kinds that only move elements, or pick among them: no rounding.
MOVING = frozenset({
    "make", "redistribute", "async", "prefetch", "view", "copy", "index", "join", "compare", "sort", "dynamic",
    "setitem", "set_data", "hook", "detach", "factory", "reshape_in_place", "shape_out",
    "to_local", "full_tensor", "from_local",
})  # fmt: skip
# Sums of products: exact on whole numbers that are small enough for the dtype.
POLYNOMIAL = frozenset({
    "pointwise", "reduction", "matmul", "cumulative", "cast", "write", "foreach", "out", "data", "backward", "grad",
})  # fmt: skip
# Kinds with results that jump, as the index of the least element does where two are alike.
DECIDING = frozenset({"pointwise", "compare", "reduction", "sort", "cumulative", "cast", "index", "softmax", "conv"})
# Draws of which every one agrees by chance, where two elements are alike, once in 2^6.
NUM_DRAWS = 6
# Every rounding of the twin is this many units of the last place of the largest number that took part.
NOISE_ULPS = 8.0
# An error of the library's own order of additions may be so many times that of the twin.
HEADROOM = 16.0


class Environment:
    """Variables of a program, and what its statements need besides."""

    def __init__(self, place: OneDevice) -> None:
        self.names: dict[str, Any] = {"torch": torch, "F": F, "place": place}
        self.variables: list[str] = []

    def run(self, statement: Statement) -> None:
        """Runs a statement; raises what it raises."""
        # torch.compile keeps what it made by the code of a function, and puts it among the names where that ran first.
        find = compiled.__wrapped__ if statement.kind == "compile" else compiled
        exec(find(statement.source), self.names)
        self.variables.extend(name for name in statement.makes if isinstance(self.names[name], torch.Tensor))

    def forget(self, statement: Statement) -> None:
        """Takes back what a statement set."""
        for name in statement.makes:
            self.names.pop(name, None)
            if name in self.variables:
                self.variables.remove(name)

    def __getitem__(self, name: str) -> Any:
        return self.names[name]

    def tensors(self) -> dict[str, torch.Tensor]:
        """All variables, and the gradients of those that have one."""
        found = {name: self.names[name] for name in self.variables}
        grads = {f"{name}.grad": tensor.grad for name, tensor in found.items() if tensor.is_leaf}
        return found | {name: grad for name, grad in grads.items() if grad is not None}


class OneDeviceRun:
    """The two runs of a program on one device, statement by statement."""

    def __init__(self, seed: int, mesh_shape: Sequence[int]) -> None:
        self._mesh_shape = mesh_shape
        self.plain, self.twin = Environment(OneDevice()), Environment(OneDevice())
        self._noise = torch.Generator().manual_seed(seed)
        # Gradients of what was rounded have draws of their own, so that programs stay what they were.
        self._noise_of_gradients = torch.Generator().manual_seed(seed)
        self._rounding: set[Any] = set()  # operators of which the results are rounded

    def run(self, statement: Statement, thirded: Collection[str] = ()) -> None:
        """Runs a statement on both, and disturbs the twin's results; raises what the statement raises.

        `thirded` are variables that a mesh holds as terms of a mean after the statement, whatever made it choose so.
        """
        before = versions(self.plain.tensors())
        self.plain.run(statement)
        self.twin.run(statement)
        passes_rounding = statement.kind in ("grad", "backward") and self._passes_rounding(statement)
        makes_mean = not isinstance(statement, Call) and is_thirded(self._mesh_shape, statement.placements)
        for name in self.changed(statement, before):
            rounds = makes_mean or name in thirded
            if rounds or statement.kind not in MOVING:
                self._disturb(name, statement, rounds, passes_rounding)

    def changed(self, statement: Statement, before: dict[str, int | None]) -> list[str]:
        """What a statement has made or written."""
        after = versions(self.plain.tensors())
        return [name for name, version in after.items() if name not in before or version != before[name]]

    def _passes_rounding(self, statement: Statement) -> bool:
        """Whether a gradient is one of what was rounded: whole numbers are then no sign that it is exact."""
        return not self._rounding.isdisjoint(graph_nodes(self.plain[name] for name in statement.reads))

    def _disturb(self, name: str, statement: Statement, rounds: bool, passes_rounding: bool) -> None:
        tensor, plain = self.twin.tensors()[name], self.plain.tensors()[name]
        if not (tensor.is_floating_point() or tensor.is_complex()) or 0 in (*tensor.shape, *tensor.stride()):
            return
        sizes = [
            float(magnitude(self.plain[read])) for read in statement.reads if self.plain.names.get(read) is not None
        ]
        scale = max(1.0, magnitude(tensor)) * prod(max(1.0, size) for size in sizes[:3])
        source = self._noise
        if not rounds and statement.kind in POLYNOMIAL and self._is_exact(plain, scale):
            if not passes_rounding:
                return
            source = self._noise_of_gradients
        if plain.grad_fn is not None:
            self._rounding.add(plain.grad_fn)
        with torch.inference_mode(tensor.is_inference()):
            noise = torch.randn(tensor.shape, generator=source, dtype=torch.float64)
            # Of one number the draw may come close to zero, as if nothing had been rounded.
            noise = (noise + noise.sign() / 2).to(tensor.dtype)
            noise = noise * (1 + 1j) if tensor.is_complex() else noise
            tensor.data.add_(noise * (NOISE_ULPS * scale * torch.finfo(tensor.dtype).eps))

    def _is_exact(self, tensor: torch.Tensor, scale: float) -> bool:
        """Whether any order of the additions gives the same whole numbers."""
        parts = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
        return scale * 64 * torch.finfo(parts.dtype).eps < 1 and bool((parts == parts.round()).all())

    def tolerance(self, name: str) -> float:
        """The largest error that rounding may have made in a variable; 0 where it must be exact."""
        plain, twin = self.plain.tensors()[name], self.twin.tensors().get(name)
        if twin is None or not plain.numel() or plain.dtype != twin.dtype:
            return 0.0
        error = difference(plain, twin)
        return HEADROOM * error if isfinite(error) else 0.0

    def is_decided_by_rounding(self, statement: Statement) -> bool:
        """Whether what a statement makes jumps where its inputs are a rounding off: the twin is one such draw alone."""
        errors = {name: self.tolerance(name) for name in statement.reads}
        if statement.kind not in DECIDING or not any(errors.values()):
            return False
        noise = torch.Generator().manual_seed(0)
        for draw in range(NUM_DRAWS + 1):
            names = dict(self.plain.names)
            for name, error in errors.items():
                tensor: torch.Tensor = names[name].detach()
                if error and draw == NUM_DRAWS:
                    names[name] = _with_whole_numbers(tensor, error)
                elif error:
                    signs = torch.randint(-2, 3, tensor.shape, generator=noise)
                    names[name] = tensor + (signs * (error / HEADROOM)).to(tensor.dtype)
            with torch.no_grad():
                exec(compiled(statement.source), names)
            if any(_is_apart(self.plain[name].detach(), names[name]) for name in statement.makes):
                return True
        return False

    def is_sound(self, names: Iterable[str]) -> bool:
        """Whether variables are of moderate size, and no rounding decides them."""
        for name in names:
            plain, twin = self.plain.tensors()[name], self.twin.tensors()[name]
            if plain.shape != twin.shape or plain.numel() > 600:
                return False
            if not plain.numel():
                continue
            # Not a number, too.
            if not magnitude(plain) <= (2**40 if plain.dtype is torch.int64 else 1e4) or _is_apart(plain, twin):
                return False
        return True


def _with_whole_numbers(tensor: torch.Tensor, error: float) -> torch.Tensor:
    """Elements that may be whole numbers but for rounding, as those: no draw meets what they are equal to then.

    >>> _with_whole_numbers(torch.tensor([1e-9, 0.5]), 1e-8).tolist()
    [0.0, 0.5]
    """
    if tensor.is_complex():
        return torch.view_as_complex(_with_whole_numbers(torch.view_as_real(tensor.resolve_conj()), error))
    whole = tensor.round()
    return torch.where((tensor - whole).abs() <= error, whole, tensor)


def is_thirded(mesh_shape: Sequence[int], placements: Iterable[str]) -> bool:
    """Whether placements hold a mean by terms, their number no power of two: dividing the terms rounds."""
    sizes = [size for size, text in zip(mesh_shape, placements, strict=False) if text == "P(avg)"]
    return prod(sizes) & (prod(sizes) - 1) != 0


def _is_apart(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether values are further from each other than roundings, of which bfloat16 with its 8 bits has larger ones."""
    if one.shape != other.shape:
        return True
    apart, is_exact_kind = difference(one, other), not (one.is_floating_point() or one.is_complex())
    allowed = max(1.0, magnitude(one)) * (0.02 if one.dtype is torch.bfloat16 else 1e-3)
    return apart > (0.0 if is_exact_kind else allowed)


def is_expanded(tensor: torch.Tensor) -> bool:
    """Whether elements share memory: what a write leaves there follows from the order of writing."""
    return any(length > 1 and step == 0 for length, step in zip(tensor.shape, tensor.stride(), strict=True))


def versions(tensors: dict[str, torch.Tensor]) -> dict[str, int | None]:
    """How often each variable was written to; None where that is not counted."""
    return {name: None if tensor.is_inference() else tensor._version for name, tensor in tensors.items()}


def magnitude(tensor: torch.Tensor) -> float:
    """The largest absolute value, 0 of none."""
    if not isinstance(tensor, torch.Tensor) or not tensor.numel():
        return 0.0
    return float(_wide(tensor).abs().max())


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest absolute difference of two tensors of one shape."""
    if not one.numel():
        return 0.0
    first, second = _wide(one), _wide(other)
    is_same = (first == second) | (first.isnan() & second.isnan())
    return float((first - second).abs().masked_fill(is_same, 0).nan_to_num(torch.inf).max())


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)
