"""cat, stack and repeat: what stays where it is, what is gathered, and their gradients."""

import pytest
import torch

import tritondt as T
from tests.ops.distinct import numbers
from tests.ops.sharded import Case, check, distribute, placements_of, whole
from tritondt.comm.transports.threads import run_ranks
from tritondt.sharding.placement import parse_placements

X, Y, Z = numbers(7, 5), numbers(7, 5) + 100, numbers(4, 5) + 200


@pytest.mark.parametrize(
    ("function", "tensors", "placements", "expect"),
    [
        # Other dims stay as they are cut; where two are cut differently one moves.
        (lambda *all: torch.cat(all, 1), (X, Y), ("S0", "S0"), "S0"),
        (lambda *all: torch.cat(all, -1), (X, Y), ("S0(sizes=1/0/6)", "S0(sizes=1/0/6)"), "S0(sizes=1/0/6)"),
        (lambda *all: torch.cat(all), (X, Z), ("S1(unit=5)", "S1(unit=5)"), "S1(unit=5)"),
        (lambda *all: torch.cat(all), (X, Z), ("S1", "R"), "S1"),
        (lambda *all: torch.cat(all, 1), (X, Y), ("S0(sizes=1/0/6)", "R"), "S0(sizes=1/0/6)"),
        # The joined dim: equal blocks cut alike, consecutive pieces, else whole.
        (lambda *all: torch.cat(all), (X, Y), ("S0", "S0"), "S0(repeats=2)"),
        (lambda *all: torch.cat(all), (X, Y), ("S0(sizes=1/0/6)", "S0(sizes=1/0/6)"), "S0(sizes=1/0/6, repeats=2)"),
        (lambda *all: torch.cat(all), (X, Z), ("S0", "S0"), "R"),
        (lambda *all: torch.cat(all), (X, Z), ("S0(sizes=3/4/0)", "S0(sizes=0/2/2)"), "S0(sizes=3/6/2)"),
        (lambda *all: torch.cat(all), (X, Z), ("S0(sizes=4/3/0)", "S0(sizes=0/1/3)"), "S0"),
        (lambda *all: torch.cat(all), (X, Z), ("S0(sizes=0/4/3)", "S0(sizes=2/2/0)"), "R"),
        (lambda *all: torch.cat(all), (X, X[:0], Z), ("S0(sizes=3/4/0)", "S0", "S0(sizes=0/2/2)"), "S0(sizes=3/6/2)"),
        (lambda *all: torch.cat(all), (X, Y), ("S0", "R"), "R"),
        (lambda *all: torch.cat(all), (X,), ("S0",), "S0"),
        # Terms.
        (lambda *all: torch.cat(all), (X, Z), ("P", "P"), "P"),
        (lambda *all: torch.cat(all), (X, Z), ("P(avg)", "P(avg)"), "P(avg)"),
        (lambda *all: torch.cat(all), (X, Z), ("P", "R"), "P"),
        (lambda *all: torch.hstack(all), (X, Y), ("S0", "S0"), "S0"),
        (lambda *all: torch.stack(all), (X, Y), ("S0", "S0"), "S1"),
        (lambda *all: torch.stack(all, 1), (X, Y), ("S0", "S0"), "S0"),
        (lambda *all: torch.stack(all, -1), (X, Y), ("S1(unit=5)", "S1(unit=5)"), "S1(unit=5)"),
        (lambda *all: torch.stack(all), (X, Y), ("S0", "R"), "S1"),
        (lambda *all: torch.stack(all), (X, Y), ("P", "P"), "P"),
        (lambda *all: torch.stack(all), (X, Y), ("R", "R"), "R"),
        # What a rank holds is repeated there.
        (lambda x: x.repeat(2, 3), (X,), ("S0",), "S0(repeats=2)"),
        (lambda x: x.repeat(3, 1), (X,), ("S0(sizes=1/0/6)",), "S0(sizes=1/0/6, repeats=3)"),
        (lambda x: x.repeat(4, 1, 2), (X,), ("S0",), "S1"),
        (lambda x: x.repeat(2, 1), (X[:6],), ("S0(repeats=3)",), "S0(repeats=6)"),
        (lambda x: x.tile(2), (X,), ("S1",), "S1(repeats=2)"),
        (lambda x: x.repeat(2, 2), (X,), ("P",), "P"),
    ],
)
def test_joined_as_on_one_device(function, tensors, placements, expect):
    check(function, Case((3,), tensors, placements), gradients=True, expect=expect)


def test_joining_nothing():
    # A tensor of no elements and one dim may stand among others.
    check(lambda *all: torch.cat(all), Case((3,), (X, numbers(0)), ("S1", "R")), exact=True, expect="S1")
    check(lambda x: x.repeat(0, 1), Case((3,), (X,), ("S0(sizes=1/0/6)",)), exact=True, expect="S0")


def test_joined_on_meshes_of_two_axes():
    both = ("S0, S1", "S0, S1")
    check(lambda x, y: torch.cat([x, y]), Case((2, 2), (X, Y), both), gradients=True, expect="S0(repeats=2), S1")
    check(lambda x, y: torch.cat([x, y], 1), Case((2, 3), (X, Y), both), gradients=True, expect="S0, S1(repeats=2)")
    check(lambda x, z: torch.cat([x, z]), Case((2, 2), (X, Z), both), gradients=True, expect="R, S1")
    nested = ("S0, S0", "S0, S0")
    joined = "S0(repeats=2), S0(repeats=2)"
    check(lambda x, y: torch.cat([x, y]), Case((2, 2), (X, Y), nested), gradients=True, expect=joined)
    check(lambda x, y: torch.cat([x, y]), Case((2, 2), (X, Y), nested, (1, 0)), gradients=True, expect=joined)
    check(lambda x, z: torch.cat([x, z]), Case((3, 1), (X, Z), nested), gradients=True, expect="R, S0")
    check(lambda x, y: torch.stack([x, y]), Case((2, 2), (X, Y), nested), gradients=True, expect="S1, S1")
    check(lambda x: x.repeat(2, 2), Case((2, 2), (X,), ("S0, S0",), (1, 0)), gradients=True, expect=joined)


def test_what_was_split_is_joined_without_moving():
    def body(rank):
        mesh = T.Mesh((4,))
        for text, pieces in (
            ("S0", lambda x: x.split(3)),
            ("S0(sizes=2/5/0/2)", lambda x: x.split([4, 0, 5])),
            ("S0(repeats=3)", lambda x: x.chunk(3)),
            ("S1", lambda x: x.split(4)),
        ):
            x = distribute(numbers(9, 8), mesh, text)
            with T.explicit_redistribution():
                joined = torch.cat(pieces(x))
            assert placements_of(joined) == x.placements, f"{joined} of {text}"
            torch.testing.assert_close(whole(joined), numbers(9, 8), rtol=0, atol=0)

    run_ranks(4, body)


def test_joining_different_dtypes_and_modes():
    integers = torch.arange(35).reshape(7, 5)
    check(lambda x, y: torch.cat([x, y], 1), Case((3,), (X, integers), ("S0", "S0")), exact=True, expect="S0")
    with torch.inference_mode():
        check(lambda x, y: torch.cat([x, y], 1), Case((3,), (X, Y), ("S0", "S0")), exact=True, expect="S0")
        check(lambda x, y: torch.stack([x, y]), Case((3,), (X, Y), ("S0", "S0")), exact=True, expect="S1")


@pytest.mark.parametrize("join", [torch.cat, torch.stack])
def test_terms_of_reductions_that_do_not_commute_are_reduced_before_they_meet(join):
    factors, heights = torch.tensor([2.0, -3.0]), torch.tensor([-5.0, -1.0])

    def body(rank):
        mesh, (row, column) = T.Mesh((2, 2)), divmod(rank, 2)
        product = T.DTensor.from_local(factors[row : row + 1], mesh, [T.Partial("product"), T.Replicate()])
        highest = T.DTensor.from_local(heights[column : column + 1], mesh, [T.Replicate(), T.Partial("max")])
        for tensors, expected in (([product, highest], [-6.0, -1.0]), ([highest, product], [-1.0, -6.0])):
            assert whole(join(tensors)).flatten().tolist() == expected

    run_ranks(4, body)


def test_joining_along_a_dim_that_is_cut_otherwise_is_refused_where_nothing_may_move():
    def body(rank):
        mesh = T.Mesh((3,))
        x, z = distribute(X, mesh, "S0"), distribute(Z, mesh, "S0")
        refused = pytest.raises(T.ImplicitRedistributionError, match=r"aten\.cat\.default needs")
        with T.explicit_redistribution(), refused:
            torch.cat([x, z])

    run_ranks(3, body)


def made(shape, dtype, text, mesh):
    """Ones, as terms or as they are: every reduction of terms has a result of its own."""
    local = T.zeros(*shape, dtype=dtype, device_mesh=mesh, placements=parse_placements(text)).to_local()
    return T.DTensor.from_local(torch.ones_like(local), mesh, parse_placements(text), shape=torch.Size(shape))


@pytest.mark.parametrize(
    ("function", "texts", "dtypes"),
    [
        (lambda x, y: torch.stack([x, y]), ("P, R", "R, P(min)"), ("float32", "float32")),
        (lambda x, y: torch.cat([x, y]), ("P(avg), R", "R, R"), ("float32", "int64")),
        (lambda x, y: torch.cat([x, y]), ("S1, R", "R, P"), ("bool", "int64")),
        (lambda x, y: x.sum(0, dtype=torch.bool) | (y.sum(0) > 9), ("P, S0", "S0, R"), ("float32", "int64")),
        (lambda x, y: torch.where(y, x, y), ("P, P", "R, R"), ("int64", "bool")),
    ],
)
def test_reductions_that_do_not_go_together_or_not_with_the_dtype_end_before(function, texts, dtypes):
    def body(rank):
        mesh = T.Mesh((2, 2))
        tensors = [made((3, 4), getattr(torch, name), text, mesh) for name, text in zip(dtypes, texts, strict=True)]
        found, expected = function(*tensors), function(*(tensor.full_tensor() for tensor in tensors))
        assert found.dtype is expected.dtype
        torch.testing.assert_close(found.full_tensor(), expected, rtol=0, atol=0)

    run_ranks(4, body)
