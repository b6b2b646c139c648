"""What every test gets: a fixed seed, its own thread count, and subprocesses that find tritondt."""

import importlib.util
import os
import random
import sys
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from tests.harness.gloo_ranks import GlooRanks
from tests.harness.gpu_device import IS_DRY, interpret_tables
from tests.harness.optional_packages import MissingPackages

REPOSITORY = Path(__file__).parents[1]

# The Python of a machine with a GPU (`make gpu`) may have torch, Triton and pytest alone.
LACKING = MissingPackages()
sys.meta_path.append(LACKING)
HAS_TIMEOUTS = importlib.util.find_spec("pytest_timeout") is not None

# Cases of a parametrized test that are in the core (`make test`), where its mark `in_core` says no other number; the
# others are `extended`, for `make test-all`.
CORE_CASES = 2

if "hypothesis" not in LACKING.names:
    from hypothesis import settings

    # No deadline: the machine is shared. Derandomised: a change that passes here passes in CI.
    settings.register_profile("tritondt", deadline=None, derandomize=True)
    settings.load_profile("tritondt")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Lets pyproject.toml set pytest-timeout's limit where that is not installed, which is otherwise an error."""
    if not HAS_TIMEOUTS:
        parser.addini("timeout", "seconds that a test may take (pytest-timeout, which is not installed)")


def pytest_configure(config: pytest.Config) -> None:
    """Makes the mark of pytest-timeout known where that is not installed."""
    if not HAS_TIMEOUTS:
        config.addinivalue_line("markers", "timeout(seconds): limit of a test; without pytest-timeout there is none")


def pytest_report_header() -> list[str]:
    """Says what is left out, so that a short run is not taken for a whole one."""
    names = ", ".join((*LACKING.names, *(() if HAS_TIMEOUTS else ("pytest-timeout",))))
    return [f"not installed, and what needs them is skipped: {names}"] if names else []


@pytest.hookimpl(tryfirst=True)  # before -m chooses by the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what is beyond the core and what runs alone, and leaves tests that need GPUs to machines that have them."""
    _mark_tiers(items)
    found = 1 if IS_DRY else torch.cuda.device_count()
    for item in items:
        if "alone" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.alone)
        for mark, needed in (("gpu", 1), ("multigpu", 2)):
            if item.get_closest_marker(mark) and found < needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA devices, found {found}"))


def _mark_tiers(items: Iterable[pytest.Item]) -> None:
    """Marks as `soak` and `extended` what CI, and what the core, leaves out."""
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.extended)
    for cases in _cases_of_tests(items):
        chosen = cases[0].get_closest_marker("in_ci")
        ci = cases if chosen is None else _spread(cases, chosen.args[0])
        wanted = cases[0].get_closest_marker("in_core")
        core = _spread(ci, CORE_CASES if wanted is None else wanted.args[0])
        for item in cases:
            if item not in ci:
                item.add_marker(pytest.mark.soak)
            elif item not in core:
                item.add_marker(pytest.mark.extended)


def _cases_of_tests(items: Iterable[pytest.Item]) -> Iterable[list[pytest.Item]]:
    """The cases of each test that are marked neither `extended` nor `soak` as they stand."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("extended") is None and item.get_closest_marker("soak") is None:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return cases.values()


def _spread(cases: list[pytest.Item], count: int) -> list[pytest.Item]:
    """So many of the cases, evenly among all, from one that the test's name chooses: what many share is met whole."""
    first = zlib.crc32(cases[0].nodeid.partition("[")[0].encode())
    return [
        cases[number] for number in sorted({(first + each * len(cases) // count) % len(cases) for each in range(count)})
    ]


@pytest.fixture(scope="session")
def alone() -> None:
    """Asked for by tests, and by fixtures, that must have the machine to themselves: times, memory, all its cores."""


@pytest.fixture(scope="session")
def kept_ranks() -> Iterator[list[GlooRanks]]:
    """Processes that all tests of a session share: those that a fixture appends end side by side."""
    kept: list[GlooRanks] = []
    yield kept
    with ExitStack() as closing:
        for ranks in kept:
            ranks.begin_close()
            closing.callback(ranks.close)


@pytest.fixture(scope="session", autouse=True)
def tables_of_a_dry_run() -> Iterator[None]:
    """Has what is marked `gpu` run on Triton's tables in a dry run."""
    with interpret_tables():
        yield


@pytest.fixture(scope="session", autouse=True)
def subprocess_environment() -> Iterator[None]:
    """Processes that tests start import this checkout from any folder, with one thread a rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(REPOSITORY), prepend=os.pathsep)
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(autouse=True)
def deterministic_torch() -> Iterator[None]:
    """Seeds every generator, and undoes a test's change of the number of threads."""
    random.seed(0)
    torch.manual_seed(0)
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)
