"""What every test gets: a fixed seed, its own thread count, and subprocesses that find tritondt."""

import importlib.util
import os
import random
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

REPOSITORY = Path(__file__).parents[1]

# tests/cli needs the extra `cli`, which the Python of a machine with a GPU (`make gpu`) may lack.
HAS_CLI = all(importlib.util.find_spec(name) for name in ("click", "rich", "matplotlib"))
collect_ignore = [] if HAS_CLI else ["cli"]

# Tests that start processes, rank by rank, or measure time: they get the machine to themselves. All others run side by
# side, a worker of pytest-xdist on each core (`make test`).
ALONE = (
    *("cli/", "comm/", "doubles/", "nccl/", "packaging/", "tools/"),
    *("csrc/test_sanitizers.py", "csrc/test_team.py", "csrc/test_watchdog.py"),
    *("parallel/test_hidden_communication.py", "parallel/test_overlap.py"),
    *("dtensor/test_bounded.py", "dtensor/test_transforms.py"),
)
# In those folders, what has ranks in threads only.
SIDE_BY_SIDE = tuple(f"comm/packing/test_wire_{name}.py" for name in ("dtype", "gradients", "layouts"))

# No deadline: the machine is shared. Derandomised: a change that passes here passes in CI.
hypothesis.settings.register_profile("tritondt", deadline=None, derandomize=True)
hypothesis.settings.load_profile("tritondt")


def pytest_report_header() -> list[str]:
    """Says what is left out, so that a short run is not taken for a whole one."""
    return [] if HAS_CLI else ["tests/cli left out: click, rich or matplotlib is not installed"]


@pytest.hookimpl(tryfirst=True)  # before -m chooses by the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves tests that need GPUs to machines that have them, and says which tests run alone."""
    found, here = torch.cuda.device_count(), REPOSITORY / "tests"
    for item in items:
        if item.path.is_relative_to(here):
            path = item.path.relative_to(here).as_posix()
            if path.startswith(ALONE) and path not in SIDE_BY_SIDE:
                item.add_marker(pytest.mark.alone)
        for mark, needed in (("gpu", 1), ("multigpu", 2)):
            if item.get_closest_marker(mark) and found < needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA devices, found {found}"))


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
