"""Packages that most tests do without, as on a machine that has torch, Triton and pytest: what needs one is skipped.

sys.meta_path.append(MissingPackages())  # `import click` in a test file, or below it, then skips the file by name
"""

import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

OPTIONAL = ("click", "rich", "matplotlib", "expecttest", "hypothesis", "numpy")
REPOSITORY = Path(__file__).parents[2]
_OURS = tuple(f"{REPOSITORY / name}/" for name in ("tests", "tritondt", "benchmarks", "kernels", "examples"))


def missing() -> tuple[str, ...]:
    """Names of the optional packages that are not installed."""
    return tuple(name for name in OPTIONAL if importlib.util.find_spec(name) is None)


class MissingPackages(importlib.abc.MetaPathFinder):
    """A finder of packages that are not there: it skips the test, or file of tests, whose import asks for one.

    Imports by torch, and others that can do without, go on to the ImportError that they expect.
    """

    def __init__(self, names: Sequence[str] | None = None) -> None:
        self.names = missing() if names is None else tuple(names)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """None; raises pytest's Skipped where one of our files imports one of `names`."""
        if name in self.names and _importer().startswith(_OURS):
            pytest.skip(f"{name} is not installed", allow_module_level=True)
        return None


def _importer() -> str:
    """The path of the file whose statement is being run, below the frames of importing."""
    frame = sys._getframe(2)
    while frame.f_back is not None and "importlib" in frame.f_code.co_filename:
        frame = frame.f_back
    return frame.f_code.co_filename
