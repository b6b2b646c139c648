"""The command `bench redistribute`: starts the ranks, shows what they measure, writes it down."""

from __future__ import annotations

from collections.abc import Mapping

import click
import torch
from rich.console import Console

from tritondt.cli import ranks as joined_ranks
from tritondt.cli.bench import REDUCE_OPS, nccl_tests
from tritondt.cli.bench import loopback as loopback_counter
from tritondt.cli.bench.cases import (
    default_pairs,
    make_cases,
    parse_pairs,
    parse_sizes,
    shape_of,
    with_reductions,
)
from tritondt.cli.bench.collective.sides import NAMES, imported, refusal
from tritondt.cli.bench.documents import as_csv, as_json
from tritondt.cli.bench.inputs import DTYPES
from tritondt.cli.bench.json_result import is_printed, refuse_one_place, write_json, write_text
from tritondt.cli.bench.measure import OF_TORCH, SHARED_MEMORY, TRITONDT, Measured, Request, measure_on_rank
from tritondt.cli.bench.over_sockets import choose_sockets
from tritondt.cli.bench.report import line, print_report
from tritondt.cli.bench.sizes import sweep
from tritondt.cli.outputs import ProgressLine, is_first
from tritondt.cli.surroundings import surroundings
from tritondt.cli.user_error import BenchmarkError
from tritondt.sharding.placement import OPS_OF_KIND

_DEFAULT_RANKS = 4


def redistribute(
    ranks: int | None,
    against: str | None,
    impl: str | None,
    sizes: str,
    minbytes: int | None,
    maxbytes: int | None,
    stepfactor: float | None,
    stepbytes: int | None,
    pairs: str | None,
    rounds: int,
    case_seconds: float,
    warmup_iters: int,
    check: int,
    average: int,
    dtype: str,
    op: str | None,
    device: str,
    threads: int,
    loopback: bool,
    breakdown: bool,
    json_to: str | None,
    csv_to: str | None,
    ngpus: int | None,
) -> None:
    """Times redistributions; ends with status 1 if a result is wrong or a rank fails."""
    _check(device, {"--breakdown": breakdown, "--loopback": loopback}, (impl, against), (json_to, csv_to))
    others = _others(impl if against is None else f"{TRITONDT},{against}", device)
    num_ranks = joined_ranks.join(nccl_tests.ranks_asked(ranks, ngpus), _DEFAULT_RANKS)
    chosen = default_pairs(num_ranks) if pairs is None else parse_pairs(pairs)
    has = OPS_OF_KIND["float" if DTYPES[dtype].is_floating_point else "int"]
    if op is not None:
        chosen = with_reductions(chosen, has if op == "all" else (REDUCE_OPS[op],))
    for pair in chosen:
        if pair.reduce_op is not None and pair.reduce_op not in has:
            asked = f"a reduction by {pair.reduce_op} was asked for of {dtype}"
            raise click.UsageError(f"{asked}; allowed are {', '.join(has)}")
    shapes = parse_sizes(sizes) if minbytes is None else _shapes(minbytes, maxbytes, stepfactor, stepbytes, dtype)
    cases = make_cases(num_ranks, shapes, chosen)
    sides = dtype, others, rounds, case_seconds, threads, loopback
    request = Request(cases, *sides, warmup_iters, check, average, breakdown, device)
    status = _measure(request, num_ranks, json_to, csv_to)
    if status:
        raise click.exceptions.Exit(status)


def _check(
    device: str,
    parts: Mapping[str, bool],
    sides: tuple[str | None, str | None],
    files: tuple[str | None, str | None],
) -> None:
    """UsageError or BenchmarkError for options that do not go together."""
    (impl, against), (json_to, csv_to) = sides, files
    if parts["--loopback"] and not loopback_counter.is_readable():
        raise click.UsageError("--loopback reads a counter of Linux, which this system does not have")
    refuse_one_place(json_to, csv_to)
    if device == "cuda" and not torch.cuda.is_available():
        raise BenchmarkError(f"--device cuda was asked for; torch {torch.__version__} sees no CUDA device")
    for flag, is_asked in parts.items():
        if is_asked and device == "cuda":
            raise click.UsageError(f"{flag} measures the sockets; allowed are tensors of the CPU (--device cpu)")
        if is_asked:
            choose_sockets(flag)
    if impl is not None and against is not None:
        raise click.UsageError(
            f"--impl {impl} and --against {against}: only one can be; --against X is --impl tritondt,X"
        )


def _shapes(
    minbytes: int, maxbytes: int | None, factor: float | None, step: int | None, dtype: str
) -> tuple[tuple[int, ...], ...]:
    itemsize = DTYPES[dtype].itemsize
    last = minbytes if maxbytes is None else maxbytes
    return tuple(shape_of(size, itemsize) for size in sweep(minbytes, last, factor, step))


def _others(impl: str | None, device: str) -> tuple[str, ...]:
    """Implementations that take turns with tritondt; one that is not available here takes a line on stderr."""
    asked = [TRITONDT] if impl is None else [name.strip() for name in impl.split(",")]
    if len(set(asked)) < len(asked) or TRITONDT not in asked:
        raise click.UsageError(f"--impl {impl!r}: allowed are {TRITONDT} and others, joined by commas, each once")
    return tuple(name for name in asked if name != TRITONDT and _is_available(name, device))


def _is_available(name: str, device: str) -> bool:
    """Whether an implementation can be timed here; UsageError or BenchmarkError for what is none."""
    if device == "cuda":
        if ":" not in name:
            raise click.UsageError(
                f"{name!r} cannot be timed beside {TRITONDT} on GPUs; allowed is MODULE:FUNCTION, a pack kernel of "
                "your own, and for collectives bench COLLECTIVE --device cuda"
            )
        imported(name)
        return True
    if name in (*OF_TORCH, SHARED_MEMORY):
        return True
    if ":" in name:
        choose_sockets(name)
        imported(name)
        return True
    if name not in NAMES or name == "engine":
        allowed = ", ".join((*OF_TORCH, SHARED_MEMORY, "nccl"))
        raise click.UsageError(f"{name!r} cannot be timed beside {TRITONDT}; allowed are {allowed} and MODULE:FUNCTION")
    reason = refusal(name, "cpu") or "redistributions are timed on the CPU, where torch's meshes are on Gloo"
    if is_first():
        click.echo(f"{name} is not available: {reason}", err=True)
    return False


def _measure(request: Request, num_ranks: int, json_to: str | None, csv_to: str | None) -> int:
    """Exit status; what was measured before a rank failed, or before Ctrl-C, is printed and written, too."""
    found: list[Measured] = []
    before = surroundings()
    with ProgressLine() as progress:
        progress.tell(f"starting {num_ranks} ranks")

        def add(message: object) -> None:
            assert isinstance(message, Measured), f"ranks send measurements, not {message!r}"
            found.append(message)
            progress.tell(f"{len(found)}/{len(request.cases)}  {line(message)}")

        status, errors = joined_ranks.run(num_ranks, measure_on_rank, request, add)
    if is_first():
        if found:
            print_report(found, Console(stderr=is_printed(json_to, csv_to)), request.average)
        write_json(as_json(request, num_ranks, found, before, errors), json_to)
        write_text(as_csv(request, num_ranks, found), csv_to)
        for text in errors:
            click.echo(f"Error: partial, {len(found)} of {len(request.cases)} cases were measured: {text}", err=True)
    elif errors:
        click.echo(f"Error: {errors[0]}", err=True)
    if not errors:
        joined_ranks.leave()
    return status
