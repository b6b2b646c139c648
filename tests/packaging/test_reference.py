"""`make reference`: pdoc describes every public name of the rooms that the Makefile lists."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.test_documented import ROOMS

REPOSITORY = Path(__file__).parents[2]


def listed_rooms() -> list[str]:
    (line,) = re.findall("^PUBLIC := (.*)$", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    first, names = re.fullmatch(r"(\w+) \$\(addprefix tritondt\.,([\w ]+)\)", line).groups()  # type: ignore[union-attr]
    return [first, *(f"tritondt.{name}" for name in names.split())]


def test_the_makefile_lists_the_public_rooms():
    assert sorted(listed_rooms()) == sorted(room.__name__ for room in ROOMS)


@pytest.mark.extended
def test_every_public_name_is_described(tmp_path):
    pytest.importorskip("pdoc")
    command = [sys.executable, "-m", "pdoc", "--output-directory", str(tmp_path), *listed_rooms()]
    found = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    for room in listed_rooms():
        page = (tmp_path / f"{room.replace('.', '/')}.html").read_text()
        missing = [name for name in importlib.import_module(room).__all__ if f'id="{name}"' not in page]
        assert missing == [], room
