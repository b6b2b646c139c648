"""`bench report`: one page of all results of a folder, with bandwidths, latencies, ratios and histograms of times."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import click

from tritondt.cli.bench.compare import MALFORMED, read, seconds_of
from tritondt.cli.bench.harness import percentile
from tritondt.cli.bench.inputs import DTYPES
from tritondt.cli.charts import COLOURS, Series, histogram, line_chart
from tritondt.cli.foreign_files import printable
from tritondt.cli.html_page import charts, legend, page, table
from tritondt.cli.outputs import refuse_obstacle, refuse_unwritable, replace_file
from tritondt.cli.user_error import BenchmarkError

_PLACES = ("out_of_place", "in_place")
_MOST_HISTOGRAMS = 24
# Of fewer iterations a histogram shows how they happened to fall.
_FEWEST_ITERATIONS = 30
_TIMES = ("median ms", "p95 ms", "p99 ms", "fastest ms")
_REFERENCE = "torch"
_UNITS = (("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10))


@dataclass(frozen=True)
class Point:
    """One case of one implementation; `group` is all that tells cases apart but for the size, which is in bytes.

    `num_wrong` is None where nothing was checked. `beside` is the time of the call and a compute at once over that of
    both in turn, None where that was not measured.
    """

    group: str
    side: str
    size: int
    seconds: tuple[float, ...]
    bus_gb_per_s: float
    num_wrong: int | None
    beside: float | None = None

    @property
    def is_right(self) -> bool:
        """Whether the result was checked and found right; nothing else is drawn."""
        return self.num_wrong == 0


def points_of(found: Mapping[str, Any]) -> list[Point]:
    """Points of a result that `bench COLLECTIVE --json` or `bench redistribute --json` wrote."""
    return [*_of_redistributions(found), *_of_collectives(found)]


def _of_redistributions(found: Mapping[str, Any]) -> Iterator[Point]:
    for case in found.get("cases", ()):
        size = prod(case["shape"]) * DTYPES[found["dtype"]].itemsize
        group = f"{case['source']} -> {case['target']} on {'x'.join(map(str, case['mesh']))}"
        moved = case["bus_gb_per_s"] * case["median_s"] if "bus_gb_per_s" in case else 0.0
        num_wrong = 0 if found.get("validation", 1) else None  # a wrong result ends the run
        for side, seconds in seconds_of(case).items():
            yield Point(group, side, size, tuple(seconds), moved / median(seconds), num_wrong)


def _of_collectives(found: Mapping[str, Any]) -> Iterator[Point]:
    for result in found.get("results", ()) if "cases" not in found else ():
        words = [result["type"], *([result["redop"]] if result["redop"] != "none" else [])]
        if result["root"] >= 0:
            words.append(f"root {result['root']}")
        for place in _PLACES:
            if result[place] is not None:
                times = tuple(microseconds / 1e6 for microseconds in result[f"{place}_per_iter"]["times_us"])
                overlap = result.get("overlap") if place == "out_of_place" else None
                yield Point(
                    " ".join([*words, place.replace("_", " ")]),
                    result["implementation"],
                    result["size"],
                    times,
                    result[place]["bus_bw"],
                    result[place]["nwrong"],
                    overlap and overlap["both_us"] / (overlap["alone_us"] + overlap["compute_us"]),
                )


def _count(results: Mapping[str, object]) -> str:
    return "1 result" if len(results) == 1 else f"{len(results)} results"


def report_page(sections: Mapping[str, Sequence[str]], skipped: Mapping[str, str]) -> str:
    """The page of sections by the name of their files; `skipped` says why other files are not in it."""
    body = [f"<p>{_count(sections)}. GB/s are nccl-tests' bus bandwidth; only right results are drawn.</p>"]
    for section in sections.values():
        body += section
    if skipped:
        body.append("<h2>Not in this report</h2><ul>")
        body += [f"<li>{escape(name)}: {escape(why)}</li>" for name, why in skipped.items()]
        body.append("</ul>")
    return page("tritondt bench report", body)


def _section(name: str, found: Mapping[str, Any]) -> Iterator[str]:
    points = points_of(found)
    styles = {side: place for place, side in enumerate(dict.fromkeys(point.side for point in points))}
    ranks = found.get("ranks", found.get("config", {}).get("ranks"))
    yield f"<h2>{escape(str(found['benchmark']))} on {escape(str(ranks))} ranks ({escape(name)})</h2>"
    around = {"date": found.get("date", "?"), **found.get("machine", {}), **found.get("versions", {})}
    yield f"<p>{escape(', '.join(f'{key} {value}' for key, value in around.items()))}</p>"
    if not found.get("complete", True):
        yield f'<p class="wrong">partial: {escape("; ".join(found.get("errors", ())))}</p>'
    yield legend({side: COLOURS[style % len(COLOURS)] for side, style in styles.items()})
    groups: dict[str, list[Point]] = {}
    for point in points:
        groups.setdefault(point.group, []).append(point)
    for heading, drawn in _headed_charts(groups, styles):
        if any(drawn):
            yield f"<h3>{escape(heading)}</h3>"
            yield charts(filter(None, drawn))
    yield "<details><summary>All figures</summary>" + _figures(points) + "</details>"


Groups = Mapping[str, Sequence[Point]]
Styles = Mapping[str, int]


def _headed_charts(groups: Groups, styles: Styles) -> Iterator[tuple[str, list[str]]]:
    """Charts of a section below their headings; only right results are in them."""
    right = {group: [point for point in own if point.is_right] for group, own in groups.items()}
    yield "Bandwidth over size", [_bandwidth(group, own, styles) for group, own in right.items()]
    tinted = "Latency over size: median time, tinted up to the 95th percentile"
    yield tinted, [_latency(group, own, styles) for group, own in right.items()]
    if len(styles) > 1:
        reference = _REFERENCE if _REFERENCE in styles else next(iter(styles))
        heading = f"Time / {reference}'s, by medians; below 1 is faster"
        yield heading, [_ratios(group, own, styles, reference) for group, own in right.items()]
    if any(point.beside is not None for own in right.values() for point in own):
        heading = "Time beside a compute / both in turn, by medians; below 1 they overlap"
        yield heading, [_beside(group, own, styles) for group, own in right.items()]
    cases = _with_histograms(right)
    said = f"Times of iterations, each as long as its slowest rank, where there are {_FEWEST_ITERATIONS} and more"
    yield said, [_histogram(group, size, right[group], styles) for group, size in cases]


def _lines(points: Sequence[Point], styles: Styles, y: Callable[[Point], float]) -> list[Series]:
    """A line for each implementation; a value of 0, as the bandwidth where nothing moves, has no place on the axis."""
    return [
        Series(side, sorted((p.size, y(p)) for p in points if p.side == side and p.size > 0 and y(p) > 0), style)
        for side, style in styles.items()
    ]


def _bandwidth(group: str, points: Sequence[Point], styles: Styles) -> str:
    return line_chart(group, "GB/s", _lines(points, styles, lambda p: p.bus_gb_per_s), size_text)


def _latency(group: str, points: Sequence[Point], styles: Styles) -> str:
    medians = _lines(points, styles, lambda p: median(p.seconds) * 1e6)
    tops = _lines(points, styles, lambda p: percentile(p.seconds, 95) * 1e6)
    both = [replace(line, tops=[y for _, y in top.points]) for line, top in zip(medians, tops, strict=True)]
    return line_chart(group, "us", both, size_text)


def _ratios(group: str, points: Sequence[Point], styles: Styles, reference: str) -> str:
    """Lines of ratios to the reference; empty where it has no right result of the group."""
    theirs = {point.size: median(point.seconds) for point in points if point.side == reference}
    others = {side: style for side, style in styles.items() if side != reference}
    both = [point for point in points if point.size in theirs]
    series = _lines(both, others, lambda p: median(p.seconds) / theirs[p.size])
    return line_chart(group, "ratio", series, size_text, reference=1.0)


def _beside(group: str, points: Sequence[Point], styles: Styles) -> str:
    measured = [point for point in points if point.beside is not None]
    return line_chart(group, "ratio", _lines(measured, styles, lambda p: p.beside or 0.0), size_text, reference=1.0)


def _with_histograms(groups: Groups) -> list[tuple[str, int]]:
    """Groups and sizes with enough iterations; of too many, each group's smallest and largest."""
    enough = {group: [p for p in own if len(p.seconds) >= _FEWEST_ITERATIONS] for group, own in groups.items()}
    cases = [(group, size) for group, own in enough.items() for size in sorted({point.size for point in own})]
    if len(cases) <= _MOST_HISTOGRAMS:
        return cases
    ends = {group: {min(p.size for p in own), max(p.size for p in own)} for group, own in enough.items() if own}
    return [case for case in cases if case[1] in ends[case[0]]][:_MOST_HISTOGRAMS]


def _histogram(group: str, size: int, points: Sequence[Point], styles: Styles) -> str:
    enough = [p for p in points if p.size == size and len(p.seconds) >= _FEWEST_ITERATIONS]
    times = {p.side: [s * 1e3 for s in p.seconds] for p in enough}
    return histogram(f"{size_text(size)} {group}", "ms", times, styles)


def _figures(points: Sequence[Point]) -> str:
    head = ("case", "implementation", "size", "iterations", *_TIMES, "GB/s", "#wrong")
    rows = []
    for p in points:
        times = [median(p.seconds), percentile(p.seconds, 95), percentile(p.seconds, 99), min(p.seconds)]
        cells = [p.group, p.side, size_text(p.size), str(len(p.seconds)), *(f"{s * 1e3:.3f}" for s in times)]
        rows.append([*cells, f"{p.bus_gb_per_s:.3f}", "N/A" if p.num_wrong is None else str(p.num_wrong)])
    return table(head, rows, {number: "wrong" for number, p in enumerate(points) if p.num_wrong})


def size_text(size: float) -> str:
    """A number of bytes in the unit in which nccl-tests takes sizes.

    >>> size_text(1 << 20), size_text(1500), size_text(24)
    ('1M', '1.46K', '24')
    """
    for unit, factor in _UNITS:
        if size >= factor:
            return f"{size / factor:.3g}{unit}"
    return f"{size:.3g}"


def report(folder: Path, out: Path | None) -> None:
    """Writes a page of all results in a folder."""
    if not folder.is_dir():
        raise click.UsageError(f"{folder} is no folder; allowed is one with results of bench --json")
    path = folder / "report.html" if out is None else out
    if out is None:
        refuse_obstacle(path)
    refuse_unwritable(str(path))
    sections, skipped = {}, {}
    for file in sorted(folder.glob("*.json")):
        try:
            sections[file.name] = _read_section(file)
        except BenchmarkError as error:
            skipped[file.name] = str(error)
    if not sections:
        raise click.ClickException(
            f"{folder} has no result of bench --json among {len(skipped)} files that end in .json; nothing is written"
        )
    page_text = report_page(sections, skipped).encode("utf-8", "backslashreplace")
    if out is None:
        replace_file(path, page_text)
    else:
        path.write_bytes(page_text)
    click.echo(f"{path}: {_count(sections)}" + (f", {len(skipped)} files left out" if skipped else ""))


def _read_section(file: Path) -> list[str]:
    """The page's section of a file; BenchmarkError where it cannot be drawn, which leaves the others as they are."""
    _, found = read(file)
    try:
        return list(_section(file.name, found))
    except MALFORMED as error:
        raise BenchmarkError(printable(f"cannot read {file}: {type(error).__name__}: {error!s:.200}")) from error
