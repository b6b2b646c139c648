"""Figures of collectives: nccl-tests' sizes and factors, what a timing says, and sums that any order makes alike."""

import pytest
import torch

from tritondt.cli.bench.collective import data
from tritondt.cli.bench.collective.case import case_of_matrix, make_case
from tritondt.cli.bench.collective.kinds import KINDS
from tritondt.cli.bench.collective.record import Timing

FLOAT = ("float", 4)

# doc/PERFORMANCE.md of nccl-tests, for all-to-all of uneven parts src/alltoallv.cu.
FACTORS = {
    "all_reduce": 2 * 7 / 8,
    "all_gather": 7 / 8,
    "all_gather_v": 7 / 8,
    "reduce_scatter": 7 / 8,
    "reduce_scatter_v": 7 / 8,
    "all_to_all": 7 / 8,
    "all_to_all_v": 7 / 8,
    "broadcast": 1,
    "reduce": 1,
    "gather": 7 / 8,
    "scatter": 7 / 8,
    "sendrecv": 1,
}


def test_bandwidths_are_those_of_nccl_tests():
    assert set(FACTORS) == set(KINDS)
    for name, factor in FACTORS.items():
        assert KINDS[name].bandwidths(3 * 10**9, 8, 2.0) == (1.5, 1.5 * factor), name


def test_size_and_count_are_those_of_nccl_tests():
    # 8 ranks, 32 MiB of floats: the whole buffer, or one rank's part of it.
    whole, part = (32 << 20) // 4, (32 << 20) // 4 // 8
    parts = {"all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"}
    for name in KINDS:
        case = make_case(name, 8, FLOAT, "sum", 0, 32 << 20, 0.0)
        assert case is not None
        assert (case.size, case.count) == (32 << 20, part if name in parts else whole), name
    # Each part is rounded down to 16 bytes: 1000 bytes over 3 ranks are 3 times 320.
    rounded = make_case("all_gather", 3, FLOAT, "sum", 0, 1000, 0.0)
    assert rounded is not None
    assert rounded.size == 960
    # Far ranks get more; what a rank gets may be more than what it sends.
    matrix = case_of_matrix("all_to_all_v", 2, FLOAT, "none", 0, ((16, 64), (0, 160)))
    assert (matrix.size, matrix.count) == (224, 56)


@pytest.mark.parametrize("redop", data.REDOPS)
def test_terms_add_up_to_the_same_bits_in_any_order(redop):
    for type_name, dtype in data.DTYPES.items():
        if redop == "avg" and not dtype.is_floating_point:
            continue
        case = make_case("all_reduce", 5, (type_name, dtype.itemsize), redop, 0, 4096, 0.0)
        assert case is not None
        backwards = data.given(case, 4)
        for rank in (3, 2, 1, 0):
            backwards = data._PAIRWISE[redop](backwards, data.given(case, rank))
        found = backwards / 5 if redop == "avg" else backwards
        torch.testing.assert_close(found, data.expected(case, 0), rtol=0, atol=0)
        assert data.num_wrong(case, found, data.expected(case, 0)) == 0
        assert data.num_wrong(case, found + 1, data.expected(case, 0)) == found.numel()


def test_figures_of_a_timing():
    timing = Timing(((1.0, 3.0, 2.0), (2.0, 2.0, 5.0)), 0)
    assert [timing.time_s(average) for average in (0, 1, 2, 3)] == [2.0, 2.5, 2.0, 3.0]
    assert timing.slowest_s == (2.0, 3.0, 5.0)
    assert timing.rank_spread == pytest.approx(0.4)
