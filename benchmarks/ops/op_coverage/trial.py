"""One call of one operator on distributed tensors, on thread ranks, held against the same call on one device."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import tritondt as T
from benchmarks.ops.op_coverage.operators import Operator, leaves_of
from benchmarks.ops.op_coverage.placing import random_placement
from benchmarks.ops.op_coverage.sides import Ours, Side
from tritondt import events, identity

OURS = Ours()
RIGHT, RAISES, WRONG = "right", "raises", "wrong"
_MIXED_TOLERANCE = 1e-4
_PLAIN = "the right values on every rank, but no distributed tensor:"


# The database calls torch.Tensor's own method past what a subclass makes of it.
_AS_WRITTEN: Mapping[str, Callable[..., Any]] = {"__getitem__": getitem}


class NotMeasuredError(Exception):
    """A sample that one device refuses too."""


class Expected(NamedTuple):
    """Outputs of one device: results, arguments afterwards, the gradients' seeds and the arguments' gradients."""

    results: list[Any]
    tensors: list[torch.Tensor]
    written: list[bool]
    seeds: list[torch.Tensor]
    gradients: list[torch.Tensor | None]


class Case(NamedTuple):
    """A sample, which of its leaves are tensors, and what it gives on one device."""

    operator: Operator
    sample: Any
    tensors: list[torch.Tensor]
    expected: Expected


class Outcome(NamedTuple):
    """How a call ended, in words where it did not end well, and what the call (not its gradients) sent and moved.

    `completing_bytes` of each result add it up whole where the call leaves terms, and `in_pieces` says which are cut.
    """

    verdict: str
    text: str = ""
    sent_bytes: int = 0
    num_moved: int = 0
    completing_bytes: tuple[int, ...] = ()
    in_pieces: tuple[bool, ...] = ()

    def bytes_without_terms(self, other: Outcome) -> int:
        """Bytes sent until no result is terms: in pieces, at half the bytes, where `other` has pieces of that result.

        >>> terms, pieces = Outcome(RIGHT, "", 2, 0, (8,), (False,)), Outcome(RIGHT, "", 6, 0, (0,), (True,))
        >>> terms.bytes_without_terms(pieces), terms.bytes_without_terms(terms)
        (6, 10)
        """
        cut = zip_longest(self.completing_bytes, other.in_pieces, fillvalue=0)
        return self.sent_bytes + sum(whole // 2 if in_pieces else whole for whole, in_pieces in cut)


def made_case(operator: Operator, sample: Any) -> Case:
    """The sample run on one device; NotMeasuredError where that fails."""
    tensors = [leaf.detach().clone(memory_format=torch.contiguous_format) for leaf in _tensors(sample)]
    tensors = [tensor.resolve_conj().resolve_neg() for tensor in tensors]
    wanted = [leaf.requires_grad for leaf in _tensors(sample)]
    mine = [tensor.clone().requires_grad_(grad) for tensor, grad in zip(tensors, wanted, strict=True)]
    versions = [tensor._version for tensor in mine]
    try:
        results = call(operator, sample, mine)
        differentiable = _differentiable(operator, sample, results)
        generator = torch.Generator().manual_seed(1)
        seeds = [torch.randn(item.shape, generator=generator, dtype=item.dtype) for item in differentiable]
        if differentiable:
            torch.autograd.backward(differentiable, seeds)
    except Exception as error:
        raise NotMeasuredError(f"one device raises {error}") from error
    written = [tensor._version != version for tensor, version in zip(mine, versions, strict=True)]
    expected = Expected(tree_leaves(results), mine, written, seeds, [tensor.grad for tensor in mine])
    return Case(operator, sample, tensors, expected)


def call(operator: Operator, sample: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The operator on a sample with other tensors in place of its own."""
    leaves, form = tree_flatten((sample.input, sample.args, sample.kwargs))
    given = iter(tensors)
    replaced = [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    first, args, kwargs = tree_unflatten(replaced, form)
    function = _AS_WRITTEN.get(operator.name, operator.info.op)
    return function(first, *args, **kwargs)


def _tensors(sample: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves_of(sample) if isinstance(leaf, torch.Tensor)]


def _differentiable(operator: Operator, sample: Any, results: Any) -> list[torch.Tensor]:
    """Results to differentiate, as torch's own tests choose them where only a part of a result has a gradient."""
    if not operator.is_differentiable:
        return []
    found = sample.output_process_fn_grad(results)
    return [item for item in tree_leaves(found) if isinstance(item, torch.Tensor) and item.requires_grad]


class _Counts:
    """Bytes sent and arguments moved by each rank thread while it says so."""

    def __init__(self) -> None:
        self.sent_bytes, self.num_moved = Counter[int](), Counter[int]()
        self.completing_bytes = defaultdict[int, Counter[int]](Counter)
        self._open: dict[int, Counter[int]] = {}

    @contextmanager
    def counting(self, bytes_of_rank: Counter[int]) -> Iterator[None]:
        if not identity.is_assumed():  # a rank of the other library
            yield
            return
        rank = identity.current().rank
        self._open[rank] = bytes_of_rank
        try:
            yield
        finally:
            del self._open[rank]

    def step(self, event: events.StepRan) -> None:
        if identity.is_assumed() and identity.current().rank in self._open:
            rank = identity.current().rank
            self._open[rank][rank] += event.sent_bytes

    def moved(self, event: events.ImplicitRedistribution) -> None:
        if identity.is_assumed() and self._open.get(identity.current().rank) is self.sent_bytes:
            self.num_moved[identity.current().rank] += 1


def run_trial(
    case: Case, placements: Sequence[T.Placement], num_ranks: int, *, seed: int, gradients: bool, side: Side = OURS
) -> Outcome:
    """The call on `num_ranks` ranks with the tensors so placed."""
    counts = _Counts()
    ends = [events.subscribe(counts.step), events.subscribe(counts.moved, events.ImplicitRedistribution)]
    trial = _Trial(case, placements, num_ranks, seed, gradients, side, counts)
    try:
        ended = side.run(num_ranks, trial.on_rank)
    finally:
        for end in ends:
            end()
    outcomes = [
        item if isinstance(item, Outcome) else Outcome(RAISES, f"ranks went different ways: {item}") for item in ended
    ]
    bad = [outcome for verdict in (WRONG, RAISES) for outcome in outcomes if outcome.verdict == verdict]
    worst = bad[0] if bad else outcomes[0]
    return worst._replace(
        sent_bytes=counts.sent_bytes.total(),
        num_moved=counts.num_moved.total(),
        completing_bytes=tuple(counts.completing_bytes[place].total() for place in range(len(worst.in_pieces))),
    )


class _Trial(NamedTuple):
    """A call with everything that it depends on."""

    case: Case
    placements: Sequence[T.Placement]
    num_ranks: int
    seed: int
    gradients: bool
    side: Side
    counts: _Counts

    def on_rank(self, _: int) -> Outcome:
        """The call and its gradients on one rank."""
        case, expected, mesh = self.case, self.case.expected, self.side.mesh(self.num_ranks)
        mine = [
            self.side.placed(tensor, mesh, placement)
            for tensor, placement in zip(case.tensors, self.placements, strict=True)
        ]
        for tensor, of in zip(mine, expected.tensors, strict=True):
            tensor.requires_grad_(self.gradients and of.requires_grad)

        def forward() -> Any:
            with self._counting(self.counts.sent_bytes):
                results = call(case.operator, case.sample, mine)
            return results, self._complete(results)

        ended, failure = _attempt(forward)
        if failure is not None:
            return failure
        results, in_pieces = ended
        leaves, tolerance = tree_leaves(results), _tolerance(case)
        if len(leaves) != len(expected.results):
            return Outcome(WRONG, f"{len(leaves)} results, expected {len(expected.results)}")
        for place, (found, of) in enumerate(zip(leaves, expected.results, strict=True)):
            difference = self._difference(found, of, tolerance)
            if difference:
                return _failure(f"result {place}: {difference}")
        for place, (tensor, of) in enumerate(zip(mine, expected.tensors, strict=True)):
            difference = self._difference(tensor, of, tolerance) if expected.written[place] else ""
            if difference:
                return Outcome(WRONG, f"argument {place} afterwards: {difference}")
        outcome = self._gradients_on_rank(mine, results, mesh) if self.gradients else Outcome(RIGHT)
        return outcome._replace(in_pieces=in_pieces)

    def _complete(self, results: Any) -> tuple[bool, ...]:
        """Counts what it takes to add up each result that is terms; which of the results are in pieces."""
        found = [of.placements if self.side.is_distributed(of) else () for of in tree_leaves(results)]
        for place, (result, placements) in enumerate(zip(tree_leaves(results), found, strict=True)):
            if any(placement.is_partial() for placement in placements):
                with self._counting(self.counts.completing_bytes[place]):
                    self.side.whole(result)
        return tuple(any(placement.is_shard() for placement in placements) for placements in found)

    @contextmanager
    def _counting(self, bytes_of_rank: Counter[int]) -> Iterator[None]:
        def of_other(sent_bytes: int) -> None:
            bytes_of_rank[-1] += sent_bytes

        with self.side.counting(self.num_ranks, of_other), self.counts.counting(bytes_of_rank):
            yield

    def _gradients_on_rank(self, mine: Sequence[Any], results: Any, mesh: Any) -> Outcome:
        case, expected = self.case, self.case.expected
        differentiable = _differentiable(case.operator, case.sample, results)
        if len(differentiable) != len(expected.seeds):
            return Outcome(WRONG, f"{len(differentiable)} results have a gradient, expected {len(expected.seeds)}")
        if not differentiable:
            return Outcome(RIGHT)
        random = case.operator.random("seeds", self.seed)
        seeds = [
            self.side.placed(item, mesh, random_placement(item, self.num_ranks, random, is_written=False))
            for item in expected.seeds
        ]
        _, failure = _attempt(lambda: torch.autograd.backward(differentiable, seeds))
        if failure is not None:
            return failure._replace(text=f"backward: {failure.text}")
        for place, (tensor, gradient) in enumerate(zip(mine, expected.gradients, strict=True)):
            if (tensor.grad is None) != (gradient is None):
                return Outcome(WRONG, f"gradient {place} is {tensor.grad}, expected {gradient}")
            tolerance = _tolerance(case, exact=False)
            difference = "" if gradient is None else self._difference(tensor.grad, gradient, tolerance)
            if difference:
                return _failure(f"gradient {place}: {difference}")
        return Outcome(RIGHT)

    def _difference(self, found: Any, expected: Any, tolerance: float | None) -> str:
        """How a result differs from that of one device; empty where it does not."""
        if not isinstance(expected, torch.Tensor):
            near = isinstance(expected, float) and abs(found - expected) <= 1e-7
            return "" if found == expected or near else f"{found}, expected {expected}"
        if not self.side.is_distributed(found):
            same = isinstance(found, torch.Tensor) and torch.equal(found, expected)
            return f"{_PLAIN if same else 'other values, and'} a {type(found).__name__}"
        flaw = self.side.flaw(found)
        if flaw:
            return flaw
        try:
            whole = self.side.whole(found)
            torch.testing.assert_close(whole, expected.detach(), rtol=tolerance, atol=tolerance, equal_nan=True)
        except AssertionError as error:
            return f"{getattr(found, '_spec', '')}: {error}"
        return ""


def _attempt(function: Callable[[], Any]) -> tuple[Any, Outcome | None]:
    """The result of a function, or the outcome of the error that it raises."""
    try:
        return function(), None
    except Exception as error:  # noqa: BLE001  whatever the operator raises is what is measured
        return None, Outcome(RAISES, _text(error))


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _failure(text: str) -> Outcome:
    """A plain tensor of the right values is not right, but nor is it silently wrong: what meets it next raises."""
    return Outcome(RAISES if _PLAIN in text else WRONG, text)


def _tolerance(case: Case, *, exact: bool = True) -> float | None:
    """How far results may be off: by nothing where elements move; None for what the dtype allows."""
    if exact and case.operator.is_movement:
        return 0.0
    low = any(tensor.dtype in (torch.float32, torch.complex64) for tensor in case.tensors)
    # Some samples mix types: what is computed in fp32 on the way is no nearer in a result of fp64.
    return _MIXED_TOLERANCE if low and case.operator.dtype is torch.float64 else None
