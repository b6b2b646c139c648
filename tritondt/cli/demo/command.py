"""The command `demo`: both runs, then the verdict, the tables and the files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import click
import torch
import torch.distributed as dist
from rich.console import Console

from tritondt.cli.demo.data import corpus
from tritondt.cli.demo.experiment import (
    STYLES,
    DTensorStyle,
    Experiment,
    RanksRun,
    Step,
    Style,
    train_on_ranks,
    train_on_this_process,
    train_on_this_rank,
)
from tritondt.cli.demo.laid_out import num_batch_parts
from tritondt.cli.demo.model import Model
from tritondt.cli.demo.report import Comparison, RunProgress, shares, write_results
from tritondt.cli.launch import num_cores, run_on_ranks
from tritondt.cli.outputs import refuse_unwritable_folder
from tritondt.cli.ranks import check_started_here
from tritondt.comm import world
from tritondt.errors import MeshError

_DEFAULT_HEAD_WIDTH = 32
_DEFAULT_RANKS = 4
_FILE_COLUMNS = 100
_PRELOAD = (train_on_ranks.__module__, "torch._dynamo")


def demo(
    style_name: str,
    parallel: str,
    ranks: int | None,
    steps: int,
    heads: int,
    experts: int,
    layers: int,
    width: int | None,
    sequence: int,
    batch: int,
    seed: int,
    out: Path,
    as_json: bool,
) -> None:
    """Both runs of the demo; ClickException if their losses differ by more than 1e-4 at any step."""
    width = heads * _DEFAULT_HEAD_WIDTH if width is None else width
    _check(heads, width, sequence)
    model = Model(heads, layers, width, sequence, experts if parallel == "ep" else 0)
    experiment = Experiment(model, steps, batch, seed)
    style = _style(style_name, parallel)
    console = _console(to_stderr=as_json)
    if dist.is_torchelastic_launched():
        found = _train_under_torchrun(experiment, style, ranks, console, out)
        if found is None:
            return
        num_ranks, on_ranks = found
    else:
        num_ranks = _DEFAULT_RANKS if ranks is None else ranks
        check_started_here(num_ranks, "torchrun")
        _check_grid(style, num_ranks, batch)
        refuse_unwritable_folder(out)
        on_ranks = train_on_new_processes(experiment, style, num_ranks, console)
    single = train_single(experiment, style, console)
    num_tensor_ranks = style.num_tensor_ranks(num_ranks)
    comparison = Comparison(experiment, style.name, num_ranks, on_ranks, single, parallel, num_tensor_ranks)
    summary = write_results(comparison, out, console)
    if as_json:
        click.echo(json.dumps(summary))
    if not comparison.agrees:
        raise click.ClickException(comparison.disagreement())


def _style(name: str, parallel: str) -> Style:
    style = STYLES[name]
    if parallel == style.parallel:
        return style
    if not isinstance(style, DTensorStyle):
        raise click.UsageError(f"--parallel {parallel} is there with --style dtensor only, not with --style {name}")
    return replace(style, parallel=parallel)


def _check_grid(style: Style, num_ranks: int, batch: int) -> None:
    try:
        num_parts = num_batch_parts(style.parallel, num_ranks)
    except MeshError as error:
        raise click.UsageError(f"--parallel {error}") from error
    if batch < num_parts:
        raise click.UsageError(
            f"--batch {batch} is less than the {num_parts} ranks that share it with --parallel {style.parallel}"
        )


def _check(heads: int, width: int, sequence: int) -> None:
    if width % heads:
        raise click.UsageError(f"--width {width} is no multiple of --heads {heads}")
    longest = len(corpus()) - 1
    if sequence > longest:
        raise click.UsageError(f"--seq {sequence} is longer than the text; allowed is up to {longest}")


def _console(*, to_stderr: bool) -> Console:
    console = Console(stderr=to_stderr)
    # A file or a pipe has no width; rich would take 80 columns and break the lines of the tables.
    return console if console.is_terminal else Console(stderr=to_stderr, width=_FILE_COLUMNS)


def train_on_new_processes(experiment: Experiment, style: Style, num_ranks: int, console: Console) -> RanksRun:
    """Start `num_ranks` processes, train on them and end them; RankFailedError if one fails."""
    _introduce(experiment, style, num_ranks, console)
    with RunProgress(console, _count(num_ranks, "rank"), experiment) as show:
        results = run_on_ranks(
            num_ranks, train_on_this_rank, experiment, style, on_message=_only_steps(show), preload=_PRELOAD
        )
    on_ranks = results[0]
    assert isinstance(on_ranks, RanksRun), f"ranks return their run, not {on_ranks!r}"
    return on_ranks


def train_single(experiment: Experiment, style: Style, console: Console) -> tuple[Step, ...]:
    """Run without ranks on one new process with all cores, without the engine."""
    with RunProgress(console, "1 process", experiment) as show:
        (steps,) = run_on_ranks(
            1, train_on_this_process, experiment, style, on_message=_only_steps(show), preload=_PRELOAD
        )
    assert isinstance(steps, tuple), f"the process returns its steps, not {steps!r}"
    return steps


def _only_steps(show: Callable[[Step], None]) -> Callable[[object], None]:
    def on_message(message: object) -> None:
        assert isinstance(message, Step), f"ranks send steps, not {message!r}"
        show(message)

    return on_message


def _train_under_torchrun(
    experiment: Experiment, style: Style, ranks: int | None, console: Console, out: Path
) -> tuple[int, RanksRun] | None:
    """Number of ranks and their run, on rank 0; None on the others, which have no more to do."""
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    if ranks not in (None, num_ranks):
        raise click.UsageError(f"--ranks {ranks} was asked for, but torchrun has started {num_ranks} processes")
    torch.set_num_threads(max(1, num_cores() // num_ranks))
    _check_grid(style, num_ranks, experiment.batch)
    if rank == 0:
        refuse_unwritable_folder(out)  # on its host alone: the others write nothing
        _introduce(experiment, style, num_ranks, console)
        with RunProgress(console, _count(num_ranks, "rank"), experiment) as show:
            on_ranks = train_on_ranks(experiment, style, on_step=show)
    else:
        on_ranks = train_on_ranks(experiment, style)
    world.close()
    dist.destroy_process_group()
    return (num_ranks, on_ranks) if rank == 0 else None


def _introduce(experiment: Experiment, style: Style, num_ranks: int, console: Console) -> None:
    model = experiment.model
    of_ranks = shares(model, style.num_tensor_ranks(num_ranks), style.parallel).items()
    held = ", ".join(f"{' + '.join(map(str, lengths))} {name}" for name, lengths in of_ranks)
    console.print(
        f"GPT of {_count(model.layers, 'layer')}, width {model.width}, on {_count(num_ranks, 'rank')}: {held}",
        highlight=False,
        soft_wrap=True,
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
