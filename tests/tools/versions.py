"""Runs the core of the tests on several versions of torch and Python, and keeps their counts in docs/versions.md.

    python -m tests.tools.versions --torch '2.13.0 2.15.0' --python 'python3.11 python3.13'    # as `make versions` does

Each pair has a virtual environment in build/versions/, made by uv where that is installed, else by pip, and kept for
the next time. `--ready` names interpreters of environments that are there already, which are tested as they stand. One
build of the extension serves all versions of torch: only Python's counts.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

REPOSITORY = Path(__file__).parents[2]
TABLE = REPOSITORY / "docs" / "versions.md"
CORE = "not sanitized and not alone and not extended and not soak"
_ROW = re.compile(r"\| (?P<python>\d+\.\d+\.\d+\S*) \| (?P<torch>\d+\.\S+) \| ")
_ASK_VERSIONS = "import platform, torch; print(platform.python_version(), torch.__version__)"
# A run of the core takes 5 minutes on 2 cores; what takes this long hangs.
_LIMIT_S = 3600


class Counts(NamedTuple):
    """What became of the tests; `failures` names those that failed."""

    passed: int
    skipped: int
    failures: tuple[str, ...]


class Row(NamedTuple):
    """A line of the table."""

    python: str
    torch: str
    day: str
    tests: str
    counts: Counts

    def text(self) -> str:
        """The line in Markdown, with the first three failures by name.

        >>> Row("3.11.7", "2.15.0+cpu", "2026-11-28", "core", Counts(7, 1, ("tests/ops/test_x.py::test_y",))).text()
        '| 3.11.7 | 2.15.0+cpu | 2026-11-28 | core | 7 | 1 | 1 | `tests/ops/test_x.py::test_y` |'
        """
        failures = self.counts.failures
        named = ", ".join(f"`{name}`" for name in failures[:3]) + (", ..." if len(failures) > 3 else "")
        return (
            f"| {self.python} | {self.torch} | {self.day} | {self.tests} | {self.counts.passed} | {len(failures)} | "
            f"{self.counts.skipped} | {named or '-'} |"
        )


def counts_of(report: str) -> Counts:
    """The counts in pytest's report in JUnit's form."""
    passed, skipped, failures = 0, 0, []
    for case in ElementTree.fromstring(report).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            failures.append(f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}")
        elif case.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
    return Counts(passed, skipped, tuple(dict.fromkeys(failures)))


def with_row(text: str, row: Row) -> str:
    """The document with a row in place of that of its versions, or below the last one."""
    lines = text.splitlines()
    places = [number for number, line in enumerate(lines) if _ROW.match(line)]
    same = [number for number in places if lines[number].startswith(f"| {row.python} | {row.torch} |")]
    if same:
        lines[same[0]] = row.text()
    else:
        after = places[-1] if places else max(number for number, line in enumerate(lines) if line.startswith("|---"))
        lines.insert(after + 1, row.text())
    return "\n".join(lines) + "\n"


def commands_of(python: str, torch: str, folder: Path, uv: str | None) -> list[list[str]]:
    """What makes a virtual environment: by uv, or by Python's own venv and pip."""
    inside = str(folder / "bin" / "python")
    make = [uv, "venv", "--python", python, str(folder)] if uv else [python, "-m", "venv", str(folder)]
    # Tests write no bytecode: were none installed, as pip does, each process would compile torch for 20 s.
    by_uv = [str(uv), "pip", "install", "--quiet", "--compile-bytecode", "--python", inside]
    install = by_uv if uv else [inside, "-m", "pip", "install", "-qq"]
    # torch goes first: the extension is built without isolation, and says what is missing. The setuptools that venv
    # brings reads no licence as pyproject.toml has it.
    return [
        make,
        [*install, f"torch=={torch}", "numpy", "setuptools>=77.0.3", "pybind11"],
        [*install, "--no-build-isolation", "--editable", f"{REPOSITORY}[cli,test]"],
    ]


def environment_of(python: str, torch: str) -> Path:
    """The interpreter of a pair's virtual environment, which is made where it is not there."""
    # By the version: two interpreters may be called by one name.
    ask = [python, "-c", "import platform; print(platform.python_version())"]
    version = subprocess.check_output(ask, text=True).strip()
    folder = REPOSITORY / "build" / "versions" / f"python-{version}-torch-{torch}"
    stamp = folder / "made"
    if not stamp.exists():
        shutil.rmtree(folder, ignore_errors=True)
        for command in commands_of(python, torch, folder, shutil.which("uv")):
            subprocess.run(command, check=True)
        stamp.touch()
    return folder / "bin" / "python"


def interpreters(pythons: Sequence[str], torches: Sequence[str], ready: Sequence[str]) -> Iterator[Path]:
    """Interpreters that have torch: the ready ones, then each pair's, which is installed when its turn comes."""
    for inside in ready:
        # Not resolved: an environment is where its link to the interpreter lies.
        yield Path(inside).absolute()
    for python in pythons:
        for torch in torches:
            yield environment_of(python, torch)


def run(python: Path, tests: Sequence[str]) -> Row:
    """The row of an interpreter: the extension is built where it is older than its sources, then the tests run."""
    build = [str(python), "setup.py", "--quiet", "build_ext", "--inplace"]
    subprocess.run(build, cwd=REPOSITORY, check=True)
    versions = subprocess.check_output([str(python), "-c", _ASK_VERSIONS], text=True).split()
    report = REPOSITORY / "build" / "versions" / f"python-{versions[0]}-torch-{versions[1]}.xml"
    report.parent.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    # A worker that dies fails its test alone.
    workers = ["--numprocesses", os.environ.get("WORKERS", "auto"), "--dist", "loadfile", "--max-worker-restart", "20"]
    command = [str(python), "-m", "pytest", "-q", *workers, "-m", CORE, f"--junitxml={report}", *(tests or ["tests"])]
    subprocess.run(command, cwd=REPOSITORY, env=os.environ | {"PYTHONPATH": "."}, check=False, timeout=_LIMIT_S)
    names = " ".join(name.removeprefix("tests/") for name in tests)
    return Row(versions[0], versions[1], date.today().isoformat(), names or "core", counts_of(report.read_text()))


def main(arguments: Sequence[str]) -> int:
    """The exit status: 1 where a test failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.versions", description=__doc__.partition("\n")[0])
    parser.add_argument("--torch", default="", help="versions of torch")
    parser.add_argument("--python", default=sys.executable, help="interpreters")
    parser.add_argument("--ready", default="", help="interpreters of environments that have torch and pytest")
    parser.add_argument("--tests", default="", help="folders or files of tests; all of them without")
    given = parser.parse_args(arguments)
    if not (given.torch or given.ready):
        parser.error("nothing to test: --torch names versions to install, --ready interpreters that have one")
    failed = False
    for inside in interpreters(given.python.split(), given.torch.split(), given.ready.split()):
        row = run(inside, given.tests.split())
        TABLE.write_text(with_row(TABLE.read_text(), row))
        sys.stdout.write(row.text() + "\n")
        sys.stdout.flush()
        failed |= bool(row.counts.failures)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
