"""What a new user meets first: a checkout that has not been built, and packages that are missing, in one line each."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tritondt.__main__ import run

REPOSITORY = Path(__file__).parents[2]
# Without the hook of an editable install, which would find the extension of another checkout.
IMPORT = """
import sys
sys.meta_path = [finder for finder in sys.meta_path if "__editable__" not in repr(finder)]
import tritondt
"""


def test_a_checkout_that_is_not_built_says_what_to_run(tmp_path: Path) -> None:
    (tmp_path / "tritondt").mkdir()
    for name in ("__init__.py", "_extension.py", "_import_pause.py"):
        shutil.copy2(REPOSITORY / "tritondt" / name, tmp_path / "tritondt")
    found = subprocess.run([sys.executable, "-c", IMPORT], cwd=tmp_path, capture_output=True, text=True, check=False)
    version = ".".join(map(str, sys.version_info[:2]))
    assert found.returncode == 1
    assert found.stderr.splitlines()[-1] == (
        f"ImportError: the extension tritondt._C has not been built for Python {version} in {tmp_path}/tritondt; run "
        f"`{sys.executable} -m pip install {tmp_path}`, or, to use it from there, "
        f"`{sys.executable} setup.py build_ext --inplace` in {tmp_path}"
    )


@pytest.mark.parametrize(
    ("missing", "arguments", "modules"),
    [
        ("click", ["plan"], ["main"]),
        ("matplotlib", ["demo", "--help"], ["demo.command", "demo.report"]),
        ("rich", ["bench", "redistribute", "--help"], ["bench", "bench.command", "bench.report"]),
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
    monkeypatch.setattr(sys, "argv", ["tritondt", "plan"])
    with pytest.raises(ModuleNotFoundError, match="tritondt"):
        run()
