"""Import of the package: the check that its extension has been built, and a pause of the garbage collection."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module as import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

_PACKAGE = Path(__file__).parent


def check_extension() -> None:
    """Raises ImportError, with what to run, where `tritondt._C` has not been built."""
    if find_spec("tritondt._C") is not None:
        return
    version = ".".join(map(str, sys.version_info[:2]))
    missing = f"the extension tritondt._C has not been built for Python {version} in {_PACKAGE}"
    installed = _installed()
    if installed is not None:
        raise ImportError(
            f"{missing}, which comes before {installed} on sys.path, where it has been built; use the command "
            f"`tritondt` instead of `python -m tritondt`, start Python in another folder than {_PACKAGE.parent}, or "
            f"run `{sys.executable} setup.py build_ext --inplace` there"
        )
    raise ImportError(
        f"{missing}; run `{sys.executable} -m pip install {_PACKAGE.parent}`, or, to use it from there, "
        f"`{sys.executable} setup.py build_ext --inplace` in {_PACKAGE.parent}"
    )


def _installed() -> Path | None:
    others = (Path(folder) / _PACKAGE.name for folder in sys.path)
    return next((other for other in others if PathFinder.find_spec("_C", [str(other)]) is not None), None)


@contextmanager
def without_collections() -> Iterator[None]:
    """Leaves cyclic garbage alone: what an import makes stays, and one look at all that torch has made takes 0.1 s."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
