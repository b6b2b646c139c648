"""Slices of dims that are cut: placements, values and gradients."""

import pytest
import torch

import tritondt as T
from tests.ops.distinct import numbers
from tests.ops.sharded import Case, check, distribute, placements_of, whole
from tritondt.comm.transports.threads import run_ranks


@pytest.mark.parametrize(
    ("function", "before", "after"),
    [
        (lambda x: x[:-1], "S0", "S0"),
        (lambda x: x[1:], "S0", "S0(sizes=1/2/2/2)"),
        (lambda x: x[::2], "S0", "S0"),
        (lambda x: x[2:6], "S0", "S0(sizes=0/2/2/0)"),
        (lambda x: x[:4], "S0(unit=2)", "S0(unit=2)"),
        (lambda x: x[2:6], "S0(unit=2)", "S0(unit=2, sizes=0/2/2/0)"),
        (lambda x: x[4:], "S0(repeats=2)", "S0"),
        (lambda x: x.chunk(2), "S0(repeats=2)", "S0"),
        (lambda x: x.split([4, 4]), "S0", "S0(sizes=2/2/0/0)"),
        (lambda x: x[:, 1:2], "S0", "S0"),
        (lambda x: x[3:3], "S0", "S0"),
        (lambda x: x.expand(5, 8, 3), "S0", "S1"),
        (lambda x: x[None].expand(5, 8, 3), "S1", "S2"),
    ],
)
def test_placements_of_parts(function, before, after):
    check(function, Case((4,), (numbers(8, 3),), (before,)), exact=True, gradients=True, expect=after)


def test_slices_on_meshes_of_several_axes():
    x = numbers(9, 6)
    check(lambda x: x[1:, :4], Case((2, 3), (x,), ("S0, S1",)), exact=True, gradients=True)
    check(lambda x: x[1:], Case((4, 1), (x,), ("S0, S0",)), exact=True, gradients=True, expect="S0(sizes=2/3/3/0), S0")
    check(lambda x: x.chunk(3), Case((2, 2), (x,), ("S0(repeats=3), S0(repeats=3)",)), exact=True, gradients=True)
    check(lambda x: x[1:, 0], Case((4, 1), (x,), ("S0, S1",)), exact=True, gradients=True)
    check(lambda x: x.squeeze(0), Case((1, 2), (x[:1],), ("S0, S1",)), exact=True, gradients=True, expect="R, S0")


def test_gradients_of_slices_come_back_as_what_was_sliced():
    def body(rank):
        mesh = T.Mesh((4,))
        for text in ("S0", "S0(unit=3)", "S0(repeats=3)"):
            for cut in (lambda x: x[1:], lambda x: x[:-2], lambda x: x[6:9]):
                x = distribute(numbers(9, 2), mesh, text).requires_grad_()
                part = cut(x)
                if not placements_of(part)[0].is_shard(0):
                    assert "repeats" in text
                    continue
                (grad,) = torch.autograd.grad(part, x, torch.ones_like(part))
                assert placements_of(grad)[0].is_shard(0), f"{text}: {grad}"
                plain = numbers(9, 2).requires_grad_()
                (expected,) = torch.autograd.grad(cut(plain).sum(), plain)
                torch.testing.assert_close(whole(grad), expected, rtol=0, atol=0)
        x = distribute(numbers(8, 2), mesh, "S0").requires_grad_()
        (grad,) = torch.autograd.grad(x[1:], x, torch.ones_like(x[1:]))
        assert placements_of(grad) == (T.Shard(0),), "a default cut stays one"

    run_ranks(4, body)


@pytest.mark.parametrize(("length", "size"), [(32, 3), (64, 7)])
def test_pieces_of_which_several_have_no_layout_move_together(length, size):
    case = Case((2, 2), (torch.arange(float(length)),), ("S0(repeats=8), S0(repeats=8)",))
    check(lambda x: list(x.split(size)), case, exact=True)


def test_a_value_with_leading_dims_of_length_one_is_written_wherever_it_is_cut():
    def written(x, number, row):
        x = x.clone()
        x[0, 1] = number
        x[1] = row
        x[2:3] = row
        return x

    tensors = (torch.zeros(4, 3), torch.ones(1), torch.full((1, 1, 3), 2.0))
    for text in ("S0, S0, S0", "R, S0, S1", "S1, S0, S2", "S0, R, S0"):
        check(written, Case((2,), tensors, tuple(text.split(", "))), exact=True)
