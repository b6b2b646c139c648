"""Key heads fewer than ranks: a head on every rank of its group, its gradient summed over the group."""

import itertools
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tritondt as T
from tritondt.comm.transports.threads import run_ranks
from tritondt.debug import CommDebugMode
from tritondt.errors import ParallelizeError
from tritondt.parallel import ColwiseParallel, KeyValueParallel, ParallelStyle, RowwiseParallel, parallelize_module
from tritondt.parallel.feature_cut import FeatureCut, members_of_group

HEADS, HEAD_WIDTH, WIDTH, SEQUENCE = 6, 4, 10, 7
X, WANTED = (torch.randn(2, SEQUENCE, WIDTH, generator=torch.Generator().manual_seed(s)).double() for s in (3, 4))


class Attention(nn.Module):
    """Grouped queries, of as many heads as the projections give features for."""

    def __init__(self, key_heads: int) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.wq, self.wk, self.wv = (
            nn.Linear(WIDTH, heads * HEAD_WIDTH, dtype=torch.float64) for heads in (HEADS, key_heads, key_heads)
        )
        self.wo = nn.Linear(HEADS * HEAD_WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            project(x).unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2) for project in (self.wq, self.wk, self.wv)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return cast(torch.Tensor, self.wo(mixed.transpose(1, 2).flatten(2)))


def plan(key_heads: int) -> dict[str, ParallelStyle]:
    return {
        "wq": ColwiseParallel(unit=HEAD_WIDTH, groups=key_heads),
        "w[kv]": KeyValueParallel(unit=HEAD_WIDTH),
        "wo": RowwiseParallel(unit=HEAD_WIDTH, groups=key_heads),
    }


def train(model: nn.Module) -> list[float]:
    """Losses and gradient norms of three steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.mse_loss(model(X), WANTED)
        loss.backward()
        norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        found += [loss.item(), (norm.full_tensor() if isinstance(norm, T.DTensor) else norm).item()]
    return found


# Ranks that divide into groups, those that do not, those of which some have no queries, and as many key heads as ranks.
@pytest.mark.parametrize(
    ("num_ranks", "key_heads", "query_heads"),
    [
        (4, 2, (2, 1, 2, 1)),
        (7, 2, (1, 1, 1, 0, 1, 1, 1)),
        (5, 2, (1, 1, 1, 2, 1)),
        (4, 1, (2, 2, 1, 1)),
        (2, 3, (4, 2)),
        (2, 2, (3, 3)),
        (1, 2, (6,)),
    ],
)
def test_three_steps_are_those_of_one_process(num_ranks, key_heads, query_heads):
    single = Attention(key_heads)
    expected = train(single)

    def body(rank: int) -> int:
        model = parallelize_module(Attention(key_heads), T.Mesh((num_ranks,)), plan(key_heads))
        torch.testing.assert_close(train(model), expected)
        for name, parameter in single.named_parameters():
            mine: Any = model.get_parameter(name)
            torch.testing.assert_close(mine.full_tensor(), parameter)
        query, key = (int(model.get_submodule(name)(X).shape[-1]) // HEAD_WIDTH for name in ("wq", "wk"))
        # Of fewer heads than ranks each rank has one whole.
        assert key == (1 if key_heads < num_ranks else query * key_heads // HEADS)
        return query

    assert run_ranks(num_ranks, body) == list(query_heads)


def test_weights_are_on_no_rank_twice_and_heads_move_within_their_groups():
    def body(rank: int) -> None:
        model = parallelize_module(Attention(2), T.Mesh((4,)), plan(2))
        weight: Any = model.get_parameter("wk.weight")
        assert weight.to_local().shape == (HEAD_WIDTH // 2, WIDTH)
        with CommDebugMode() as comm:
            model.get_submodule("wk")(X)
        # Half of a head, to the other rank of the group alone.
        assert comm.get_sent_bytes() == 2 * SEQUENCE * (HEAD_WIDTH // 2) * 8

    run_ranks(4, body)


def test_groups_have_whole_units_and_no_rank_has_parts_of_two():
    for groups in (1, 2, 3, 4):
        for num_ranks in range(1, 8):
            cut = FeatureCut(unit=5, groups=groups).shard(0, 60 * groups, num_ranks)
            assert cut.sizes is not None
            bounds = [sum(cut.sizes[:rank]) for rank in range(num_ranks + 1)]
            for rank, (start, stop) in enumerate(itertools.pairwise(bounds)):
                assert start % 5 == 0
                shared = members_of_group(groups, num_ranks, rank)
                if groups >= num_ranks:
                    assert (start % 60, stop % 60, shared) == (0, 0, range(rank, rank + 1))
                else:
                    whole = (bounds[shared.start], bounds[shared.stop])
                    assert whole[0] % 60 == 0
                    assert whole[1] == whole[0] + 60
                    assert whole[0] <= start <= stop <= whole[1]
                    assert stop - start >= 5


@pytest.mark.parametrize(
    ("make", "module", "message"),
    [
        (lambda: KeyValueParallel(unit=3), nn.Linear(4, 8), "unit=3 was given for 8 output features; allowed"),
        (lambda: KeyValueParallel(unit=0), nn.Linear(4, 8), "unit got 0; allowed is the number of features"),
        (lambda: KeyValueParallel(unit=4), nn.Embedding(4, 8), "knows nn.Linear, not Embedding"),
        (lambda: ColwiseParallel(unit=3, groups=2), nn.Linear(4, 8), "groups=2 cuts 8 features into equal groups of"),
        (lambda: ColwiseParallel(groups=0), nn.Linear(4, 8), "groups got 0; allowed is a number of at least 1"),
        (lambda: ColwiseParallel(groups=2, balanced=True), nn.Linear(4, 8), "groups=2 was given with sizes=None"),
        (lambda: ColwiseParallel(groups=2, repeats=3), nn.Linear(4, 8), "allowed is groups with unit alone"),
        (lambda: RowwiseParallel(groups=2, sizes=(4, 4)), nn.Linear(8, 4), "allowed is groups with unit alone"),
    ],
)
def test_heads_that_no_projection_has_are_refused_before_anything_changes(make, module, message):
    def body(rank: int) -> None:
        with pytest.raises(ParallelizeError, match=message):
            parallelize_module(module, T.Mesh((2,)), make())
        assert type(module.weight) is nn.Parameter

    run_ranks(2, body)
