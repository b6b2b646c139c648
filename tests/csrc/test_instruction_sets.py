"""The same bits with every set of instructions that csrc has functions for."""

import subprocess
import sys

import pytest

from tritondt import _C
from tritondt.kernels.boxes import CopyBox

pytestmark = pytest.mark.extended


def digest(name):
    ran = subprocess.run(
        [sys.executable, "-m", "tests.csrc.instruction_sets", name], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_tables_give_the_same_bits_with_every_set():
    digests = {name: digest(name) for name in ("baseline", "avx2", "avx512")}
    assert len(digests["baseline"]) == 65
    assert set(digests.values()) == {digests["baseline"]}, digests


def test_a_set_that_does_not_exist():
    with pytest.raises(ValueError, match="instructions 'mmx'; allowed are baseline, avx2, avx512"):
        _C.limit_instructions("mmx")


def test_a_limit_that_comes_too_late():
    _C.CopyTable([CopyBox(0, 0, 0, 0, 1, (3, 100), (200, 1), (100, 1))])
    with pytest.raises(RuntimeError, match=r"limited to 'avx2' after a table was made; .* before the first one"):
        _C.limit_instructions("avx2")
