"""How many functions of Python a call over NCCL takes, the double's own not counted: most of the host's time."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("triton", reason="Triton is not installed")

import tritondt as T
from benchmarks.nccl import no_op_nccl
from benchmarks.nccl.no_op_nccl import carried_by_nothing
from tests.nccl.conftest import SettingOf

# Files of functions that stand for torch's in C++, or are torch's own.
NOT_OURS = (str(Path(no_op_nccl.__file__).parent), str(Path(torch.__file__).parent), "contextlib.py", __file__)
# The most that there may be.
MOST_REDISTRIBUTION, MOST_COLLECTIVE = 25, 12


def calls_of(run: Callable[[], object]) -> list[str]:
    """The functions of Python that a warm call enters, without the double's and torch's."""
    seen = list[str]()

    def note(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and not any(each in code.co_filename for each in NOT_OURS):
            seen.append(f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}")

    for _ in range(10):
        run()
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return seen


def counted(rank: int) -> tuple[list[str], list[str]]:
    T.close()
    with carried_by_nothing(), torch.no_grad():
        x = T.ones(64, 64, device_mesh=T.Mesh((2,)), placements=[T.Shard(0)])
        columns: list[Any] = [T.Shard(1)]
        group, whole = dist.new_group(backend="tritondt"), torch.zeros(8)
        moved = calls_of(lambda: x.redistribute(placements=columns, async_op=True).wait())
        reduced = calls_of(lambda: dist.all_reduce(whole, group=group))
        T.abort()
    return moved, reduced


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="comprehensions are no calls there: counted where they are")
def test_a_call_enters_few_functions_of_python(setting_of: SettingOf) -> None:
    """An asynchronous redistribution with its wait, and a synchronous collective of the backend."""
    for moved, reduced in setting_of("host", 2).ranks.run(counted):
        assert len(moved) <= MOST_REDISTRIBUTION, "\n".join(moved)
        assert len(reduced) <= MOST_COLLECTIVE, "\n".join(reduced)
