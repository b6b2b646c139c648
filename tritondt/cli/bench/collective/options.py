"""The request that a collective's options make, which are nccl-tests' flags."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from tritondt.cli.bench.collective.case import Case, case_of_matrix, make_case
from tritondt.cli.bench.collective.data import DTYPES, REDOPS
from tritondt.cli.bench.collective.kinds import Kind
from tritondt.cli.bench.collective.request import Request
from tritondt.cli.bench.collective.sides import ENGINE, refusal
from tritondt.cli.bench.collective.splits import read_matrix
from tritondt.cli.bench.over_sockets import choose_sockets
from tritondt.cli.bench.sizes import DEFAULT_STEP, bytes_text, parse_bytes, sweep
from tritondt.cli.user_error import BenchmarkError

ALL = "all"
DEFAULT_SIZE = "32M"
_TYPES_OF_TORCH = {str(dtype).removeprefix("torch."): name for name, dtype in DTYPES.items()}
_MEMORY = Path("/proc/meminfo")


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
    if not _MEMORY.exists():
        return
    lines = (line.split() for line in _MEMORY.read_text(encoding="utf-8").splitlines())
    free = next((int(words[1]) << 10 for words in lines if words[0] == "MemAvailable:"), None)
    if free is not None and num_bytes > free:
        raise BenchmarkError(
            f"{num_ranks} ranks need {num_bytes / 1e9:.1f} GB for {what}, and {free / 1e9:.1f} GB are free; take a "
            "smaller -e, or fewer --ranks"
        )
