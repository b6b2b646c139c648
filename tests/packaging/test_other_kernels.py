"""`kernels` is Hugging Face's package, also where the checkout's folder of that name comes first on sys.path."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

# As transformers 5.23 asks whether there is one and of what version: what has no metadata it imports, with no `try`.
# 4.57 and others import under `try` without asking.
AS_TRANSFORMERS_ASKS = """
import importlib, importlib.metadata, importlib.util

def version():
    if importlib.util.find_spec("kernels") is None:
        return None
    try:
        return importlib.metadata.version("kernels")
    except importlib.metadata.PackageNotFoundError:
        package = importlib.import_module("kernels")
        found = getattr(package, "__version__", None)
        return None if found is None and getattr(package, "__file__", None) is None else found

try:
    from kernels import get_kernel
except ImportError:
    get_kernel = None
print(version(), get_kernel and get_kernel())
"""


def run_in_checkout(code: str, *later_on_path: Path) -> str:
    """What a fresh interpreter prints that has the checkout's root first on sys.path, and no site-packages."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    completed = subprocess.run(
        [sys.executable, "-S", "-c", code],
        cwd=REPOSITORY,
        env=environment | {"PYTHONPATH": os.pathsep.join(map(str, later_on_path))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout.strip()


@pytest.fixture
def other_kernels(tmp_path: Path) -> Path:
    """A folder with a regular package `kernels`, installed as pip does it."""
    (tmp_path / "kernels" / "layer").mkdir(parents=True)
    (tmp_path / "kernels" / "__init__.py").write_text("def get_kernel():\n    return 'theirs'\n")
    (tmp_path / "kernels" / "layer" / "__init__.py").touch()
    metadata = tmp_path / "kernels-0.18.2.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.18.2\n")
    return tmp_path


def test_an_installed_one_is_found_and_imported(other_kernels: Path) -> None:
    code = "import importlib.util, kernels.layer; print(kernels.__file__, importlib.util.find_spec('kernels').origin)"
    theirs = other_kernels / "kernels" / "__init__.py"
    assert run_in_checkout(code, other_kernels) == f"{theirs} {theirs}"
    assert run_in_checkout(AS_TRANSFORMERS_ASKS, other_kernels) == "0.18.2 theirs"


def test_without_one_it_reads_as_not_installed() -> None:
    assert run_in_checkout(AS_TRANSFORMERS_ASKS) == "None None"


def test_ours_stays_ours_beside_an_installed_one(other_kernels: Path) -> None:
    """tritondt itself imports torch, which is not there: an empty module stands for it."""
    code = (
        "import importlib, sys, types, kernels\n"
        "parent = sys.modules['tritondt'] = types.ModuleType('tritondt')\n"
        "parent.__path__ = ['tritondt']\n"
        "boxes = importlib.import_module('tritondt.kernels.boxes')\n"
        "print(kernels.get_kernel(), boxes.CopyBox.__module__)\n"
    )
    assert run_in_checkout(code, other_kernels) == "theirs tritondt.kernels.boxes"


def test_the_folder_has_nothing_that_goes_before_an_installed_one() -> None:
    """Python takes a folder without `__init__` for a package only where the rest of sys.path has none."""
    answers = {path.name for pattern in ("kernels.*", "kernels/__init__.*") for path in REPOSITORY.glob(pattern)}
    assert not answers


def test_the_kernels_in_triton_refuse_the_other_name() -> None:
    code = "try:\n    import kernels.gpu\nexcept ImportError as error:\n    print(error)"
    assert "'kernels.gpu', and is tritondt.kernels.gpu only" in run_in_checkout(code)
