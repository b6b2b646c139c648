"""A plugin of pytest that notes each test's outcome in a file as it comes, and leaves out those that are noted there.

    python -m pytest -p tests.tools.gpu_progress --progress FILE ...

A line of the file is a JSON object: `{"begun": NAME}`, `{"test": NAME, "outcome": ..., "seconds": ...}`, or
`{"ended": STATUS}` when pytest has come to its end. A process that was killed leaves all that it has done, and a test
begun without an outcome is what it died of.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest

DIED = "died"
_DONE = "tests_of_earlier_calls"


class Progress(NamedTuple):
    """The notes of a file: outcomes by test, tests under way when the notes stopped, whether pytest has ended."""

    outcomes: dict[str, str]
    under_way: tuple[str, ...]
    has_ended: bool

    @property
    def has_failed(self) -> bool:
        """Whether a test failed or took its process with it."""
        return not {"passed", "skipped"}.issuperset(self.outcomes.values())

    def counts(self) -> str:
        """How many came out how.

        >>> Progress({"a": "passed", "b": "passed", "c": "died"}, (), True).counts()
        '2 passed, 1 died'
        """
        return ", ".join(f"{count} {outcome}" for outcome, count in Counter(self.outcomes.values()).most_common())


def read(path: Path) -> Progress:
    """The notes of a file, empty where there is none; a line that was cut off by a kill counts for nothing."""
    outcomes: dict[str, str] = {}
    begun: dict[str, None] = {}
    has_ended = False
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            note = json.loads(line)
        except json.JSONDecodeError:
            continue
        has_ended = "ended" in note
        if "begun" in note:
            begun[note["begun"]] = None
        elif "test" in note:
            begun.pop(note["test"], None)
            if outcomes.get(note["test"]) != "failed":  # of a test's setup, call and teardown
                outcomes[note["test"]] = note["outcome"]
    return Progress(outcomes, tuple(begun), has_ended)


def note(path: Path, **what: Any) -> None:
    """Adds a line."""
    with path.open("a") as file:
        file.write(json.dumps(what) + "\n")


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option that names the file."""
    parser.addoption("--progress", type=Path, required=False, help="file of outcomes, which are continued")


def pytest_configure(config: pytest.Config) -> None:
    """Notes are written where tests are told of: in the process that starts pytest-xdist's workers, not in these."""
    path: Path = config.getoption("--progress")
    told: dict[str, Any] | None = getattr(config, "workerinput", None)
    if told is None:
        # What was skipped may have been given what it lacked.
        done = [name for name, outcome in read(path).outcomes.items() if outcome != "skipped"]
        config.pluginmanager.register(_Writer(path, done))
    else:
        done = told[_DONE]
    config.pluginmanager.register(_Chooser(frozenset(done)))


class _Chooser:
    """Leaves out tests that are noted as done."""

    def __init__(self, done: frozenset[str]) -> None:
        self._done = done

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        left = [item for item in items if item.nodeid not in self._done]
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in self._done])
        items[:] = left


class _Writer:
    """Writes the notes."""

    def __init__(self, path: Path, done: list[str]) -> None:
        self._path, self._done = path, done
        note(path, started=True)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tells a worker of pytest-xdist: one in place of another that died must collect what the others did."""
        node.workerinput[_DONE] = self._done

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        note(self._path, begun=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            why = {"why": str(report.longrepr)[-2000:]} if report.outcome != "passed" else {}
            note(self._path, test=report.nodeid, outcome=report.outcome, seconds=round(report.duration, 3), **why)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":
            note(self._path, test=report.nodeid, outcome=report.outcome, why=str(report.longrepr)[-2000:])

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        note(self._path, ended=int(exitstatus))
