"""Packages that most tests do without, as on a machine that has torch, Triton and pytest: what needs one is skipped.

sys.meta_path.append(MissingPackages())  # `import click` in a test file, or below it, then skips the file by name
"""

import importlib.abc
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FrameType, ModuleType

import pytest

OPTIONAL = (
    "click",
    "rich",
    "matplotlib",
    "expecttest",
    "hypothesis",
    "numpy",
    "transformers",
    "safetensors",
    "accelerate",
    "peft",
)
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
        importer = _importer() if name in self.names else None
        if importer is not None and importer.f_code.co_filename.startswith(_OURS):
            # pytest leaves half a module there, of which the next file that imports it would miss a name.
            for frame in _half_imported(importer):
                sys.modules.pop(frame.f_globals.get("__name__", ""), None)
            pytest.skip(f"{name} is not installed", allow_module_level=True)
        return None


def _half_imported(importer: FrameType) -> Iterator[FrameType]:
    """Frames of our modules whose import waits for that of `importer`, and it itself."""
    frame: FrameType | None = importer
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(_OURS):
            yield frame
        frame = frame.f_back


def _importer() -> FrameType:
    """The frame of the statement that imports, below the frames of importing."""
    frame = sys._getframe(2)
    while frame.f_back is not None and "importlib" in frame.f_code.co_filename:
        frame = frame.f_back
    return frame
