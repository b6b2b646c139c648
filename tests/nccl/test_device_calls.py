"""What a redistribution asks of a device: each call costs the host a microsecond or more, and none may come unseen."""

from collections import Counter
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import tritondt as T
from benchmarks.nccl import no_op_nccl
from benchmarks.nccl.no_op_nccl import NoOpEvent, NoOpStream, NoOpStreams, carried_by_nothing
from tests.nccl.conftest import SettingOf
from tritondt.comm.nccl import stream_queue
from tritondt.comm.transports import base
from tritondt.kernels import memory

NO_EVENT: Any = NoOpEvent()


def calls_of_a_cached_redistribution(rank: int, source: str, target: str) -> dict[str, int]:
    """Calls until an asynchronous redistribution returns, and "waited" for those of its wait; all has run meanwhile."""
    calls: Counter[str] = Counter()

    def counted(name: str, result: object) -> Any:
        def call(*_: object) -> object:
            calls[name] += 1
            return result

        return call

    allocate = memory.allocate

    def allocated(*arguments: Any) -> torch.Tensor:
        calls["allocations of buffers"] += 1
        return allocate(*arguments)

    T.close()
    with pytest.MonkeyPatch.context() as patch, carried_by_nothing():
        patch.setattr(no_op_nccl, "_launch", counted("launches", None))
        patch.setattr(NoOpStream, "record_event", counted("events recorded", NO_EVENT))
        patch.setattr(NoOpStream, "wait_event", counted("waits", None))
        patch.setattr(NoOpStreams, "follow", counted("follows", None))
        patch.setattr(NoOpEvent, "query", counted("questions", True))
        patch.setattr(NoOpStreams, "is_capturing", counted("questions for a capture", False))
        patch.setattr(stream_queue, "allocate", allocated)
        patch.setattr(base, "allocate", allocated)
        x = T.ones(64, 64, device_mesh=T.Mesh((2,)), placements=T.parse_placements(source))
        for _ in range(3):
            calls.clear()
            moved = x.redistribute(placements=T.parse_placements(target), async_op=True)
            issued = dict(calls)
            moved.to_local()
            waited = sum(calls.values()) - sum(issued.values())
        T.abort()
    return issued | {"waited": waited}


@pytest.mark.parametrize(
    ("source", "target", "launches"),
    [("S0", "S1", 1), ("S0", "R", 1), ("S1", "S0", 1)],
)
def test_an_issued_redistribution_takes_few_calls(
    setting_of: SettingOf, source: str, target: str, launches: int
) -> None:
    """A follow is an event recorded and waited for. S0 -> S1 also packs, S1 -> S0 also unpacks."""
    expected = {"follows": 1, "events recorded": 1, "questions": 1, "questions for a capture": 1, "launches": launches}
    expected |= {"waited": 1}
    for found in setting_of("host", 2).ranks.run(calls_of_a_cached_redistribution, source, target):
        assert found == expected
