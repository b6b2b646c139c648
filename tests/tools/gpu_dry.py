"""A dry run of `make gpu` in an environment that has torch, Triton, pytest and what they require, and nothing else.

    python -m tests.tools.gpu_dry [--short]

The environment, build/gpu_dry/venv, has links to the packages of the Python that runs this, and no package is fetched:
what `make gpu` would import and a machine may lack is missing there. Triton's interpreter imports NumPy, which lies
beside it, in build/gpu_dry/numpy, for the parts that interpret: that of this Python, or of the checkout's .venv. Where
neither has one, those parts are skipped.
"""

import importlib.metadata
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterable, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
FOLDER = REPOSITORY / "build" / "gpu_dry"
WANTED = ("torch", "triton", "pytest", "setuptools")
# It takes some 2 minutes on two cores; beside other programs, or where the extension is to be built first, more.
DEADLINE_S = 560
_NAME = re.compile(r"^[A-Za-z0-9._-]+")


def required(names: Sequence[str]) -> dict[str, importlib.metadata.Distribution]:
    """The installed distributions of these names and all that they require, but for extras."""
    found: dict[str, importlib.metadata.Distribution] = {}
    waiting = list(names)
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in found:
            continue
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            if name in names:
                raise
            continue  # for another platform or version of Python
        for line in found[name].requires or ():
            match = _NAME.match(line)
            if match is not None and "extra ==" not in line:
                waiting.append(match[0])
    return found


def make_environment(folder: Path) -> Path:
    """The interpreter of an environment that has links to what is required."""
    shutil.rmtree(folder, ignore_errors=True)
    venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
    (site,) = folder.glob("lib/python*/site-packages")
    _link(required(WANTED).values(), site)
    return folder / "bin" / "python"


def numpy_distribution() -> importlib.metadata.Distribution | None:
    """NumPy as this Python has it, or the checkout's environment for the same version of Python; None without both."""
    site = REPOSITORY / ".venv" / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    for folders in (sys.path, [str(site)]):
        for found in importlib.metadata.distributions(name="numpy", path=folders):
            return found
    return None


def _link(distributions: Iterable[importlib.metadata.Distribution], folder: Path) -> None:
    """Links to all that lies at the top of what these have installed."""
    folder.mkdir(exist_ok=True)
    for distribution in distributions:
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            link, source = folder / top, Path(str(distribution.locate_file(top)))
            if source.exists() and not link.exists():
                link.symlink_to(source)


def main(arguments: Sequence[str]) -> int:
    """The exit status of the dry run."""
    python = make_environment(FOLDER / "venv")
    numpy = numpy_distribution()
    shutil.rmtree(FOLDER / "numpy", ignore_errors=True)
    _link(() if numpy is None else (numpy,), FOLDER / "numpy")
    command = [str(python), "-m", "tests.tools.on_gpu", "--dry", "--deadline", str(DEADLINE_S), *arguments]
    return subprocess.run(command, cwd=REPOSITORY, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
