"""The command `bench redistribute`: starts the ranks, shows what they measure, writes it down."""

from __future__ import annotations

import click
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tritondt.cli.bench import loopback as loopback_counter
from tritondt.cli.bench.cases import (
    DEFAULT_SIZES,
    Case,
    default_pairs,
    make_cases,
    parse_pairs,
    parse_sizes,
)
from tritondt.cli.bench.inputs import DTYPES
from tritondt.cli.bench.json_result import json_option, write_json
from tritondt.cli.bench.measure import Measured, Request, measure_on_rank
from tritondt.cli.bench.report import as_json, line, print_report
from tritondt.cli.launch import run_on_ranks
from tritondt.comm import world

_DEFAULT_RANKS = 4


@click.command(context_settings={"show_default": True})
@click.option("--ranks", type=click.IntRange(min=2), help="Processes to start.  [default: 4, or torchrun's]")
@click.option("--against", type=click.Choice(["torch"]), help="Time torch.distributed.tensor in turns with it.")
@click.option("--sizes", default=DEFAULT_SIZES, help="Shapes of the whole tensor.")
@click.option("--pairs", help='As in "S0->R; S0,S1->R,R".  [default: about 20, on meshes of 1 and 2 axes]')
@click.option("--rounds", type=click.IntRange(min=1), default=25, help="Most rounds of a case.")
@click.option("--case-seconds", type=float, default=10.0, help="Time for a case; 9 rounds are made anyway.")
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="float32", help="Element type.")
@click.option("--threads", type=click.IntRange(min=1), default=1, help="CPU threads of a rank.")
@click.option("--loopback", is_flag=True, help="Read the loopback interface's counter as well (1 MB and more).")
@json_option
def redistribute(
    ranks: int | None,
    against: str | None,
    sizes: str,
    pairs: str | None,
    rounds: int,
    case_seconds: float,
    dtype: str,
    threads: int,
    loopback: bool,
    json_to: str | None,
) -> None:
    """Time redistributions on CPU processes: each is checked first, then timed round by round.

    Ends with status 1 if a result is wrong, or if bytes or messages are not those that explain foretells.
    Under torchrun it runs on the processes that torchrun has started.
    """
    if loopback and not loopback_counter.is_readable():
        raise click.UsageError("--loopback reads a counter of Linux, which this system does not have")
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
        if ranks not in (None, dist.get_world_size()):
            raise click.UsageError(f"--ranks {ranks} was asked for, but torchrun has started {dist.get_world_size()}")
        ranks = dist.get_world_size()
    num_ranks = _DEFAULT_RANKS if ranks is None else ranks
    chosen = default_pairs(num_ranks) if pairs is None else parse_pairs(pairs)
    cases = make_cases(num_ranks, parse_sizes(sizes), chosen)
    request = Request(cases, dtype, against == "torch", rounds, case_seconds, threads, loopback)
    found = _measure_under_torchrun(request) if dist.is_initialized() else _measure(request, num_ranks)
    if found is None:
        return
    print_report(found, Console())
    write_json(as_json(request, num_ranks, found), json_to)


def _measure(request: Request, num_ranks: int) -> list[Measured]:
    with _Progress(request.cases) as progress:
        run_on_ranks(num_ranks, measure_on_rank, request, on_message=progress.add)
    return progress.found


def _measure_under_torchrun(request: Request) -> list[Measured] | None:
    """Measurements on rank 0; None on the others, which have no more to do."""
    if dist.get_rank() == 0:
        with _Progress(request.cases) as progress:
            measure_on_rank(progress.add, request)
        found = progress.found
    else:
        measure_on_rank(_drop, request)
        found = None
    world.close()
    dist.destroy_process_group()
    return found


def _drop(_: object) -> None:
    """Ignores a measurement, on ranks other than 0."""


class _Progress:
    """Collector of measurements; on stderr a bar, or a line a case where that is no terminal."""

    def __init__(self, cases: tuple[Case, ...]) -> None:
        self.found: list[Measured] = []
        self._num_cases = len(cases)
        self._console = Console(stderr=True)
        self._bar = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
            transient=True,
        )
        self._task = self._bar.add_task("starting", total=self._num_cases)

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def add(self, message: object) -> None:
        """Adds the measurement of one case from rank 0."""
        assert isinstance(message, Measured), f"ranks send measurements, not {message!r}"
        self.found.append(message)
        text = line(message)
        self._bar.update(self._task, advance=1, description=text)
        if not self._console.is_terminal:
            self._console.print(
                f"{len(self.found)}/{self._num_cases}  {text}", highlight=False, markup=False, soft_wrap=True
            )
