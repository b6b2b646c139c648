"""The package is the same from a wheel, from an editable install and from the repository's root."""

import compileall
import email
import importlib.metadata
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

# Drops the hook of an editable install, so that only sys.path can have found the package.
WITHOUT_EDITABLE_HOOK = """
import sys
sys.meta_path = [finder for finder in sys.meta_path if "__editable__" not in repr(finder)]
"""
REPORT_ORIGINS = """
import importlib, json
import tritondt.kernels
names = ["tritondt", "tritondt.kernels.reference", "tritondt._C"]
files = [importlib.import_module(name).__file__ for name in names]
print(json.dumps([*files, *tritondt.kernels.__path__]))
"""
REPORT_IMPORT = """
import gc, json, sys, time
start = time.perf_counter()
import torch
report = {"torch_seconds": time.perf_counter() - start}
triton_came_with_torch = "triton" in sys.modules
full_collections = gc.get_stats()[2]["collections"]
start = time.perf_counter()
import tritondt
report["bare_seconds"] = time.perf_counter() - start
tritondt.DTensor
report["seconds"] = time.perf_counter() - start
report["full_collections"] = gc.get_stats()[2]["collections"] - full_collections
report["collects"] = gc.isenabled()
report["triton"] = "triton" in sys.modules and not triton_came_with_torch
print(json.dumps(report))
"""


def run_python(code: str, folder: Path, **variables: str) -> str:
    """Standard output of a fresh interpreter started in `folder`, blind to our own PYTHONPATH."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    completed = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=environment | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


def origins(code: str, folder: Path, **variables: str) -> list[Path]:
    """What the package, a kernel and the extension were loaded from, and each folder of the kernels."""
    return [Path(path) for path in json.loads(run_python(code, folder, **variables))]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout: building in it would take up leftovers of build/."""
    folder = tmp_path_factory.mktemp("checkout") / "tritondt"
    leftovers = shutil.ignore_patterns(".*", "build", "dist", "*.so", "*.egg-info", "__pycache__")
    shutil.copytree(REPOSITORY, folder, symlinks=True, ignore=leftovers)
    return folder


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel, for which the extension that is compiled in place is lent."""
    lend_compiled_extension(checkout)
    wheels = tmp_path_factory.mktemp("wheels")
    options = ["--quiet", "--disable-pip-version-check", "--no-build-isolation", "--no-deps"]
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", str(wheels), str(checkout)],
        check=True,
    )
    (built,) = wheels.glob("tritondt-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel unpacked, with its bytecode compiled, as pip installs it."""
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    assert compileall.compile_dir(folder, quiet=1)
    return folder


def lend_compiled_extension(checkout: Path) -> None:
    """Puts the extension compiled in place where the build looks for its own, if there is one.

    It saves the 20 s of compiling; setuptools compiles all the same if a source is newer.
    """
    name = "tritondt/_C" + sysconfig.get_config_var("EXT_SUFFIX")
    if (REPOSITORY / name).exists():
        (checkout / "setup.cfg").write_text("[build]\nbuild_lib = build/lib\n")
        (checkout / "build" / "lib" / "tritondt").mkdir(parents=True)
        shutil.copy2(REPOSITORY / name, checkout / "build" / "lib" / name)


@pytest.mark.extended
def test_wheel_holds_every_module_and_no_second_kernels(wheel: Path) -> None:
    package = {path.relative_to(REPOSITORY) for path in REPOSITORY.glob("tritondt/**/*.py")}
    kernels = {"tritondt" / path.relative_to(REPOSITORY) for path in REPOSITORY.glob("kernels/**/*.py")}
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
    modules = {Path(name) for name in files if name.endswith(".py")}
    assert modules == package | kernels | {Path("tritondt_autoload.py")}
    assert {"tritondt/py.typed", "tritondt/_C.pyi", "tritondt/kernels/gpu/tuning.json"} <= files
    assert {Path(name).parts[0] for name in files} == {"tritondt", "tritondt_autoload.py"}
    assert not [name for name in files if name.endswith((".cpp", ".h"))]


@pytest.mark.extended
def test_wheel_brings_the_command_and_names_the_backend(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/entry_points.txt")]
        entries = archive.read(name).decode()
    assert "[console_scripts]\ntritondt = tritondt.__main__:run\n" in entries
    assert "[torch.backends]\ntritondt = tritondt_autoload:register\n" in entries


@pytest.mark.extended
def test_wheel_says_its_licence_and_what_it_needs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (licence,) = [name for name in archive.namelist() if name.endswith("/licenses/LICENSE")]
        assert archive.read(licence) == (REPOSITORY / "LICENSE").read_bytes()
        (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        metadata = email.message_from_bytes(archive.read(name))
    assert metadata["License-Expression"] == "MIT"
    needed = metadata.get_all("Requires-Dist", [])
    assert [text for text in needed if "extra ==" not in text] == ["torch>=2.10"]
    assert {"cli", "triton"} <= set(metadata.get_all("Provides-Extra", []))


@pytest.mark.extended
def test_the_wheel_is_installed_by_its_name_and_plans_without_torch(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True, timeout=200)
    python = str(environment / "bin" / "python")
    options = ["--quiet", "--disable-pip-version-check", "--no-index", "--no-deps", "--find-links", str(wheel.parent)]
    subprocess.run([python, "-m", "pip", "install", *options, "tritondt"], check=True, timeout=200)
    program = """
from tritondt import Layout, parse_placements
from tritondt._C import ArenaGroup
from tritondt.planning.cost import CostTable
from tritondt.planning.explain import explain_layouts
source, target = (Layout((4,), parse_placements(each), (10, 3)) for each in ("S0", "R"))
print(explain_layouts(source, target, 4, CostTable()).received_bytes)
"""
    ran = subprocess.run([python, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.stdout == "84\n", ran.stderr


@pytest.mark.extended
def test_source_distribution_holds_all_that_a_build_reads(checkout: Path, tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", str(tmp_path)]
    subprocess.run(command, cwd=checkout, check=True)
    (built,) = tmp_path.glob("tritondt-*.tar.gz")
    with tarfile.open(built) as archive:
        found = {name.partition("/")[2] for name in archive.getnames()}
    needed = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "csrc/*/*.cpp", "csrc/*/*.h", "tritondt/**/*.py")
    kernels = ("kernels/**/*.py", "kernels/**/*.json", "tritondt/*.pyi", "tritondt/py.typed")
    paths = {path.relative_to(REPOSITORY) for pattern in (*needed, *kernels) for path in REPOSITORY.glob(pattern)}
    assert {str(path) for path in paths} <= found


def test_a_number_of_compilers_that_is_none_is_refused() -> None:
    ran = subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"],
        cwd=REPOSITORY,
        env={**os.environ, "MAX_JOBS": "many"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1
    assert ran.stderr == "MAX_JOBS='many' is set; allowed is a number of compilers at a time, from 1 on\n"


@pytest.mark.extended
def test_wheel_imports_outside_the_repository(installed: Path, tmp_path: Path) -> None:
    found = origins(WITHOUT_EDITABLE_HOOK + REPORT_ORIGINS, tmp_path, PYTHONPATH=str(installed))
    assert all(path.is_relative_to(installed / "tritondt") for path in found), found


def test_editable_install_imports_outside_the_repository(tmp_path: Path) -> None:
    if not installed_editable():
        pytest.skip("this Python has no editable install of this checkout; `make venv` makes one")
    found = origins(REPORT_ORIGINS, tmp_path)
    assert all(path.resolve().is_relative_to(REPOSITORY) for path in found), found


def test_repository_root_imports_without_an_install() -> None:
    found = origins(WITHOUT_EDITABLE_HOOK + REPORT_ORIGINS, REPOSITORY)
    assert all(path.is_relative_to(REPOSITORY / "tritondt") for path in found), found


@pytest.mark.extended
@pytest.mark.usefixtures("alone")
def test_import_is_quick_and_leaves_triton_alone(installed: Path, tmp_path: Path) -> None:
    code = WITHOUT_EDITABLE_HOOK + REPORT_IMPORT
    runs = [json.loads(run_python(code, tmp_path, PYTHONPATH=str(installed))) for _ in range(5)]
    assert not any(run["triton"] for run in runs)
    # 0.05 to 0.1 on the machine where this was written, and 0.2 where bytecode is not kept.
    ratio = statistics.median(run["seconds"] / run["torch_seconds"] for run in runs)
    assert ratio <= 0.3, f"tritondt's modules take {ratio:.2f} of the time of import torch"
    bare = statistics.median(run["bare_seconds"] / run["torch_seconds"] for run in runs)
    assert bare <= 0.1, f"import tritondt takes {bare:.2f} of the time of import torch"


@pytest.mark.extended
@pytest.mark.parametrize("ask", ["gc.enable()", "gc.disable()"])
def test_import_collects_nothing_and_leaves_the_collector_as_it_was(ask: str, tmp_path: Path) -> None:
    code = f"import gc\n{ask}\n{REPORT_IMPORT}"
    run = json.loads(run_python(code, tmp_path, PYTHONPATH=str(REPOSITORY)))
    assert run["full_collections"] == 0
    assert run["collects"] == (ask == "gc.enable()")


@pytest.mark.extended
def test_public_packages_are_attributes_without_an_import_of_their_own(tmp_path: Path) -> None:
    code = """
import tritondt as T
print(*sorted(T._PACKAGES), T.debug.mark_step, T.nccl.Communicator, T.sharded.ShardedTensor, T.fsdp.fully_shard)
print(T.parallel.ColwiseParallel, T.random, T.experimental, hasattr(T, "debugging"))
"""
    names, found = run_python(code, tmp_path, PYTHONPATH=str(REPOSITORY)).splitlines()
    packages = "debug errors experimental found_plan fsdp interop kernels nccl ops parallel random sharded"
    assert names.startswith(f"{packages} <function mark_step")
    assert found.endswith("False")


def installed_editable() -> bool:
    """Whether pip installed this checkout, as a link, into the Python that runs the tests."""
    try:
        origin = importlib.metadata.distribution("tritondt").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return False
    if origin is None:
        return False
    source = json.loads(origin)
    editable = source.get("dir_info", {}).get("editable", False)
    return bool(editable) and source["url"] == REPOSITORY.as_uri()
