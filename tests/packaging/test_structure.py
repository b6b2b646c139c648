"""A limit that keeps the layout readable: files at the package's root."""

from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
MOST_AT_THE_ROOT = 10


def test_the_package_has_few_files_at_its_root():
    at_the_root = sorted(path.name for path in (REPOSITORY / "tritondt").glob("*.py"))
    assert "__init__.py" in at_the_root
    assert len(at_the_root) <= MOST_AT_THE_ROOT, at_the_root
