"""Limits that keep the layout readable: files at the package's root, files in a folder, lines in a file."""

from collections import Counter
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
ROOMS = ("tritondt", "kernels", "csrc", "tests", "benchmarks", "examples")
SUFFIXES = {".py", ".pyi", ".cpp", ".h"}
MOST_AT_THE_ROOT, MOST_IN_A_FOLDER, MOST_LINES = 10, 25, 350


def code_files() -> list[Path]:
    """Files of code by path; `tritondt/kernels` is a link to `kernels`, which rglob does not follow."""
    found = (path for room in ROOMS for path in (REPOSITORY / room).rglob("*") if path.suffix in SUFFIXES)
    return [path.relative_to(REPOSITORY) for path in found]


def test_the_package_has_few_files_at_its_root():
    at_the_root = sorted(path.name for path in (REPOSITORY / "tritondt").glob("*.py"))
    assert "__init__.py" in at_the_root
    assert len(at_the_root) <= MOST_AT_THE_ROOT, at_the_root


def test_no_folder_has_many_files():
    folders = Counter(path.parent for path in code_files())
    assert {Path("tritondt/dtensor"), Path("kernels/gpu"), Path("csrc/boxes")} <= set(folders)
    assert {str(folder): number for folder, number in folders.items() if number > MOST_IN_A_FOLDER} == {}


def test_no_file_is_long():
    lines = {path: len((REPOSITORY / path).read_text(encoding="utf-8").splitlines()) for path in code_files()}
    assert lines[Path("tritondt/_C.pyi")] > 0
    assert {str(path): number for path, number in lines.items() if number > MOST_LINES} == {}
