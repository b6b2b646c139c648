"""The commands: their options, which are declared without torch, so that help and completion come at once.

A command's body is imported when it runs, and is given the options by their names.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

import tritondt
from tritondt.cli.bench import (
    AVERAGES,
    DEFAULT_SIZES,
    DTYPE_NAMES,
    REDUCE_OPS,
    SLOWEST_RANK,
    WARM_UP_ROUNDS,
    nccl_tests,
)
from tritondt.cli.bench.collective.kinds import KINDS, Kind
from tritondt.cli.bench.json_result import csv_option, json_option
from tritondt.cli.bench.sizes import parse_bytes
from tritondt.cli.demo import PARALLEL, STYLE_NAMES
from tritondt.cli.outputs import INTERRUPTED, writable
from tritondt.errors import TritondtError

ALL = "all"
_AT_LEAST_1, _AT_LEAST_2 = click.IntRange(min=1), click.IntRange(min=2)
_FOLDER_OR_FILE = click.Path(path_type=Path)
_DEVICES = click.Choice(["cpu", "cuda"])
_KERNELS = ("copy", "cast", "cast to float64", "reduce 1", "reduce 2", "reduce 4", "reduce 8")
_DTYPES = (
    *("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"),
    *("complex64", "complex128"),
)


class Commands(click.Group):
    """A group of commands, each with one line of help, in the order in which they were given.

    Errors of our own end the program with their sentence and status 1, Ctrl-C with one line and status 130, as shells
    have it; others keep their traceback.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the commands in the order in which they were given."""
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except TritondtError as error:
            raise click.ClickException(str(error)) from error
        except KeyboardInterrupt as error:
            click.echo("Error: interrupted", err=True)
            raise click.exceptions.Exit(INTERRUPTED) from error


def _run(place: str, values: Mapping[str, Any]) -> None:
    """Calls the function `module:name` of this package with the values of a command's options."""
    module, _, name = place.partition(":")
    getattr(importlib.import_module(f"tritondt.cli.{module}"), name)(**values)


def _together(*decorators: nccl_tests.Decorator) -> nccl_tests.Decorator:
    """Decorator that adds several options, in their order."""

    def decorate(run: Callable[..., Any]) -> Callable[..., Any]:
        for each in reversed(decorators):
            run = each(run)
        return run

    return decorate


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="""\b
Completion of commands and flags, in bash (others: zsh_source, fish_source):
  eval "$(_TRITONDT_COMPLETE=bash_source tritondt)"
""",
)
@click.version_option(tritondt.__version__)
def main() -> None:
    """Move tensors between layouts on a mesh of ranks, with the fewest bytes."""


@main.command(
    short_help="Train a small GPT on 4 CPU ranks and on one process.", context_settings={"show_default": True}
)
@click.option(
    "--style",
    "style_name",
    type=click.Choice(STYLE_NAMES),
    default=STYLE_NAMES[0],
    help="Modules of torch.nn under a plan, or plain tensors and every redistribution by hand.",
)
@click.option(
    "--parallel",
    type=click.Choice(PARALLEL),
    default=PARALLEL[0],
    help="Axes of the ranks: tensors cut, parameters sharded (fsdp; hsdp: in two replicas) or replicated (ddp), "
    "experts apart (ep), or the sequence shared (cp).",
)
@click.option("--ranks", type=_AT_LEAST_1, help="Processes to start.  [default: 4, or torchrun's]")
@click.option("--steps", type=_AT_LEAST_1, default=60, help="Updates of the weights.")
@click.option("--heads", type=_AT_LEAST_1, default=6, help="Attention heads of a layer.")
@click.option("--experts", type=_AT_LEAST_1, default=6, help="Experts of a layer with --parallel ep.")
@click.option("--layers", type=_AT_LEAST_1, default=4, help="Transformer blocks.")
@click.option("--width", type=_AT_LEAST_1, help="Features, a multiple of --heads.  [default: 32 a head]")
@click.option("--seq", "sequence", type=_AT_LEAST_1, default=127, help="Bytes of a sequence.")
@click.option("--batch", type=_AT_LEAST_1, default=16, help="Sequences of a step.")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Of weights and data.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("demo_out"),
    help="Folder for summary.json and loss.png.",
)
@click.option("--json", "as_json", is_flag=True, help="Print summary.json too; the rest to stderr.")
def demo(**values: Any) -> None:
    """Train a small GPT in parallel on CPU ranks and on one process, and compare.

    The ranks share heads, hidden features and the sequence, or with --parallel the batch and the
    parameters, none of which need divide by their number. Ends with status 1 if the losses of the
    two runs differ by more than 1e-4 at any step. Under torchrun it runs on the processes that
    torchrun has started.
    """
    _run("demo.command:demo", values)


@main.group(cls=Commands, short_help="Time tritondt in turns with others; compare results.")
def bench() -> None:
    """Time tritondt, in turns with what it is compared to; compare results."""


def _numbers(_: click.Context, __: click.Parameter, text: str | None) -> tuple[int, ...] | None:
    """Whole numbers joined by commas; None for an option that was not given."""
    if text is None:
        return None
    try:
        return tuple(int(item) for item in text.split(",") if item.strip())
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a list of whole numbers such as 2,4") from None


def _written(flag: str, told: str) -> nccl_tests.Decorator:
    return click.option(flag, callback=writable, metavar="FILE", help=told)


_as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
_whose_prices = click.option("--device", type=_DEVICES, default="cpu", show_default=True, help="Whose prices.")


@main.command(short_help="Explain a redistribution: steps, bytes, memory, time.")
@click.option("--mesh", callback=_numbers, metavar="INTS", required=True, help="Ranks on each mesh axis.")
@click.option("--shape", callback=_numbers, metavar="INTS", required=True, help="Shape of the whole tensor.")
@click.option("--from", "source", required=True, help="Placement on each mesh axis before.")
@click.option("--to", "target", required=True, help="Placement on each mesh axis after.")
@click.option("--from-order", "source_order", callback=_numbers, metavar="INTS", help="Cut order of the axes before.")
@click.option("--to-order", "target_order", callback=_numbers, metavar="INTS", help="Cut order of the axes after.")
@click.option("--dtype", type=click.Choice(_DTYPES), default="float32", show_default=True)
@click.option("--coordinate", callback=_numbers, metavar="INTS", help="The rank to explain.  [default: the first]")
@_whose_prices
@click.option(
    "--transport",
    help="What carries messages: a transport's name.  [default: TRITONDT_TRANSPORT, or shared-memory and nccl]",
)
@click.option("--against", type=click.Choice(["torch"]), help="What torch.distributed.tensor would move as well.")
@click.option("--all-ranks", is_flag=True, help="Least, mean and most over all ranks, of which there may be 65,536.")
@click.option(
    "--topology",
    metavar="KIND:INTS",
    help="Bytes over links, as of rail-optimised:8, fat-tree:8,4 or dragonfly:8,4,2; 512 ranks plan for its hosts.",
)
@_written("--html", "Write a page: who sends how much to whom.")
@_written("--png", "Write that as an image.")
@_as_json
def plan(**values: Any) -> None:
    """Explain a redistribution: steps, messages, bytes, memory, time.

    Bytes and messages are what one rank will send; times come from the default cost table. A
    placement is R, P, P(max), S0, S1(unit=128), S0(sizes=5/0/3), S0(repeats=3) or S0(block=64). With --against
    torch the installed torch says which collectives it would call, over Gloo or, for cuda, NCCL.

    \b
    python -m tritondt plan --mesh 2,4 --shape 4096,4096 --from S0,R --to R,S0
    """
    _run("plan:plan", values)


def _axes(_: click.Context, __: click.Parameter, text: str | None) -> dict[str, int] | None:
    if text is None:
        return None
    try:
        pairs = [(name.strip(), int(size)) for name, size in (item.split("=") for item in text.split(","))]
    except ValueError:
        raise click.BadParameter(f"{text!r} is no list of axes such as dp=4,tp=8") from None
    if len(dict(pairs)) < len(pairs):
        raise click.BadParameter(f"{text!r} has two axes of one name; allowed is a list of axes such as dp=4,tp=8")
    return dict(pairs)


def _memory(_: click.Context, __: click.Parameter, text: str | None) -> int | None:
    return None if text is None else parse_bytes(text)


@main.command("plan-model", short_help="Find how a model is laid over a mesh, and price it.")
@click.argument("factory", metavar="MODULE:FACTORY", required=False)
@click.option("--config", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A config.json instead.")
@click.option("--mesh", callback=_axes, metavar="NAME=INT,...", help="Ranks on the axes dp and tp.")
@click.option("--ranks", type=_AT_LEAST_1, help="Compare all meshes of so many ranks instead.")
@click.option("--memory", callback=_memory, metavar="SIZE", help="Most memory of a rank, as 80G (of 1024 MB).")
@_whose_prices
@click.option(
    "--ranks-per-host", type=_AT_LEAST_1, default=8, show_default=True, help="Neighbouring ranks on each host."
)
@click.option(
    "--objective",
    type=click.Choice(["step time", "bytes", "memory"]),
    default="step time",
    show_default=True,
    help="What is to be least: predicted, or received or held by a rank.",
)
@click.option("--optimizer", default="adamw", show_default=True, help="adamw, adam, sgd or sgd with momentum.")
@click.option("--batch", type=_AT_LEAST_1, default=1, show_default=True, help="Sequences, with --config.")
@click.option("--sequence", type=_AT_LEAST_1, default=2048, show_default=True, help="Tokens, with --config.")
@click.option("--dtype", default="bfloat16", show_default=True, help="Of parameters, with --config.")
@_written("--html", "Write a page with the program and the tables.")
@click.option("--check", "is_checked", is_flag=True, help="Run steps of it too, and compare.")
@click.option("--steps", type=_AT_LEAST_1, default=10, show_default=True, help="Steps that --check runs.")
@click.option("--seconds", type=float, default=120.0, show_default=True, help="Time for its steps; one runs anyway.")
@_as_json
def plan_model(**values: Any) -> None:
    """Find the layout of a model: styles, bytes, memory, predicted time.

    FACTORY is called without arguments, and returns the model and its example inputs: a tensor, a
    tuple or a dict of named ones. It runs on the device meta, so that nothing takes memory. With
    --mesh inputs are those of one rank of dp, with --ranks those of all. --config is the file of a
    model of Hugging Face transformers, without weights. --check runs steps on processes that it starts,
    or that torchrun has started, and prints seconds, bytes and messages of each phase beside the
    predicted ones; it ends with status 1 where bytes or messages differ.

    \b
    tritondt plan-model --config config.json --mesh dp=8,tp=8 --device cuda --memory 80G
    """
    _run("plan_model:plan_model", values)


def _drawable(context: click.Context, parameter: click.Parameter, path: str | None) -> str | None:
    if path is not None:
        importlib.import_module("tritondt.cli.trace.picture").check_ending(path)
    return writable(context, parameter, path)


@main.command(
    short_help="Run a program on ranks and write a timeline of it.", context_settings={"ignore_unknown_options": False}
)
@click.option("--ranks", type=_AT_LEAST_1, metavar="N", help="Ranks to start.  [default: 2]")
@click.option(
    "--out",
    default="trace.json",
    show_default=True,
    type=click.Path(dir_okay=False),
    callback=writable,
    metavar="FILE",
)
@click.option(
    "--summary",
    type=click.Path(dir_okay=False),
    callback=_drawable,
    metavar="FILE",
    help="Write a page with the summary, too: .png, .svg or .pdf.",
)
@click.option("--collected", is_flag=True, hidden=True, help="Whether whoever has started this rank collects.")
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- SCRIPT [ARGS]...")
def trace(**values: Any) -> None:
    """Run a program on ranks, and write what they did when as a timeline, with a summary.

    The file is in the trace-event format: https://ui.perfetto.dev and chrome://tracing read it. Steps end
    where an optimizer's step() does, or at tritondt.debug.mark_step(). Runs on the processes that torchrun
    has started, where it has. Ends with the program's status.

    \b
    python -m tritondt trace --ranks 2 -- train.py --lr 0.1
    torchrun --nproc-per-node 8 -m tritondt trace -- -m package.train
    """
    _run("trace.command:trace", values)


@main.group(invoke_without_command=True, short_help="Say what this machine has, and try each transport.")
@_as_json
@click.option(
    "--seconds", type=click.FloatRange(0, 600), default=5.0, show_default=True, help="Time of each transport's test."
)
@click.pass_context
def doctor(context: click.Context, as_json: bool, seconds: float) -> None:
    """Say what this machine has and lacks, and move tensors between two processes over each transport.

    Under torchrun, MPI or srun, between all ranks: their hosts, versions and clocks are compared, too.

    Each finding that is not well says what to do: marked X where something cannot work, which ends the
    command with status 1, and ! where it may matter. With a command, runs that instead.
    """
    if context.invoked_subcommand is None:
        _run("doctor:doctor", {"as_json": as_json, "seconds": seconds})
    elif as_json:
        raise click.UsageError(f"--json goes behind the command: doctor {context.invoked_subcommand} --json")


@doctor.command(short_help="Say who waits for whom, from the ranks' flight recorders.")
@click.argument("folder", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    *("--patience", "patience_s"),
    type=click.FloatRange(min=0.0),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="How long an operation may be under way without being told.",
)
@_as_json
def flight(**values: Any) -> None:
    """Say who waits for whom, and why, from the files that flight recorders left in DIR.

    Reads rank-0.json, rank-1.json and so on, one per rank. The first line is the verdict. Then
    come ranks without a file; the first operation that ranks issued differently; ranks that never
    issued what others wait for; failures; circles of waiting; and what was under way, since when
    and from which line.

    Ends with status 0 if nothing is wrong, 1 if something is, 2 if a file cannot be read.

    \b
    python -m tritondt doctor flight /tmp/flight
    """
    _run("flight:flight", values)


@main.command(short_help="Time a GPU's kernels and record the fastest choices.")
@click.option("--device", type=int, default=0, show_default=True, help="Number of the CUDA device.")
@click.option("--kernel", "kernels", multiple=True, type=click.Choice(_KERNELS), help="Only this one.  [default: all]")
@click.option("--mebibytes", type=_AT_LEAST_1, default=256, show_default=True, help="What one run writes.")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="The file to change.")
@click.option(
    "--architecture", type=click.IntRange(80), help="Compile for it, such as 90 for an H100, and time nothing."
)
@click.option("--model", is_flag=True, help="Print what packs and unpacks cost by models, and time nothing.")
@click.option("--jobs", type=_AT_LEAST_1, help="Compilations at a time.  [default: cores]")
def tune(**values: Any) -> None:
    """Time the kernels on a GPU under every choice, and record the fastest.

    They are recorded under the name of the device in the file that ships with the package, or in --output;
    what other devices have there stays. Takes minutes, most of them for compiling. With --architecture, the kernels
    are compiled into Triton's cache (TRITON_CACHE_DIR) for a GPU that need not be there, under the default choices.
    With --model, it prints the bytes that a model of the cache of an H200 moves to and from memory for packs and
    unpacks of columns, over the least, and the instructions of their kernels for each byte, on sm_90 or --architecture.
    """
    _run("tune:tune", values)


class _Size(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic from click 8.2 on
    """Bytes, as in 32M."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return value if isinstance(value, int) else parse_bytes(value)
        except TritondtError as error:
            self.fail(str(error), param, ctx)


class _Root(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """A rank, or all of them in turn."""

    name = "rank|all"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        text = str(value)
        if text != ALL and not text.isdecimal():
            self.fail(f"{text!r} is no root; allowed are a rank, as in 0, and {ALL}", param, ctx)
        return text if text == ALL else int(text)


_SIZE = _Size()


def _sizes(smallest: str) -> nccl_tests.Decorator:
    return _together(
        click.option("-b", "--minbytes", type=_SIZE, help=smallest),
        click.option("-e", "--maxbytes", type=_SIZE, help="Largest size.  [default: that of -b]"),
        click.option("-f", "--stepfactor", type=float, help="From one size to the next, times this."),
        click.option("-i", "--stepbytes", type=_SIZE, help="From one size to the next, plus this.  [default: 1M]"),
    )


def _iterations(least_warm_up: int) -> nccl_tests.Decorator:
    return _together(
        click.option("-n", "--iters", type=_AT_LEAST_1, default=20, show_default=True, help="Timed iterations."),
        click.option(
            *("-w", "--warmup_iters"),
            type=click.IntRange(least_warm_up),
            default=1,
            show_default=True,
            help="Untimed ones.",
        ),
        click.option(
            "-c", "--check", type=click.IntRange(0), default=1, show_default=True, help="Checked ones; 0: none."
        ),
    )


def _average(default: int, told: str) -> nccl_tests.Decorator:
    return click.option(
        *("-a", "--average"),
        type=click.IntRange(min(AVERAGES), max(AVERAGES)),
        default=default,
        show_default=True,
        help=told.format(", ".join(f"{number} {text}" for number, text in AVERAGES.items())),
    )


_impl = click.option("--impl", default="tritondt,torch", show_default=True, help="Implementations, in turns.")
_device = click.option("--device", type=_DEVICES, default="cpu", show_default=True)
_threads = click.option("--threads", type=_AT_LEAST_1, default=1, show_default=True, help="CPU threads of a rank.")


@bench.command(
    short_help="Time redistributions, of tensors on CPUs or GPUs.",
    context_settings={"show_default": True},
    epilog=nccl_tests.EPILOG,
)
@click.option("--ranks", type=_AT_LEAST_2, help="Processes to start.  [default: 4, or the launcher's]")
@click.option("--against", help="Time torch in turns with it, or copies by a function MODULE:FUNCTION.")
@click.option("--impl", help="Implementations, in turns: tritondt, torch, gloo, shared-memory, MODULE:FUNCTION.")
@click.option("--sizes", default=DEFAULT_SIZES, help="Shapes of the whole tensor.")
@_sizes("Size of matrices in place of --sizes, as in 32M.")
@click.option("--pairs", help='As in "S0->R; S0,S1->R,R".  [default: about 20, on meshes of 1 and 2 axes]')
@click.option("-n", "--rounds", type=_AT_LEAST_1, default=25, help="Most rounds of a case.")
@click.option("--case-seconds", type=float, default=10.0, help="Time for a case; 9 rounds are made anyway.")
@click.option("-w", "--warmup_iters", type=_AT_LEAST_1, default=WARM_UP_ROUNDS, help="Rounds that do not count.")
@click.option("-c", "--check", type=click.IntRange(min=0), default=1, help="Checked runs; 0: none, and no ratios.")
@_average(SLOWEST_RANK, "Time of a round: {} of ranks.")
@click.option("-d", "--dtype", type=click.Choice(DTYPE_NAMES), default="float32", help="Element type.")
@click.option("-o", "--op", type=click.Choice([*REDUCE_OPS, ALL]), help="Reduction of pairs with P, or all.")
@_device
@_threads
@click.option("--loopback", is_flag=True, help="Read the loopback interface's counter as well (1 MB and more).")
@click.option(
    "--breakdown", is_flag=True, help="Time local work and messages alone as well, and the peak; over sockets."
)
@json_option
@csv_option
@nccl_tests.options(nccl_tests.Flag("-r", "--root", (), "a redistribution has no root; leave -r out"))
def redistribute(**values: Any) -> None:
    """Time redistributions on several processes: each is checked first, then timed round by round.

    Ends with status 1 if a result is wrong, or if bytes or messages are not those that explain foretells.
    Under torchrun, MPI or srun it runs on the processes that are there.
    """
    _run("bench.command:redistribute", values)


def _options_of(kind: Kind) -> list[nccl_tests.Decorator]:
    """Options of a collective's command; those that say nothing of it (a root, an operation) are refused by name."""
    found: list[nccl_tests.Decorator] = [
        click.option("--ranks", type=_AT_LEAST_2, help="Processes to start.  [default: a core each, 2 to 4]"),
        _impl,
        _sizes("Smallest size.  [default: 32M]"),
        _iterations(least_warm_up=0),
        click.option("-d", "--datatype", default="float", show_default=True, help="Element type, or all."),
        _average(1, "Time reported: {}."),
        _device,
        _threads,
        click.option(
            "--breakdown", is_flag=True, help="Time local work and messages alone of the engine's moves, and the peak."
        ),
        click.option(
            "--compute-overlap",
            type=click.FloatRange(min=0, min_open=True),
            metavar="MS",
            help="Time each beside a compute of so many ms, too, and say what overlaps.",
        ),
        click.option(
            "--min-bw",
            type=click.FloatRange(min=0),
            envvar="NCCL_TESTS_MIN_BW",
            show_envvar=True,
            help="GB/s of mean bus bandwidth of the first implementation; status 1 below 0.9 of it.",
        ),
    ]
    unasked = []
    if kind.reduces:
        found.append(click.option("-o", "--op", default="sum", show_default=True, help="Reduction, or all."))
    else:
        unasked.append(nccl_tests.Flag("-o", "--op", (), f"{kind.name} reduces nothing; leave -o out"))
    if kind.has_root:
        found.append(click.option("-r", "--root", type=_Root(), default="0", show_default=True, help="Root, or all."))
    else:
        unasked.append(nccl_tests.Flag("-r", "--root", (), f"{kind.name} has no root; leave -r out"))
    if kind.has_uneven_parts:
        found.append(
            click.option(
                "--skew",
                type=click.FloatRange(0, 1),
                default=0.5,
                show_default=True,
                help="Parts are equal with 0, in proportion to 0, 1, 2, ... with 1.",
            )
        )
        found.append(click.option("--matrix", type=_FOLDER_OR_FILE, help="File of the bytes of each part."))
    return [*found, json_option, csv_option, nccl_tests.options(*unasked)]


def _collective(kind: Kind) -> click.Command:
    def run(**values: Any) -> None:
        _run("bench.collective.command:collective", {"kind": kind, **values})

    run.__doc__ = f"""Time {kind.name} on several processes, as nccl-tests does.

    Each implementation's result is checked first; then they are timed in turns. Status 1 where an element is
    wrong, a rank has failed, or the bandwidth is below --min-bw. Runs on the processes that torchrun, MPI or srun has
    started, where it has.

    \b
    python -m tritondt bench {kind.name} -b 1M -e 32M -f 2 --impl tritondt,engine,torch
    """
    command = click.command(kind.name, short_help=f"Time {kind.name} as nccl-tests does.", epilog=nccl_tests.EPILOG)
    return command(_together(*_options_of(kind))(run))


for _kind in KINDS.values():
    bench.add_command(_collective(_kind))


@bench.command(short_help="Time the collectives of a recorded program.", epilog=nccl_tests.EPILOG)
@click.argument("file", type=_FOLDER_OR_FILE)
@click.option("--ranks", type=_AT_LEAST_2, help="Processes to start.  [default: as many as were recorded]")
@_impl
@_iterations(least_warm_up=1)
@_device
@_threads
@json_option
@nccl_tests.options()
def replay(**values: Any) -> None:
    """Time the collectives of a recording, with its sizes and in its order.

    FILE is what `trace --out` has written, or a rank-*.json of flight records, of a program on the backend
    "tritondt". An iteration is all of its collectives, one after the other, without what was computed in between.

    \b
    python -m tritondt trace --ranks 2 --out step.json -- train.py
    python -m tritondt bench replay step.json --impl tritondt,torch
    """
    _run("bench.collective.replay:replay", values)


@bench.command(short_help="Print the ratios of two results' median times.")
@click.argument("before", type=_FOLDER_OR_FILE)
@click.argument("after", type=_FOLDER_OR_FILE)
@json_option
def compare(**values: Any) -> None:
    """Ratios of the median times of two results, AFTER / BEFORE: below 1 is faster.

    A verdict needs a 95 % bootstrap interval that leaves 1 out. The interval knows what changed from iteration to
    iteration within the two runs, not what else the machine did between them: in one run, --impl takes turns.
    Cases with wrong or unchecked results are left out.
    """
    _run("bench.compare:compare", values)


@bench.command(short_help="Measure the prices that plans are made by.", context_settings={"show_default": True})
@click.option("--ranks", type=_AT_LEAST_2, help="Processes to start.  [default: 2, or the launcher's]")
@click.option("--device", "device_type", type=_DEVICES, default="cpu", help="Where tensors are.")
@click.option("-n", "--rounds", type=_AT_LEAST_1, default=25, help="Rounds of each figure.")
@click.option("--shrink", type=_AT_LEAST_1, default=1, help="Sizes are divided by this.")
@json_option
def calibrate(**values: Any) -> None:
    """Measure the prices that plans are made by, between ranks 0 and 1 and on each, and print them for TRITONDT_COSTS.

    On GPUs those of NCCL's collectives too, among all ranks.

    Under torchrun, MPI or srun it runs on the processes that are there.
    """
    _run("bench.calibrate:calibrate", values)


@bench.command(short_help="Write one HTML page of all results in a folder.")
@click.argument("folder", metavar="DIR", type=_FOLDER_OR_FILE)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Where to.  [default: DIR/report.html]")
def report(**values: Any) -> None:
    """Write one self-contained HTML page of all results in a folder: files that bench has written with --json.

    It has bandwidths and latencies over sizes, ratios to torch, histograms of times, machine and versions, and asks no
    network.
    """
    _run("bench.page:report", values)
