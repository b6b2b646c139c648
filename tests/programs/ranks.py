"""A program on the ranks of a mesh: what every rank saw after each statement, and what it holds at the end."""

import logging
import pickle
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

import tritondt as T
from tests.harness.gloo_ranks import GlooRanks
from tests.programs.one_device import Environment, is_thirded, versions
from tests.programs.places import OnMesh
from tests.programs.statements import Program
from tritondt.comm.transports.threads import run_ranks


class Seen(NamedTuple):
    """What can be told of a tensor without looking into it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]
    requires_grad: bool


class Step(NamedTuple):
    """What came of a statement: the error, what it changed, and what of that is held as terms of a mean that round."""

    error: BaseException | None
    seen: dict[str, Seen]
    written: frozenset[str]
    thirded: frozenset[str] = frozenset()


class Holding(NamedTuple):
    """What a rank holds of a variable, and how that is laid out; an error where it cannot be read."""

    layout: T.Layout | None
    local: torch.Tensor | None
    error: str | None


@dataclass
class Trace:
    """All that a rank tells of a program; a step is None where variables were missing."""

    coordinate: tuple[int, ...] | None
    steps: list[Step | None] = field(default_factory=list)
    holdings: dict[str, Holding] = field(default_factory=dict)


class Observer:
    """The statements of one program, run one by one in an environment."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._seen: dict[str, Seen] = {}
        self._versions: dict[str, int | None] = {}

    def after(self, error: BaseException | None) -> Step:
        """What has changed since the last call."""
        tensors = self._environment.tensors()
        seen, now = {name: seen_of(tensor) for name, tensor in tensors.items()}, versions(tensors)
        changed = {name: item for name, item in seen.items() if self._seen.get(name) != item}
        written = frozenset(name for name, version in self._versions.items() if now.get(name, version) != version)
        thirded = frozenset(name for name in {*changed, *written} if _is_thirded(tensors.get(name)))
        self._seen, self._versions = seen, now
        return Step(error, changed, written, thirded)


def _is_thirded(tensor: torch.Tensor | None) -> bool:
    return isinstance(tensor, T.DTensor) and is_thirded(tensor._spec.mesh.shape, map(repr, tensor._spec.placements))


def seen_of(tensor: torch.Tensor) -> Seen:
    """What can be told of a tensor; strides only along dims that have a step."""
    stride = tuple(step if length > 1 else 0 for step, length in zip(tensor.stride(), tensor.shape, strict=True))
    return Seen(tuple(tensor.shape), tensor.dtype, stride if tensor.numel() else (), tensor.requires_grad)


def run_on_rank(program: Program) -> Trace:
    """Runs a program on this rank; a statement that raises is left out, with all that need what it sets."""
    place = OnMesh(program.mesh_shape, program.ranks)
    environment = Environment(place)
    torch.manual_seed(program.seed)  # the ranks of a smaller mesh may have drawn before
    observer, trace = Observer(environment), Trace(place.mesh.coordinate)
    known: set[str] = set()
    for statement in program.statements:
        if not known.issuperset(statement.reads):
            trace.steps.append(None)
            continue
        error: BaseException | None = None
        try:
            environment.run(statement)
            known.update(statement.makes)
        except Exception as raised:  # noqa: BLE001  compared with what one device does
            error = raised.with_traceback(None)
            environment.forget(statement)
        trace.steps.append(observer.after(error))
    trace.holdings = {name: _holding(tensor) for name, tensor in environment.tensors().items()}
    return trace


def _holding(tensor: Any) -> Holding:
    if not isinstance(tensor, T.DTensor):
        return Holding(None, tensor.detach().clone(), None)
    try:
        # An operator brings a view that moved up to date, which reading does not.
        current: Any = tensor.detach()
        local = current._local_tensor
    except Exception as error:  # noqa: BLE001  what a variable raises that is read at the end
        return Holding(None, None, f"{type(error).__name__}: {error}")
    return Holding(tensor._spec.layout, local.detach().clone(), None)


def run_on_threads(programs: Sequence[Program], world_size: int) -> list[list[Trace]]:
    """The traces of all ranks of each program, one program after another in one world of rank threads."""
    of_ranks = run_ranks(world_size, lambda rank: [run_on_rank(program) for program in programs])
    return [list(traces) for traces in zip(*of_ranks, strict=True)]


def run_in_process(rank: int, programs: Sequence[Program]) -> list[Trace]:
    """The traces of this process's rank."""
    quieten()
    traces = [run_on_rank(program) for program in programs]
    for trace in traces:
        trace.steps = [None if step is None else step._replace(error=_portable(step.error)) for step in trace.steps]
    return traces


def _portable(error: BaseException | None) -> BaseException | None:
    """The error, or its text where another process could not read it."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001  whatever its class does
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def run_on_processes(ranks: GlooRanks, programs: Sequence[Program]) -> list[list[Trace]]:
    """The traces of all ranks of each program, on real processes."""
    of_ranks = ranks.run(run_in_process, list(programs), timeout_s=150 + len(programs))
    return [list(traces) for traces in zip(*of_ranks, strict=True)]


def quieten() -> None:
    """Leaves out what torch says of programs that are wrong on purpose, and of deprecated forms; one thread."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
