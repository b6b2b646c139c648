"""Views that moved see what is written to their tensor, and what is written to them reaches it, or is refused."""

import copy
import pickle
from typing import Any

import pytest
import torch

import tritondt as T
from tests.ops.distinct import numbers
from tests.ops.sharded import distribute
from tritondt.comm.transports.threads import run_ranks
from tritondt.debug import CommDebugMode
from tritondt.ops import set_fallback


def views(x):
    """Views of a tensor of 12 rows by 2 that have to move where 4 ranks share the rows."""
    return x.view(2, 6, 2), x[5], x.flatten().view(2, 12), x.unbind(0)[7], x.view(2, 6, 2)[1].transpose(0, 1)


def test_views_that_moved_see_what_is_written_to_their_tensor():
    def body(rank):
        full, x = numbers(12, 2), distribute(numbers(12, 2), T.Mesh((4,)), "S0")
        pairs = list(zip(views(x), views(full), strict=True))
        # By an operator on it, on another view of it, on a view that moved, and seen under another name of the view.
        for write in (lambda y: y.mul_(2), lambda y: y.t().add_(1), lambda y: y[3].neg_()):
            write(full)
            write(x)
            for found, expected in pairs:
                for seen, of in ((found, expected), (found.detach(), expected)):
                    torch.testing.assert_close(seen.full_tensor(), of, rtol=0, atol=0)
        again = copy.deepcopy(pairs[0][0]), pickle.loads(pickle.dumps(pairs[0][0]))
        expected = pairs[0][1].clone()
        x.zero_()
        assert type(again[1]) is T.DTensor
        for made in again:
            torch.testing.assert_close(made.full_tensor(), expected, rtol=0, atol=0)

    with set_fallback("replicate"):
        run_ranks(4, body)


READS = {
    "to_local": lambda v: v.to_local(),
    "full_tensor": lambda v: v.full_tensor(),
    "its own layout": lambda v: v.redistribute(placements=v.placements).to_local(),
    "asynchronous": lambda v: v.redistribute(placements=[T.Replicate()], async_op=True).to_local(),
}


@pytest.mark.parametrize("name", READS)
def test_gradients_of_what_is_read_of_a_view_that_moved(name):
    def body(rank):
        plain, x = numbers(4, 3), distribute(numbers(4, 3), T.Mesh((2,)), "S0").requires_grad_()
        read = READS[name]((x * 2)[1])
        (read * read).sum().backward()
        plain.requires_grad_()
        ((plain * 2)[1] ** 2).sum().backward()
        assert type(x.grad) is T.DTensor
        torch.testing.assert_close(x.grad.full_tensor(), plain.grad, rtol=0, atol=0)

    run_ranks(2, body)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_views_of_a_view_that_moved_stay_one_memory_when_it_is_copied_again(mode):
    def chain(x):
        moved = x[..., -1]
        inner = moved[...]
        part, other = inner.split(2)[0], moved[1:]
        seen = []
        for number in (1, 2, 3):
            inner.add_(number)
            seen += [part.clone(), other.clone()]  # copies what moved again
            inner.add_(number)
            seen += [x.clone(), part.clone()]
            part.mul_(number)
            x.sub_(1)
            seen += [inner.clone(), moved.clone(), other.clone()]
        return [*seen, x, moved, inner, part, other]

    def body(rank):
        mesh = T.Mesh((2,))
        for shape in ((1, 1), (4, 3)):
            with mode():
                expected = chain(numbers(*shape))
                for text in ("S0", "S1", "R"):
                    for found, of in zip(chain(distribute(numbers(*shape), mesh, text)), expected, strict=True):
                        torch.testing.assert_close(found.full_tensor(), of, rtol=0, atol=0)

    run_ranks(2, body)


def test_a_view_that_moved_follows_after_the_fallback_has_ended():
    def body(rank):
        x = distribute(numbers(12, 2), T.Mesh((4,)), "S0")
        view: Any = x.view(2, 6, 2)
        # What all others send, they send once they have been let pass.
        x.full_tensor()
        set_fallback("raise")
        x.mul_(2)
        torch.testing.assert_close(view.full_tensor(), numbers(12, 2).view(2, 6, 2) * 2, rtol=0, atol=0)
        with pytest.raises(T.PropagationError, match="would have to move data"):
            x.view(2, 6, 2)

    with set_fallback("replicate"):
        run_ranks(4, body)


def test_what_one_rank_writes_to_its_part_is_refused_where_it_is_found():
    def body(rank):
        x = distribute(numbers(12, 2), T.Mesh((4,)), "S0")
        row: Any = x[5]
        if rank == 1:
            x.to_local().neg_()
            with pytest.raises(T.PropagationError, match=r"written to without an operator on it.*take the view again"):
                row + 1
        else:
            torch.testing.assert_close((row + 1).to_local(), numbers(12, 2)[5] + 1, rtol=0, atol=0)
        # Rank 1 held rows 3, 4 and 5.
        again: Any = x[5]
        torch.testing.assert_close(again.to_local(), -numbers(12, 2)[5], rtol=0, atol=0)

    run_ranks(4, body)


@pytest.mark.parametrize("take", [lambda x: x[5], torch.Tensor.diagonal], ids=["row", "diagonal"])
def test_what_is_written_to_the_part_of_a_view_is_refused_where_it_is_found(take):
    def body(rank):
        x = distribute(numbers(12, 12), T.Mesh((4,)), "S0")
        view, other = take(x), take(x)
        view.mul_(2)  # an operator's write is the base's too
        view[:3].add_(1)  # a view of the copy
        expected = take(numbers(12, 12)) * 2
        expected[:3] += 1
        torch.testing.assert_close(view.full_tensor(), expected, rtol=0, atol=0)
        torch.testing.assert_close(take(x).full_tensor(), expected, rtol=0, atol=0)
        view.to_local().fill_(7.0)
        refusal = (
            r"local tensor of a view by .* was written to without an operator on the view.*write to the view itself"
        )
        for use in (
            view.to_local,
            view.full_tensor,
            lambda: view + 1,
            lambda: view.redistribute(placements=[T.Shard(0)]),
        ):
            with pytest.raises(T.PropagationError, match=refusal):
                use()
        torch.testing.assert_close(other.full_tensor(), expected, rtol=0, atol=0)
        torch.testing.assert_close(copy.deepcopy(other).full_tensor(), expected, rtol=0, atol=0)
        torch.testing.assert_close(take(x).full_tensor(), expected, rtol=0, atol=0)

    run_ranks(4, body)


def both(x):
    torch._foreach_add_([x[3]], 1)
    x.diagonal().mul_(3)


def seen_by_each_other(x):
    first, same = x[3], x[3]
    first.add_(1)
    same.add_(2)
    x.add_(1)
    first.mul_(same)


def assigned(x):
    x[5] = 7
    x[2:5][1] = x[0]
    x[0, 1] = 100


WRITES = {
    "in place": lambda x: x[5].mul_(2),
    "assigned": assigned,
    "through a view of it": lambda x: x[5].t()[1:].add_(3),
    "one of several": lambda x: x.unbind()[3].neg_(),
    "as out": lambda x: torch.add(x[3], 1, out=x[4]),
    "in a list, and a diagonal": both,
    "seen by each other": seen_by_each_other,
    "of one length": lambda x: x[:1].squeeze(0).neg_(),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("text", ["S0", "S1", "S0(sizes=3/0/7/2)", "S0(repeats=3)"])
def test_what_is_written_to_a_view_that_moved_reaches_its_tensor(name, text):
    def body(rank):
        full, x = numbers(12, 2), distribute(numbers(12, 2), T.Mesh((4,)), text)
        WRITES[name](full)
        WRITES[name](x)
        torch.testing.assert_close(x.full_tensor(), full, rtol=0, atol=0)

    run_ranks(4, body)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_what_a_view_itself_wrote_it_has(requires_grad):
    """Its own write leaves it up to date: looking at it sends nothing, until something else writes to the base."""

    def body(rank):
        x: Any = distribute(numbers(12, 2), T.Mesh((4,)), "S0").requires_grad_(requires_grad).clone()
        view: Any = x[5]
        expected = numbers(12, 2)[5]
        for _ in range(2):
            view.mul_(2).sub_(1)
            expected = expected * 2 - 1
            with CommDebugMode() as comm:
                local = view.to_local()
                assert "view by" not in repr(view)
            assert comm.get_total_counts() == 0
            assert view.placements == (T.Replicate(),)
            torch.testing.assert_close(local.detach(), expected, rtol=0, atol=0)
            torch.testing.assert_close(view.detach().full_tensor(), expected, rtol=0, atol=0)
            torch.testing.assert_close(x.detach().full_tensor()[5], expected, rtol=0, atol=0)
        x.detach().add_(1)
        with pytest.raises(T.PropagationError, match="copied again by the next operator on the view"):
            view.to_local()
        torch.testing.assert_close(view.detach().full_tensor(), expected + 1, rtol=0, atol=0)

    run_ranks(4, body)


def test_writes_are_seen_both_ways_in_inference_mode():
    def body(rank):
        made: Any = distribute(numbers(12, 2), T.Mesh((4,)), "S0")
        with torch.inference_mode():
            for full, x in ((numbers(12, 2), made), (numbers(12, 2) + 1, made + 1)):
                pairs = [(y[5], y.t()[:, 3]) for y in (full, x)]
                for write in (lambda y, row, column: y.mul_(2), lambda y, row, column: row.add_(1)):
                    write(full, *pairs[0])
                    write(x, *pairs[1])
                    for of, found in ((full, x), *zip(*pairs, strict=True)):
                        torch.testing.assert_close(found.full_tensor(), of, rtol=0, atol=0)
                full.zero_()
                x.zero_()

    run_ranks(4, body)


def test_what_is_written_to_a_copy_of_another_shape_reaches_its_tensor():
    def body(rank):
        full, x = numbers(12, 2), distribute(numbers(12, 2), T.Mesh((4,)), "S0")
        for y in (full, x):
            y.view(2, 6, 2).mul_(2)
            y.view(2, 6, 2)[1, 2:4].neg_()
        torch.testing.assert_close(x.full_tensor(), full, rtol=0, atol=0)

    with set_fallback("replicate"):
        run_ranks(4, body)


@pytest.mark.parametrize("text", ["S0", "S1", "R"])
@pytest.mark.parametrize("write", [lambda y: y[5].mul_(2), lambda y: y[1:3].mul_(2), lambda y: y[:, 1].mul_(3)])
def test_gradients_of_writes_to_views(write, text):
    def function(x):
        y = x * 1
        write(y)
        return y.sin().sum()

    full = numbers(12, 2).requires_grad_()
    function(full).backward()

    def body(rank):
        x: Any = distribute(numbers(12, 2), T.Mesh((4,)), text).requires_grad_()
        function(x).backward()
        torch.testing.assert_close(x.grad.full_tensor(), full.grad)

    run_ranks(4, body)


def test_writes_that_could_not_reach_are_refused():
    def body(rank):
        x = distribute(numbers(12, 2), T.Mesh((4,)), "S0")
        sentence = r"would write to a view by aten\..* of .* whose elements had to move, .* or to a copy: view\.clone"
        row = x[5]
        with pytest.raises(T.PropagationError, match=sentence):
            x.unfold(0, 3, 3).zero_()
        torch.testing.assert_close(x.full_tensor(), numbers(12, 2), rtol=0, atol=0)
        row.clone().add_(1)

    run_ranks(4, body)


def test_lists_of_views_of_one_tensor_are_written_in_order():
    def body(rank):
        found, expected = distribute(numbers(12, 2), T.Mesh((4,)), "S0"), numbers(12, 2)
        for x in (found, expected):
            row = x[5]
            torch._foreach_add_([row, x[6]], 1)
            torch._foreach_mul_([row, x], [row.clone(), x.clone()])
            torch._foreach_add_([x, row], [x, row])
            assert row.shape == (2,)
        torch.testing.assert_close(found.full_tensor(), expected, rtol=0, atol=0)

    run_ranks(4, body)


def test_gradients_accumulate_into_what_a_moved_view_gave():
    def body(rank):
        x: Any = distribute(numbers(4), T.Mesh((2,)), "S0").requires_grad_()
        x.redistribute(placements=[T.Replicate()]).unsqueeze(0).backward(distribute(numbers(1, 4), T.Mesh((2,)), "S1"))
        assert type(x.grad) is T.DTensor
        x.grad = None
        for _ in range(2):
            grad = distribute(numbers(1, 4), T.Mesh((2,)), "S1")
            x.view(1, 4).backward(grad)
            x.redistribute(placements=[T.Replicate()]).view(2, 2).backward(
                distribute(torch.ones(2, 2, dtype=torch.float64), T.Mesh((2,)), "S1")
            )
        torch.testing.assert_close(x.grad.full_tensor(), 2 * numbers(4) + 2)

    run_ranks(2, body)


def test_a_list_is_refused_before_its_first_write_where_one_does_not_reach_its_base():
    def body(rank):
        x = T.distribute_tensor(torch.arange(4.0).view(1, 4), T.Mesh((2,)), [T.Shard(1)])
        column = x.expand(2, 4).unbind(-1)[0]
        first = T.distribute_tensor(torch.ones(2), T.Mesh((2,)), [T.Replicate()])
        with pytest.raises(T.PropagationError, match="would not reach what it is a view of"):
            torch._foreach_zero_([first, column])
        torch.testing.assert_close(first.full_tensor(), torch.ones(2), rtol=0, atol=0)

    run_ranks(2, body)
