"""Work of every rank: checks what each implementation moves, then times them in turns."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tritondt import environment
from tritondt.cli.bench.breakdown import Breakdown, measured_peak
from tritondt.cli.bench.collective import backends, engine
from tritondt.cli.bench.collective.case import Case
from tritondt.cli.bench.collective.data import DTYPES, expected, given, num_wrong
from tritondt.cli.bench.collective.overlap import Issue, Overlap, overlaps
from tritondt.cli.bench.collective.record import Request, Row, Timing, label
from tritondt.cli.bench.collective.sides import ENGINE, Bind, Call, NotOfferedError, Run, backend_of, load, told_errors
from tritondt.cli.bench.harness import own_seconds, synchronized
from tritondt.cli.user_error import BenchmarkError
from tritondt.comm.objects import gather_objects

# Implementations that bring a transport of their own; the others are backends of torch.distributed.
_BINDS: dict[str, Bind] = {ENGINE: engine.bind, "shared-memory": engine.bind_shared_memory}
# Not among the elements that are moved, so that one that nobody wrote is found.
_POISON = 99


@dataclass(frozen=True)
class Device:
    """Where a rank runs, as nccl-tests lists it: on the CPU without a device's index and PCI bus."""

    rank: int
    pid: int
    hostname: str
    device: int | None
    pci_bus_id: str | None
    name: str

    def __str__(self) -> str:
        where = "" if self.device is None else f"{self.device:2d} [{self.pci_bus_id}] "
        return f"Rank {self.rank:2d} Pid {self.pid:6d} on {self.hostname:>10} device {where}{self.name}"


@dataclass(frozen=True)
class Devices:
    """All ranks' devices, sent once before the first row."""

    of_ranks: tuple[Device, ...]


@dataclass(frozen=True)
class Starting:
    """Case that is measured next."""

    case: Case


@dataclass(frozen=True)
class _Side:
    name: str
    bind: Bind
    group: dist.ProcessGroup


@dataclass
class _Contestant:
    """One implementation in one place: what is run, or why it is not."""

    side: _Side
    call: Call
    reset: Callable[[], object]
    run: Run | None = None
    num_wrong: int | None = None
    refusal: str | None = None


def measure_on_rank(send: Callable[[object], None], request: Request) -> None:
    """Measures every case and passes Devices, Starting and Row to `send` on rank 0; a collective call of all ranks.

    The process group that is there is for barriers and for what ranks tell each other.
    """
    torch.set_num_threads(request.num_threads)
    tell = send if dist.get_rank() == 0 else _drop
    device = _device(request)
    tell(Devices(tuple(gather_objects(device))))
    sides = [_open(name, request) for name in request.sides]
    peak_bytes_per_s = measured_peak(request.iterations) if request.breaks_down else None
    with torch.no_grad():
        for case in request.cases:
            tell(Starting(case))
            for row in _measure(case, sides, request, peak_bytes_per_s):
                tell(row)


def _drop(_: object) -> None:
    """Ignores a message, on ranks other than 0."""


def _device(request: Request) -> Device:
    rank = dist.get_rank()
    process = rank, os.getpid(), socket.gethostname()
    if request.device != "cuda":
        return Device(
            *process, None, None, f"cpu, {request.num_threads} thread{'s' if request.num_threads > 1 else ''}"
        )
    torch.cuda.set_device(rank % torch.cuda.device_count())
    found: Any = torch.cuda.get_device_properties()
    bus = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}"
    return Device(*process, torch.cuda.current_device(), bus, found.name)


def _open(name: str, request: Request) -> _Side:
    """Implementation with a group of its own; a collective call."""
    backend = backend_of(name, request.device)
    group = dist.new_group(backend=backend or "gloo", timeout=environment.timeout())
    assert group is not None, "all ranks are in the group"
    bind = load(name) if ":" in name else _BINDS.get(name, backends.bind)
    return _Side(name, bind, group)


def open_sides(request: Request) -> list[_Side]:
    """All implementations of a request, each with a group; a collective call."""
    _device(request)
    return [_open(name, request) for name in request.sides]


def checked_calls(side: _Side, cases: Sequence[Case], request: Request) -> tuple[list[Run], int | None, str | None]:
    """Runs of a side's calls out of place, the number of wrong elements, and why it refuses one; a collective call."""
    rank = dist.get_rank()
    runs, wrong = list[Run](), 0
    for case in cases:
        call_of, reset = _buffers(case, rank, given(case, rank, request.device), False, request.device)
        contestant = _Contestant(side, call_of(side.group), reset)
        _check(contestant, expected(case, rank, request.device) if request.check else None, request)
        if contestant.run is None:
            return [], None, contestant.refusal
        runs.append(contestant.run)
        wrong += contestant.num_wrong or 0
    return runs, wrong if request.check else None, None


def _measure(case: Case, sides: list[_Side], request: Request, peak_bytes_per_s: float | None) -> list[Row]:
    rank = dist.get_rank()
    x = given(case, rank, request.device)
    correct = expected(case, rank, request.device) if request.check else None
    found: dict[str, dict[bool, _Contestant | Timing]] = {side.name: {} for side in sides}
    parts: dict[str, Breakdown | None] = {}
    beside: dict[str, Overlap] = {}
    for in_place in (False, True) if case.kind.has_in_place else (False,):
        call_of, reset = _buffers(case, rank, x, in_place, request.device)
        contestants = [_Contestant(side, call_of(side.group), reset) for side in sides]
        for contestant in contestants:
            _check(contestant, correct, request)
            found[contestant.side.name][in_place] = contestant
        ready = [contestant for contestant in contestants if contestant.run is not None]
        if request.compute_ms and ready and not in_place:
            beside = _overlaps(ready, request)
        for contestant, timing in zip(ready, _time(ready, request), strict=True):
            found[contestant.side.name][in_place] = timing
            if peak_bytes_per_s is not None and contestant.side.name == ENGINE:
                parts[ENGINE] = engine.parts(contestant.call, request.iterations, peak_bytes_per_s)
    return [
        replace(_row(case, side.name, found[side.name]), parts=parts.get(side.name), overlap=beside.get(side.name))
        for side in sides
    ]


def _overlaps(contestants: list[_Contestant], request: Request) -> dict[str, Overlap]:
    """Overlaps with a compute, by the name of each implementation that issues the call; a collective call."""
    issues: dict[str, Issue] = {}
    for contestant in contestants:
        name = contestant.side.name
        issue = engine.issue if name == ENGINE else backends.issue if backend_of(name, request.device) else None
        if issue is None:
            continue
        try:
            issue(contestant.call)()
        except NotOfferedError:
            continue
        issues[name] = partial(issue, contestant.call)
    found = overlaps(list(issues.values()), request.compute_ms / 1e3, request.iterations) if issues else []
    return dict(zip(issues, found, strict=True))


def _row(case: Case, name: str, places: dict[bool, _Contestant | Timing]) -> Row:
    out, inside = (timing if isinstance(timing := places.get(place), Timing) else None for place in (False, True))
    refused = [each.refusal for each in places.values() if isinstance(each, _Contestant)]
    return Row(case, name, out, inside, refused[0] if out is None and inside is None and refused else None)


def _buffers(
    case: Case, rank: int, values: torch.Tensor, in_place: bool, device: str
) -> tuple[Callable[[dist.ProcessGroup], Call], Callable[[], object]]:
    """Maker of calls on one pair of buffers, and what fills these anew: the input, and poison where the result goes."""
    # dist.reduce writes to the buffer of every rank.
    out_length = case.total if case.kind.name == "reduce" else case.output_length(rank)
    in_length = values.numel()
    whole = torch.empty(max(in_length, out_length), dtype=DTYPES[case.type], device=device)
    separate = torch.empty(in_length if not in_place else 0, dtype=whole.dtype, device=device)
    start = sum(case.parts()[:rank]) if case.kind.divides and min(in_length, out_length) else 0
    if not in_place:
        x, out = separate, whole[:out_length]
    elif not out_length or not in_length:
        x, out = whole[:in_length], whole[:out_length]
    elif in_length < out_length:
        x, out = whole[start : start + in_length], whole
    else:
        x, out = whole, whole[start : start + out_length]

    def reset() -> None:
        whole.fill_(_POISON)
        x.copy_(values)

    return lambda group: Call(case, rank, x, out, in_place, group), reset


def _check(contestant: _Contestant, correct: torch.Tensor | None, request: Request) -> None:
    """Binds an implementation and runs it, once even where nothing is compared: it may refuse the call."""
    contestant.reset()
    wrong = 0

    def bind() -> None:
        run = contestant.side.bind(contestant.call)
        contestant.run = synchronized(run) if request.device == "cuda" else run

    def check() -> None:
        nonlocal wrong
        assert contestant.run is not None, "it was bound"
        for _ in range(max(request.check, 1)):
            contestant.reset()
            result = contestant.run()
            if correct is not None and correct.numel():
                wrong += num_wrong(contestant.call.case, contestant.call.out if result is None else result, correct)

    # One that some ranks refuse is run on none: the others would wait for them.
    for part in (bind, check):
        contestant.refusal = _agreed(contestant, gather_objects(_refusal_of(contestant, part)))
        if contestant.refusal is not None:
            contestant.run = None
            return
    if correct is not None:
        total = torch.tensor([wrong])
        dist.all_reduce(total)
        contestant.num_wrong = int(total)


def _refusal_of(contestant: _Contestant, part: Callable[[], None]) -> str | None:
    """The reason why a part cannot be run, None once it has been; an error of a function of one's own is raised."""
    try:
        with told_errors((contestant.side.name,), contestant.call.case):
            part()
    except BenchmarkError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a library raises, it says why the row is missing
        return str(error) if isinstance(error, NotOfferedError) else f"{type(error).__name__}: {error}"
    return None


def _agreed(contestant: _Contestant, refusals: list[str | None]) -> str | None:
    """Refusal of all ranks, in its first line; BenchmarkError where some ranks took the call."""
    refused = {rank: text for rank, text in enumerate(refusals) if text is not None}
    if not refused:
        return None
    if len(refused) < len(refusals):
        rank, text = next(iter(refused.items()))
        raise BenchmarkError(
            f"{label(contestant.side.name)} failed on {len(refused)} of {len(refusals)} ranks in "
            f"{contestant.call.case}; rank {rank}: {text}"
        )
    return next(iter(refused.values())).splitlines()[0]


def _time(contestants: list[_Contestant], request: Request) -> list[Timing]:
    """Times of all contestants in the same rounds."""
    runs = [contestant.run for contestant in contestants if contestant.run is not None]
    if not runs:
        return []
    for contestant in contestants:
        contestant.reset()
    with told_errors([contestant.side.name for contestant in contestants], contestants[0].call.case):
        if request.warmup:
            own_seconds(runs, request.warmup)
        own = own_seconds(runs, request.iterations)
    gathered = [torch.empty_like(own) for _ in range(request.num_ranks)]
    dist.all_gather(gathered, own)
    of_runs = torch.stack(gathered, dim=1).tolist()
    return [
        Timing(tuple(map(tuple, seconds)), contestant.num_wrong)
        for contestant, seconds in zip(contestants, of_runs, strict=True)
    ]
