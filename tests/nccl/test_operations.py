"""Every operation of our communicator of NCCL, exact: on a GPU, and over the double."""

import pytest

from tests.doubles.fake_nccl.tensors import assert_same
from tests.nccl.conftest import Setting
from tests.nccl.here import join, leave
from tests.nccl.operations import CASES


def run_case(rank: int, where: str, name: str) -> None:
    try:
        for number, (found, expected) in enumerate(CASES[name](join(rank, where))):
            assert_same(found.cpu(), expected, f"{name}, result {number}")
    except BaseException:
        leave(where)
        raise


@pytest.mark.parametrize("name", CASES)
def test_operations(setting: Setting, name: str) -> None:
    setting.ranks.run(run_case, setting.where, name)
