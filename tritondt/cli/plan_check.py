"""Steps of a found plan on ranks: bytes, messages and seconds of each phase, beside those that were predicted."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import nn

import tritondt as T
from tritondt import events
from tritondt.cli import ranks as joined_ranks
from tritondt.cli.outputs import ProgressLine, is_first
from tritondt.cli.surroundings import free_bytes
from tritondt.events import StepRan
from tritondt.found_plan import FoundPlan
from tritondt.found_plan.dry_run import start_backward
from tritondt.found_plan.find import OPTIMIZER_TENSORS, arguments
from tritondt.found_plan.mesh_axes import MeshAxes
from tritondt.found_plan.predict import Computing, predict
from tritondt.found_plan.prices import prices_of_world
from tritondt.found_plan.step_cost import StepCost, columns
from tritondt.found_plan.traffic import Traffic

# Steps before those that count: they connect ranks, compile exchanges and make what the optimizer holds.
_WARM_UP = 2
_PHASES = ("forward", "backward", "optimizer")
_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda it: torch.optim.AdamW(it, lr=1e-4),
    "adam": lambda it: torch.optim.Adam(it, lr=1e-4),
    "sgd": lambda it: torch.optim.SGD(it, lr=1e-4),
    "sgd with momentum": lambda it: torch.optim.SGD(it, lr=1e-4, momentum=0.9),
}
# Makes a model and its example inputs on a type of device.
Make = Callable[[str], tuple[nn.Module, Any]]


@dataclass(frozen=True)
class Request:
    """The steps that ranks are to run: a model, a plan as JSON, their number, and the seconds that they may take."""

    make: Make
    plan: str
    device_type: str
    optimizer: str
    num_steps: int
    budget_s: float


@dataclass
class Moved:
    """Bytes and messages of a rank in a phase of a step, and the seconds of its exchanges."""

    sent_bytes: int = 0
    received_bytes: int = 0
    messages: int = 0
    seconds: float = 0.0


@dataclass
class Phase:
    """One phase of a step of a rank: seconds, what moves in it, and both as predicted; seconds of the fastest step."""

    seconds: float = float("inf")
    moved: Moved = field(default_factory=Moved)
    predicted_seconds: float = 0.0
    predicted: Moved = field(default_factory=Moved)

    @property
    def is_exact(self) -> bool:
        """Whether bytes and messages are those that were predicted."""
        return _counts(self.moved) == _counts(self.predicted)


Checked = dict[str, Phase]
Send = Callable[[object], None]


@dataclass(frozen=True)
class Found:
    """Phases of every rank, and the number of steps that ran."""

    of_all: list[Checked]
    num_steps: int


def _counts(moved: Moved) -> tuple[int, int, int]:
    return moved.sent_bytes, moved.received_bytes, moved.messages


def check_on_rank(send: Send, request: Request) -> None:
    """Runs the steps; rank 0 sends words on what is done, and what was found at last. A collective call."""

    def tell(text: str) -> None:
        if dist.get_rank() == 0:
            send(text)

    if request.device_type == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found, num_steps = _phases(request, tell)
    finally:
        torch.set_num_threads(threads)
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, found)
    if dist.get_rank() == 0:
        send(Found(of_all, num_steps))


def _phases(request: Request, tell: Callable[[str], None]) -> tuple[Checked, int]:
    """Phases of this rank, and the number of steps, at least 1; a collective call."""
    tell("making the model on every rank")
    plan = FoundPlan.from_json(request.plan)
    torch.manual_seed(0)
    model, inputs = request.make(request.device_type)
    given = arguments(inputs)
    mesh = T.Mesh(plan.mesh.sizes, plan.mesh.names, device_type=request.device_type)
    tensors, prices = OPTIMIZER_TENSORS[request.optimizer], prices_of_world(mesh)
    options: Any = {"train": True, "optimizer_tensors": tensors, "of_others": partial(_of_tensor_axis, plan.mesh)}
    tell("predicting the step of every rank")
    step = predict(model, given, plan.mesh, plan.laid_out, prices, dist.get_rank(), **options).step
    tell("laying the model out")
    plan.apply(model, mesh)
    runner = _Runner(model, given, _OPTIMIZERS[request.optimizer](model.parameters()), request.device_type)
    tell("running steps that do not count")
    for _ in range(_WARM_UP):
        runner.step()
    found, started, num_steps = _predicted(step), time.monotonic(), 0
    while num_steps < request.num_steps and not (num_steps and _is_over(started + request.budget_s)):
        num_steps += 1
        tell(f"running step {num_steps} of {request.num_steps}")
        for name, (seconds, moved) in runner.step().items():
            phase = found[name]
            if phase.seconds == float("inf"):
                phase.moved = moved
            if _counts(phase.moved) != _counts(moved):
                raise RuntimeError(f"{name} moved {phase.moved} in one step and {moved} in another")
            phase.moved.seconds = min(phase.moved.seconds, moved.seconds)
            phase.seconds = min(phase.seconds, seconds)
    return found, num_steps


def _of_tensor_axis(axes: MeshAxes, own: Computing) -> list[Computing]:
    """Seconds that the other ranks of this one's tensor axis compute; a collective call of all ranks."""
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, tuple(own))
    rank = dist.get_rank()
    return [Computing(*of_all[other]) for other in axes.ranks_along(axes.tensor, rank) if other != rank]


def _is_over(end: float) -> bool:
    """Whether a rank has come to its end of the time, as all ranks know; a collective call."""
    is_over = torch.tensor(float(time.monotonic() >= end))
    dist.all_reduce(is_over, dist.ReduceOp.MAX)
    return bool(is_over)


def _predicted(step: StepCost) -> Checked:
    def moved(tensor: Traffic, data: Traffic) -> Moved:
        both = tensor + data
        return Moved(both.sent_bytes, both.received_bytes, both.messages, both.seconds)

    forward = moved(step.tensor_forward, step.data_forward)
    backward = moved(step.tensor_backward, step.data_backward)
    seconds = (step.forward_seconds, step.backward_seconds, step.optimizer_seconds)
    known = zip(_PHASES, seconds, (forward, backward, Moved()), strict=True)
    return {name: Phase(predicted_seconds=seconds, predicted=moved) for name, seconds, moved in known}


@dataclass
class _Runner:
    """Training steps of a model that is laid out."""

    model: nn.Module
    inputs: tuple[tuple[Any, ...], dict[str, Any]]
    optimizer: torch.optim.Optimizer
    device_type: str

    def step(self) -> dict[str, tuple[float, Moved]]:
        """Seconds and moves of each phase of one step; a collective call."""
        args, kwargs = self.inputs
        results: list[Any] = []
        phases: tuple[Callable[[], Any], ...] = (
            lambda: results.append(self.model(*args, **kwargs)),
            lambda: start_backward(results),
            self.optimizer.step,
        )
        self.optimizer.zero_grad()
        dist.barrier()
        return {name: self._run(phase) for name, phase in zip(_PHASES, phases, strict=True)}

    def _run(self, phase: Callable[[], Any]) -> tuple[float, Moved]:
        moved = Moved()

        def count(event: StepRan) -> None:
            if event.kind not in ("local", "scale"):
                moved.sent_bytes += event.sent_bytes
                moved.received_bytes += event.received_bytes
                moved.messages += event.num_sent
                moved.seconds += event.seconds

        end = events.subscribe(count)
        try:
            start = time.perf_counter()
            phase()
            if self.device_type == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter() - start, moved
        finally:
            end()


def refuse_unrunnable(num_ranks: int, device_type: str) -> None:
    """Refuses steps that cannot be run here: on a device that is not there, or on too many or other ranks."""
    if device_type == "cuda" and not torch.cuda.is_available():
        raise click.ClickException(f"--check on cuda was asked for; torch {torch.__version__} sees no CUDA device")
    launched = joined_ranks.num_launched()
    if launched is None:
        joined_ranks.check_started_here(num_ranks, "torchrun, mpirun or srun")
    elif launched != num_ranks:
        raise click.UsageError(f"--check of {num_ranks} ranks was asked for, but the launcher has started {launched}")


def refuse_unheld(num_ranks: int, num_bytes: int, what: str, device_type: str) -> None:
    """Refuses steps for which this machine lacks memory: each of so many ranks needs `num_bytes` for `what`."""
    free = free_bytes()
    if device_type != "cpu" or free is None or joined_ranks.num_launched() is not None:
        return
    if num_ranks * num_bytes > free:
        raise click.ClickException(
            f"--check starts {num_ranks} ranks here, each of which needs {num_bytes / 1e9:,.1f} GB for {what}, and "
            f"{free / 1e9:,.1f} GB are free; allowed is a model of fewer layers, as by num_hidden_layers of --config, "
            "or fewer ranks"
        )


def check(
    make: Make, plan: FoundPlan, device_type: str, optimizer: str, num_steps: int, budget_s: float
) -> Found | None:
    """Phases of steps of a plan, and their number, on processes that are started here or by a launcher; None on others.

    After `budget_s` seconds no further step begins. ClickException where a rank fails.
    """
    num_ranks = joined_ranks.join(plan.mesh.num_ranks, plan.mesh.num_ranks)
    found: list[Found] = []
    request = Request(make, plan.to_json(), device_type, optimizer, num_steps, budget_s)
    with ProgressLine() as progress:

        def hear(message: object) -> None:
            if isinstance(message, Found):
                found.append(message)
            else:
                progress.tell(f"{num_ranks} ranks: {message}")

        progress.tell(f"starting {num_ranks} ranks")
        status, errors = joined_ranks.run(num_ranks, check_on_rank, request, hear)
    joined_ranks.leave()
    if status:
        raise click.ClickException("; ".join(errors))
    return found[0] if is_first() else None


def check_text(of_all: list[Checked], num_steps: int) -> str:
    """Table of the phases, of the slowest rank, and of all that moves, of the first."""
    rows: list[tuple[str, ...]] = [
        ("phase", "predicted", "measured", "bytes in, predicted", "measured", "messages, predicted", "measured")
    ]
    for name in _PHASES:
        slowest = max((phases[name] for phases in of_all), key=lambda phase: phase.seconds)
        rows.append(_cells(name, slowest.predicted_seconds, slowest.seconds, of_all[0][name]))
    first = of_all[0].values()
    total = Phase(moved=_sum([phase.moved for phase in first]), predicted=_sum([phase.predicted for phase in first]))
    rows.append(_cells("communication", total.predicted.seconds, total.moved.seconds, total))
    head = f"fastest of {num_steps} steps on {len(of_all)} ranks: seconds of the slowest rank, the rest of rank 0"
    return "\n".join([head, *columns(rows)])


def _cells(name: str, predicted_s: float, seconds: float, phase: Phase) -> tuple[str, ...]:
    times = (f"{it * 1e3:,.3f} ms" for it in (predicted_s, seconds))
    pairs = ((getattr(it, kind) for it in (phase.predicted, phase.moved)) for kind in ("received_bytes", "messages"))
    return (name, *times, *(f"{it:,}" for pair in pairs for it in pair))


def _sum(moved: list[Moved]) -> Moved:
    return Moved(*(sum(getattr(it, name) for it in moved) for name in asdict(Moved())))


def differences(of_all: list[Checked]) -> list[str]:
    """A sentence for each rank and phase whose bytes or messages are not those that were predicted."""
    return [
        f"{name} of rank {rank} moved (sent, received, messages) {_counts(phase.moved)}, and "
        f"{_counts(phase.predicted)} were predicted"
        for rank, phases in enumerate(of_all)
        for name, phase in phases.items()
        if not phase.is_exact
    ]
