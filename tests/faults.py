"""Ranks that fail on purpose in the middle of training, as values and as named doubles, and what the others saw of it.

A case is a fault, a moment and a way of calling. `train` is a small training of a row-sharded weight: its step gathers
the weight, and reduces and scatters the gradient.
"""

import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import tritondt as T
from tests.oracle.arithmetic import take
from tritondt.comm import world

SIZE, CULPRIT = 3, 1
SHAPE = (7, 4)
IN_EXCHANGE = ("pack", "exchange", "unpack")
OF_USER = ("before issue", "before wait")


class Case(NamedTuple):
    """What goes wrong on rank 1, when, and whether redistributions are asynchronous."""

    fault: str
    moment: str
    is_async: bool

    def __str__(self) -> str:
        return f"{self.fault} at {self.moment}, {'async' if self.is_async else 'sync'}"

    @property
    def ends_process(self) -> bool:
        """Whether nothing is left of the rank."""
        return self.fault in ("killed", "exits")

    @property
    def is_heard(self) -> bool:
        """Whether the others hear of it, and need not wait for the timeout."""
        return self.fault not in ("stopped", "stays away")


EXCHANGE_CASES = {
    fault: tuple(Case(fault, moment, is_async) for moment in IN_EXCHANGE for is_async in (False, True))
    for fault in ("killed", "stopped", "out of memory")
}
USER_CASES = {
    fault: (Case(fault, OF_USER[0], False), Case(fault, OF_USER[0], True), Case(fault, OF_USER[1], True))
    for fault in ("raises in forward", "raises in backward", "raises in a hook", "stays away", "exits")
}
CASES = {**EXCHANGE_CASES, **USER_CASES}


class PlantedError(Exception):
    """Raised by the user's own code on the rank at fault."""


class AwayError(Exception):
    """Ends the training of a rank that stays alive and tells nobody."""


class Seams:
    """A double of the user's code: calls that do nothing until the fault is armed at one of them."""

    def __init__(self, case: Case | None, tell: Callable[[], None]) -> None:
        self._case, self._tell = case, tell

    def at(self, code: str, moment: str) -> None:
        """What the user's `code` does before something is issued, or before it is waited for."""
        if self._case is None or self._case.moment != moment:
            return
        fault = self._case.fault
        if fault == f"raises in {code}":
            self._tell()
            raise PlantedError(f"the {code} is broken")
        if code == "forward" and fault == "stays away":
            self._tell()
            raise AwayError
        if code == "forward" and fault == "exits":
            self._tell()
            sys.exit(0)


class _InBackward(torch.autograd.Function):
    """The identity, whose backward is user's code."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, seams: Seams, moment: str) -> Any:
        ctx.seams, ctx.moment = seams, moment
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        ctx.seams.at("backward", ctx.moment)
        return grad, None, None


def step(weight: Any, rank: int, seams: Seams, *, is_async: bool) -> None:
    """One step: whole weight, a loss that is each rank's own, the gradient's sum in rows, the update."""
    seams.at("forward", "before issue")
    whole = _InBackward.apply(weight, seams, "before wait").redistribute(placements=[T.Replicate()], async_op=is_async)
    seams.at("forward", "before wait")
    whole.register_hook(lambda grad: seams.at("hook", "before issue"))
    local = whole.to_local(grad_placements=[T.Partial()])
    batch = torch.arange(28.0, dtype=torch.float64).view(SHAPE) + rank
    loss = (_InBackward.apply(local, seams, "before issue") * batch).square().sum()
    loss.backward()
    seams.at("hook", "before wait")
    with torch.no_grad():
        weight -= weight.grad / 4096
    weight.grad = None


def new_weight(size: int) -> Any:
    """A weight whose 7 rows do not divide."""
    full = torch.linspace(-1, 1, 28, dtype=torch.float64).view(SHAPE)
    spec = T.DTensorSpec(T.Mesh((size,)), (T.Shard(0),), T.TensorMeta.contiguous(SHAPE, full.dtype))
    assert spec.coordinate is not None, "every rank is in the mesh"
    rows = torch.arange(7).chunk(size)[spec.coordinate[0]]
    return T.DTensor.from_local(take(full, (rows, torch.arange(4))), spec.mesh, spec.placements, shape=SHAPE)


def train(rank: int, size: int) -> list[list[float]]:
    """The weight after three healthy steps."""
    weight = new_weight(size).requires_grad_()
    for _ in range(3):
        step(weight, rank, Seams(None, lambda: None), is_async=True)
    found: list[list[float]] = weight.detach().full_tensor().tolist()
    return found


def fail(case: Case, rank: int, tell: Callable[[], None]) -> None:
    """Trains until something is raised; the fault strikes after a healthy step, which has connected the ranks."""
    weight = new_weight(SIZE).requires_grad_()
    step(weight, rank, Seams(None, tell), is_async=case.is_async)
    undo = plant(case, tell) if rank == CULPRIT and case in EXCHANGE_CASES.get(case.fault, ()) else None
    try:
        for _ in range(3):
            step(weight, rank, Seams(case if rank == CULPRIT else None, tell), is_async=case.is_async)
        weight.to_local()
    finally:
        if undo is not None:
            undo()


def plant(case: Case, tell: Callable[[], None]) -> Callable[[], None]:
    """Puts the fault into this rank's next exchange; returns how to take it out again."""
    communicator: Any = world.current().communicator(range(SIZE))
    double = _ExhaustedStaging if case == Case("out of memory", "pack", case.is_async) else _FaultyTransport
    return double(case, tell, communicator).remove


class _ExhaustedStaging:
    """A double of the plan of a communicator's next exchange: it stages more bytes than there is memory."""

    def __init__(self, case: Case, tell: Callable[[], None], communicator: Any) -> None:
        self._tell, self._communicator, self._plan = tell, communicator, communicator._plan
        communicator._plan = self._huge

    def _huge(self, transfer: Any) -> Any:
        self.remove()
        self._tell()
        return self._plan(transfer)._replace(staged_bytes=1 << 60)

    def remove(self) -> None:
        """Leaves the communicator as it was."""
        self._communicator.__dict__.pop("_plan", None)


class _FaultyTransport:
    """A double of a communicator's transport: the fault strikes in the middle of its next exchange."""

    def __init__(self, case: Case, tell: Callable[[], None], communicator: Any) -> None:
        self._moment, self._tell, self._communicator = case.moment, tell, communicator
        self._strike = {"killed": _kill, "stopped": _stop, "out of memory": _exhaust}[case.fault]
        self._carry = communicator.carry
        communicator.carry = self._faulty

    def _faulty(
        self, transfer: Any, receives: Any, sends: Any, pack: Callable[[], None], meanwhile: Callable[[], None]
    ) -> None:
        def faulty_pack() -> None:
            self._at("pack")
            pack()

        def faulty_meanwhile() -> None:
            self._at("exchange")
            meanwhile()

        self._carry(transfer, receives, sends, faulty_pack, faulty_meanwhile)
        self._at("unpack")

    def _at(self, moment: str) -> None:
        if moment == self._moment:
            self._moment = ""
            self._tell()
            self._strike()

    def remove(self) -> None:
        """Leaves the communicator as it was."""
        self._communicator.__dict__.pop("carry", None)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _exhaust() -> None:
    torch.empty(1 << 60)
