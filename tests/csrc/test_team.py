"""Tables run on the threads of torch's OpenMP; a child of fork, which has none of them, starts its own."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from tritondt import _C
from tritondt.kernels.boxes import CopyBox

pytestmark = pytest.mark.usefixtures("alone")

NUM_ELEMENTS = 4 << 20  # 16 MB: above what each thread must have
COLUMNS = CopyBox(0, 0, 0, 0, 4, (2048, 2048), (4096, 1), (2048, 1))

FORKED = """
import os, torch
from tests.csrc.test_team import assert_copies
from tritondt import _C
torch.set_num_threads(2)
torch.ones(1 << 22).add_(1)  # the parent's OpenMP has a thread by now
assert_copies(2)
assert _C.team_origin() == "torch"
child = os.fork()
if child == 0:
    torch.set_num_threads(1)  # torch itself would wait for the thread that is not here
    assert _C.team_origin() == "own"
    assert_copies(2)
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def assert_copies(num_threads):
    source = torch.arange(2 * NUM_ELEMENTS, dtype=torch.int32)
    target = torch.full((NUM_ELEMENTS,), -1, dtype=torch.int32)
    _C.CopyTable([COLUMNS]).run([source.data_ptr()], [target.data_ptr()], num_threads)
    assert torch.equal(target.view(2048, 2048), source.view(2048, 4096)[:, :2048])


def tasks():
    return {task.name for task in Path("/proc/self/task").iterdir()}


@pytest.fixture
def num_torch_threads():
    """As many threads for torch's operators as for the tables: OpenMP ends what a smaller team leaves over."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield 3
    torch.set_num_threads(before)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc and fork are Linux's")
def test_a_forked_child_starts_its_own_threads():
    ran = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=150, check=False, env=os.environ
    )
    assert (ran.returncode, ran.stdout.strip()) == (0, "7"), ran.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_threads_are_kept_from_run_to_run(num_torch_threads):
    assert _C.team_origin() == "torch"
    assert_copies(num_torch_threads)
    before = tasks()
    for _ in range(5):
        assert_copies(num_torch_threads)
    assert tasks() <= before  # those of other tests may have ended


def test_threads_of_python_have_teams_of_their_own():
    failures = []

    def copy():
        try:
            for _ in range(3):
                assert_copies(2)
        except AssertionError as error:
            failures.append(error)

    threads = [threading.Thread(target=copy) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
