"""Text of a run as nccl-tests prints it, with the implementation's name behind; narrower where the terminal is."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from tritondt.cli.bench import AVERAGES
from tritondt.cli.bench.breakdown import HEADER, TITLE
from tritondt.cli.bench.collective.case import Case
from tritondt.cli.bench.collective.on_rank import Devices
from tritondt.cli.bench.collective.record import (
    Request,
    Row,
    Timing,
    average_bus_bandwidth,
    label,
    num_wrong,
)
from tritondt.cli.bench.harness import percentile, ratio_of
from tritondt.cli.bench.sizes import bytes_text

_PLACES = ("out", "in")
# nccl-tests' columns; then the same closer together, so that a name fits in 120; a name is two and up to 10 letters.
_WIDE, _CLOSER = 118, 106
_SIDE_WIDTH = 2 + 10


def figure(value: float, width: int) -> str:
    """Number with two decimals (three below 1), or fewer where the width has no room for them.

    >>> figure(12.345, 7), figure(0.0421, 6), figure(123456.7, 7), figure(1234567.8, 7)
    ('  12.35', ' 0.042', ' 123457', '1234568')
    """
    texts = [f"{value:.{decimals}f}" for decimals in ((3, 2, 1, 0) if value < 1 else (2, 1, 0))]
    return next((text for text in texts if len(text) <= width), texts[-1]).rjust(width)


class Table:
    """Lines of one run; `columns` is the terminal's width, None where there is none to fit."""

    def __init__(self, request: Request, columns: int | None) -> None:
        self._request = request
        more = _SIDE_WIDTH if len(request.sides) > 1 else 0
        self._is_wide = columns is None or columns >= _CLOSER + more
        # Between columns: two spaces where they are as far apart as nccl-tests', else one.
        self._space = "  " if columns is None or columns >= _WIDE + more else " "
        self._columns = columns
        self._said = ""

    def title(self, devices: Devices, versions: dict[str, str], notes: Sequence[str]) -> list[str]:
        """Lines above the table: versions, what is measured, and where."""
        request = self._request
        said = " ".join(f"{name}={version}" for name, version in versions.items())
        cases = request.cases
        lines = [
            f"# tritondt bench, in the conventions of nccl-tests: {said}",
            f"# Collective test starting: {request.collective}",
            f"# ranks {request.num_ranks} minBytes {cases[0].size} maxBytes {max(case.size for case in cases)} "
            + (f"step: {request.step_text} " if request.step is not None else "")
            + f"warmup iters {request.warmup} iters {request.iterations} validation {request.check} "
            f"time: {AVERAGES[request.average]} of ranks",
            f"# implementations: {', '.join(request.sides)}, in turns",
            *(f"# {note}" for note in notes),
            "#",
            "# Using devices",
        ]
        lines += [f"#  {one}" for one in devices.of_ranks]
        return [*self._wrapped(lines), "#", *self._header()]

    def _wrapped(self, lines: Sequence[str]) -> list[str]:
        """Lines of words, none wider than the terminal, each part of one behind a #."""
        if self._columns is None:
            return list(lines)
        width = self._columns
        return [
            part
            for line in lines
            for part in (textwrap.wrap(line, width, subsequent_indent="#   ") if len(line) > width else [line])
        ]

    def _header(self) -> list[str]:
        if not self._is_wide:
            figures = f"  {'time':>8}  {'algbw':>6}  {'busbw':>6}  {'#wrong':>6}"
            units = f"  {'(us)':>8}  {'(GB/s)':>6}  {'(GB/s)':>6}"
            return [
                f"#{'size':>10} {'count':>10} {'type':>8}    {figures}",
                f"#{'(B)':>10} {'(elem.)':>10} {'':>8}    {units}",
            ]
        between = self._space
        figures, units = (
            "".join(f"{between}{name:>{width}}" for name, width in zip(names, (7, 6, 6, 6), strict=True))
            for names in (("time", "algbw", "busbw", "#wrong"), ("(us)", "(GB/s)", "(GB/s)", ""))
        )
        widths = (12, 12, 8, 6, 6)
        left, below = (
            between.join(f"{name:>{width}}" for name, width in zip(names, widths, strict=True)).replace(" ", "#", 1)
            for names in (("size", "count", "type", "redop", "root"), ("(B)", "(elements)", "", "", ""))
        )
        above = f"#{'':>{len(left) - 1}}{'out-of-place':>{len(figures)}}{'in-place':>{len(figures)}}"
        side = f"  {'impl'}" if len(self._request.sides) > 1 else ""
        return [above, f"{left}{figures}{figures}{side}", (below + units + units).rstrip()]

    def row(self, row: Row) -> list[str]:
        """A row of nccl-tests, or a line for each place where the terminal is narrow."""
        case = row.case
        if row.note is not None:
            return self._wrapped([f"# {label(row.side)}: not run at {bytes_text(case.size)}: {row.note}"])
        side = f"  {label(row.side)}" if len(self._request.sides) > 1 else ""
        if self._is_wide:
            between = self._space
            cells = (f"{case.size:>12}", f"{case.count:>12}", f"{case.type:>8}", f"{case.redop:>6}", f"{case.root:>6}")
            return [between.join(cells) + "".join(self._figures(row, place, 7) for place in _PLACES) + side]
        name = " ".join(_kind(case))
        said = [f"# {name}:"] if self._has_several_kinds and name != self._said else []
        self._said = name
        left = f"{case.size:>11} {case.count:>10} {case.type:>8}"
        return [*said, *(f"{left} {place:>3}{self._figures(row, place, 8)}{side}" for place in row.timings)]

    @property
    def _has_several_kinds(self) -> bool:
        """Whether cases differ in more than size; narrow rows have no columns for reduction and root."""
        return len({" ".join(_kind(case)) for case in self._request.cases}) > 1

    def _figures(self, row: Row, place: str, time_width: int) -> str:
        between = self._space if self._is_wide else "  "
        timing = row.timings.get(place)
        if timing is None:
            cells = ["N/A".rjust(time_width), *("N/A".rjust(6) for _ in range(3))]
        else:
            seconds = timing.time_s(self._request.average)
            bandwidths = row.case.kind.bandwidths(row.case.size, row.case.num_ranks, seconds)
            wrong = "N/A" if timing.num_wrong is None else str(timing.num_wrong)
            cells = [figure(seconds * 1e6, time_width), *(figure(each, 6) for each in bandwidths), wrong.rjust(6)]
        return "".join(f"{between}{cell}" for cell in cells)

    def iterations(self, rows: Sequence[Row]) -> list[str]:
        """A line of percentiles for each row and place, of 80 columns with names of up to 10 letters."""
        names = ("min", "p50", "p95", "p99", "max")
        lines = [
            "#",
            *self._wrapped(
                ["# Iterations (us, of the slowest rank in each), their variation, and the spread of the ranks' means:"]
            ),
            f"#{'size':>10}    " + "".join(f"{name:>8}" for name in names) + "  cv% ranks%  impl",
        ]
        for said, row in self._told_apart(rows):
            lines += said + [self._percentiles(row, place, timing) for place, timing in row.timings.items()]
        return lines

    def _told_apart(self, rows: Sequence[Row]) -> Iterator[tuple[list[str], Row]]:
        """Rows, each with the line above it that says which type, reduction and root come; none where all are alike."""
        names = [" ".join(_kind(row.case)) for row in rows]
        before = "" if len(set(names)) > 1 else names[0] if names else ""
        for name, row in zip(names, rows, strict=True):
            yield ([f"# {name}:"] if name != before else []), row
            before = name

    def parts(self, rows: Sequence[Row]) -> list[str]:
        """A line for each row of which parts were timed, below what they are; none without any."""
        found = [row for row in rows if row.parts is not None]
        if not found:
            return []
        form = "#{:>11}" + "{:>10}" * 6
        lines = ["#", *(f"# {line}" for line in TITLE.splitlines()), form.format("size", *HEADER)]
        for said, row in self._told_apart(found):
            assert row.parts is not None, f"{row.case} has parts"
            lines += [*said, form.format(row.case.size, *row.parts.cells())]
        return lines

    def overlaps(self, rows: Sequence[Row]) -> list[str]:
        """A line for each row that was timed beside a compute, and for each implementation that could not be."""
        found = [row for row in rows if row.overlap is not None]
        lacking = [row for row in rows if row.overlap is None and row.timings and self._request.compute_ms]
        said_once = dict.fromkeys(
            f"# {label(row.side)}: {row.case.kind.name} is not issued by itself, and has no overlap" for row in lacking
        )
        if not found:
            return [*(["#"] if said_once else []), *self._wrapped(list(said_once))]
        told = (
            "# Out of place beside a compute (us, medians of the slowest rank), and how much of the shorter is hidden:"
        )
        lines = ["#", *self._wrapped([*said_once, told])]
        lines.append(
            f"#{'size':>10}" + "".join(f"{name:>10}" for name in ("call", "compute", "both")) + f"{'overlap':>16}  impl"
        )
        for said, row in self._told_apart(found):
            assert row.overlap is not None, f"{row.case} has an overlap"
            times = (row.overlap.alone_s, row.overlap.compute_s, row.overlap.both_s)
            cells = "".join(f"{seconds * 1e6:>10.1f}" for seconds in times)
            share = row.overlap.share
            text = "not measurable" if share is None else f"{share * 100:.0f}%"
            lines += [*said, f"#{row.case.size:>10}{cells}{text:>16}  {label(row.side)}"]
        return lines

    def _percentiles(self, row: Row, place: str, timing: Timing) -> str:
        slowest = [seconds * 1e6 for seconds in timing.slowest_s]
        values = [min(slowest), *(percentile(slowest, percent) for percent in (50, 95, 99)), max(slowest)]
        text = f"#{row.case.size:>10} {place:>3}" + "".join(f" {figure(value, 7)}" for value in values)
        return f"{text} {timing.variation * 100:>4.0f} {timing.rank_spread * 100:>6.0f}  {label(row.side)}"

    def footer(self, rows: Sequence[Row], least_bandwidth: float | None) -> list[str]:
        """Lines below the table: wrong elements, the mean bus bandwidth of each side, and the ratios of times."""
        request = self._request
        wrong = num_wrong(rows)
        lines = ["#", f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}"]
        for side in request.sides:
            mean = average_bus_bandwidth(rows, side, request.average)
            if mean is not None:
                verdict = ""
                if side == request.sides[0] and least_bandwidth is not None:
                    verdict = "OK" if reaches(mean, least_bandwidth) else "FAILED"
                name = f" ({label(side)})" if len(request.sides) > 1 else ""
                lines.append(f"# Avg bus bandwidth    : {mean:g} {verdict}".rstrip() + name)
        lines += [f"# {text}" for text in comparisons(request, rows)]
        return [*self._wrapped(lines), "#", f"# Collective test concluded: {request.collective}", "#"]


def _kind(case: Case) -> list[str]:
    """Words that tell a case from others of its size: type, reduction, root."""
    words = [case.type, *([case.redop] if case.kind.reduces else [])]
    return [*words, *([f"root {case.root}"] if case.kind.has_root else [])]


def reaches(mean: float, least: float) -> bool:
    """Whether a mean bandwidth passes nccl-tests' check, which allows for a tenth less."""
    return mean >= 0.9 * least


def comparisons(request: Request, rows: Sequence[Row]) -> list[str]:
    """The first implementation's time in units of each other's; not said where a result is wrong or unchecked."""
    first, *others = request.sides
    lines = []
    for other in others:
        pairs, unfit = [], 0
        by_case = {(row.side, row.case): row for row in rows}
        for case in request.cases:
            both = [by_case.get((side, case)) for side in (first, other)]
            ours, theirs = (row.timings if row is not None else {} for row in both)
            for place in ours.keys() & theirs.keys():
                if ours[place].is_right and theirs[place].is_right:
                    pairs.append((ours[place].slowest_s, theirs[place].slowest_s))
                else:
                    unfit += 1
        against = f"time of {label(first)} / {label(other)}"
        if unfit:
            why = "results were not checked (-c 0)" if request.check == 0 else "a result is wrong"
            lines.append(f"{against}: not said, since {why}")
        elif pairs:
            lines.append(f"{against}: {ratio_of(pairs, in_turns=True)}")
    return lines
