"""The workflows of the public CI run commands that a contributor runs, too."""

import re
from pathlib import Path
from typing import Any

import pytest

import tritondt
from tritondt.version import VERSION

REPOSITORY = Path(__file__).parents[2]
FILES = sorted((REPOSITORY / ".github").rglob("*.yml"))


def read(path: Path) -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    found: dict[str, Any] = yaml.safe_load(path.read_text())
    return found


def commands(item: Any) -> list[str]:
    """All that a workflow's steps run."""
    if isinstance(item, dict):
        own = [item["run"]] if isinstance(item.get("run"), str) else []
        return own + [text for value in item.values() for text in commands(value)]
    return [text for value in item for text in commands(value)] if isinstance(item, list) else []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_workflow_runs_targets_of_the_makefile(path: Path) -> None:
    targets = re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    for text in commands(read(path)):
        words = text.split()
        assert words[0] in ("make", ".ci/run", "pipx"), text
        assert set(words[1:]) <= set(targets) or words[0] != "make", text
        assert (REPOSITORY / words[0]).is_file() or "/" not in words[0], text


def test_the_wheels_are_those_of_the_versions_that_are_declared() -> None:
    project = pytest.importorskip("tomllib").loads((REPOSITORY / "pyproject.toml").read_text())
    declared = re.findall(r"Python :: (3\.\d+)", " ".join(project["project"]["classifiers"]))
    built = re.findall(r"cp3(\d+)-", project["tool"]["cibuildwheel"]["build"])
    assert [f"3.{minor}" for minor in built] == declared


def test_ranks_compare_the_version_that_is_published() -> None:
    project = pytest.importorskip("tomllib").loads((REPOSITORY / "pyproject.toml").read_text())
    assert tritondt.__version__ == VERSION == project["project"]["version"]
