"""Products of matrices: which cuts meet without communication, what a sharded contraction leaves, and the values."""

import pytest
import torch

import tritondt as T
from tests.ops.sharded import Case, check, compare
from tritondt.comm.transports.threads import run_ranks

DOUBLE = torch.float64
A, B, ROW, WHOLE = (torch.randn(shape, dtype=DOUBLE) for shape in ((7, 6), (6, 5), (5,), (7, 5)))
BATCH_A, BATCH_B, BATCH_ROW = (torch.randn(shape, dtype=DOUBLE) for shape in ((4, 3, 6), (4, 6, 5), (4, 1, 5)))
VECTOR = torch.randn(6, dtype=DOUBLE)


@pytest.mark.parametrize(
    ("placements", "expect"),
    [
        (("S0", "R"), "S0"),
        (("R", "S1"), "S1"),
        (("S1", "S0"), "P"),
        (("S0(sizes=4/0/3)", "R"), "S0(sizes=4/0/3)"),
        (("R", "S1(unit=5)"), "S1(unit=5)"),
        (("S1(unit=2)", "S0(unit=2)"), "P"),
        (("S1(sizes=1/5/0)", "R"), "P"),
        (("S1(repeats=2)", "R"), "P"),
        (("R", "S0(unit=3)"), "P"),
        (("P", "R"), "P"),
        (("R", "P"), "P"),
        (("P(avg)", "R"), "P(avg)"),
        (("R", "R"), "R"),
    ],
)
def test_mm(placements, expect):
    check(torch.mm, Case((3,), (A, B), placements), expect=expect)


def test_terms_times_terms_are_reduced_on_one_side():
    check(torch.mm, Case((3,), (A, B), ("P", "P")), expect="P")


def test_a_maximum_is_not_linear():
    def body(rank):
        mesh = T.Mesh((3,))
        left = T.DTensor.from_local(A + rank, mesh, [T.Partial("max")])
        compare(torch.mm(left, T.DTensor.from_local(B, mesh)), torch.mm(A + 2, B))

    run_ranks(3, body)


def test_where_cuts_differ_the_smaller_factor_moves():
    def body(rank):
        mesh = T.Mesh((2,))
        left = T.DTensor.from_local(torch.ones(2, 1 + 4 * rank), mesh, [T.Shard(1, sizes=(1, 5))])
        right = T.DTensor.from_local(torch.ones(3, 50), mesh, [T.Shard(0)])
        needs = r"needs \(S1\(sizes=1/5\)\) of \(2, 6\) float32 as \(S1\)"
        with pytest.raises(T.ImplicitRedistributionError, match=needs), T.explicit_redistribution():
            torch.mm(left, right)
        compare(torch.mm(left, right), torch.full((2, 50), 6.0))

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("placements", "expect"),
    [
        (("S0, S1", "R, S0"), "S0, P"),
        (("S0, R", "R, S1"), "S0, S1"),
        (("S0, S0", "R, R"), "S0, S0"),
        (("S1, S1", "S0, S0"), "P, P"),
        (("P, S0", "R, R"), "P, S0"),
        (("P(avg), S1", "R, S0"), "P(avg), P"),
    ],
)
def test_mm_on_two_axes(placements, expect):
    check(torch.mm, Case((2, 2), (A, B), placements), expect=expect)
    check(torch.mm, Case((2, 2), (A, B), placements, order=(1, 0)), expect=expect)


@pytest.mark.parametrize(
    ("placements", "expect"),
    [
        (("R", "S1", "S0"), "P"),
        (("S0", "S1", "S0"), "P"),
        (("P", "S1", "S0"), "P"),
        (("S0", "R", "S1"), "S1"),
        (("S0(sizes=3/2/0)", "R", "S1(sizes=3/2/0)"), "S1(sizes=3/2/0)"),
        (("R", "S0", "R"), "S0"),
        (("R", "P", "R"), "P"),
        (("R", "R", "P(avg)"), "P(avg)"),
        (("R", "P(avg)", "R"), "P(avg)"),
        (("P", "R", "R"), "R"),
        (("R", "R", "R"), "R"),
    ],
)
@pytest.mark.parametrize("numbers", [{}, {"beta": 0.5, "alpha": 3}])
def test_addmm_adds_the_bias_once(placements, expect, numbers):
    def added(row, a, b):
        return torch.addmm(row, a, b, **numbers)

    check(added, Case((3,), (ROW, A, B), placements), expect=expect)


@pytest.mark.parametrize("shape", [(7, 5), (1, 5), (7, 1), (1, 1), ()])
@pytest.mark.parametrize(("left", "right"), [("S0", "R"), ("R", "S1"), ("S1", "S0"), ("R", "P")])
def test_addmm_of_every_shape_that_broadcasts(shape, left, right):
    check(torch.addmm, Case((3,), (torch.randn(shape, dtype=DOUBLE), A, B), ("R", left, right)))


def test_a_bias_of_not_a_number_is_ignored_where_beta_is_zero():
    row = torch.full((5,), torch.nan, dtype=DOUBLE)
    check(lambda row, a, b: torch.addmm(row, a, b, beta=0), Case((3,), (row, A, B), ("R", "S1", "S0")), expect="P")


@pytest.mark.parametrize(
    ("placements", "expect"),
    [
        (("S0", "S0"), "S0"),
        (("S0(sizes=0/4/0)", "R"), "S0(sizes=0/4/0)"),
        (("S1", "R"), "S1"),
        (("R", "S2"), "S2"),
        (("S2", "S1"), "P"),
        (("P", "R"), "P"),
    ],
)
def test_bmm_and_baddbmm(placements, expect):
    check(torch.bmm, Case((3,), (BATCH_A, BATCH_B), placements), expect=expect)
    for row in (BATCH_ROW, ROW, BATCH_A.new_ones(4, 3, 5)):
        check(
            lambda row, a, b: torch.baddbmm(row, a, b, beta=2, alpha=0.5),
            Case((3,), (row, BATCH_A, BATCH_B), ("R", *placements)),
            expect=expect,
        )


def test_vectors():
    check(torch.mv, Case((4,), (A, VECTOR), ("S1", "S0")), expect="P")
    check(torch.mv, Case((4,), (A, VECTOR), ("S0", "R")), expect="S0")
    check(torch.dot, Case((4,), (VECTOR, VECTOR), ("S0", "S0(sizes=0/6/0/0)")), expect="P")
    check(torch.dot, Case((4,), (VECTOR, VECTOR), ("R", "P(avg)")), expect="P(avg)")
    check(torch.vdot, Case((4,), (VECTOR, VECTOR), ("S0", "R")), expect="P")
    column = torch.randn(7, dtype=DOUBLE)
    check(torch.addmv, Case((4,), (column, A, VECTOR), ("R", "S1", "S0")), expect="P")
    check(torch.addmv, Case((4,), (column, A, VECTOR), ("R", "S0", "R")), expect="S0")
    check(torch.addr, Case((4,), (WHOLE, column, ROW), ("R", "S0", "R")), expect="S0")
    check(torch.addbmm, Case((4,), (ROW, BATCH_A, BATCH_B), ("R", "S0", "S0")), expect="P")


def test_in_place_products_leave_their_target_where_it_is():
    def added(target, a, b):
        return (target * 1).addmm_(a, b, beta=2)

    check(added, Case((3,), (WHOLE, A, B), ("S0", "S0", "R")), expect="S0")
    check(added, Case((3,), (WHOLE, A, B), ("S1", "S1", "S0")), expect="S1")
    check(added, Case((3,), (WHOLE, A, B), ("P", "S1", "S0")), expect="P")
    check(added, Case((3,), (WHOLE, A, B), ("R", "S1", "S0")), expect="R")


def test_ints_add_up_exactly():
    a, b = torch.randint(-9, 9, (5, 7)), torch.randint(-9, 9, (7, 3))
    check(torch.mm, Case((4,), (a, b), ("S1(sizes=0/1/6/0)", "S0")), expect="P", exact=True)


def test_a_contraction_of_nothing_is_zero():
    check(torch.mm, Case((3,), (torch.ones(4, 0), torch.ones(0, 3)), ("S1", "S0")), expect="P", exact=True)
    check(torch.mm, Case((3,), (torch.ones(0, 4), torch.ones(4, 3)), ("S0", "R")), expect="S0", exact=True)


@pytest.mark.parametrize("shape", [(3, 1), (1, 5), (1, 1)])
@pytest.mark.parametrize("placements", ["S0", "S1"])
def test_a_product_is_added_to_a_dim_of_length_1_that_is_cut(shape, placements):
    """On the rank that holds none of it, too: the summand is the result, and stays as it is."""
    added, left, right = torch.ones(shape), torch.ones(shape[0], 2), torch.ones(2, shape[1])
    batches = [tensor.expand(2, *tensor.shape).contiguous() for tensor in (added, left, right)]
    beyond = {"S0": "S1", "S1": "S2"}[placements]
    check(lambda to, a, b: (to * 1).addmm_(a, b), Case((2,), [added, left, right], [placements, "R", "R"]))
    check(lambda to, a, b: (to * 1).baddbmm_(a, b), Case((2,), batches, [beyond, "R", "R"]))
    check(lambda to, a, b: (to * 1).addmm_(a, b), Case((2,), [added, left, right], [placements, "R", "S1"]))


@pytest.mark.parametrize("shapes", [((2, 3, 0), (2, 0, 4)), ((2, 0, 3), (2, 3, 4)), ((0, 2, 3), (0, 3, 4))])
@pytest.mark.parametrize("placements", [("R", "R"), ("S0", "S0"), ("S1", "R"), ("S2", "S1")])
def test_batches_of_two_dtypes_that_have_no_products_to_add_up_give_the_dtype_of_the_second(shapes, placements):
    left, right = torch.zeros(shapes[0]), torch.zeros(shapes[1], dtype=torch.bfloat16)
    check(torch.bmm, Case((2,), (left, right), placements), exact=True)
    check(torch.bmm, Case((2,), (right.mT, left.mT), placements), exact=True)
    assert torch.bmm(left, right).dtype is torch.bfloat16


def test_batches_of_two_dtypes_that_have_products_are_refused_as_on_one_device():
    def body(rank):
        mesh = T.Mesh((2,))
        with pytest.raises(RuntimeError, match="expected scalar type"):
            torch.bmm(*(T.DTensor.from_local(it, mesh) for it in (BATCH_A, BATCH_B.float())))

    run_ranks(2, body)
