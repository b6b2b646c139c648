"""The check that the extension has been built for the Python that imports the package."""

import sys
from importlib.util import find_spec
from pathlib import Path

_PACKAGE = Path(__file__).parent


def check() -> None:
    """Raises ImportError, with what to run, where `tritondt._C` has not been built."""
    if find_spec("tritondt._C") is not None:
        return
    version = ".".join(map(str, sys.version_info[:2]))
    raise ImportError(
        f"the extension tritondt._C has not been built for Python {version} in {_PACKAGE}; run "
        f"`{sys.executable} -m pip install {_PACKAGE.parent}`, or, to use it from there, "
        f"`{sys.executable} setup.py build_ext --inplace` in {_PACKAGE.parent}"
    )
