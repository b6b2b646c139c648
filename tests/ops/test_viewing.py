"""Views whose shards cannot stay: they move the cheapest way, are refused where nothing may, follow their tensor."""

import copy
import pickle
import re
from typing import Any

import pytest
import torch

import tritondt as T
from tests.ops.distinct import numbers
from tests.ops.sharded import Case, check, distribute
from tritondt import events
from tritondt.comm.threads import run_ranks

# Function, shape, placements on 4 ranks, and the placements that its argument is sent to.
MOVED = [
    (lambda x: x.view(2, 6), (12,), "S0", "S0(unit=6)"),
    (lambda x: x.view(2, 3, 6, 5), (2, 3, 30), "S2", "S2(unit=5)"),
    (lambda x: x.unbind(), (8,), "S0", "R"),
    (lambda x: x.unbind(), (8, 4), "S0", "S1"),
    (lambda x: x[3:9], (16,), "S0(repeats=4)", "R"),
    (lambda x: x.squeeze(), (1,), "S0", "R"),
]


@pytest.mark.parametrize(("function", "shape", "text", "needed"), MOVED)
def test_what_has_to_move_goes_the_cheapest_way_and_is_counted(function, shape, text, needed):
    check(function, Case((4,), (numbers(*shape),), (text,)), exact=True)
    moved: list[events.InputMoved] = []
    unsubscribe = events.subscribe(moved.append, events.InputMoved)
    try:
        run_ranks(4, lambda rank: function(distribute(numbers(*shape), T.Mesh((4,)), text)))
    finally:
        unsubscribe()
    assert len(moved) == 4
    assert all(event.target.startswith(f"({needed})") for event in moved), moved


@pytest.mark.parametrize(("function", "shape", "text", "needed"), MOVED)
def test_where_nothing_may_move_the_call_is_named_that_makes_it_possible(function, shape, text, needed):
    def body(rank):
        x = distribute(numbers(*shape), T.Mesh((4,)), text)
        with T.explicit_redistribution():
            with pytest.raises(T.ImplicitRedistributionError, match=re.escape(f"needs {x._spec} as ")) as caught:
                function(x)
            asked = re.search(r"x\.redistribute\(placements=(\[.*\])\)", str(caught.value))
            assert asked is not None, "the sentence asks for placements"
            placements = eval(asked[1], {"Shard": T.Shard, "Replicate": T.Replicate})
            assert placements == list(T.parse_placements(needed))
            function(x.redistribute(placements=placements))

    run_ranks(4, body)


@pytest.mark.parametrize("index", [0, 4, -1])
@pytest.mark.parametrize("text", ["S0", "S0(unit=3)", "S0(sizes=1/0/7/1)", "S0(repeats=3)"])
def test_one_index_of_a_cut_dim_is_sent_and_nothing_else(index, text):
    x = numbers(9, 4)
    check(lambda x: x[index], Case((4,), (x,), (text,)), exact=True, gradients=True, expect="R")
    sent = []
    unsubscribe = events.subscribe(lambda event: sent.append(event.sent_bytes))
    try:
        run_ranks(4, lambda rank: distribute(x, T.Mesh((4,)), text)[index])
    finally:
        unsubscribe()
    assert sum(sent) == 3 * 4 * 8


def test_one_index_of_a_dim_that_two_axes_cut():
    check(lambda x: x[2], Case((2, 2), (numbers(7, 3),), ("S0, S0",)), exact=True, gradients=True)


def views(x):
    """Views of a tensor of 12 rows by 2 that have to move where 4 ranks share the rows."""
    return x.view(2, 6, 2), x[5], x.flatten().view(2, 12), x.unbind(0)[7], x.view(2, 6, 2)[1].transpose(0, 1)


def test_views_that_moved_see_what_is_written_to_their_tensor():
    def body(rank):
        full, x = numbers(12, 2), distribute(numbers(12, 2), T.Mesh((4,)), "S0")
        pairs = list(zip(views(x), views(full), strict=True))
        # By an operator on it, on another view of it, on its part, and never through a detached name of the view.
        for write in (
            lambda y: y.mul_(2),
            lambda y: y.t().add_(1),
            lambda y: (y.to_local() if isinstance(y, T.DTensor) else y).neg_(),
        ):
            write(full)
            write(x)
            for found, expected in pairs:
                for seen, of in ((found, expected), (found.detach(), expected)):
                    torch.testing.assert_close(seen.full_tensor(), of, rtol=0, atol=0)
        again = copy.deepcopy(pairs[0][0]), pickle.loads(pickle.dumps(pairs[0][0]))
        expected = pairs[0][1].clone()
        x.zero_()
        for made in again:
            assert type(made) is T.DTensor
            torch.testing.assert_close(made.full_tensor(), expected, rtol=0, atol=0)

    run_ranks(4, body)


def test_writing_to_a_view_that_moved_is_refused():
    def body(rank):
        x = distribute(numbers(12, 2), T.Mesh((4,)), "S0")
        for view in (*views(x), x.view(2, 6, 2).detach(), x.view(2, 6, 2)[:, 1:]):
            with pytest.raises(T.PropagationError, match=r"would write to a view by aten.* of .* whose elements"):
                view.add_(1)
            with pytest.raises(T.PropagationError, match=r"write to that, or to a copy: view\.clone"):
                torch._foreach_add_([view], 1)
            view.clone().add_(1)

    run_ranks(4, body)


def test_a_tensor_that_changes_its_own_shape_does_not_move():
    def body(rank):
        x = distribute(numbers(1, 4), T.Mesh((4,)), "S0(sizes=0/1/0/0)").flatten()
        assert x.shape == (4,)
        with pytest.raises(T.PropagationError, match=r"would have to move what it changes in place.*Replicate\(\)"):
            distribute(numbers(1), T.Mesh((4,)), "S0").squeeze_()

    run_ranks(4, body)


def test_gradients_go_through_views_that_move():
    for function in (lambda x: x.view(2, 6, 2).sin(), lambda x: x[5] * x[6], lambda x: torch.stack(x.unbind()).exp()):
        check(function, Case((4,), (numbers(12, 2) / 10,), ("S0",)), gradients=True)
    check(lambda x: x.flatten().cos(), Case((2, 2), (numbers(4, 7) / 9,), ("S0, S1(sizes=2/5)",)), gradients=True)


def test_gradients_accumulate_into_what_a_moved_view_gave():
    def body(rank):
        x: Any = distribute(numbers(4), T.Mesh((2,)), "S0").requires_grad_()
        for _ in range(2):
            grad = distribute(numbers(1, 4), T.Mesh((2,)), "S1")
            x.view(1, 4).backward(grad)
            x.redistribute(placements=[T.Replicate()]).view(2, 2).backward(
                distribute(torch.ones(2, 2, dtype=torch.float64), T.Mesh((2,)), "S1")
            )
        torch.testing.assert_close(x.grad.full_tensor(), 2 * numbers(4) + 2)

    run_ranks(2, body)


def test_what_no_tensor_has_is_refused_as_on_one_device():
    def body(rank):
        with pytest.raises(RuntimeError, match="shape '\\[5, 5\\]' is invalid for input of size 28"):
            distribute(numbers(4, 7), T.Mesh((2,)), "S0").view(5, 5)

    run_ranks(2, body)
