"""torch's tests on threads have no process for each rank: a world there is refused, not waited for."""

import subprocess
import sys
from pathlib import Path

import pytest

# unittest.main: torch's own run_tests wants the package xmlrunner where the environment has CI set.
PROGRAM = """
import unittest
from torch.testing._internal.common_distributed import MultiThreadedTestCase
import tritondt as T

class OnThreads(MultiThreadedTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_threads()

    def test_refused(self):
        try:
            T.zeros(4, device_mesh=T.Mesh((2,)), placements=[T.Shard(0)])
        except T.WorldError as error:
            assert "ranks are threads of torch's tests (MultiThreadedTestCase); a world needs" in str(error)
        else:
            raise AssertionError("a world was made")

unittest.main()
"""


@pytest.mark.extended
def test_a_world_of_threads_of_torch_is_refused_on_every_rank() -> None:
    repository = Path(__file__).parents[2]
    command = [sys.executable, "-c", PROGRAM]
    found = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False, timeout=250)
    assert found.returncode == 0, found.stderr
    assert "Ran 1 test" in found.stderr
