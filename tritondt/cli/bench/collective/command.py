"""The commands `bench all_reduce`, `bench all_gather` and so on: their request, output, files and status."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch

from tritondt.cli import ranks as joined_ranks
from tritondt.cli.bench import nccl_tests
from tritondt.cli.bench.collective.case import Case, case_of_matrix, make_case, read_matrix
from tritondt.cli.bench.collective.data import DTYPES, REDOPS
from tritondt.cli.bench.collective.documents import as_csv, as_json
from tritondt.cli.bench.collective.kinds import Kind
from tritondt.cli.bench.collective.on_rank import Devices, Starting, measure_on_rank
from tritondt.cli.bench.collective.record import Request, Row, average_bus_bandwidth, num_wrong
from tritondt.cli.bench.collective.sides import ENGINE, refusal
from tritondt.cli.bench.collective.table import Table, reaches
from tritondt.cli.bench.json_result import is_printed, refuse_one_place, write_json, write_text
from tritondt.cli.bench.over_sockets import choose_sockets
from tritondt.cli.bench.sizes import DEFAULT_STEP, bytes_text, parse_bytes, sweep
from tritondt.cli.launch import num_cores
from tritondt.cli.outputs import ProgressLine, columns, is_first
from tritondt.cli.surroundings import free_bytes, surroundings
from tritondt.cli.user_error import BenchmarkError

ALL = "all"
DEFAULT_SIZE = "32M"
_TYPES_OF_TORCH = {str(dtype).removeprefix("torch."): name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Choice:
    """Values of the options, by click's names."""

    minbytes: int | None
    maxbytes: int | None
    stepfactor: float | None
    stepbytes: int | None
    iters: int
    warmup_iters: int
    check: int
    datatype: str
    average: int
    device: str
    threads: int
    impl: str
    op: str = "sum"
    root: int | str = 0
    skew: float = 0.0
    matrix: Path | None = None
    breakdown: bool = False
    compute_overlap: float | None = None


def make_request(kind: Kind, num_ranks: int, choice: Choice) -> tuple[Request, list[str]]:
    """Request of a command, and lines on what was left out of it. BenchmarkError where nothing is left."""
    sides, notes = implementations(choice.impl, choice.device)
    if not 0 <= choice.skew <= 1:
        raise BenchmarkError(f"--skew {choice.skew} was asked for; allowed is a number from 0 to 1")
    if choice.compute_overlap is not None and choice.device != "cpu":
        raise BenchmarkError("--compute-overlap computes on the CPU; allowed are tensors of the CPU (--device cpu)")
    if choice.breakdown:
        _check_breakdown(choice, sides)
    cases = [
        case
        for type_name in _types(choice.datatype)
        for redop in (_redops(choice.op, type_name, notes) if kind.reduces else ("none",))
        for root in (_roots(choice.root, num_ranks) if kind.has_root else (0,))
        for case in _cases(kind, num_ranks, (type_name, redop, root), choice, notes)
    ]
    if not cases:
        raise BenchmarkError(f"there is nothing to measure: {'; '.join(notes)}")
    request = Request(
        collective=kind.name,
        cases=tuple(cases),
        sides=tuple(sides),
        iterations=choice.iters,
        warmup=choice.warmup_iters,
        check=choice.check,
        average=choice.average,
        device=choice.device,
        num_threads=choice.threads,
        breaks_down=choice.breakdown,
        step=_step(choice),
        compute_ms=choice.compute_overlap or 0.0,
    )
    if request.device == "cpu":
        check_memory(
            request.buffer_bytes, num_ranks, f"buffers of {bytes_text(max(case.size for case in request.cases))}"
        )
    return request, notes


def _step(choice: Choice) -> float | int | None:
    """The step from one size to the next: a factor or a number of bytes; None where there is one size."""
    if choice.maxbytes is None or choice.maxbytes == choice.minbytes:
        return None
    if choice.stepfactor is not None:
        return choice.stepfactor
    return DEFAULT_STEP if choice.stepbytes is None else choice.stepbytes


def implementations(impl: str, device: str) -> tuple[list[str], list[str]]:
    """Names of --impl that are available on a device, and a line on each that is not; BenchmarkError without any."""
    if device == "cuda" and not torch.cuda.is_available():
        raise BenchmarkError(f"--device cuda was asked for; torch {torch.__version__} sees no CUDA device")
    asked = [name.strip() for name in impl.split(",") if name.strip()]
    if len(set(asked)) < max(len(asked), 1):
        raise BenchmarkError(f"--impl {impl!r}: allowed are names joined by commas, each once")
    reasons = {name: refusal(name, device) for name in asked}
    found = [name for name in asked if reasons[name] is None]
    if not found:
        raise BenchmarkError("; ".join(f"{name} is not available: {reason}" for name, reason in reasons.items()))
    return found, [f"{name} is not available: {reason}" for name, reason in reasons.items() if reason is not None]


def _check_breakdown(choice: Choice, sides: list[str]) -> None:
    if ENGINE not in sides:
        raise BenchmarkError(
            f"--breakdown takes the moves of {ENGINE} apart; --impl {choice.impl} has none of them, allowed is for "
            f"example --impl {ENGINE},torch"
        )
    if choice.device != "cpu":
        raise BenchmarkError("--breakdown measures the sockets; allowed are tensors of the CPU")
    choose_sockets("--breakdown")


def _types(text: str) -> tuple[str, ...]:
    if text == ALL:
        return tuple(DTYPES)
    found = _TYPES_OF_TORCH.get(text, text)
    if found not in DTYPES:
        raise BenchmarkError(f"there is no element type {text!r} (-d); there are {', '.join(DTYPES)}, and {ALL}")
    return (found,)


def _redops(text: str, type_name: str, notes: list[str]) -> tuple[str, ...]:
    if text != ALL and text not in REDOPS:
        raise BenchmarkError(f"there is no reduction {text!r} (-o); there are {', '.join(REDOPS)}, and {ALL}")
    asked = REDOPS if text == ALL else (text,)
    found = tuple(op for op in asked if op != "avg" or DTYPES[type_name].is_floating_point)
    if len(found) < len(asked):
        notes.append(f"no average of {type_name}, which has no fractions")
    return found


def _roots(root: int | str, num_ranks: int) -> tuple[int, ...]:
    if isinstance(root, str):
        return tuple(range(num_ranks))
    if root >= num_ranks:
        allowed = f"allowed are 0..{num_ranks - 1}, and {ALL}"
        raise BenchmarkError(f"rank {root} is no root (-r) of {num_ranks} ranks; {allowed}")
    return (root,)


def _cases(kind: Kind, num_ranks: int, asked: tuple[str, str, int], choice: Choice, notes: list[str]) -> list[Case]:
    type_name, redop, root = asked
    typed = (type_name, DTYPES[type_name].itemsize)
    if choice.matrix is not None:
        if any(each is not None for each in (choice.minbytes, choice.maxbytes, choice.stepfactor, choice.stepbytes)):
            raise BenchmarkError("--matrix says the bytes of each part; sizes (-b, -e, -f, -i) do not go with it")
        num_rows = num_ranks if kind.name.startswith("all_to_all") else 1
        bytes_matrix = read_matrix(choice.matrix, num_rows, num_ranks)
        given = case_of_matrix(kind.name, num_ranks, typed, redop, root, bytes_matrix)
        if not given.size:
            raise BenchmarkError(
                f"every part of the matrix {choice.matrix} is below 16 bytes, to which parts are rounded"
            )
        return [given]
    first = parse_bytes(DEFAULT_SIZE) if choice.minbytes is None else choice.minbytes
    last = first if choice.maxbytes is None else choice.maxbytes
    found: list[Case] = []
    for size in sweep(first, last, choice.stepfactor, choice.stepbytes):
        case = make_case(kind.name, num_ranks, typed, redop, root, size, choice.skew)
        if case is None:
            note = f"{bytes_text(size)} left out: less than 16 bytes a rank, or than an element"
            notes += [note] if note not in notes else []
        elif not found or case != found[-1]:
            found.append(case)
    return found


def check_memory(num_bytes: int, num_ranks: int, what: str) -> None:
    """BenchmarkError where this machine has not so many bytes free."""
    free = free_bytes()
    if free is not None and num_bytes > free:
        raise BenchmarkError(
            f"{num_ranks} ranks need {num_bytes / 1e9:.1f} GB for {what}, and {free / 1e9:.1f} GB are free; take a "
            "smaller -e, or fewer --ranks"
        )


_FEWEST_RANKS, _MOST_RANKS = 2, 4


class _Printed:
    """The output that is printed while rows come, with the rows and devices that have come."""

    def __init__(self, request: Request, notes: list[str], to_stderr: bool, progress: ProgressLine) -> None:
        self.rows: list[Row] = []
        self.devices: Devices | None = None
        self._request, self._notes, self._to_stderr, self._progress = request, notes, to_stderr, progress
        self.table = Table(request, columns(to_stderr))
        self._num_started = 0

    def take(self, message: object) -> None:
        """Takes a message of rank 0."""
        if isinstance(message, Devices):
            self.devices = message
            self.lines(self.table.title(message, surroundings()["versions"], self._notes))
        elif isinstance(message, Starting):
            self._num_started += 1
            self._progress.tell(f"{self._num_started}/{len(self._request.cases)}  {message.case}")
        else:
            assert isinstance(message, Row), f"ranks send rows, not {message!r}"
            self.rows.append(message)
            self.lines(self.table.row(message))

    def lines(self, lines: list[str]) -> None:
        """Prints lines above what is said of the progress."""
        self._progress.erase()
        for line in lines:
            click.echo(line, err=self._to_stderr)


def collective(
    kind: Kind,
    ranks: int | None,
    ngpus: int | None,
    min_bw: float | None,
    json_to: str | None,
    csv_to: str | None,
    **values: Any,
) -> None:
    """Times a collective; ends with status 1 if an element is wrong, a rank fails, or --min-bw is not reached."""
    refuse_one_place(json_to, csv_to)
    num_ranks = joined_ranks.join(
        nccl_tests.ranks_asked(ranks, ngpus), max(_FEWEST_RANKS, min(_MOST_RANKS, num_cores()))
    )
    request, notes = make_request(kind, num_ranks, Choice(**values))
    status = _measure(request, notes, min_bw, json_to, csv_to)
    if status:
        raise click.exceptions.Exit(status)


def _measure(
    request: Request, notes: list[str], least_bandwidth: float | None, json_to: str | None, csv_to: str | None
) -> int:
    """Exit status of a run; what was measured before it failed or was interrupted is printed and written, too."""
    found = surroundings()
    with ProgressLine() as progress:
        progress.tell(f"starting {request.num_ranks} ranks")
        printed = _Printed(request, notes, is_printed(json_to, csv_to), progress)
        status, errors = joined_ranks.run(request.num_ranks, measure_on_rank, request, printed.take)
    if is_first():
        _conclude(printed, errors, least_bandwidth)
        write_json(as_json(request, printed.rows, printed.devices, found, least_bandwidth, errors), json_to)
        write_text(as_csv(request, printed.rows, found), csv_to)
        status = status or int(_has_failed(request, printed.rows, least_bandwidth))
    elif errors:
        click.echo(f"Error: {errors[0]}", err=True)
    if not errors:
        joined_ranks.leave()
    return status


def _conclude(printed: _Printed, errors: list[str], least_bandwidth: float | None) -> None:
    request = printed._request
    if printed.rows:
        printed.lines(printed.table.iterations(printed.rows))
        printed.lines(printed.table.parts(printed.rows))
        printed.lines(printed.table.overlaps(printed.rows))
        printed.lines(printed.table.footer(printed.rows, least_bandwidth))
    for error in errors:
        num_done = len({row.case for row in printed.rows})
        click.echo(f"Error: partial, {num_done} of {len(request.cases)} cases were measured: {error}", err=True)


def _has_failed(request: Request, rows: list[Row], least_bandwidth: float | None) -> bool:
    mean = average_bus_bandwidth(rows, request.sides[0], request.average)
    too_slow = least_bandwidth is not None and (mean is None or not reaches(mean, least_bandwidth))
    return num_wrong(rows) > 0 or mean is None or too_slow
