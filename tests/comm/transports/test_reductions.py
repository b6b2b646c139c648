"""The reduction contract: coordinate order, wide accumulation of half types, one true division, one rounding."""

from functools import reduce

import pytest
import torch

import tritondt as T
from tests.harness.gloo_ranks import GlooRanks
from tritondt.comm.transports.threads import run_ranks

SHAPE = (5, 7)
ACCUMULATION_DTYPES = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def random_terms(dtype: torch.dtype, num_terms: int) -> list[torch.Tensor]:
    """Terms of very different size, whose sum depends on the order and on the accumulation."""
    generator = torch.Generator().manual_seed(7)
    terms = []
    for _ in range(num_terms):
        scale = torch.pow(2.0, torch.randint(-9, 9, SHAPE, generator=generator))
        terms.append((torch.randn(SHAPE, generator=generator, dtype=torch.float64) * scale).to(dtype))
    return terms


def in_order(terms: list[torch.Tensor], op: str) -> torch.Tensor:
    """The terms reduced one after the other, as the contract says."""
    dtype = terms[0].dtype
    wide = [term.to(ACCUMULATION_DTYPES.get(dtype, dtype)) for term in terms]
    if op == "product":
        return reduce(torch.mul, wide).to(dtype)
    if op in ("max", "min"):
        return reduce(torch.maximum if op == "max" else torch.minimum, wide).to(dtype)
    total = reduce(torch.add, wide)
    return (total / len(terms) if op == "avg" else total).to(dtype)


def reduced(mesh_shape: tuple[int, ...], source: str, target: str, terms: list[torch.Tensor]) -> list[torch.Tensor]:
    """The results by rank; rank r holds term r."""

    def body(rank: int) -> torch.Tensor:
        return reduced_by(rank, mesh_shape, source, target, terms[rank])

    return run_ranks(len(terms), body)


def reduced_by(rank: int, mesh_shape: tuple[int, ...], source: str, target: str, term: torch.Tensor) -> torch.Tensor:
    meta = T.TensorMeta.contiguous(term.shape, term.dtype)
    before, after = (T.DTensorSpec(T.Mesh(mesh_shape), T.parse_placements(text), meta) for text in (source, target))
    return T.redistribute(term, before, after)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", ["sum", "avg", "product", "max", "min"])
def test_terms_are_reduced_in_coordinate_order_with_one_rounding(op: str, dtype: torch.dtype) -> None:
    terms = random_terms(dtype, 5)
    expected = in_order(terms, op)
    for local in reduced((5,), f"P({op})", "R", terms):
        torch.testing.assert_close(local, expected, rtol=0, atol=0)
    pieces = reduced((5,), f"P({op})", "S1", terms)
    torch.testing.assert_close(torch.cat(pieces, 1), expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("target", ["R, R", "S0, S1", "R, S1", "S1, R"])
def test_several_axes_are_reduced_in_row_major_coordinate_order(target: str, dtype: torch.dtype) -> None:
    terms = random_terms(dtype, 6)
    expected = in_order(terms, "sum")
    whole = T.Layout((2, 3), T.parse_placements(target), SHAPE)
    for coordinate, local in zip(whole.coordinates(), reduced((2, 3), "P, P", target, terms), strict=True):
        box = tuple(slice(start, stop) for start, stop in whole.boxes(coordinate)[0])
        torch.testing.assert_close(local, expected[box], rtol=0, atol=0)


def test_a_sum_of_means_is_divided_once() -> None:
    """Six terms in float16: a mean over one axis of a sum over the other, divided by 3 at the end."""
    terms = random_terms(torch.float16, 6)
    expected = (reduce(torch.add, [term.float() for term in terms]) / 3).half()
    for local in reduced((2, 3), "P(sum), P(avg)", "R, R", terms):
        torch.testing.assert_close(local, expected, rtol=0, atol=0)


def test_a_mean_is_divided_not_multiplied_by_a_reciprocal() -> None:
    """5 / 5 is 1, while 5 * float32(0.2) and products of other sums with it are not always the quotient."""
    terms = [torch.arange(1, 1001, dtype=torch.float32) * (rank == 2) for rank in range(5)]
    (first, *_) = reduced((5,), "P(avg)", "R", terms)
    torch.testing.assert_close(first, torch.arange(1, 1001, dtype=torch.float32) / 5, rtol=0, atol=0)


def test_half_sums_do_not_overflow_on_the_way() -> None:
    terms = [torch.full((3,), value, dtype=torch.float16) for value in (60000.0, 60000.0, -60000.0)]
    for local in reduced((3,), "P", "R", terms):
        torch.testing.assert_close(local, torch.full((3,), 60000.0, dtype=torch.float16), rtol=0, atol=0)


@pytest.mark.parametrize("op", ["sum", "avg", "product", "max", "min"])
@pytest.mark.parametrize("where", [0, 1, 2])
def test_nan_reaches_the_result_from_any_rank(op: str, where: int) -> None:
    terms = [torch.tensor([1.0, 2.0, 3.0]) for _ in range(3)]
    terms[where] = torch.tensor([float("nan"), 2.0, 3.0])
    for local in reduced((3,), f"P({op})", "R", terms):
        assert torch.isnan(local).tolist() == [True, False, False]


def test_integers_wrap() -> None:
    terms = [torch.tensor([100, -100, 1], dtype=torch.int8) for _ in range(2)]
    for local in reduced((2,), "P", "R", terms):
        assert local.tolist() == [-56, 56, 2]


@pytest.mark.parametrize(("op", "expected"), [("max", [True, True, True, False]), ("min", [True, False, False, False])])
def test_bools_have_or_and_and(op: str, expected: list[bool]) -> None:
    terms = [torch.tensor([True, True, False, False]), torch.tensor([True, False, True, False])]
    for local in reduced((2,), f"P({op})", "R", terms):
        assert local.tolist() == expected


def test_all_holders_have_the_same_bits_again_and_again(four_ranks: GlooRanks) -> None:
    terms = random_terms(torch.bfloat16, 4)
    expected = in_order(terms, "avg")
    for _ in range(3):
        for local in four_ranks.run(reduce_own, terms):
            torch.testing.assert_close(local, expected, rtol=0, atol=0)


def reduce_own(rank: int, terms: list[torch.Tensor]) -> torch.Tensor:
    return reduced_by(rank, (4,), "P(avg)", "R", terms[rank])
