"""Tests on an extension, and a test double of NCCL, that have AddressSanitizer and UndefinedBehaviorSanitizer.

    python -m tests.tools.sanitized tests/comm/transports/test_nccl_cases.py [PYTEST ARGUMENTS]

It ends as pytest does, or with 1 for any report.

They run in a checkout of links to this one, build/sanitize/checkout, where only the extension is another. What the
sanitizers report goes to files, for a rank that they end may be one that a test expects to lose. Leaks are not looked
for: Python and torch leave what they have to the end of the process. torch itself has no sanitizers.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parents[2]
BUILD = REPOSITORY / "build" / "sanitize"
CHECKOUT = BUILD / "checkout"
DOUBLE = BUILD / "fake_nccl" / "address" / "libnccl.so.2"
_ERRORS = ("ERROR: AddressSanitizer", "runtime error: ")
# C++ exceptions are intercepted where the library that throws them is there from the start.
_PRELOADED = ("libasan.so", "libubsan.so", "libstdc++.so.6")


class Outcome(NamedTuple):
    """How a process ended, and what the sanitizers reported of it and of all that it started."""

    returncode: int
    output: str
    reports: tuple[str, ...]


def build() -> None:
    """Builds extension and double, where their sources have changed, and links the checkout anew."""
    extension = BUILD / "address" / "_C.so"
    for makefile, target in (("tests/csrc/sanitize", extension), ("tests/doubles/fake_nccl", DOUBLE)):
        command = ["make", "--silent", "--jobs", "2", "--file", f"{makefile}/Makefile", f"PYTHON={sys.executable}"]
        subprocess.run([*command, str(target)], check=True, cwd=REPOSITORY)
    shutil.rmtree(CHECKOUT, ignore_errors=True)
    package = CHECKOUT / "tritondt"
    package.mkdir(parents=True)
    for found in REPOSITORY.iterdir():
        if found.name not in ("tritondt", ".git"):
            (CHECKOUT / found.name).symlink_to(found)
    for found in (REPOSITORY / "tritondt").iterdir():
        if not found.name.startswith("_C.cpython"):
            (package / found.name).symlink_to(found)
    (package / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}").symlink_to(extension)


def run(arguments: Sequence[str], reports: Path) -> Outcome:
    """Runs Python with these arguments in the checkout; an empty folder takes the reports."""
    libraries = [subprocess.check_output(["g++", f"-print-file-name={name}"], text=True) for name in _PRELOADED]
    common = f"log_path={reports / 'report'}:halt_on_error=1"
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(map(str.strip, libraries)),
        # A fault asks for more memory than there is; that is warned of.
        "ASAN_OPTIONS": f"{common}:detect_leaks=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": f"{common}:print_stacktrace=1",
        "FAKE_NCCL_LIBRARY": str(DOUBLE),
        "PYTHONPATH": str(CHECKOUT),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    ran = subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        cwd=CHECKOUT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    written = (found.read_text() for found in sorted(reports.iterdir()))
    return Outcome(ran.returncode, ran.stdout, tuple(text for text in written if any(map(text.count, _ERRORS))))


def run_tests(arguments: Sequence[str], reports: Path) -> Outcome:
    """Runs pytest so; without its cache, which is that of the tests that were run without sanitizers."""
    return run(["-m", "pytest", "-p", "no:cacheprovider", "--quiet", *arguments], reports)


def main() -> None:
    """Runs the tests that are named, and tells what became of them."""
    build()
    folder = BUILD / "reports"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    outcome = run_tests(sys.argv[1:], folder)
    sys.stdout.write("\n".join([outcome.output, *outcome.reports, f"sanitizers: {len(outcome.reports)} reports\n"]))
    sys.exit(outcome.returncode or bool(outcome.reports))


if __name__ == "__main__":
    main()
