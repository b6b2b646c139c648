"""Builds `tritondt._C` and maps `tritondt.kernels` to kernels/; the rest is in pyproject.toml."""

import email
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import setuptools
from setuptools import Distribution, Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent


def pybind11_headers():
    """The folder of pybind11's headers: its own, or torch's, which brings them, on a machine that has torch alone."""
    if importlib.util.find_spec("pybind11") is not None:
        import pybind11  # noqa: PLC0415  it may not be there

        return pybind11.get_include()
    torch = importlib.util.find_spec("torch")
    if torch is None:
        raise SystemExit("neither pybind11 nor torch, which has its headers, is installed; one of them is needed")
    return str(Path(torch.origin).parent / "include")


COMPILE_FLAGS = [
    "-std=c++17",
    "-O3",
    # One rounding per operation: a fused multiply-add would make the sum depend on the machine.
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-pthread",
    "-g0",
    "-Wall",
    "-Wextra",
    # A system folder, so that `make check`, which adds -Werror, judges our code and not pybind11's.
    f"-isystem{pybind11_headers()}",
]


class InPlaceDistribution(Distribution):
    """A distribution of which older setuptools builds the extension in place: that needs nothing of pyproject.toml.

    Before 77 they refuse how a license is named there. `make gpu` builds with what a machine has; the fresh environment
    of Python 3.11 has 65.5. A package is installed by pip, which fetches what pyproject.toml asks for.
    """

    def parse_config_files(self, filenames=None, ignore_option_errors=False):
        is_old = int(setuptools.__version__.partition(".")[0]) < 77
        if is_old and "build_ext" in sys.argv and "--inplace" in sys.argv:
            filenames = []
        super().parse_config_files(filenames, ignore_option_errors)


def num_jobs():
    """Compilers at a time: MAX_JOBS, as torch's own extensions have it, or one for each processor."""
    given = os.environ.get("MAX_JOBS", "")
    if not given:
        return os.cpu_count()
    if not given.isdecimal() or int(given) < 1:
        sys.exit(f"MAX_JOBS={given!r} is set; allowed is a number of compilers at a time, from 1 on")
    return int(given)


class ParallelBuildExt(build_ext):
    """Compiles the sources of an extension side by side; setuptools alone takes them in turn."""

    def build_extension(self, ext):
        compile_in_turn, jobs = self.compiler.compile, num_jobs()

        def compile_side_by_side(sources, *args, **kwargs):
            with ThreadPoolExecutor(max_workers=jobs) as pool:
                compiled = pool.map(lambda one: compile_in_turn([one], *args, **kwargs), sources)
                return [object_path for object_paths in compiled for object_path in object_paths]

        self.compiler.compile = compile_side_by_side
        try:
            super().build_extension(ext)
        finally:
            self.compiler.compile = compile_in_turn


def relative_paths(pattern):
    """Paths below the project that match, sorted: the same sources make the same binary."""
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(pattern))


# Forms of a remote of git: https, and ssh in both of its own. Who logs in is left out.
REMOTES = tuple(
    re.compile(rf"{before}(?P<host>[\w.-]+\.[a-z]{{2,}}(?::\d+)?){between}(?P<path>[\w.~+-]+(?:/[\w.~+-]+)*)/?")
    for before, between in ((r"https?://(?:[^@/]*@)?", "/"), (r"ssh://(?:[^@/]*@)?", "/"), (r"[^@/:]+@", ":"))
)
# Ends of names that mean something within a network only, as names without a dot and numbers do.
WITHIN_A_NETWORK = (".local", ".localdomain", ".lan", ".internal", ".intranet", ".corp", ".home")


def project_urls():
    """Addresses for the metadata: where the checkout was cloned from, or what a source distribution has noted of that.

    None for a clone of a folder, and where there is no git.
    """
    noted = ROOT / "PKG-INFO"
    if noted.is_file():
        lines = email.message_from_string(noted.read_text(encoding="utf-8")).get_all("Project-URL", [])
        return dict(line.split(", ", 1) for line in lines)
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        return {}
    command = ["git", f"--git-dir={ROOT / '.git'}", "config", "--get", "remote.origin.url"]
    remote = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    found = next(filter(None, (form.fullmatch(remote) for form in REMOTES)), None)
    if found is None or found["host"].partition(":")[0].endswith(WITHIN_A_NETWORK):
        return {}
    host = found["host"] if remote.startswith("http") else found["host"].partition(":")[0]
    path = found["path"][:-4] if found["path"].endswith(".git") else found["path"]
    return {"Repository": f"https://{host}/{path}", "Issues": f"https://{host}/{path}/issues"}


setup(
    project_urls=project_urls(),
    distclass=InPlaceDistribution,
    # The symlink tritondt/kernels serves the repository itself; a wheel takes the folder kernels/ and its subfolders.
    packages=[
        *find_packages(include=["tritondt", "tritondt.*"], exclude=["tritondt.kernels*"]),
        "tritondt.kernels",
        *(f"tritondt.kernels.{package}" for package in find_packages(str(ROOT / "kernels"))),
    ],
    package_dir={"tritondt.kernels": "kernels"},
    py_modules=["tritondt_autoload"],
    ext_modules=[
        Extension(
            "tritondt._C",
            sources=relative_paths("csrc/*/*.cpp"),
            include_dirs=["csrc"],
            depends=[*relative_paths("csrc/*/*.h"), "setup.py"],
            extra_compile_args=COMPILE_FLAGS,
            extra_link_args=["-pthread", "-ldl"],
            language="c++",
        )
    ],
    cmdclass={"build_ext": ParallelBuildExt},
)
