"""nn.Embedding(max_norm=): rows renormalized where they are held, or a refusal on all ranks."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tritondt as T
from tritondt.comm.transports.threads import run_ranks

TABLE = torch.randn(7, 4, generator=torch.Generator().manual_seed(0))
INDICES = torch.tensor([[1, 6, 1], [3, 0, 6]])


@pytest.mark.parametrize("cut", ["S0", "R", "S0(sizes=0/7/0)"])
def test_rows_that_are_looked_up_are_renormalized(cut: str) -> None:
    expected = TABLE.clone()
    looked_up = F.embedding(INDICES, expected, max_norm=1.0, norm_type=1.0)

    def body(rank: int) -> None:
        mesh = T.Mesh((3,))
        table = T.distribute_tensor(TABLE, mesh, T.parse_placements(cut))
        found: Any = F.embedding(T.distribute_tensor(INDICES, mesh), table, max_norm=1.0, norm_type=1.0)
        torch.testing.assert_close(found.full_tensor(), looked_up, rtol=0, atol=0)
        torch.testing.assert_close(table.full_tensor(), expected, rtol=0, atol=0)

    run_ranks(3, body)


@pytest.mark.parametrize(("cut", "of_indices"), [("S1", "R"), ("R", "S1"), ("S0", "S0")])
def test_norms_that_no_rank_could_take_alone_are_refused_or_right(cut: str, of_indices: str) -> None:
    expected = TABLE.clone()
    F.embedding(INDICES, expected, max_norm=1.0)

    def body(rank: int) -> bool:
        mesh = T.Mesh((3,))
        table = T.distribute_tensor(TABLE, mesh, T.parse_placements(cut))
        indices = T.distribute_tensor(INDICES, mesh, T.parse_placements(of_indices))
        try:
            F.embedding(indices, table, max_norm=1.0)
        except T.PropagationError:
            torch.testing.assert_close(table.full_tensor(), TABLE, rtol=0, atol=0)
            return False
        torch.testing.assert_close(table.full_tensor(), expected, rtol=0, atol=0)
        return True

    assert len(set(run_ranks(3, body))) == 1
