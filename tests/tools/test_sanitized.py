"""The NCCL transport, from Python down to the double, under AddressSanitizer and UBSan; `make sanitize` runs more."""

from pathlib import Path

import pytest

from tests.csrc.test_sanitizers import skip_unless_there
from tests.tools import sanitized

# One element past the end of a tensor, copied by the extension.
PLANTED = """
import torch
from tritondt._C import CopyTable
from tritondt.kernels.boxes import CopyBox
source, target = torch.zeros(4), torch.zeros(8)
CopyTable([CopyBox(0, 0, 0, 0, 4, (5,), (1,), (1,))]).run([source.data_ptr()], [target.data_ptr()], 1)
"""
# Of the engine's matrix two ranks, and a rank killed and one stopped.
REPRESENTATIVE = (
    "tests/comm/transports/test_nccl_cases.py::test_random_cases[2-400000]",
    "tests/comm/monitor/test_faults.py::test_a_fault[killed, nccl]",
)

pytestmark = pytest.mark.sanitized


@pytest.fixture(scope="module", autouse=True)
def built(tmp_path_factory: pytest.TempPathFactory) -> None:
    skip_unless_there("address", tmp_path_factory.mktemp("planted"))
    sanitized.build()


@pytest.mark.slow
@pytest.mark.timeout(600)  # the first build takes minutes on two busy cores
def test_a_planted_error_is_reported(tmp_path: Path) -> None:
    outcome = sanitized.run(["-c", PLANTED], tmp_path)
    assert outcome.returncode != 0
    assert len(outcome.reports) == 1, outcome.output
    assert "heap-buffer-overflow" in outcome.reports[0]
    assert "tritondt::" in outcome.reports[0]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_transport_over_the_double_has_no_errors(tmp_path: Path) -> None:
    outcome = sanitized.run_tests(REPRESENTATIVE, tmp_path)
    assert outcome.reports == ()
    assert outcome.returncode == 0, outcome.output
    assert f"{len(REPRESENTATIVE)} passed" in outcome.output
