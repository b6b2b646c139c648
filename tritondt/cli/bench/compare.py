"""`bench compare`: how the times of one result relate to those of another, with a verdict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from tritondt.cli.bench.harness import Ratio, ratio_of
from tritondt.cli.bench.json_result import is_printed, write_json
from tritondt.cli.foreign_files import ForeignFileError, parse, printable, read_text
from tritondt.cli.outputs import columns, fitted
from tritondt.cli.user_error import BenchmarkError

# What reading an object raises that is no result.
MALFORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError, RecursionError)
_PLACES = ("out_of_place", "in_place")
_TOP = ("benchmark", "ranks", "threads", "dtype")
# An interval of up to 1,000 times fits its column.
_COLUMNS = "{:>8}  {:<18}  {:<14}  {}"


@dataclass(frozen=True)
class Entry:
    """Times of one case in a file; `side` is the implementation, `case` all else that tells cases apart."""

    case: str
    side: str
    times: tuple[float, ...]
    is_right: bool


def read(path: Path) -> tuple[list[Entry], Mapping[str, Any]]:
    """Entries of a file that `--json` wrote, and the object in it; BenchmarkError for anything else."""
    try:
        found = parse(read_text(path))
        entries = list(_entries(found))
    except ForeignFileError as error:
        raise BenchmarkError(printable(f"cannot read {path}: {error}")) from error
    except MALFORMED as error:
        entries, missing = [], f"{error!r:.200}"
    else:
        missing = "no results"
    if not entries:
        raise BenchmarkError(
            printable(f"{path} is no result of `bench COLLECTIVE --json` or `bench redistribute --json`: {missing}")
        )
    return entries, found


def _entries(found: Mapping[str, Any]) -> Iterator[Entry]:
    for case in found.get("cases", ()):
        name = f"{'x'.join(map(str, case['shape']))} {case['source']} -> {case['target']} on {case['mesh']}"
        for side, seconds in seconds_of(case).items():
            # A wrong one ends the run.
            yield Entry(f"{name}, {found['dtype']}", side, tuple(seconds), found.get("validation", 1) > 0)
    for result in found.get("results", ()) if "cases" not in found else ():
        for place in _PLACES:
            if result[place] is not None:
                times = tuple(result[f"{place}_per_iter"]["times_us"])
                yield Entry(_name(found, result, place), result["implementation"], times, result[place]["nwrong"] == 0)


def seconds_of(case: Mapping[str, Any]) -> dict[str, list[float]]:
    """Seconds of each implementation of a redistribution, by its name; files of older versions have torch's only."""
    if "others" in case:
        others = {name: other["seconds"] for name, other in case["others"].items()}
    else:
        others = {"torch": case["torch_seconds"]} if "torch_seconds" in case else {}
    return {"tritondt": case["seconds"], **others}


def _name(found: Mapping[str, Any], result: Mapping[str, Any], place: str) -> str:
    parts = result["parts"]
    rows = parts if isinstance(parts[0], list) else [parts]
    is_even = len({part for row in rows for part in row}) == 1
    words = [found["benchmark"], str(result["size"]), result["type"], result["redop"], place.replace("_", "-")]
    words += [f"on {found['config']['ranks']}"] + ([] if is_even else [f"parts {parts}"])
    return " ".join(words + ([] if result["root"] < 0 else [f"root {result['root']}"]))


@dataclass(frozen=True)
class Pair:
    """One case in both files."""

    name: str
    before: Entry
    after: Entry


def pair(before: list[Entry], after: list[Entry]) -> list[Pair]:
    """Cases that both have, by implementation; where the files have one each, and others, these are compared."""
    sides = [{entry.side for entry in entries} for entries in (before, after)]
    across = not sides[0] & sides[1]
    if across and max(map(len, sides)) > 1:
        names = [", ".join(sorted(each)) for each in sides]
        raise BenchmarkError(f"no implementation is in both files: {names[0]} and {names[1]}")

    def key(entry: Entry) -> tuple[str, str]:
        return entry.case, "" if across else entry.side

    of_after = {key(entry): entry for entry in after}
    label = "" if across or len(sides[0] & sides[1]) == 1 else " by "
    found = [
        Pair(entry.case + (label and label + entry.side), entry, of_after[key(entry)])
        for entry in before
        if key(entry) in of_after
    ]
    if not found:
        raise BenchmarkError(f"no case is in both files; the first have {before[0].case!r} and {after[0].case!r}")
    return found


def compare(before: Path, after: Path, json_to: str | None) -> None:
    """Prints the ratios of the median times of two results, AFTER / BEFORE."""
    (old, old_file), (new, new_file) = read(before), read(after)
    pairs = pair(old, new)
    right = [each for each in pairs if each.before.is_right and each.after.is_right]
    _check_times(before, after, right)
    try:
        means = {side: _ratio([each for each in right if each.after.side == side]) for side in _sides(right)}
        result = {
            "before": str(before),
            "after": str(after),
            "differences": differences(old_file, new_file),
            "left_out": [each.name for each in pairs if each not in right],
            "cases": [_case(each) for each in right],
            "only_in_one": len(old) + len(new) - 2 * len(pairs),
            "geometric_means": {side: _ratio_json(ratio) for side, ratio in means.items()},
        }
        told = [*lines(result), *(f"geometric mean of time after / before, {s}: {m}" for s, m in means.items())]
        width = columns(is_printed(json_to))
        told = [part for line in told for part in fitted(printable(line), width, _indent(line))]
    except MALFORMED as error:
        raise BenchmarkError(printable(f"cannot compare {before} and {after}: {error!r:.200}")) from error
    for line in told:
        click.echo(line, err=is_printed(json_to))
    write_json(result, json_to)
    if not right:
        raise click.ClickException("no case has right results in both files: there is no ratio to report")


def _check_times(before: Path, after: Path, pairs: list[Pair]) -> None:
    """BenchmarkError where a ratio cannot be made of what is there."""
    for path, times in ((before, [p.before.times for p in pairs]), (after, [p.after.times for p in pairs])):
        for seconds in times:
            if not seconds or not all(type(each) in (int, float) and each >= 0 for each in seconds):
                raise BenchmarkError(
                    printable(
                        f"{path} has times {list(seconds)!r:.100}; allowed are one or more numbers that are not below 0"
                    )
                )


def _sides(pairs: list[Pair]) -> list[str]:
    return list(dict.fromkeys(each.after.side for each in pairs))


def _ratio(pairs: list[Pair]) -> Ratio:
    return ratio_of([(each.after.times, each.before.times) for each in pairs], in_turns=False)


def _ratio_json(ratio: Ratio) -> dict[str, Any]:
    return {"ratio": ratio.mean, "interval": ratio.interval, "verdict": ratio.verdict}


def _case(found: Pair) -> dict[str, Any]:
    return {"case": found.name, **_ratio_json(_ratio([found]))}


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Machine, versions and settings in which two results differ, and whether one of them is partial."""
    found = [
        f"{name} is partial" for name, each in (("before", before), ("after", after)) if not each.get("complete", True)
    ]
    for group in ("machine", "versions"):
        old, new = before.get(group, {}), after.get(group, {})
        found += [f"{name}: {old.get(name)} and {new.get(name)}" for name in old if old.get(name) != new.get(name)]
    old, new = ({key: each.get(key, each.get("config", {}).get(key)) for key in _TOP} for each in (before, after))
    return found + [f"{name}: {old[name]} and {new[name]}" for name in _TOP if old[name] != new[name]]


def _indent(line: str) -> str:
    """Space before further parts of a line: below the case's name, or as wide as a level."""
    return " " * (len(_COLUMNS.format("", "", "", "")) if line.startswith(" ") else 4)


def lines(result: Mapping[str, Any]) -> list[str]:
    """A line for each case, its name last."""
    found = [f"differs: {text}" for text in result["differences"]]
    found.append(_COLUMNS.format("ratio", "95 % interval", "verdict", "case"))
    for case in result["cases"]:
        interval = "-" if case["interval"] is None else "{:.3f} to {:.3f}".format(*case["interval"])
        found.append(_COLUMNS.format(f"{case['ratio']:.3f}", interval, case["verdict"], case["case"]))
    found += [f"left out, wrong or unchecked: {name}" for name in result["left_out"]]
    if result["only_in_one"]:
        found.append(f"in one of the files only: {result['only_in_one']} measurements")
    return found
