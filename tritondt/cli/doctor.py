"""`doctor`: what a machine offers to tritondt, what to do about it, and whether each transport moves tensors on it."""

from __future__ import annotations

import json
import textwrap
from dataclasses import replace

import click

from tritondt.cli.machine import Finding, machine_findings
from tritondt.cli.outputs import is_first
from tritondt.cli.smoke import Clock, Passed, Ranks, smoke_test, transports_here

_WIDTH = 100
_INDENT = 16
# Logs tell milliseconds.
_MOST_SKEW_NS = 1_000_000
_ONE = "install one version on all hosts"
_MARKS = {"ok": " ", "note": "!", "problem": "X"}


def doctor(as_json: bool, seconds: float) -> None:
    """Prints what this machine has and lacks, and tests each transport; status 1 where something fails."""
    prints = is_first()
    found = machine_findings()
    if prints and not as_json:
        _print(found)
    tested = smoke_findings(seconds)
    if prints and as_json:
        click.echo(json.dumps(_fields([*found, *tested]), indent=2))
    elif prints:
        _print(tested)
    if any(finding.level == "problem" for finding in [*found, *tested]):
        raise click.exceptions.Exit(1)


def smoke_findings(seconds: float) -> list[Finding]:
    """Findings of the smoke tests: hosts and clocks, each transport, and "exchange" for all of them."""
    smoke = smoke_test(seconds)
    found = [] if smoke.ranks is None else [*_hosts(smoke.ranks), *map(_clock, smoke.ranks.clocks)]
    num_ranks = 0 if smoke.ranks is None else smoke.ranks.num_ranks
    found += [_passed(each, num_ranks) for each in smoke.passed]
    if smoke.failed is None:
        return [*found, Finding("exchange", "OK")]
    transport, reason = smoke.failed
    known = [each.transport for each in smoke.passed]
    left = [name for name in transports_here() if name not in (transport, *known)]
    advice = "the traceback above names the call; TRITONDT_SOCKET_IFNAME chooses an interface, TRITONDT_TRANSPORT "
    advice += f"another transport (passed: {', '.join(known) or 'none'})"
    not_tested = [Finding(f"{name} test", "not reached", "note", "mend what failed before") for name in left]
    return [*found, *not_tested, Finding("exchange", f"{transport}: {reason}", "problem", advice)]


def _passed(found: Passed, num_ranks: int) -> Finding:
    """A transport that moved tensors; a note where it had to take another's place."""
    value = (
        f"{found.num_exchanges:,} exchanges of {num_ranks} ranks were right; 2 of 5x3 took "
        f"{found.small_s * 1e6:,.0f} us, 2 of 1025x511 {found.large_s * 1e3:,.2f} ms (medians)"
    )
    if not found.is_elsewhere:
        return Finding(f"{found.transport} test", value)
    advice = "run the ranks of a host as one user in one container, with memory for an arena of TRITONDT_ARENA_MB for "
    advice += "each, or choose sockets by TRITONDT_TRANSPORT=sockets"
    return Finding(f"{found.transport} test", f"no memory is shared, sockets carried it: {value}", "note", advice)


def _hosts(met: Ranks) -> list[Finding]:
    """The hosts of a launcher's ranks, and what is not well on those that have printed nothing; none of one host."""
    first, *others = met.hosts
    if not others:
        return []
    names = ", ".join(f"{host.name} (from rank {host.rank} on)" for host in met.hosts)
    found = [Finding("hosts", f"{met.num_ranks} ranks on {len(met.hosts)}: {names}")]
    versions = {finding.name: finding.value for finding in first.findings if finding.name in ("tritondt", "torch")}
    for host in others:
        found += [replace(each, name=f"{each.name} of {host.name}") for each in host.findings if each.level != "ok"]
        for each in host.findings:
            expected = versions.get(each.name, each.value)
            if each.value != expected:
                value = f"{each.value}; {expected} on {first.name}"
                found.append(Finding(f"{each.name} of {host.name}", value, "problem", _ONE))
    return found


def _clock(clock: Clock) -> Finding:
    """The offset of a host's clock from rank 0's, which is none within the error of the pings on one machine."""
    offset = clock.offset
    value = (
        f"{offset.offset_ns / 1e3:,.0f} us from rank 0 to rank {clock.rank} on {clock.host}, off by "
        f"{offset.error_ns / 1e3:,.0f} us at most"
    )
    if abs(offset.offset_ns) <= max(offset.error_ns, _MOST_SKEW_NS):
        return Finding("clock skew", value)
    advice = "times in logs and flight records do not compare: run chrony or ntpd on all hosts; traces align by pings"
    return Finding("clock skew", value, "note", advice)


def _print(found: list[Finding]) -> None:
    for finding in found:
        head = f"{_MARKS[finding.level]} {finding.name}"
        first, *rest = str(finding.value).splitlines() or [""]
        click.echo(f"{head:<{_INDENT - 1}} {first}")
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
