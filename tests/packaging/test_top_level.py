"""The top level of the repository has the names that are listed here, and no file that a program has left there."""

import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
HIDDEN = {".ci", ".clang-format", ".github", ".gitignore", ".pre-commit-config.yaml"}
TEXTS = {"CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "README.md", "SECURITY.md"}
BUILD = {"Makefile", "constraints.txt", "mkdocs.yml", "pyproject.toml", "setup.py"}
CODE = {"benchmarks", "csrc", "docs", "examples", "kernels", "tests", "tritondt", "tritondt_autoload.py"}


def test_the_top_level_has_no_file_that_a_program_left_there():
    if shutil.which("git") is None or not (REPOSITORY / ".git").exists():
        pytest.skip("this is no checkout of git, or git is not installed")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    found = {path.partition("/")[0] for path in listed.stdout.split("\0") if path}
    assert found == HIDDEN | TEXTS | BUILD | CODE
