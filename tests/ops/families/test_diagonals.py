"""Diagonals, triangles, windows, indices written to, complex numbers as pairs, and lookups."""

import pytest
import torch

import tritondt as T
from tests.ops.distinct import numbers
from tests.ops.sharded import Case, check, distribute
from tritondt.comm.transports.threads import run_ranks

GENERATOR = torch.Generator().manual_seed(4)


def randn(*shape, dtype=torch.float64):
    return torch.randn(shape, generator=GENERATOR, dtype=dtype)


X = randn(3, 7, 6)
LAYOUTS = [((2,), text) for text in ("S0", "S1", "S2(sizes=1/5)", "S1(repeats=7)", "P", "R")] + [((2, 2), "S1, S2")]


@pytest.mark.in_ci(51)
@pytest.mark.parametrize(("mesh", "placements"), LAYOUTS)
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.diagonal(dim1=1, dim2=2),
        lambda x: x.diagonal(1, 0, -1),
        lambda x: torch.diagonal_copy(x, -1, 2, 1),
        lambda x: torch.diag_embed(x[0], 1),
        lambda x: torch.diag_embed(x[0], dim1=0, dim2=2),
        lambda x: torch.diagonal_scatter(x, 2 * x.diagonal(0, 1, 2), 0, 1, 2),
        lambda x: x.tril(),
        lambda x: x.triu(2),
        lambda x: x.tril(-3) + x.triu(-1),
        lambda x: x[0].trace(),
        lambda x: x.unfold(1, 3, 2),
        lambda x: x.select_scatter(x[:, 0], 1, 5),
        lambda x: x.slice_scatter(x[:, :3], 1, 2, 5),
        lambda x: x.roll(2, 1),
        lambda x: x.roll((1, -2), (0, 2)),
        lambda x: x.rot90(1, (0, 1)),
        lambda x: x.renorm(2, 1, 1.5),
        lambda x: x.cummax(1)[0],
        lambda x: x.kthvalue(2, 0)[0],
        lambda x: x.median(-1)[0],
        lambda x: x.nanmedian(1, keepdim=True)[0],
        lambda x: torch.nn.functional.glu(x, 2),
        lambda x: x.index_fill(1, torch.ops.aten.new_zeros(x, [2], dtype=torch.int64), 3.0),
        lambda x: x.logcumsumexp(1),
    ],
)
def test_values_and_gradients_are_those_of_one_device(function, mesh, placements):
    check(function, Case(mesh, (X,), (placements,)), gradients=True)


@pytest.mark.parametrize(
    ("function", "placements", "expect"),
    [
        (torch.tril, "S1", "S1"),
        (torch.triu, "S2(sizes=1/5)", "S2(sizes=1/5)"),
        (lambda x: x[0].trace(), "S1", "P"),
        (lambda x: x.select_scatter(x[:, 0].redistribute(placements=[T.Replicate()]), 1, 5), "S1", "S1"),
        (lambda x: x.diagonal(0, 1, 2), "S0", "S0"),
        (lambda x: x.roll(1, 0), "P", "P"),
    ],
)
def test_layout_of_the_result(function, placements, expect):
    def body(rank):
        found = function(distribute(X, T.Mesh((2,)), placements))
        assert found.placements == T.parse_placements(expect)

    run_ranks(2, body)


def test_distances_of_nothing():
    case = Case((2,), (randn(1, 4, 5), randn(0, 3, 5)), ("S2", "S0"))
    check(lambda x, y: torch.cdist(x, y, 0.0), case, gradients=True)


def test_a_diagonal_is_a_view():
    def body(rank):
        x = distribute(X, T.Mesh((2,)), "S0")
        x.diagonal(0, 1, 2).zero_()
        expected = X.clone()
        expected.diagonal(0, 1, 2).zero_()
        torch.testing.assert_close(x.full_tensor(), expected, rtol=0, atol=0)

    run_ranks(2, body)


Z = randn(4, 6, dtype=torch.complex128)


@pytest.mark.parametrize("placements", ["S0", "S1(sizes=2/4)", "P"])
@pytest.mark.parametrize(
    "function",
    [
        torch.view_as_real,
        lambda z: torch.view_as_real(z.conj().resolve_conj()),
        lambda z: z.conj() * z,
        lambda z: (z.real + z.imag).sin(),
        lambda z: z.mH @ z,
        torch.abs,
        lambda z: torch.view_as_complex(torch.view_as_real(z) * 2),
        lambda z: torch.polar(z.abs(), z.angle()),
    ],
)
def test_complex_numbers(function, placements):
    check(function, Case((2,), (Z,), (placements,)))


def test_the_same_bits_as_another_dtype():
    for placements in ("S0", "P"):
        check(lambda x: x.view(torch.int64), Case((2,), (numbers(3, 4),), (placements,)), exact=True)
    with pytest.raises(T.PropagationError, match="elements as others of another size; copy them"):
        run_ranks(1, lambda rank: distribute(X, T.Mesh((1,)), "R").view(torch.float32))


TABLE, VALUES = torch.arange(9.0, dtype=torch.float64), randn(5, 4) * 5


@pytest.mark.parametrize("placements", ["S0", "S1(sizes=0/4)", "P"])
@pytest.mark.parametrize("of_table", ["R", "S0"])
@pytest.mark.parametrize(
    "function",
    [
        torch.searchsorted,
        lambda table, x: torch.bucketize(x, table),
        lambda table, x: torch.isin(x.round(), table),
        lambda table, x: table.take((x.abs() % 9).long()),
        lambda table, x: torch.searchsorted(table.expand(5, 9).contiguous(), x),
    ],
)
def test_lookups(function, of_table, placements):
    check(function, Case((2,), (TABLE, VALUES), (of_table, placements)))


@pytest.mark.parametrize(("first", "second"), [("S0", "R"), ("R", "S0"), ("S0", "S0"), ("S1", "R"), ("P", "R")])
@pytest.mark.parametrize("p", [1.0, 2.0])
def test_distances_of_rows(first, second, p):
    case = Case((2,), (randn(5, 3), randn(4, 3)), (first, second))
    check(lambda x, y: torch.cdist(x, y, p, "donot_use_mm_for_euclid_dist"), case, gradients=True)
    check(lambda x, y: torch.dist(x[:4], y, p), case, gradients=True)


def test_products_of_three():
    for placements in (("S0", "R", "R"), ("R", "R", "S0"), ("S1", "R", "S1"), ("P", "R", "R")):
        case = Case((2,), (randn(5, 3), randn(5, 4), randn(2, 3, 4)), placements)
        check(torch.nn.functional.bilinear, case, gradients=True)
