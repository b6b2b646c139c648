"""The command group; a command's module is imported when the command is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import click
from click.shell_completion import CompletionItem

import tritondt
from tritondt.errors import TritondtError

# What shells give to a program that Ctrl-C has ended.
INTERRUPTED = 130


class LazyGroup(click.Group):
    """A group whose commands are named by `module:attribute` and imported when one is run.

    Each has its line of help here, since a command's own would need its module, and most modules import torch. Errors
    of our own end the program with their sentence and status 1, Ctrl-C with one line and status 130, as shells have
    it; others keep their traceback.
    """

    def __init__(self, *args: Any, commands_at: Mapping[str, tuple[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.commands_at = dict(commands_at)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the commands in the order in which they were given."""
        return list(self.commands_at)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command; None for an unknown name."""
        if cmd_name not in self.commands_at:
            return None
        module, attribute = self.commands_at[cmd_name][0].split(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command), f"{module}:{attribute} is no command"
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands, each with its line."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in self.commands_at.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The commands that begin so, or else options."""
        found = [
            CompletionItem(name, help=line)
            for name, (_, line) in self.commands_at.items()
            if name.startswith(incomplete)
        ]
        return found + click.Command.shell_complete(self, ctx, incomplete)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except TritondtError as error:
            raise click.ClickException(str(error)) from error
        except KeyboardInterrupt as error:
            click.echo("Error: interrupted", err=True)
            raise click.exceptions.Exit(INTERRUPTED) from error


@click.group(
    cls=LazyGroup,
    commands_at={
        "demo": ("tritondt.cli.demo.command:demo", "Train a small GPT on 4 CPU ranks and on one process."),
        "bench": ("tritondt.cli.main:bench", "Time tritondt in turns with others; compare results."),
        "plan": ("tritondt.cli.plan:plan", "Explain a redistribution: steps, bytes, memory, time."),
        "plan-model": ("tritondt.cli.plan_model:plan_model", "Find how a model is laid over a mesh, and price it."),
        "trace": ("tritondt.cli.trace.command:trace", "Run a program on ranks and write a timeline of it."),
        "doctor": ("tritondt.cli.doctor:doctor", "Say what this machine has, and try each transport."),
        "tune": ("tritondt.cli.tune:tune", "Time a GPU's kernels and record the fastest choices."),
    },
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="""\b
Completion of commands and flags, in bash (others: zsh_source, fish_source):
  eval "$(_TRITONDT_COMPLETE=bash_source tritondt)"
""",
)
@click.version_option(tritondt.__version__)
def main() -> None:
    """Move tensors between layouts on a mesh of ranks, with the fewest bytes."""


_COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_v", "reduce_scatter", "reduce_scatter_v", "all_to_all", "all_to_all_v"),
    *("broadcast", "reduce", "gather", "scatter", "sendrecv"),
)


@click.group(
    cls=LazyGroup,
    commands_at={
        "redistribute": ("tritondt.cli.bench:redistribute", "Time redistributions on CPU processes."),
        **{
            name: (f"tritondt.cli.bench.collective.command:{name}", f"Time {name} as nccl-tests does.")
            for name in _COLLECTIVES
        },
        "replay": ("tritondt.cli.bench.collective.replay:replay", "Time the collectives of a recorded program."),
        "compare": ("tritondt.cli.bench.compare:compare", "Print the ratios of two results' median times."),
        "calibrate": ("tritondt.cli.bench.calibrate:calibrate", "Measure the prices that plans are made by."),
        "report": ("tritondt.cli.bench.page:report", "Write one HTML page of all results in a folder."),
    },
)
def bench() -> None:
    """Time tritondt, in turns with what it is compared to; compare results."""
