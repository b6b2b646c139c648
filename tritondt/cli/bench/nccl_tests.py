"""nccl-tests' flags beyond sizes and iterations: taken where they ask for what is done here, else refused by name.

A refusal says what to write instead. Sizes, iterations, types, roots and averages are options of the commands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

from tritondt import environment

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class Flag:
    """One flag: the values that ask for what is done here anyway, and the sentence that refuses another `{value}`."""

    short: str
    long: str
    taken: tuple[str, ...]
    refusal: str


# Names and values of nccl-tests 2.19.
FLAGS = (
    Flag("-t", "--nthreads", ("1",), "each rank is a process of its own; write -t 1, and all ranks as -g N"),
    Flag("-m", "--agg_iters", ("1",), "calls are not aggregated, since each is timed; write -m 1 and a larger -n"),
    Flag("-N", "--run_cycles", ("1",), "sizes are run through once; write -N 1 and a larger -n, or a shell's loop"),
    Flag("-p", "--parallel_init", ("0", "1"), "allowed are 0 and 1; ranks are processes, which start side by side"),
    Flag("-z", "--blocking", ("1",), "every call is waited for before the next; write -z 1"),
    Flag("-y", "--stream_null", ("0",), "calls run in torch's current stream; write -y 0"),
    Flag("-T", "--timeout", ("0",), "a limit holds for each call; write TRITONDT_TIMEOUT={value} before the command"),
    Flag("-G", "--cudagraph", ("0",), "calls are not captured in CUDA graphs; write -G 0"),
    Flag("-C", "--report_cputime", ("0",), "times are of whole calls; write -C 0, or --breakdown for local work"),
    Flag("-S", "--report_timestamps", ("0",), "rows have no time of day; write -S 0, and --json for start and end"),
    Flag(
        *("-R", "--local_register", ("0",)),
        'buffers are not registered; write -R 0, or "registered_bytes" in TRITONDT_COSTS for --impl engine',
    ),
    Flag("-x", "--cta_policy", ("0",), "NCCL's policy is its own setting; write -x 0, and NCCL_CTA_POLICY={value}"),
    Flag("-D", "--device_implementation", ("0",), "kernels of one's own come by name; write --impl MODULE:FUNCTION"),
    Flag("-V", "--device_cta_count", (), "kernels of one's own say how many; write --impl MODULE:FUNCTION"),
    Flag("-M", "--memory_report", ("0",), "memory is not reported; write -M 0, or see `plan` for a redistribution's"),
)

EPILOG = (
    "nccl-tests' "
    + ", ".join(f"{flag.short} {'|'.join(flag.taken)}" for flag in FLAGS if flag.taken)
    + " are taken as well, being what is done here; other values are refused with what to write instead."
)


def options(*others: Flag) -> Decorator:
    """Decorator that adds these flags, and `others`, to a command, which is told of `ngpus` alone."""

    def decorate(run: Callable[..., Any]) -> Callable[..., Any]:
        for flag in reversed((*FLAGS, *others)):
            run = click.option(
                *(flag.short, flag.long), expose_value=False, hidden=True, callback=_refused_by(flag), metavar="VALUE"
            )(run)
        ngpus = click.option("-g", "--ngpus", type=click.IntRange(min=1), help="The same as --ranks, in nccl-tests.")
        return ngpus(run)

    return decorate


def _refused_by(flag: Flag) -> Callable[[click.Context, click.Parameter, str | None], None]:
    def refuse(_: click.Context, __: click.Parameter, value: str | None) -> None:
        if value is not None and value not in flag.taken:
            raise click.UsageError(f"{flag.short} {value}: {flag.refusal.format(value=value)}")

    return refuse


def ranks_asked(ranks: int | None, ngpus: int | None) -> int | None:
    """Number of ranks by either flag, None without both; UsageError where `-g` does not mean what runs here."""
    if ngpus is None:
        return ranks
    launched = environment.launched()
    if launched is not None:
        if ngpus != 1:
            raise click.UsageError(
                f"-g {ngpus}: each of the {launched.num_ranks} processes that {launched.launcher} has started is one "
                f"rank; write -g 1, and start {ngpus * launched.num_ranks} processes for so many ranks"
            )
        return ranks
    if ranks not in (None, ngpus):
        raise click.UsageError(f"--ranks {ranks} and -g {ngpus}: only one can be")
    if ngpus == 1:
        raise click.UsageError("-g 1: one rank alone moves nothing; write -g 2, or more")
    return ngpus
