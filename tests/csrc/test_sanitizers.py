"""csrc under sanitizers: its driver ends well, and a planted error is found."""

import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.extended

REPOSITORY = Path(__file__).parents[2]
SOURCES = REPOSITORY / "tests" / "csrc" / "sanitize"
PLANTED = {
    # Of two accesses at the very same moment the sanitizer may note neither: there are many.
    "thread": "int x; void add() { for (int n = 0; n < 10000; ++n) ++x; }"
    "int main() { std::thread t(add); add(); t.join(); }",
    "address": "int main(int n, char**) { int* p = new int[4]; std::thread([] {}).join(); return p[n + 3]; }",
    "undefined": "int main(int n, char**) { std::thread([] {}).join(); return (n + 0x7FFFFFFF) == 3; }",
}
REPORT = {"thread": "data race", "address": "heap-buffer-overflow", "undefined": "signed integer overflow"}


def skip_unless_there(sanitizer, folder):
    """Builds the planted program, which needs the sanitizer's library to link."""
    if shutil.which("g++") is None or shutil.which("make") is None or shutil.which("setarch") is None:
        pytest.skip("g++, make or setarch is not installed")
    source = folder / "planted.cpp"
    source.write_text(f"#include <thread>\n{PLANTED[sanitizer]}\n")
    built = subprocess.run(
        [
            "g++",
            "-g",
            "-pthread",
            f"-fsanitize={sanitizer}",
            "-fno-sanitize-recover=all",
            source,
            "-o",
            folder / "planted",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if built.returncode != 0:
        pytest.skip(f"g++ cannot link -fsanitize={sanitizer}: {built.stderr.splitlines()[-1]}")


@pytest.mark.parametrize("sanitizer", list(PLANTED))
def test_a_planted_error_is_found(sanitizer, tmp_path):
    skip_unless_there(sanitizer, tmp_path)
    ran = subprocess.run(["setarch", "-R", tmp_path / "planted"], capture_output=True, text=True, check=False)
    assert ran.returncode != 0
    assert REPORT[sanitizer] in ran.stderr


@pytest.mark.slow
@pytest.mark.timeout(400)  # the first build takes a minute on two cores
@pytest.mark.parametrize("sanitizer", ["thread", pytest.param("address", marks=pytest.mark.soak)])
def test_csrc_has_no_races_and_no_errors_of_memory(sanitizer, tmp_path):
    skip_unless_there(sanitizer, tmp_path)
    ran = subprocess.run(
        ["make", "--jobs", "2", "--file", SOURCES / "Makefile", sanitizer],
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "watchdog: " in ran.stdout  # the last part came to its end
