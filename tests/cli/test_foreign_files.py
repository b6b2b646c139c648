"""Files that others have made to harm who reads them: names as HTML, escapes of terminals, numbers that are none."""

import copy
import json
import os
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.cli.flight.recorded import as_file, failed, flight, waiting
from tests.cli.test_pages import collective, redistributions
from tritondt.cli.foreign_files import printable
from tritondt.cli.main import main

MARKUP = "<img src=x onerror=alert(1)>\"'&"
ESCAPES = "\x1b[2J\x1b]0;title\x07\x9b31m\u202e\r\b"
SEEN_BY_TERMINALS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class Tags(HTMLParser):
    """Names of tags and attributes of a page, as browsers see them."""

    def __init__(self) -> None:
        super().__init__()
        self.names = set[str]()
        self.attributes = set[str]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes.update(name for name, _ in attrs)


def invoke(*arguments: object) -> Result:
    """Runs a command; what it cannot do is said in a sentence, and never by a traceback."""
    ended = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert ended.exception is None or isinstance(ended.exception, SystemExit), repr(ended.exception)
    return ended


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all values within one, and of itself; of lists, the first ones'."""
    items = list(value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ())
    return [path, *(found for key, each in items for found in leaves(each, (*path, key)))]


def replaced(value: Any, path: tuple[Any, ...], by: Any) -> Any:
    if not path:
        return by
    found = copy.deepcopy(value)
    place = found
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = by
    return found


@pytest.mark.parametrize("made", [collective, redistributions])
def test_no_name_of_a_result_is_markup_of_the_page(tmp_path: Path, made: Callable[[], Any]) -> None:
    result = made()
    for number, path in enumerate(leaves(result)):
        (tmp_path / f"{number}.json").write_text(json.dumps(replaced(result, path, MARKUP)))
    (tmp_path / "z <img src=x>.json").write_text(json.dumps(result))
    ended = invoke("bench", "report", tmp_path)
    assert ended.exit_code == 0, ended.output
    page = (tmp_path / "report.html").read_text()
    assert "&lt;img src=x" in page
    tags = Tags()
    tags.feed(page)
    assert "svg" in tags.names
    assert tags.names.isdisjoint({"img", "script", "a"})
    assert not [name for name in tags.attributes if name.startswith("on")]


HARMFUL = {
    "no number": "NaN",
    "infinite": "Infinity",
    "too large a fraction": "1e999",
    "too large a whole number": "9" * 5000,
    "65 bits": str(1 << 65),
    "deep": "[" * 100_000 + "]" * 100_000,
    "empty": "[]",
    "nothing": "null",
    "below 0": "-1",
    "64 bits": str(1 << 63),
    "a text": '"\\u001b[31m"',
    "a half of a character": '"\\ud800"',
    "an object": '{"a": 1}',
}


@pytest.mark.in_core(4)
@pytest.mark.parametrize("made", [collective, redistributions])
@pytest.mark.parametrize("what", HARMFUL)
def test_a_harmful_value_anywhere_costs_no_other_result(tmp_path: Path, made: Callable[[], Any], what: str) -> None:
    result, mark = made(), "to be replaced"
    (tmp_path / "good.json").write_text(json.dumps(made()))
    for number, path in enumerate(leaves(result)):
        text = json.dumps(replaced(result, path, mark)).replace(f'"{mark}"', HARMFUL[what])
        (tmp_path / f"{number}.json").write_text(text)
    ended = invoke("bench", "report", tmp_path)
    assert ended.exit_code == 0, ended.output
    page = (tmp_path / "report.html").read_text()
    assert "(good.json)" in page
    for harmful in sorted(tmp_path.glob("[0-9]*.json"))[::3]:
        ended = invoke("bench", "compare", harmful, tmp_path / "good.json")
        assert not SEEN_BY_TERMINALS.search(ended.output), ended.output


def test_a_report_waits_for_no_pipe_and_reads_no_device(tmp_path: Path) -> None:
    (tmp_path / "good.json").write_text(json.dumps(collective()))
    os.mkfifo(tmp_path / "a.json")
    (tmp_path / "b.json").mkdir()
    (tmp_path / "c.json").symlink_to("/dev/zero")
    ended = invoke("bench", "report", tmp_path)
    assert ended.output == f"{tmp_path / 'report.html'}: 1 result, 3 files left out\n"
    page = (tmp_path / "report.html").read_text()
    assert page.count("it is no regular file but ") == 3


@pytest.mark.parametrize("what", ["a link", "a pipe"])
def test_the_page_takes_the_place_of_a_file_alone(tmp_path: Path, what: str) -> None:
    (tmp_path / "good.json").write_text(json.dumps(collective()))
    page, elsewhere = tmp_path / "report.html", tmp_path / "elsewhere"
    elsewhere.write_text("kept")
    page.symlink_to(elsewhere) if what == "a link" else os.mkfifo(page)
    ended = invoke("bench", "report", tmp_path)
    assert ended.exit_code == 2
    assert f"{page} is no file but {'l' if what == 'a link' else 'p'}rw" in ended.output
    assert ended.output.rstrip().endswith(", and is not replaced")
    assert elsewhere.read_text() == "kept"
    page.unlink()
    page.write_text("an older report")
    assert invoke("bench", "report", tmp_path).exit_code == 0
    assert "all_reduce" in page.read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "good.json", "report.html"]


def test_nothing_of_a_flight_record_is_obeyed_by_a_terminal(tmp_path: Path) -> None:
    fields = {"communicator": f"c{ESCAPES}", "operation": f"o{ESCAPES}", "site": f"s{ESCAPES}\nnothing is wrong"}
    (tmp_path / "rank-0.json").write_text(as_file(flight(0, waiting(1, 1, **fields), world_size=2)))
    (tmp_path / "rank-1.json").write_text(as_file(flight(1, failed(1, f"e{ESCAPES}\nfake", **fields), world_size=2)))
    ended = invoke("doctor", "flight", tmp_path)
    assert ended.exit_code == 1
    assert not SEEN_BY_TERMINALS.search(ended.output), ended.output
    assert r"\x1b[2J\x1b]0;title\x07\x9b31m\u202e\r\x08" in ended.output
    assert not [line for line in ended.output.splitlines() if line.startswith(("nothing is wrong", "fake"))]
    found = json.loads(invoke("doctor", "flight", tmp_path, "--json").output)
    assert found["failures"][0]["entry"]["error"] == f"e{ESCAPES}\nfake"  # as it is, for programs


def test_the_name_of_a_file_that_is_refused_is_not_obeyed(tmp_path: Path) -> None:
    (tmp_path / "rank-\x1b[31m.json").write_text("{}")
    ended = invoke("doctor", "flight", tmp_path)
    assert ended.exit_code == 2
    assert r"rank-\x1b[31m.json is refused" in ended.output
    assert not SEEN_BY_TERMINALS.search(ended.output)
    ended = invoke("bench", "compare", tmp_path / "rank-\x1b[31m.json", tmp_path / "b")
    assert ended.exit_code == 1
    assert not SEEN_BY_TERMINALS.search(ended.output)


@pytest.mark.in_core(3)
@pytest.mark.parametrize("what", HARMFUL)
def test_a_harmful_value_anywhere_in_a_flight_record_is_no_traceback(tmp_path: Path, what: str) -> None:
    record, mark = json.loads(as_file(flight(0, waiting(1, 1), failed(2, "error"), world_size=2))), "to be replaced"
    for path in leaves(record):
        text = json.dumps(replaced(record, path, mark)).replace(f'"{mark}"', HARMFUL[what])
        (tmp_path / "rank-0.json").write_text(text)
        ended = invoke("doctor", "flight", tmp_path)
        assert ended.exit_code in (1, 2), ended.output
        assert not SEEN_BY_TERMINALS.search(ended.output), ended.output


def test_what_is_seen_stays_as_it_is() -> None:
    assert printable("S0 -> R, träge, 層, 🙂") == "S0 -> R, träge, 層, 🙂"
