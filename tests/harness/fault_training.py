"""A small training of a row-sharded weight, and doubles that let one of its ranks fail at a given moment.

A step gathers the weight, and reduces and scatters the gradient. Numbers are chosen such that all results are exact.
"""

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch

import tritondt as T
from tests.harness.faults import SIZE, Case, Code, Moment
from tests.ops.sharded import distribute
from tritondt.comm import world
from tritondt.comm.transports.nccl import NcclCommunicator
from tritondt.comm.transports.shared_memory import SharedMemoryCommunicator
from tritondt.comm.transports.sockets import SocketCommunicator
from tritondt.comm.transports.threads import ThreadCommunicator

# 7 rows do not divide; messages of 64 kB and more are more than a rank at fault can send at once.
SHAPE = (7, 1 << 13)
_SMALL_BUFFER = 4096
_NUM_STEPS = 3
_HOLD_S = 100.0


class PlantedError(Exception):
    """Raised by the user's own code on the rank at fault."""


class AwayError(Exception):
    """Ends the training of a rank that returns early and tells nobody."""


def _weight() -> torch.Tensor:
    return (torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float64) % 61 - 30).view(SHAPE)


def _batch(rank: int) -> torch.Tensor:
    return (torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float64) % 5 + rank).view(SHAPE)


class _InBackward(torch.autograd.Function):
    """The identity, whose backward is user's code."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, seams: "Seams") -> Any:
        ctx.seams = seams
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        ctx.seams.at("backward")
        return grad, None


def step(weight: Any, rank: int, seams: "Seams", *, is_async: bool) -> None:
    """One step: the whole weight, a loss that is each rank's own, the gradient's sum in rows, the update."""
    hook = weight.register_hook(lambda grad: seams.at("hook"))
    seams.before("forward")
    whole = _InBackward.apply(weight, seams).redistribute(placements=[T.Replicate()], async_op=is_async)
    seams.at("forward")
    local = whole.to_local(grad_placements=[T.Partial()])
    loss = (local * _batch(rank)).square().sum()
    seams.before("backward")
    loss.backward()
    with torch.no_grad():
        weight -= weight.grad / 4096
    weight.grad = None
    hook.remove()


def new_weight(mesh: T.Mesh) -> Any:
    """This rank's rows of the weight as training begins."""
    return distribute(_weight(), mesh, "S0").requires_grad_()


def train(mesh: T.Mesh) -> str:
    """Healthy steps; how the weight differs from what arithmetic on the whole tensor gives, or nothing."""
    weight = new_weight(mesh)
    for _ in range(_NUM_STEPS):
        step(weight, mesh.identity.rank, Seams(None, lambda: None), is_async=True)
    expected = _weight()
    for _ in range(_NUM_STEPS):
        expected -= sum((2 * expected * _batch(rank).square() for rank in mesh.ranks), torch.zeros(())) / 4096
    found = weight.detach().full_tensor()
    return "" if torch.equal(found, expected) else f"{found} instead of {expected}"


def fail(case: Case, rank: int, timeout_s: float, tell: Callable[[], None]) -> None:
    """Trains until something is raised; the fault strikes after a healthy step, which has connected the ranks.

    The rank at fault calls `tell` at that moment.
    """
    mesh = T.Mesh((SIZE,))
    weight = new_weight(mesh)
    step(weight, rank, Seams(None, tell), is_async=case.is_async)
    T.set_timeout(mesh, timeout_s)
    seams = Seams(case if rank == case.fault.culprit else None, tell)
    for _ in range(_NUM_STEPS):
        step(weight, rank, seams, is_async=case.is_async)


class Seams:
    """A double of the user's code: calls that do nothing on healthy ranks, and on the rank at fault let it strike."""

    def __init__(self, case: Case | None, tell: Callable[[], None]) -> None:
        self._case, self._tell = case, tell
        self._reached, self._struck = threading.Event(), threading.Event()
        self._communicator: Any = None if case is None else world.current().communicator(range(SIZE))

    def before(self, exchange: str) -> None:
        """What happens before the exchange of "forward", or that of "backward", is issued."""
        if self._case is None or self._communicator is None:
            return
        fault, moment = self._case.fault, self._case.moment
        if exchange != ("backward" if fault.code in ("backward", "hook") else "forward"):
            return
        communicator, self._communicator = self._communicator, None
        if fault.code is not None:
            faulty_transport(communicator, moment, lambda: self._hold(communicator))
            self._waits_for = communicator
        elif fault.name == "out of memory" and moment == "pack":
            ExhaustedStaging(communicator, self._tell)
        else:
            raises = fault.name == "out of memory"
            faulty_transport(communicator, moment, lambda: self._strike_process(fault.name), is_raised=raises)

    def at(self, code: Code) -> None:
        """What the user's `code` does beside the exchange."""
        if self._case is None or self._case.fault.code != code:
            return
        _wait(self._waits_for, self._reached)
        self._tell()
        self._struck.set()
        name = self._case.fault.name
        if name == "returns early":
            raise AwayError
        if name == "exits early":
            sys.exit(0)
        raise PlantedError(f"the {code} is broken")

    def _hold(self, communicator: Any) -> None:
        """Keeps the exchange where it is until the user's code has gone wrong."""
        self._reached.set()
        _wait(communicator, self._struck)

    def _strike_process(self, name: str) -> None:
        self._tell()
        if name.startswith("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        elif name.startswith("stopped"):
            # This thread stops here; one that is sent to the process, on a busy machine, has let it send its messages.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        else:
            torch.empty(1 << 60)


def _wait(communicator: Any, event: threading.Event) -> None:
    if isinstance(communicator, ThreadCommunicator):
        communicator._scheduler.wait_until(communicator._turns.participant_of_caller(), event.is_set)
    elif not event.wait(_HOLD_S):
        raise AssertionError("the exchange and the code beside it did not meet")


# What a communicator calls at a moment of an exchange.
_METHODS: dict[Moment, str] = {"pack": "_pack", "exchange": "_keep", "unpack": "_unpack"}


# What the extension calls then, where it runs the whole of an exchange.
_NATIVE_STEPS: dict[Moment, Literal["pack", "keep", "unpack"]] = {
    "pack": "pack",
    "exchange": "keep",
    "unpack": "unpack",
}


def faulty_transport(communicator: Any, moment: Moment, act: Callable[[], None], *, is_raised: bool = False) -> None:
    """Lets `act` be called at a moment of the communicator's next exchange, by a double of what runs it."""
    if isinstance(communicator, SharedMemoryCommunicator):
        FaultyPlan(communicator, moment, act)
    elif isinstance(communicator, NcclCommunicator) and communicator._arenas is not None:
        FaultySlots(communicator, moment, act, is_raised=is_raised)
    else:
        FaultyTransport(communicator, moment, act, is_raised=is_raised)


class FaultyPlan:
    """A double of the plan of a communicator's next exchange through arenas, which calls `act` at a moment of it."""

    def __init__(self, communicator: Any, moment: Moment, act: Callable[[], None]) -> None:
        self._moment, self._act = moment, act
        next_plan(communicator, self._faulty)

    def _faulty(self, plan: Any) -> Any:
        return plan._replace(native=plan.native.observed(_NATIVE_STEPS[self._moment], self._act))


def by_parts(communicator: Any) -> None:
    """Lets a communicator's next exchange over NCCL go part by part, not by a program of the extension."""
    if not isinstance(communicator, NcclCommunicator):
        return

    def is_issued(*arguments: Any) -> bool:
        del communicator._issue
        return False

    vars(communicator)["_issue"] = is_issued


def next_plan(communicator: Any, other: Callable[[Any], Any]) -> None:
    """Lets the communicator's next exchange run what `other` makes of its plan, and only that one."""
    by_parts(communicator)

    def exchange(sources: Any, targets: Any, transfer: Any, site: int) -> None:
        del communicator._exchange
        plan, record = communicator._plan(transfer)
        transfer.compiled[communicator] = other(plan), record
        try:
            communicator._exchange(sources, targets, transfer, site)
        finally:
            transfer.compiled[communicator] = plan, record

    communicator._exchange = exchange


class FaultySlots:
    """A double of what launches a communicator's next exchange through slots, which calls `act` at a moment of it."""

    def __init__(self, communicator: Any, moment: Moment, act: Callable[[], None], *, is_raised: bool) -> None:
        self._communicator, self._moment, self._act, self._in_order = communicator, moment, act, not is_raised
        self._run, self._launch = communicator._run_plan, communicator._launch
        communicator._run_plan = self._faulty

    def _faulty(self, plan: Any, *arguments: Any) -> None:
        del self._communicator._run_plan
        last = plan.unpack or (*plan.reduces, plan.pack)[0]
        struck = {"pack": plan.pack, "exchange": last, "unpack": last}

        def launch(run: Callable[..., object], *given: Any) -> None:
            if getattr(run, "__self__", None) is struck[self._moment]:
                if self._in_order:
                    self._launch(self._act)
                else:
                    self._act()
            self._launch(run, *given)

        self._communicator._launch = launch
        try:
            self._run(plan, *arguments)
        finally:
            self._communicator._launch = self._launch


class FaultyTransport:
    """A double of a communicator's transport, which calls `act` at a moment of the next exchange, and only there.

    Where exchanges are put into a stream, that is when it comes to it, or with `is_raised` when it is put there.
    """

    def __init__(self, communicator: Any, moment: Moment, act: Callable[[], None], *, is_raised: bool = False) -> None:
        self._communicator, self._moment, self._act, self._in_order = communicator, moment, act, not is_raised
        by_parts(communicator)
        self._methods = {each: getattr(communicator, name) for each, name in _METHODS.items()}
        for each, name in _METHODS.items():
            setattr(communicator, name, partial(self._run, each))
        if isinstance(communicator, SocketCommunicator):
            for found in communicator._connections.sockets:
                if found is not None:
                    found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SMALL_BUFFER)

    def _run(self, moment: Moment, *arguments: Any) -> None:
        delattr(self._communicator, _METHODS[moment])
        if moment == self._moment:
            self._strike()
        self._methods[moment](*arguments)

    def _strike(self) -> None:
        if self._in_order and isinstance(self._communicator, NcclCommunicator):
            self._communicator._launch(self._act)  # the host is long past the exchange when that comes to it
        else:
            self._act()


class ExhaustedStaging:
    """A double of the plan of a communicator's next exchange: it stages more bytes than there is memory."""

    def __init__(self, communicator: Any, tell: Callable[[], None]) -> None:
        self._tell = tell
        next_plan(communicator, self._huge)

    def _huge(self, plan: Any) -> Any:
        self._tell()
        return plan._replace(staged_bytes=1 << 60)
