"""Products in groups: which cuts meet, the values against one device, and gradients."""

from typing import cast

import pytest
import torch

import tritondt as T
from tests.ops.sharded import Case, check
from tritondt.comm.transports.threads import run_ranks

GROUPS, TOKENS, INNER, OUTER = 3, 10, 8, 12
# Small integers, of which every sum is exact.
X, WEIGHT, UPSTREAM = (
    torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(3)).float()
    for shape in ((TOKENS, INNER), (GROUPS, INNER, OUTER), (TOKENS, OUTER))
)
# The second group has no tokens.
OFFSETS = torch.tensor([4, 4, TOKENS], dtype=torch.int32)


def by_tokens(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    # The gradient of a product is dense, as torch's kernel wants it; that of a sum is not.
    return torch._grouped_mm(x, weight, offs=offsets) * 2


def has_exact_terms(placements: tuple[str, ...]) -> bool:
    """Whether ranks are not given thirds of values."""
    return not any("P" in text for text in placements)


@pytest.mark.parametrize(
    ("num_ranks", "placements", "expect"),
    [
        (4, ("R", "S2"), "S1"),
        (4, ("R", "S2(sizes=1/5/0/6)"), "S1(sizes=1/5/0/6)"),
        (3, ("S1", "S1"), "P"),
        (3, ("S1(sizes=1/5/2)", "S1(sizes=1/5/2)"), "P"),
        (2, ("R", "S0"), "P"),
        (4, ("R", "S0"), "P"),
        (2, ("P", "R"), "P"),
        (2, ("R", "P"), "P"),
        (3, ("R", "R"), "R"),
        (2, ("S0", "R"), None),
    ],
)
def test_tokens_by_experts(num_ranks, placements, expect):
    case = Case((num_ranks,), (X, WEIGHT, OFFSETS), (*placements, "R"))
    check(by_tokens, case, gradients=True, exact=has_exact_terms(placements), expect=expect)


@pytest.mark.parametrize("placements", [("R, S1", "S2, S1"), ("R, R", "S0, S2"), ("S1, P", "S1, R")])
def test_on_a_grid(placements):
    check(by_tokens, Case((2, 2), (X, WEIGHT, OFFSETS), (*placements, "R, R")), gradients=True, exact=False)


@pytest.mark.parametrize(
    ("placements", "expect"),
    [(("S0", "R"), "S1"), (("R", "S1"), "S2"), (("R", "R"), "R"), (("P", "R"), "P")],
)
def test_gradients_of_experts(placements, expect):
    by_feature, upstream = torch.zeros(INNER, 12), torch.zeros(12, OUTER)  # rows of 12 tokens, two of no expert
    by_feature[:, :TOKENS], upstream[:TOKENS] = X.t(), UPSTREAM
    case = Case((4,), (by_feature, upstream, OFFSETS), (*placements, "R"))
    check(by_tokens, case, exact=has_exact_terms(placements), expect=expect)


@pytest.mark.parametrize(
    ("placements", "expect"), [(("S1", "R"), "S0"), (("S2", "S0"), "P"), (("S0", "R"), "P"), (("R", "R"), "R")]
)
def test_tokens_as_columns(placements, expect):
    by_feature = torch.zeros(INNER, 12)
    by_feature[:, :TOKENS] = X.t()
    offsets = torch.tensor([4, 4, 12], dtype=torch.int32)
    check(by_tokens, Case((3,), (WEIGHT.mT.contiguous(), by_feature, offsets), (*placements, "R")), expect=expect)


@pytest.mark.parametrize(("placements", "expect"), [(("S0", "S0"), "S0"), (("S1", "R"), "S1"), (("S2", "S1"), "P")])
def test_batches(placements, expect):
    batch = X[:9].view(3, 3, INNER).contiguous()
    check(lambda x, y: torch._grouped_mm(x, y), Case((2,), (batch, WEIGHT), placements), expect=expect)


def test_factors_that_do_not_contract_are_refused_on_all_ranks():
    def body(rank: int) -> None:
        mesh = T.Mesh((2,))
        x, weight, offsets = (T.DTensor.from_local(tensor, mesh) for tensor in (X, WEIGHT.mT, OFFSETS))
        with pytest.raises(
            RuntimeError, match=r"got \(10, 8\) of torch.float32, \(3, 12, 8\) .*; allowed are two factors"
        ):
            torch._grouped_mm(x, weight, offs=offsets)

    run_ranks(2, body)


def test_a_rank_multiplies_its_own_experts_and_nothing_moves():
    def body(rank: int) -> None:
        mesh = T.Mesh((2,))
        weight = T.distribute_tensor(WEIGHT, mesh, [T.Shard(0)])
        x, offsets = (T.DTensor.from_local(tensor, mesh) for tensor in (X, OFFSETS))
        with T.explicit_redistribution():
            found = torch._grouped_mm(x, weight, offs=offsets)
        expected = torch._grouped_mm(X, WEIGHT, offs=OFFSETS)
        own = slice(0, 4) if rank == 0 else slice(4, TOKENS)  # two experts, the second without tokens, and one
        term = torch.zeros_like(expected)
        term[own] = expected[own]
        torch.testing.assert_close(cast(T.DTensor, found).to_local(), term, rtol=0, atol=0)

    run_ranks(2, body)
