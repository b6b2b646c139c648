"""Messages narrower than their tensors between processes: a half of the bytes, and torch's values."""

import pytest
import torch

import tritondt as T
from tests.comm.packing.wire_values import equal, numbers, rounded
from tests.harness.gloo_ranks import GlooRanks
from tests.harness.oracle import arithmetic
from tests.ops.sharded import distribute
from tritondt.debug import CommDebugMode


def on_processes(rank: int, source: str, target: str) -> tuple[int, int, torch.Tensor]:
    """Bytes sent in full and in bfloat16, and what this rank held in the end."""
    full = numbers((37, 29), torch.float32, 8).nan_to_num(0.0, 1.0, 2.0)
    x = distribute(full, T.Mesh((2, 2)), source)
    sent = list[int]()
    for wire_dtype in (None, torch.bfloat16):
        with CommDebugMode() as comm:
            found = x.redistribute(placements=T.parse_placements(target), wire_dtype=wire_dtype, async_op=bool(sent))
            local = found.to_local()
        sent.append(comm.get_sent_bytes())
    return sent[0], sent[1], local


@pytest.mark.parametrize(("source", "target"), [("S0, S1", "R, R"), ("S0, S0", "S1, S1"), ("R, S1", "S0, S0")])
def test_on_processes(four_ranks: GlooRanks, source: str, target: str) -> None:
    whole = rounded(numbers((37, 29), torch.float32, 8).nan_to_num(0.0, 1.0, 2.0), torch.bfloat16)
    for rank, (wide, narrow, local) in enumerate(four_ranks.run(on_processes, source, target)):
        assert wide == 2 * narrow > 0
        indices = arithmetic.held_indices((2, 2), T.parse_placements(target), (37, 29), divmod(rank, 2))
        equal(local, arithmetic.take(whole, indices))


def test_sums_on_processes(four_ranks: GlooRanks) -> None:
    found = four_ranks.run(on_processes, "P, P", "R, R")
    for wide, narrow, local in found:
        assert wide == 2 * narrow > 0
        equal(local, found[0][2])
