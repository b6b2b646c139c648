"""What a new user meets first: a checkout that has not been built, and packages that are missing, in one line each."""

import shutil
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from tritondt.__main__ import run

REPOSITORY = Path(__file__).parents[2]
VERSION = ".".join(map(str, sys.version_info[:2]))
# Without the hook of an editable install and without site-packages, where other copies of the package may be.
IMPORT = """
import sys
sys.meta_path = [finder for finder in sys.meta_path if "__editable__" not in repr(finder)]
sys.path = [folder for folder in sys.path if not folder.endswith("-packages")] + sys.argv[1:]
import tritondt
"""


def import_in(checkout: Path, *more_folders: Path) -> str:
    """The last line that importing the package prints in a checkout that is not built; further folders of sys.path."""
    (checkout / "tritondt").mkdir(parents=True)
    for name in ("__init__.py", "_importing.py", "version.py"):
        shutil.copy2(REPOSITORY / "tritondt" / name, checkout / "tritondt")
    command = [sys.executable, "-E", "-c", IMPORT, *map(str, more_folders)]
    found = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
    assert found.returncode == 1
    return found.stderr.splitlines()[-1]


def test_a_checkout_that_is_not_built_before_an_installed_package_says_how_to_reach_that(tmp_path: Path) -> None:
    installed = tmp_path / "site" / "tritondt"
    installed.mkdir(parents=True)
    (installed / f"_C{EXTENSION_SUFFIXES[0]}").touch()
    checkout = tmp_path / "checkout"
    assert import_in(checkout, tmp_path / "site") == (
        f"ImportError: the extension tritondt._C has not been built for Python {VERSION} in {checkout}/tritondt, which "
        f"comes before {installed} on sys.path, where it has been built; use the command `tritondt` instead of `python "
        f"-m tritondt`, start Python in another folder than {checkout}, or run `{sys.executable} setup.py build_ext "
        f"--inplace` there"
    )


def test_a_checkout_that_is_not_built_says_what_to_run(tmp_path: Path) -> None:
    assert import_in(tmp_path) == (
        f"ImportError: the extension tritondt._C has not been built for Python {VERSION} in {tmp_path}/tritondt; run "
        f"`{sys.executable} -m pip install {tmp_path}`, or, to use it from there, "
        f"`{sys.executable} setup.py build_ext --inplace` in {tmp_path}"
    )


@pytest.mark.parametrize(
    ("missing", "arguments", "modules"),
    [
        ("click", ["plan"], ["main"]),
        ("matplotlib", ["demo"], ["demo.command", "demo.report"]),
        ("rich", ["bench", "redistribute"], ["bench.command", "bench.report"]),
    ],
)
def test_a_package_of_the_commands_that_is_missing_is_named(
    missing: str, arguments: list[str], modules: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    for name in modules:
        monkeypatch.delitem(sys.modules, f"tritondt.cli.{name}", raising=False)
    monkeypatch.setattr(sys, "argv", ["tritondt", *arguments])
    with pytest.raises(SystemExit) as told:
        run()
    assert told.value.code == (
        f"{missing} is missing, which tritondt's commands need: pip install click rich matplotlib"
    )


def test_another_module_that_is_missing_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tritondt.cli.plan", None)
    monkeypatch.setattr(sys, "argv", ["tritondt", "plan", "--mesh", "2", "--shape", "4", "--from", "R", "--to", "S0"])
    with pytest.raises(ModuleNotFoundError, match="tritondt"):
        run()
