"""Cuts of features by sizes, and balanced: no rank without heads where there are as many heads as ranks."""

from typing import Any

import pytest
import torch
from torch import nn

import tritondt as T
from tests.parallel.test_transformer import FOLLOWING, HEAD_WIDTH, Model, plan, train
from tritondt.comm.transports.threads import run_ranks
from tritondt.errors import ParallelizeError
from tritondt.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from tritondt.parallel.feature_cut import FeatureCut


@pytest.mark.parametrize("options", [{"unit": HEAD_WIDTH, "balanced": True}, {"sizes": (8, 0, 4, 12)}], ids=str)
def test_losses_and_norms_are_those_of_one_process(options):
    expected = train(Model(), FOLLOWING)

    def body(rank: int) -> tuple[int, ...]:
        mesh, model, styles = T.Mesh((4,)), Model(), plan()
        styles["attention.w[qkv]"] = ColwiseParallel(use_local_output=False, **options)
        styles["attention.wo"] = RowwiseParallel(output_layouts=T.Shard(1), use_local_output=False, **options)
        parallelize_module(model, mesh, styles)
        torch.testing.assert_close(train(model, T.distribute_tensor(FOLLOWING, mesh)), expected)
        weight: Any = model.attention.wo.weight
        return tuple(weight.to_local().shape)

    held = (8, 8, 4, 4) if "balanced" in options else (8, 0, 4, 12)
    assert run_ranks(4, body) == [(24, columns) for columns in held]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("num_units", [1, 4, 6, 7])
def test_balanced_pieces_differ_by_one_unit_at_most(num_units, num_ranks):
    for repeats in (1, 3):
        found = FeatureCut(unit=5, balanced=True, repeats=repeats).shard(0, 5 * num_units * repeats, num_ranks)
        layout = T.Layout((num_ranks,), (found,), (5 * num_units * repeats,))
        lengths = [layout.local_shape((rank,))[0] // (5 * repeats) for rank in range(num_ranks)]
        assert sum(lengths) == num_units
        assert max(lengths) - min(lengths) <= 1
        assert lengths == sorted(lengths, reverse=True)


def test_an_embedding_by_sizes_and_by_balanced_rows():
    torch.manual_seed(3)
    single, indices = nn.Embedding(9, 6), torch.tensor([[0, 8, 4], [5, 5, 7]])

    def body(rank: int) -> list[tuple[int, ...]]:
        found = []
        for style in (
            ColwiseParallel(sizes=(1, 0, 2, 3), output_layouts=T.Replicate()),
            RowwiseParallel(balanced=True),
        ):
            torch.manual_seed(3)
            module: Any = parallelize_module(nn.Embedding(9, 6), T.Mesh((4,)), style)
            torch.testing.assert_close(module(indices), single(indices), rtol=0, atol=0)
            found.append(tuple(module.weight.to_local().shape))
        return found

    assert run_ranks(4, body) == [[(9, 1), (3, 6)], [(9, 0), (2, 6)], [(9, 2), (2, 6)], [(9, 3), (2, 6)]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ColwiseParallel(sizes=(4, 4), balanced=True), r"sizes=\(4, 4\) and balanced=True were given; allowed"),
        (lambda: RowwiseParallel(sizes=(4, 4), balanced=True), r"sizes=\(4, 4\) and balanced=True were given; allowed"),
        (
            lambda: ColwiseParallel(unit=3, balanced=True),
            "balanced=True cuts 8 features into whole units of 3; allowed",
        ),
        (lambda: ColwiseParallel(unit=4, repeats=3, balanced=True), "in 3 equal blocks into whole units of 4"),
        (lambda: ColwiseParallel(sizes=(4, 5)), "the sizes sum to 9, they must sum to 8"),
        (lambda: ColwiseParallel(sizes=(8,)), "1 sizes were given, allowed are 2, one per coordinate"),
    ],
)
def test_cuts_that_no_layer_has_are_refused_before_anything_changes(make, message):
    def body(rank: int) -> None:
        linear = nn.Linear(8, 8)

        def apply() -> None:
            style: ParallelStyle = make()
            parallelize_module(linear, T.Mesh((2,)), style)

        with pytest.raises(ParallelizeError, match=message):
            apply()
        assert type(linear.weight) is nn.Parameter

    run_ranks(2, body)


class ByHeads(nn.Module):
    """Attention without attention: features by head, with a length that torch is to work out."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wo = nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.wq(x)
        heads = q.view(*x.shape[:2], q.shape[-1] // 4, -1)
        found: torch.Tensor = self.wo(heads.flatten(2))
        return found


def test_a_rank_without_heads_is_told_what_to_write_where_a_length_is_minus_one():
    def body(rank: int) -> str:
        model = nn.Sequential(ByHeads())  # 6 heads of 4 features: 2, 2, 2 and 0
        plan = {"0.wq": ColwiseParallel(unit=4), "0.wo": RowwiseParallel(unit=4)}
        parallelize_module(model, T.Mesh((4,)), plan)
        with pytest.raises((RuntimeError, T.PeerError)) as found:
            model(torch.ones(2, 3, 8))
        return str(found.value)

    *others, last = run_ranks(4, body)
    advice = "this rank has no part of some layers: 0.wq (S0(unit=4)) of (24, 8) float32, 0.wo (S1(unit=4))"
    assert "cannot reshape tensor of 0 elements" in last
    assert advice in last
    assert "Their styles take balanced=True, or sizes= with a number for each rank" in last
    # The others wait for its part of the sum, and hear that it does not come.
    assert all("rank 3" in text and "this rank has no part" not in text for text in others)

    def balanced(rank: int) -> tuple[int, ...]:
        plan = {
            name: style(unit=4, balanced=True) for name, style in (("wq", ColwiseParallel), ("wo", RowwiseParallel))
        }
        model = parallelize_module(ByHeads(), T.Mesh((4,)), plan)
        return tuple(model(torch.ones(2, 3, 8)).shape)

    assert run_ranks(4, balanced) == [(2, 3, 8)] * 4
