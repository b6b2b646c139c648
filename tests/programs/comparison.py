"""Comparison of what ranks did with one device: values, shapes, dtypes, strides, gradients, writes, refusals."""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch
from torch.autograd.grad_mode import _force_original_view_tracking

from tests.harness.oracle.arithmetic import coordinates, held_indices, mean_size, ops_of, reduced, take
from tests.programs.one_device import Environment, OneDeviceRun
from tests.programs.places import OneDevice
from tests.programs.ranks import Holding, Observer, Seen, Step, Trace, seen_of
from tests.programs.statements import Program, Statement
from tritondt import Layout
from tritondt.errors import PeerError, TritondtError

# What distributed tensors may raise where one device raises, besides the library's own errors.
_AS_TORCH = (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError)


class Failure(NamedTuple):
    """One difference: its kind, the number of the statement (None at the end), the variable, and what was found."""

    kind: str
    number: int | None
    name: str
    text: str


class Report(NamedTuple):
    """What came of a program: its failures, and the texts of what distributed tensors refused."""

    failures: list[Failure]
    refused: list[str]
    num_statements: int
    tolerances: dict[str, float]


def compare(program: Program, traces: Sequence[Trace]) -> Report:
    """Everything that differs from one device; of a program whose ranks disagree, only that."""
    apart = list(_ranks_apart(program, traces))
    if apart:
        return Report(apart, [], len(program.statements), {})
    return _Comparison(program, traces).report()


class _Comparison:
    """One device, step by step beside what the ranks did: what they refused, it leaves out."""

    def __init__(self, program: Program, traces: Sequence[Trace]) -> None:
        self._program, self._traces = program, traces
        self._run = OneDeviceRun(program.seed, program.mesh_shape)
        self._observer = Observer(self._run.plain)
        self._failures: list[Failure] = []
        self._refused: list[str] = []
        self._are_gradients_known = True
        self._done: list[Statement] = []
        self._seen: dict[str, Seen] = {}
        self._has_ended = False  # the graph of a gradient, on one device alone
        self._expanded: set[str] = set()  # whose strides are not promised, as of what shares memory among its elements

    def report(self) -> Report:
        """The report on the program."""
        for number, step in enumerate(self._traces[0].steps):
            if step is not None and step.error is not None:
                self._take_error(number, step.error)
            elif step is not None and not self._take_step(number):
                return Report(self._failures, self._refused, number + 1, {})
        tensors = self._run.plain.tensors()
        tolerances = {name: self._run.tolerance(name) for name in tensors}
        if not self._failures:
            for name, tensor in tensors.items():
                if self._are_gradients_known or not name.endswith(".grad"):
                    found = _compare_values(name, tensor.detach(), tolerances[name], self._program, self._traces)
                    self._failures.extend(found)
        return Report(self._failures, self._refused, len(self._program.statements), tolerances)

    def _take_error(self, number: int, error: BaseException) -> None:
        statement = self._program.statements[number]
        if number in self._program.refused_by_one_device:
            if not isinstance(error, (TritondtError, *_AS_TORCH)):
                self._failures.append(Failure("error", number, "", _text(error)))
        elif isinstance(error, TritondtError):
            self._refused.append(f"{statement.kind}: {statement.source}: {_text(error)}")
            if statement.kind in ("backward", "grad"):  # what it had already added up stays
                self._are_gradients_known = False
        elif not self._refused:  # else one device might raise as well, for want of what was refused
            self._failures.append(Failure("error", number, "", _text(error)))
        self._observer.after(None)

    def _take_step(self, number: int) -> bool:
        """Whether one device does the statement as well."""
        statement = self._program.statements[number]
        steps = [trace.steps[number] for trace in self._traces]
        thirded = {name for step in steps if step is not None for name in step.thirded}
        try:
            self._run.run(statement, thirded)
        except Exception as error:  # noqa: BLE001  whatever torch raises
            self._failures.append(Failure("accepts", number, "", f"one device raises {_text(error)}"))
            return False
        self._done.append(statement)
        expected = self._observer.after(None)
        expected = self._with_replayed_views(statement, expected, steps)
        if statement.kind == "grad" or not self._expanded.isdisjoint(statement.reads):
            self._expanded.update(statement.makes)
        self._expanded.update(name for name, seen in expected.seen.items() if _is_expanded(seen))
        if statement.kind in ("out", "shape_out"):  # what is resized is row-major
            self._expanded.update(expected.seen)
        if statement.kind == "dynamic":
            steps = [
                _as_inside(step, expected) if trace.coordinate is None else step
                for step, trace in zip(steps, self._traces, strict=True)
            ]
        self._failures.extend(_differences(number, expected, steps, self._expanded, self._with_other_strides(expected)))
        return True

    def _with_other_strides(self, expected: Step) -> list[str]:
        """Expanded tensors of which one device sees strides change and nothing else: ours may have had those before."""
        before, self._seen = self._seen, self._seen | expected.seen
        changed = [(name, before[name], seen) for name, seen in expected.seen.items() if name in before]
        return [name for name, was, now in changed if name in self._expanded and was._replace(stride=now.stride) == now]

    def _with_replayed_views(self, statement: Statement, expected: Step, found: Sequence[Step | None]) -> Step:
        """What one device sees where it takes views that were written to again by their operators.

        So torch does with tensors without memory. Of others it takes them by as_strided, whose gradient for a view
        without elements is a new tensor of zeros: the graph of a gradient ends there, also for what uses it.
        """
        goes_on = {name for step in found if step is not None for name, it in step.seen.items() if it.requires_grad}
        ended = [name for name, seen in expected.seen.items() if name in goes_on and not seen.requires_grad]
        self._has_ended |= bool(ended) and statement.kind == "grad"
        if not (ended and self._has_ended):
            return expected
        replayed = Environment(OneDevice())
        with _force_original_view_tracking(True):
            for earlier in self._done:
                replayed.run(earlier)
        return expected._replace(seen=expected.seen | {name: seen_of(replayed[name]) for name in ended})


def _as_inside(step: Step | None, expected: Step) -> Step | None:
    """What a rank outside the mesh saw, with the expected lengths where values tell them, for which it has 0."""
    if step is None:
        return None
    seen = dict(step.seen)
    for name, wanted in expected.seen.items():
        found = seen.get(name)
        if found is None or len(found.shape) != len(wanted.shape):
            continue
        lengths = zip(found.shape, wanted.shape, strict=True)
        if found.shape != wanted.shape and all(length in (0, of) for length, of in lengths):
            seen[name] = found._replace(shape=wanted.shape, stride=wanted.stride)
    return step._replace(seen=seen)


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _ranks_apart(program: Program, traces: Sequence[Trace]) -> Iterator[Failure]:
    for number in range(len(program.statements)):
        errors = [None if (step := trace.steps[number]) is None else step.error for trace in traces]
        kinds = [type(error) for error in errors]
        if len(set(kinds)) > 1 or any(isinstance(error, PeerError) for error in errors):
            texts = "; ".join("nothing" if error is None else _text(error)[:300] for error in errors)
            yield Failure("ranks", number, "", texts)
            return


def _is_expanded(seen: Seen) -> bool:
    """Whether elements share memory, which distributed tensors need not."""
    return any(length > 1 and step == 0 for length, step in zip(seen.shape, seen.stride, strict=bool(seen.stride)))


def _differences(
    number: int,
    expected: Step,
    found: Sequence[Step | None],
    expanded: Collection[str],
    may_stay: Collection[str],
) -> Iterator[Failure]:
    """What of shape, dtype, stride, gradient and counted writes differs on the first rank where something does.

    Strides of what is `expanded` are not promised, nor that what `may_stay` has changed.
    """
    for rank, step in enumerate(found):
        assert step is not None, "all ranks have done the same statements"
        for name, wanted in expected.seen.items():
            is_same = step.seen.get(name)
            if is_same is None:
                if name in may_stay:
                    continue
                yield Failure("seen", number, name, f"rank {rank}: {name} is as before, expected {wanted}")
                return
            for what in wanted._fields:
                if what == "stride" and (name in expanded or name.endswith(".grad")):
                    continue
                if getattr(is_same, what) != getattr(wanted, what):
                    text = f"rank {rank}: {what} {getattr(is_same, what)}, expected {getattr(wanted, what)}"
                    yield Failure(what, number, name, text)
                    return
        extra = [name for name in step.seen if name not in expected.seen]
        if extra:
            yield Failure("seen", number, extra[0], f"rank {rank}: {extra[0]} has become {step.seen[extra[0]]}")
            return
        uncounted = sorted(expected.written - step.written)
        if uncounted:
            yield Failure("version", number, uncounted[0], f"rank {rank}: the write to {uncounted} is not counted")
            return


def _compare_values(
    name: str, whole: torch.Tensor, tolerance: float, program: Program, traces: Sequence[Trace]
) -> Iterator[Failure]:
    """The first part of a variable that is not what one device has."""
    of_coordinate = {}
    for trace in traces:
        holding = trace.holdings.get(name)
        if holding is None or holding.error is not None:
            yield Failure("end", None, name, "is not there" if holding is None else str(holding.error))
            return
        if trace.coordinate is not None:
            of_coordinate[trace.coordinate] = holding
    layout = next(iter(of_coordinate.values())).layout
    if layout is None:
        yield Failure("plain", None, name, "is a plain tensor on a mesh")
        return
    if any(holding.layout is not layout for holding in of_coordinate.values()):
        yield Failure("ranks", None, name, f"layouts {[holding.layout for holding in of_coordinate.values()]}")
        return
    groups = _terms(program, layout, of_coordinate)
    for coordinate, terms in groups.items():
        indices = held_indices(program.mesh_shape, layout.placements, whole.shape, coordinate, layout.order)
        expected = take(whole.resolve_conj().resolve_neg(), indices)
        if any(term.shape != expected.shape or term.dtype is not expected.dtype for term in terms):
            shapes = [(tuple(term.shape), term.dtype) for term in terms]
            yield Failure("local", None, name, f"{coordinate} holds {shapes}, expected {tuple(expected.shape)}")
            return
        value = reduced(
            terms, {op for op in ops_of(layout.placements) if op}, mean_size(program.mesh_shape, layout.placements)
        )
        if torch.equal(value, expected):
            continue
        try:
            torch.testing.assert_close(value, expected, rtol=0, atol=tolerance, equal_nan=True)
        except AssertionError as error:
            text = " ".join(str(error).split())
            yield Failure(
                "values", None, name, f"{layout.placements} at {coordinate}: {text}; {value} is not {expected}"
            )
            return


def _terms(
    program: Program, layout: Layout, held: dict[tuple[int, ...], Holding]
) -> dict[tuple[int, ...], list[torch.Tensor]]:
    """What is to be reduced together, by the first coordinate of those that hold the terms; one where nothing is."""
    ops = ops_of(layout.placements)
    groups: dict[tuple[int, ...], list[torch.Tensor]] = {}
    for coordinate in coordinates(program.mesh_shape):
        local = held[coordinate].local
        assert local is not None, "there is no error"
        key = tuple(0 if op else index for index, op in zip(coordinate, ops, strict=True))
        groups.setdefault(key, []).append(local)
    return groups
