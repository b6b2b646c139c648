"""Counts of the redistributions of a rank, by kind, by module and by operator; and the flight record on demand.

with CommDebugMode() as comm:
    model(x).sum().backward()
print(comm)
"""

import json
import os
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from tritondt import events, identity
from tritondt.comm import world
from tritondt.debug.functional_counts import CommCounts
from tritondt.dtensor.tensor import DTensor
from tritondt.dtensor.wiring import dispatcher
from tritondt.errors import ArgumentError
from tritondt.errors.arguments import checked
from tritondt.events import ImplicitRedistribution, StepRan
from tritondt.planning.explain import html_table
from tritondt.sharding.placement import Placement, placements_text

BACKWARD = "backward"
OUTSIDE = "outside modules"
ASKED = "redistribute"


@dataclass
class Count:
    """Steps of redistributions that this rank ran, and the messages and bytes that it sent and received."""

    steps: int = 0
    num_sent: int = 0
    num_received: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0

    def add(self, other: "Count | StepRan") -> None:
        """Adds a step, or another count."""
        self.steps += 1 if isinstance(other, StepRan) else other.steps
        self.num_sent += other.num_sent
        self.num_received += other.num_received
        self.sent_bytes += other.sent_bytes
        self.received_bytes += other.received_bytes


@dataclass
class _Names:
    """Modules that run now on this rank, outermost first, and the names that the outermost gives to its submodules."""

    running: list[str] = field(default_factory=list)
    known: dict[int, str] = field(default_factory=dict)

    def enter(self, module: nn.Module) -> None:
        if not self.running:
            root = type(module).__name__
            self.known = {id(child): f"{root}.{name}" if name else root for name, child in module.named_modules()}
        self.running.append(self.known.get(id(module), type(module).__name__))


class CommDebugMode:
    """Context manager that counts the redistributions of this rank, by kind, and by the module and operator they are
    for.

    A kind is written as "(S1) -> (R)"; steps without messages do not count. Redistributions of a backward pass count
    for "backward", those without a module for "outside modules", and explicit ones for the operator "redistribute".
    Counts are this rank's alone: messages, and bytes sent and received. str() is a table. Not a collective call;
    entering the mode again starts from zero. Raises ArgumentError where it is entered already, here or by another rank
    that is a thread. Source: torch.distributed.tensor.debug.CommDebugMode.

    >>> import torch
    >>> import tritondt as T
    >>> from tritondt.comm.transports.threads import run_ranks
    >>> def count_on(rank):
    ...     x = T.DTensor.from_local(torch.ones(2, 2), T.Mesh((2,)), (T.Shard(0),))
    ...     with T.debug.CommDebugMode() as comm:
    ...         x.redistribute(placements=(T.Replicate(),))
    ...     return comm
    >>> comm = run_ranks(2, count_on)[0]
    >>> comm.get_comm_counts(), comm.get_sent_bytes()
    ({'(S0) -> (R)': 1}, 16)
    >>> print(comm)
    module           redistribution  steps  messages  bytes sent  bytes received
    ---------------  --------------  -----  --------  ----------  --------------
    outside modules  (S0) -> (R)         1         1          16              16
    all                                  1         1          16              16
    for redistribute: 1 steps, 16 bytes sent, 16 received
    """

    def __init__(self) -> None:
        self._ends: list[Callable[[], None]] = []
        self._reset()

    def _reset(self) -> None:
        self._by_module: dict[str, dict[str, Count]] = defaultdict(lambda: defaultdict(Count))
        self._by_operator: dict[str, dict[str, Count]] = defaultdict(lambda: defaultdict(Count))
        self._implicit: Counter[tuple[str, str]] = Counter()
        self._sharding: dict[str, tuple[Placement, ...]] = {}
        self._parameters: dict[str, dict[str, torch.Tensor]] = {}
        self._names = _Names()
        self._watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def __enter__(self) -> "CommDebugMode":
        if self._ends:  # what it counts, and for which rank, is one
            raise ArgumentError(
                "a CommDebugMode was entered that is on already; make one of its own for each block and each rank: "
                "with CommDebugMode() as comm"
            )
        self._reset()
        # Thread ranks share the process, and with it the events and the hooks of all modules.
        self._rank = _rank()
        self._ends = [
            events.subscribe(self._step, StepRan),
            events.subscribe(self._input, ImplicitRedistribution),
            register_module_forward_pre_hook(self._enter_module).remove,
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for end in self._ends:
            end()
        self._ends = []

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        if _rank() != self._rank or _in_backward():
            return
        self._names.enter(module)
        if module not in self._watched:
            self._watched.add(module)
            self._parameters[self._names.running[-1]] = {
                name: parameter.detach() for name, parameter in module.named_parameters()
            }
            for name, parameter in module._parameters.items():
                if isinstance(parameter, DTensor):
                    self._sharding[f"{self._names.running[-1]}.{name}"] = parameter.placements
            # Runs after the hooks of a style, which move the output; a global hook would run before them.
            self._ends.append(module.register_forward_hook(self._leave_module, always_call=True).remove)

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        if _rank() == self._rank and not _in_backward() and self._names.running:
            self._names.running.pop()

    def _step(self, event: StepRan) -> None:
        if event.kind in ("local", "scale") or _rank() != self._rank:
            return
        op = dispatcher.running()
        for counts in (self._by_module[self._place()], self._by_operator[ASKED if op is None else str(op)]):
            counts[f"{event.source} -> {event.target}"].add(event)

    def _input(self, event: ImplicitRedistribution) -> None:
        if _rank() == self._rank:
            self._implicit[event.op, f"{event.source} -> {event.target}"] += 1

    def _place(self) -> str:
        if _in_backward():
            return BACKWARD
        return self._names.running[-1] if self._names.running else OUTSIDE

    def by_kind(self) -> dict[str, Count]:
        """Counts of every kind of redistribution on this rank."""
        found: dict[str, Count] = defaultdict(Count)
        for kinds in self._by_module.values():
            for kind, count in kinds.items():
                found[kind].add(count)
        return dict(found)

    def by_module(self) -> dict[str, dict[str, Count]]:
        """Counts of every module that asked for a redistribution, by its name and then by kind."""
        return {module: dict(kinds) for module, kinds in self._by_module.items()}

    def by_operator(self) -> dict[str, dict[str, Count]]:
        """Counts of every operator: redistributions of its arguments, and those that complete its reductions."""
        return {op: dict(kinds) for op, kinds in self._by_operator.items()}

    def get_comm_counts(self) -> CommCounts:
        """Numbers of steps by kind; counts[torch.ops.c10d_functional.all_reduce] and its like work too."""
        return CommCounts({kind: count.steps for kind, count in self.by_kind().items()})

    def get_total_counts(self) -> int:
        """Number of steps of all kinds."""
        return sum(self.get_comm_counts().values())

    def get_sent_bytes(self) -> int:
        """Bytes that this rank sent."""
        return sum(count.sent_bytes for count in self.by_kind().values())

    def get_received_bytes(self) -> int:
        """Bytes that this rank received."""
        return sum(count.received_bytes for count in self.by_kind().values())

    def get_implicit_counts(self) -> dict[tuple[str, str], int]:
        """Numbers of arguments that operators moved implicitly, by operator and kind."""
        return dict(self._implicit)

    def get_sharding_info(self) -> dict[str, tuple[Placement, ...]]:
        """Placements of the distributed parameters of every module that ran, by name."""
        return dict(self._sharding)

    def get_parameter_info(self) -> dict[str, dict[str, torch.Tensor]]:
        """Parameters of every module that ran, without history: by the module's name, then by the parameter's name in
        it."""
        return {module: dict(parameters) for module, parameters in self._parameters.items()}

    def to_json(self) -> str:
        """All counts as a JSON object."""
        return json.dumps(
            {
                "modules": _plain(self._by_module),
                "operators": _plain(self._by_operator),
                "implicit": [
                    {"operator": op, "kind": kind, "count": number} for (op, kind), number in self._implicit.items()
                ],
                "sharding": {name: placements_text(placements) for name, placements in self._sharding.items()},
                "total": {
                    "steps": self.get_total_counts(),
                    "sent_bytes": self.get_sent_bytes(),
                    "received_bytes": self.get_received_bytes(),
                },
            }
        )

    def __str__(self) -> str:
        return "\n".join([_table(self._rows()), *self._notes()])

    def _repr_html_(self) -> str:
        """The text of `str`, as a table of a notebook."""
        return html_table("redistributions of this rank", self._rows(), "\n".join(self._notes()))

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [
            ("module", "redistribution", "steps", "messages", "bytes sent", "bytes received")
        ]
        for module, kinds in self._by_module.items():
            rows += [(module if not place else "", *_cells(kind, kinds[kind])) for place, kind in enumerate(kinds)]
        total = Count()
        for count in self.by_kind().values():
            total.add(count)
        return [*rows, ("all", *_cells("", total))]

    def _notes(self) -> list[str]:
        notes = []
        for op, kinds in self._by_operator.items():
            count = Count()
            for of_kind in kinds.values():
                count.add(of_kind)
            moved = f"{count.sent_bytes:,} bytes sent, {count.received_bytes:,} received"
            notes.append(f"for {op}: {count.steps:,} steps, {moved}")
        for (op, kind), number in self._implicit.items():
            notes.append(f"not asked for by name: {op} moved {kind}, {number} times")
        return notes


def _rank() -> object:
    """Rank that the calling thread belongs to; threads that autograd started belong to the process's."""
    return identity.current() if identity.is_assumed() else None


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _plain(counts: Mapping[str, Mapping[str, Count]]) -> dict[str, dict[str, dict[str, int]]]:
    return {name: {kind: vars(count) for kind, count in kinds.items()} for name, kinds in counts.items()}


def _cells(kind: str, count: Count) -> tuple[str, ...]:
    numbers = (count.steps, count.num_sent, count.sent_bytes, count.received_bytes)
    return (kind, *(f"{number:,}" for number in numbers))


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Columns of equal width, the first two aligned left, with a line under the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) if place < 2 else cell.rjust(width) for place, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(row, widths, strict=True)) for row in rows)
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in lines)


@checked
def write_flight_record(path: str | os.PathLike[str]) -> None:
    """Writes the last 2,000 exchanges of this rank, with their states and the lines that asked, to `path` as JSON.

    Not a collective call: every rank writes a file of its own. The record is also written when an exchange fails, and
    on SIGUSR1, to TRITONDT_FLIGHT_DIR or to a temporary folder that the error names. `python -m tritondt doctor flight
    DIR` reads what all ranks have written. Raises OSError where the folder does not exist, WorldError where there is no
    world.

    >>> import pathlib, tempfile
    >>> from tritondt.comm.transports.threads import run_ranks
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = run_ranks(2, lambda rank: write_flight_record(f"{folder}/rank-{rank}.json"))
    ...     print(*sorted(path.name for path in pathlib.Path(folder).iterdir()))
    rank-0.json rank-1.json
    """
    world.current().flight.recorder.dump(os.fspath(path), "asked")
