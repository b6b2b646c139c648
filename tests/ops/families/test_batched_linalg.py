"""Linear algebra over leading dims that are cut, matrices that are not whole, and right-hand sides of every kind."""

import pytest
import torch

import tritondt as T
from tests.ops.sharded import Case, check, distribute
from tritondt import events
from tritondt.comm.transports.threads import run_ranks

GENERATOR = torch.Generator().manual_seed(5)


def randn(*shape):
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64)


SQUARE = randn(5, 3, 3)
POSITIVE = SQUARE @ SQUARE.mT + 3 * torch.eye(3, dtype=torch.float64)
FUNCTIONS = {
    "det": torch.linalg.det,
    "slogdet": lambda x: torch.linalg.slogdet(x)[1],
    "inv": torch.linalg.inv,
    "cholesky": torch.linalg.cholesky,
    "cholesky_solve": lambda x: torch.cholesky_solve(x, torch.linalg.cholesky(x)),
    "eigh": torch.linalg.eigvalsh,
    "svd": torch.linalg.svdvals,
    "qr": lambda x: torch.linalg.qr(x)[1],
    "lu": lambda x: torch.linalg.lu(x)[2],
    "matrix_exp": lambda x: torch.linalg.matrix_exp(x / 10),
    "pinv": torch.linalg.pinv,
    "matrix_power": lambda x: torch.linalg.matrix_power(x, 3),
    "solve_triangular": lambda x: torch.linalg.solve_triangular(x.tril(), x, upper=False),
    "cross": lambda x: torch.linalg.cross(x, x + x.mT.contiguous() * x),
    "householder": lambda x: torch.linalg.householder_product(x, x[..., 0]),
}


@pytest.mark.parametrize("placements", ["S0", "S0(sizes=0/4/1)", "S1", "P"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients_are_those_of_one_device(name, placements):
    check(FUNCTIONS[name], Case((3,), (POSITIVE,), (placements,)), gradients=True)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_cut_batches_send_nothing(name):
    sent: list[int] = []
    unsubscribe = events.subscribe(lambda event: sent.append(event.sent_bytes))
    try:
        run_ranks(3, lambda rank: FUNCTIONS[name](distribute(POSITIVE, T.Mesh((3,)), "S0")))
    finally:
        unsubscribe()
    assert sum(sent) == 0


@pytest.mark.parametrize("right", [randn(5, 3), randn(5, 3, 2), randn(3, 2), randn(3), randn(4, 5, 3, 2)])
@pytest.mark.parametrize("placements", ["S0", "S1"])
def test_right_hand_sides_of_every_kind(right, placements):
    check(torch.linalg.solve, Case((2,), (POSITIVE, right), (placements, "R")), gradients=True)


def test_a_matrix_of_right_hand_sides_is_not_taken_for_one_of_each_matrix():
    # Of 6 matrices each of 2 ranks has 3, for which a 3 x 3 right-hand side has the shape of one vector each.
    matrices = torch.cat([POSITIVE, POSITIVE[:1]])
    check(torch.linalg.solve, Case((2,), (matrices, randn(3, 3)), ("S0", "R")))


def test_terms_of_equal_layout_are_told_apart():
    # Linear in the right-hand side alone: were both taken for terms, the result would be the sum of wrong quotients.
    triangles = POSITIVE.tril()
    case = Case((2,), (triangles, randn(5, 3, 3)), ("P", "P"))
    check(lambda x, y: torch.linalg.solve_triangular(x, y, upper=False), case, gradients=True, expect="P")


def test_a_matrix_without_an_inverse_is_reported():
    def body(rank):
        x = distribute(torch.zeros(4, 2, 2, dtype=torch.float64), T.Mesh((2,)), "S0")
        with pytest.raises(torch.linalg.LinAlgError, match="singular"):
            torch.linalg.inv(x)

    run_ranks(2, body)


@pytest.mark.parametrize("dim", [(0,), (-1,), (0, 2)])
@pytest.mark.parametrize("placements", ["S0", "S1(sizes=1/3)", "S2", "P"])
def test_fourier_transforms(dim, placements):
    x = randn(5, 4, 6)
    check(lambda x: torch.fft.fftn(x, dim=dim).abs(), Case((2,), (x,), (placements,)), gradients=True)
    check(
        lambda x: torch.fft.irfftn(torch.fft.rfftn(x, dim=dim), dim=dim),
        Case((2,), (x,), (placements,)),
        gradients=True,
    )


def test_terms_pass_through_what_is_linear():
    check(lambda x: torch.fft.rfft(x), Case((2,), (randn(4, 6),), ("P",)), expect="P")
    check(lambda x: torch.fft.rfft(x), Case((2,), (randn(4, 6),), ("S0",)), expect="S0")
