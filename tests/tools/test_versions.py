"""`make versions` keeps a row for each pair of versions, and counts what pytest reports."""

from pathlib import Path

import pytest

from tests.tools.versions import TABLE, Counts, Row, commands_of, counts_of, with_row

REPORT = """<testsuites><testsuite>
<testcase classname="tests.ops.test_x" name="test_good[a]"/>
<testcase classname="tests.ops.test_x" name="test_bad"><failure message="no"/></testcase>
<testcase classname="tests.ops.test_y" name="test_died"><error message="worker crashed"/></testcase>
<testcase classname="tests.ops.test_y" name="test_not"><skipped message="no GPU"/></testcase>
</testsuite></testsuites>"""


def test_what_pytest_reports_is_counted() -> None:
    assert counts_of(REPORT) == Counts(1, 1, ("tests/ops/test_x.py::test_bad", "tests/ops/test_y.py::test_died"))


def test_a_row_takes_the_place_of_that_of_its_versions() -> None:
    head = "# Versions\n\n| Python | torch |\n|---|---|\n"
    day = "2026-11-28"
    first, second = (Row("3.11.7", torch, day, "core", Counts(1, 0, ())) for torch in ("2.13.0+cpu", "2.15.0"))
    text = with_row(with_row(head + "\nWords.\n", first), second)
    assert text == f"{head}{first.text()}\n{second.text()}\n\nWords.\n"
    better = second._replace(counts=Counts(9, 0, ()))
    assert with_row(text, better) == text.replace(second.text(), better.text())


@pytest.mark.parametrize("uv", [None, "/bin/uv"])
def test_one_torch_is_installed_before_the_package(uv: str | None) -> None:
    make, torch, package = commands_of("python3.13", "2.15.0", Path("/venv"), uv)
    assert make[0] == (uv or "python3.13")
    assert "torch==2.15.0" in torch
    assert "setuptools>=77.0.3" in torch  # the first that reads the licence of pyproject.toml; venv brings older ones
    assert "--no-build-isolation" in package
    assert all((uv or "/venv/bin/python") == command[0] for command in (torch, package))


def test_the_table_in_the_documentation_has_rows_of_this_form() -> None:
    row = Row("3.99.0", "9.9.9", "2026-11-28", "core", Counts(1, 0, ()))
    text = with_row(TABLE.read_text(), row)
    (head,) = [line for line in text.splitlines() if line.startswith("| Python |")]
    assert head.count("|") == row.text().count("|")
    assert text.count("\n") == TABLE.read_text().count("\n") + 1
