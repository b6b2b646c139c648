"""Views that moved, changed in shape, looked at by one rank, beside pending tensors, and copied with their base."""

import copy
import pickle
from typing import Any

import pytest
import torch

import tritondt as T
from tests.dtensor.test_writes import equal
from tests.ops.distinct import numbers
from tests.ops.sharded import distribute
from tritondt.comm.transports.threads import run_ranks

CHANGES = {
    "t_": lambda v: v.t_(),
    "unsqueeze_": lambda v: v.unsqueeze_(0),
    "squeeze_": lambda v: v.unsqueeze_(1).squeeze_(1),
    "squeeze_ all": lambda v: v.unsqueeze_(0).squeeze_(),
    "transpose_": lambda v: v.transpose_(0, 1),
    "swapdims_": lambda v: v.swapdims_(0, 1),
    "swapaxes_": lambda v: v.swapaxes_(1, 0),
}


@pytest.mark.in_ci(7)
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("text", ["S0", "S1"])
def test_shapes_changed_in_place_on_and_under_moved_views(name, text):
    def function(x):
        change = CHANGES[name]
        view, base = x[1], x[2]
        inner = base[1]
        change(view)
        view.add_(1)
        x.mul_(2)
        change(base)
        base.neg_()
        inner.add_(5)
        return view, base, inner

    def body(rank):
        full, x = numbers(4, 4, 4), distribute(numbers(4, 4, 4), T.Mesh((2,)), text)
        expected, found = function(full), function(x)
        for tensor, of in zip((*found, x), (*expected, full), strict=True):
            equal(tensor, of)
            assert tensor.stride() == of.stride()
        under, row = full[:, 0], x[:, 0]
        full.transpose_(0, 1).add_(1)
        x.transpose_(0, 1).add_(1)
        equal(row, under)

    run_ranks(2, body)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_a_diagonal_is_written_in_a_moved_view_whose_copy_lies_closer_than_it_did(dim):
    """Torch writes it by steps through memory, of 5 elements here: of 3 in a copy of the 4 that were chosen."""

    def function(x):
        x.select(dim, 0).fill_diagonal_(10)
        x.select(dim, 0).t().fill_diagonal_(11)
        x.select(dim, 1).as_strided((2,), (x.stride((dim + 1) % 3),)).mul_(3)
        return x

    def body(rank):
        equal(function(distribute(numbers(2, 2, 2), T.Mesh((2,)), f"S{dim}")), function(numbers(2, 2, 2)))
        view = distribute(numbers(4, 3, 2), T.Mesh((2,)), "S1")[:, 1]
        for sizes, steps in (((2,), (2,)), ((4, 2), (6, 6)), ((3,), (7,))):
            with pytest.raises(T.PropagationError, match=r"had to move: size .* are not places of its own elements"):
                view.as_strided(sizes, steps)

    run_ranks(2, body)


def test_a_list_with_a_moved_view_that_cannot_be_written_is_refused_before_any_of_it_is_written():
    def body(rank):
        x = distribute(numbers(4, 4), T.Mesh((2,)), "S1")
        view = x.unfold(1, 2, 1)
        with pytest.raises(T.PropagationError, match="would not reach what it is a view of"):
            torch._foreach_zero_([x, view])
        equal(x, numbers(4, 4))

    run_ranks(2, body)


def test_other_changes_in_place_of_moved_views_are_refused():
    def body(rank):
        mesh = T.Mesh((2,))
        x = distribute(numbers(4, 4), mesh, "S0")
        view, other = x[1], distribute(numbers(4), mesh, "R")
        sentence = (
            r"aten\..* would put a view by aten\.select\.int of .*, whose elements had to move, .* allowed in place are"
        )
        for change in (
            lambda: view.resize_(2),
            lambda: view.set_(other),  # type: ignore[call-overload]
            lambda: other.set_(view),  # type: ignore[call-overload]
            lambda: view.as_strided_((2,), (2,)),
            lambda: view.resize_as_(other),
        ):
            with pytest.raises(T.PropagationError, match=sentence):
                change()
        equal(view, numbers(4, 4)[1])
        equal(other, numbers(4))

    run_ranks(2, body)


def test_nothing_is_sent_where_one_rank_looks_at_a_moved_view():
    def body(rank):
        x = distribute(numbers(4, 4), T.Mesh((2,)), "S0")
        view: Any = x[1]
        x.add_(1)
        if rank == 0:
            assert "a view by aten.select.int whose base was written to: the next operator on it" in repr(view)
            assert view.wait() is view
            sentence = (
                "the local tensor would give what a view by aten.select.int of .* copied again by the next operator"
            )
            for look in (view.to_local, lambda: copy.deepcopy(view), lambda: pickle.dumps(view)):
                with pytest.raises(T.PropagationError, match=sentence):
                    look()
        equal(view, numbers(4, 4)[1] + 1)
        torch.testing.assert_close(view.to_local(), numbers(4, 4)[1] + 1, rtol=0, atol=0)
        assert "local (4,) =" in repr(view)

    run_ranks(2, body)


def test_a_moved_view_beside_a_pending_tensor_is_brought_up_to_date_and_written_back():
    def body(rank):
        full, x = numbers(4, 4), distribute(numbers(4, 4), T.Mesh((2,)), "S0")
        expected, view = full[1], x[1]
        pending: Any = distribute(numbers(4), T.Mesh((2,)), "S0").redistribute(
            placements=[T.Replicate()], async_op=True
        )
        full.add_(1)
        x.add_(1)
        torch.mul(numbers(4), expected, out=expected)
        torch.mul(pending, view, out=view)
        equal(x, full)

    run_ranks(2, body)


def test_deepcopy_keeps_what_a_moved_view_shares_with_its_base():
    def body(rank):
        def function(x):
            view, columns = x[1], x.t()
            for order in (("base", "view", "t", "part"), ("part", "t", "view", "base")):
                given = {"base": x, "view": view, "t": columns, "part": view[2:]}
                made = copy.deepcopy({name: given[name] for name in order})
                made["base"].mul_(2)
                made["view"].add_(1)
                made["part"].neg_()
                made["t"].add_(3)
                yield from (made[name] for name in given)
            yield from (x, view)

        expected, found = function(numbers(4, 4)), function(distribute(numbers(4, 4), T.Mesh((2,)), "S0"))
        for tensor, of in zip(found, expected, strict=True):
            equal(tensor, of)

    run_ranks(2, body)


@pytest.mark.parametrize("name", CHANGES)
def test_shapes_changed_in_place_outside_the_mesh(name):
    def body(rank):
        x = T.distribute_tensor(numbers(4, 4, 4), T.Mesh((2,), ranks=(0, 1)), [T.Shard(0)])
        view, expected = x[1], numbers(4, 4, 4)[1]
        for tensor in (view, expected):
            CHANGES[name](tensor)
        x.mul_(2)
        found: Any = view + 1
        found = found.full_tensor()
        assert view.shape == expected.shape
        if rank < 2:
            torch.testing.assert_close(found, expected * 2 + 1, rtol=0, atol=0)

    run_ranks(3, body)
