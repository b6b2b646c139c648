"""`doctor`: what a machine offers to tritondt, what to do about it, and whether each transport moves tensors on it."""

from __future__ import annotations

import json
import textwrap

import click

from tritondt.cli.flight.command import flight
from tritondt.cli.machine import Finding, machine_findings
from tritondt.cli.smoke import smoke_test, transports
from tritondt.debug.tracing.clock import Offset

_WIDTH = 100
_INDENT = 16
_MARKS = {"ok": " ", "note": "!", "problem": "X"}


@click.group(invoke_without_command=True, short_help="Say what this machine has, and try each transport.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
@click.option(
    "--seconds", type=click.FloatRange(0, 600), default=5.0, show_default=True, help="Time of each transport's test."
)
@click.pass_context
def doctor(context: click.Context, as_json: bool, seconds: float) -> None:
    """Say what this machine has and lacks, and move tensors between two processes over each transport.

    Each finding that is not well says what to do: marked X where something cannot work, which ends the
    command with status 1, and ! where it may matter. With a command, runs that instead.
    """
    if context.invoked_subcommand is not None:
        if as_json:
            raise click.UsageError(f"--json goes behind the command: doctor {context.invoked_subcommand} --json")
        return
    found = machine_findings()
    if not as_json:
        _print(found)
    tested = smoke_findings(seconds)
    if as_json:
        click.echo(json.dumps(_fields([*found, *tested]), indent=2))
    else:
        _print(tested)
    if any(finding.level == "problem" for finding in [*found, *tested]):
        raise click.exceptions.Exit(1)


doctor.add_command(flight)


def smoke_findings(seconds: float) -> list[Finding]:
    """Findings of the smoke tests: the clocks of two processes, each transport, and "exchange" for all of them."""
    passed, failed, offset = smoke_test(seconds)
    found = [] if offset is None else [_clocks(offset)]
    found += [
        Finding(
            f"{each.transport} test",
            f"{each.num_exchanges:,} exchanges of 2 ranks were right; 2 of 5x3 took {each.small_s * 1e6:,.0f} us, "
            f"2 of 1025x511 {each.large_s * 1e3:,.2f} ms (medians)",
        )
        for each in passed
    ]
    if failed is None:
        return [*found, Finding("exchange", "OK")]
    transport, reason = failed
    known = [each.transport for each in passed]
    left = [name for name in transports() if name not in (transport, *known)]
    advice = "the traceback above names the call; TRITONDT_SOCKET_IFNAME chooses an interface, TRITONDT_TRANSPORT "
    advice += f"another transport (passed: {', '.join(known) or 'none'})"
    not_tested = [Finding(f"{name} test", "not reached", "note", "mend what failed before") for name in left]
    return [*found, *not_tested, Finding("exchange", f"{transport}: {reason}", "problem", advice)]


def _clocks(offset: Offset) -> Finding:
    """The offset of two processes' clocks, which on one machine is none within the error of the pings."""
    value = f"{offset.offset_ns / 1e3:,.0f} us between two processes, off by {offset.error_ns / 1e3:,.0f} us at most"
    if abs(offset.offset_ns) <= offset.error_ns:
        return Finding("clock skew", value)
    advice = "processes of one machine read different clocks (a time namespace?); traces of them are aligned by pings"
    return Finding("clock skew", value, "note", advice)


def _print(found: list[Finding]) -> None:
    for finding in found:
        head = f"{_MARKS[finding.level]} {finding.name}"
        first, *rest = str(finding.value).splitlines() or [""]
        click.echo(f"{head:<{_INDENT}}{first}")
        for line in rest:
            click.echo(" " * _INDENT + line)
        if finding.advice:
            lines = textwrap.wrap(f"-> {finding.advice}", _WIDTH - _INDENT, subsequent_indent="   ")
            click.echo(textwrap.indent("\n".join(lines), " " * _INDENT))


def _fields(found: list[Finding]) -> dict[str, object]:
    """Values by name; and by name too, what to do about those that are not well."""
    return {
        **{finding.name: finding.value for finding in found},
        "notes": {finding.name: finding.advice for finding in found if finding.level == "note"},
        "problems": {finding.name: finding.advice for finding in found if finding.level == "problem"},
    }
