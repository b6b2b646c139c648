"""Views whose shards cannot stay: of another shape, refused with the call that helps; of some indices, moved."""

import re
from typing import Any

import pytest
import torch

import tritondt as T
from tests.ops.distinct import numbers
from tests.ops.sharded import Case, check, distribute
from tritondt import events
from tritondt.comm.transports.threads import run_ranks
from tritondt.ops import set_fallback
from tritondt.ops.propagation.fallback import Fallback

# Function, shape, placements on 4 ranks, what its argument would have to be, and the sentence that refuses it.
REFUSED = [
    (
        lambda x: x.view(2, 6),
        (12,),
        "S0",
        "S0(unit=6)",
        "aten.view.default((S0) of (12,) float64, [2, 6]) would have to move data, which a view of another shape does "
        "not do unasked: axis 0 cuts it by S0; as (2, 6) in place of (12,) these pieces are not whole indices of one "
        "dim. Ask for it first: x.redistribute(placements=[Shard(0, unit=6)]), which moves up to 48 bytes to a rank; "
        "or let such views be copies: tritondt.ops.set_fallback('replicate')",
    ),
    (
        lambda x: x.view(2, 3, 6, 5),
        (2, 3, 30),
        "S2",
        "S2(unit=5)",
        "axis 0 cuts it by S2; as (6, 5) in place of (30,) these pieces are not whole indices of one dim. Ask for it "
        "first: x.redistribute(placements=[Shard(2, unit=5)]), which moves up to 288 bytes to a rank",
    ),
    (
        lambda x: x.unflatten(0, (4, 3)).flatten(0, 1),
        (12, 2),
        "S0(sizes=2/4/4/2)",
        "S0(unit=3)",
        "not whole indices of one dim. Ask for it first: x.redistribute(placements=[Shard(0, unit=3)])",
    ),
]
# The same of views of some indices, which move what they must.
MOVED = [
    (lambda x: x.unbind(), (8,), "S0", "R"),
    (lambda x: x.unbind(), (8, 4), "S0", "S1"),
    (lambda x: x[3:9], (16,), "S0(repeats=4)", "R"),
    (lambda x: x.squeeze(), (1,), "S0", "R"),
    (lambda x: x.diagonal(), (5, 4), "S0", "R"),
]
BOTH = [*MOVED, *(case[:4] for case in REFUSED)]


def moved_to(function, shape, text):
    """Where the arguments of a call on 4 ranks are sent before it."""
    moved: list[events.ImplicitRedistribution] = []
    unsubscribe = events.subscribe(moved.append, events.ImplicitRedistribution)
    try:
        run_ranks(4, lambda rank: function(distribute(numbers(*shape), T.Mesh((4,)), text)))
    finally:
        unsubscribe()
    return [event.target.split(" of ")[0] for event in moved]


@pytest.mark.parametrize(("function", "shape", "text", "needed", "sentence"), REFUSED)
def test_a_view_of_another_shape_is_refused_with_what_to_do(function, shape, text, needed, sentence):
    def body(rank):
        x = distribute(numbers(*shape), T.Mesh((4,)), text)
        with pytest.raises(T.PropagationError, match=re.escape(sentence)) as caught:
            function(x)
        asked = re.search(r"placements=(\[.*\])\)", str(caught.value))
        assert asked is not None, "the sentence asks for placements"
        placements = eval(asked[1], {"Shard": T.Shard, "Replicate": T.Replicate})
        assert placements == list(T.parse_placements(needed))
        found = function(x.redistribute(placements=placements))
        torch.testing.assert_close(found.full_tensor(), function(numbers(*shape)), rtol=0, atol=0)

    run_ranks(4, body)
    # Nothing has moved for it.
    with pytest.raises(T.PropagationError):
        moved_to(function, shape, text)


def test_the_same_call_is_refused_again_after_the_fallback_and_autograd_have_let_it_pass():
    def body(rank):
        x: Any = distribute(numbers(12), T.Mesh((4,)), "S0").requires_grad_()
        for _ in range(2):
            # The gradient of the flattened comes cut so that it cannot be viewed as what was flattened.
            rows = x.redistribute(placements=[T.Replicate()]).view(2, 6)
            rows.flatten().backward(distribute(numbers(12), T.Mesh((4,)), "S0"))
            with pytest.raises(T.PropagationError, match="would have to move data"):
                x.view(2, 6)
            with pytest.raises(T.PropagationError, match="would have to move data"):
                x.detach().view(2, 6)
        torch.testing.assert_close(x.grad.full_tensor(), 2 * numbers(12), rtol=0, atol=0)

    run_ranks(4, body)
    with set_fallback("replicate"):
        run_ranks(4, lambda rank: distribute(numbers(12), T.Mesh((4,)), "S0").view(2, 6))
    run_ranks(4, body)


def test_refusals_on_two_axes_name_the_axes():
    def body(rank):
        sized = distribute(numbers(4, 7), T.Mesh((2, 2)), "S0, S1(sizes=2/5)")
        with pytest.raises(
            T.PropagationError, match="sizes are kept only by the first cut of a dim; axis 0 cuts outside"
        ):
            sized.view(28)
        with pytest.raises(RuntimeError, match="shape '\\[5, 5\\]' is invalid for input of size 28"):
            sized.view(5, 5)

    run_ranks(4, body)


@pytest.mark.parametrize(("function", "shape", "text", "needed"), BOTH)
def test_what_may_move_goes_the_cheapest_way_and_is_counted(function, shape, text, needed):
    with set_fallback("replicate"):
        check(function, Case((4,), (numbers(*shape),), (text,)), exact=True)
        assert moved_to(function, shape, text) == [f"({needed})"] * 4


@pytest.mark.parametrize(("function", "shape", "text", "needed"), MOVED)
def test_some_indices_move_under_either_fallback(function, shape, text, needed):
    check(function, Case((4,), (numbers(*shape),), (text,)), exact=True)


def test_the_fallback_tells_once_that_views_of_another_shape_are_copies(caplog):
    fallback = Fallback(lambda: None)
    with pytest.raises(T.PropagationError, match="not unasked"):
        fallback.admit(torch.ops.aten.view.default, "not unasked")
    with fallback.set("replicate"), caplog.at_level("WARNING", "tritondt"):
        for _ in range(2):
            fallback.admit(torch.ops.aten.view.default, "not unasked")
    assert caplog.messages == ["aten.view.default moves its argument and gives a copy, as the fallback says"]


@pytest.mark.parametrize(("function", "shape", "text", "needed"), BOTH)
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

    with set_fallback("replicate"):
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


def test_gradients_go_through_views_that_move():
    for function in (lambda x: x.view(2, 6, 2).sin(), lambda x: x[5] * x[6], lambda x: torch.stack(x.unbind()).exp()):
        with set_fallback("replicate"):
            check(function, Case((4,), (numbers(12, 2) / 10,), ("S0",)), gradients=True)
            case = Case((2, 2), (numbers(4, 7) / 9,), ("S0, S1(sizes=2/5)",))
            check(lambda x: x.flatten().cos(), case, gradients=True)


def test_a_copy_of_another_shape_moves_and_shares_no_memory():
    for text in ("S0", "S1", "P"):
        check(lambda x: torch.view_copy(x, (2, 12)), Case((4,), (numbers(6, 4),), (text,)), gradients=True)

    def body(rank):
        x = distribute(numbers(6, 4), T.Mesh((2,)), "R")
        torch.view_copy(x, (24,)).zero_()
        torch.testing.assert_close(x.full_tensor(), numbers(6, 4), rtol=0, atol=0)

    run_ranks(2, body)


def test_a_tensor_that_changes_its_own_shape_does_not_move():
    def body(rank):
        x = distribute(numbers(1, 4), T.Mesh((4,)), "S0(sizes=0/1/0/0)").flatten()
        assert x.shape == (4,)
        with pytest.raises(T.PropagationError, match=r"would have to move what it changes in place.*Replicate\(\)"):
            distribute(numbers(1), T.Mesh((4,)), "S0").squeeze_()

    run_ranks(4, body)
