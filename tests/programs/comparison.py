"""Comparison of what ranks did with one device: values, shapes, dtypes, strides, gradients, counted writes, refusals."""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch

from tests.harness.oracle.arithmetic import coordinates, held_indices, mean_size, ops_of, reduced, take
from tests.programs.one_device import OneDeviceRun
from tests.programs.ranks import Observer, Seen, Step, Trace
from tests.programs.statements import Program
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
    steps = traces[0].steps
    run = OneDeviceRun(program.seed)
    observer = Observer(run.plain)
    failures: list[Failure] = []
    refused: list[str] = []
    is_cut_short = False
    expanded: set[str] = set()  # and what was made of them
    for number, (statement, step) in enumerate(zip(program.statements, steps, strict=True)):
        if step is None:
            continue
        if step.error is not None:
            if number in program.refused_by_one_device:
                if not isinstance(step.error, (TritondtError, *_AS_TORCH)):
                    failures.append(Failure("error", number, "", _text(step.error)))
            elif isinstance(step.error, TritondtError):
                refused.append(f"{statement.kind}: {statement.source}: {_text(step.error)}")
                # What it had already done is done.
                is_cut_short = is_cut_short or statement.kind in ("backward", "grad")
            elif not refused:
                failures.append(Failure("error", number, "", _text(step.error)))
            observer.after(None)
            continue
        try:
            run.run(statement)
        except Exception as error:  # noqa: BLE001  whatever torch raises
            failures.append(Failure("accepts", number, "", f"one device raises {_text(error)}"))
            return Report(failures, refused, number + 1, {})
        expected = observer.after(None)
        if statement.kind == "grad" or not expanded.isdisjoint(statement.reads):
            expanded.update(statement.makes)
        expanded.update(name for name, seen in expected.seen.items() if _is_expanded(seen))
        failures.extend(_differences(number, expected, [trace.steps[number] for trace in traces], expanded))
    tolerances = {name: run.tolerance(name) for name in run.plain.tensors()}
    if not failures:
        for name, tensor in run.plain.tensors().items():
            if not (is_cut_short and name.endswith(".grad")):
                failures.extend(_compare_values(name, tensor.detach(), tolerances[name], program, traces))
    return Report(failures, refused, len(program.statements), tolerances)


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
    number: int, expected: Step, found: Sequence[Step | None], expanded: Collection[str]
) -> Iterator[Failure]:
    """What of shape, dtype, stride, gradient and counted writes differs on the first rank where something does.

    Strides of what is `expanded` are not promised.
    """
    for rank, step in enumerate(found):
        assert step is not None, "all ranks have done the same statements"
        for name, wanted in expected.seen.items():
            is_same = step.seen.get(name)
            if is_same is None:
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
    ops = ops_of(layout.placements)
    groups: dict[tuple[int, ...], list[torch.Tensor]] = {}
    for coordinate in coordinates(program.mesh_shape):
        local = of_coordinate[coordinate].local
        assert local is not None, "there is no error"
        key = tuple(0 if op else index for index, op in zip(coordinate, ops, strict=True))
        groups.setdefault(key, []).append(local)
    for coordinate, terms in groups.items():
        indices = held_indices(program.mesh_shape, layout.placements, whole.shape, coordinate, layout.order)
        expected = take(whole.resolve_conj().resolve_neg(), indices)
        if any(term.shape != expected.shape or term.dtype is not expected.dtype for term in terms):
            shapes = [(tuple(term.shape), term.dtype) for term in terms]
            yield Failure("local", None, name, f"{coordinate} holds {shapes}, expected {tuple(expected.shape)}")
            return
        value = reduced(terms, {op for op in ops if op}, mean_size(program.mesh_shape, layout.placements))
        if torch.equal(value, expected):
            continue
        try:
            torch.testing.assert_close(value, expected, rtol=0, atol=tolerance, equal_nan=True)
        except AssertionError as error:
            text = " ".join(str(error).split())
            yield Failure("values", None, name, f"{layout.placements} at {coordinate}: {text}; {value} is not {expected}")
            return
