"""Writes of every kind: counted as torch counts them on one device, and seen by who holds copies of the elements."""

import copy
from typing import Any

import pytest
import torch

import tritondt as T
from tests.ops.distinct import numbers
from tests.ops.sharded import distribute, whole
from tritondt.comm.transports.threads import run_ranks
from tritondt.dtensor import writes


def equal(found: Any, expected: torch.Tensor) -> None:
    """Whether a distributed tensor is exactly `expected`."""
    torch.testing.assert_close(whole(found), expected, rtol=0, atol=0)


def optimizer(make):
    """A write to a tensor by a step of an optimizer, with the tensor itself for its gradient."""

    def step(x):
        weight = torch.nn.Parameter(x.detach())
        weight.grad = x.detach().clone()
        make([weight]).step()

    return step


def normalized(x):
    """A write to a vector as running mean of a batch norm; distributed images where the vector is distributed."""
    images = numbers(3, 4)
    spread = numbers(4)
    if isinstance(x, T.DTensor):
        images, spread = distribute(images, x._spec.mesh, "R"), distribute(spread, x._spec.mesh, "R")
    torch.nn.functional.batch_norm(images, x, spread, training=True)


def replaced(x):
    x.detach().data.view(-1).data.add_(3)


def through_copy(x):
    copy.copy(x).add_(1)


WRITES = {
    "in place": lambda x: x.add_(1),
    "in a list": lambda x: torch._foreach_mul_([x], 2.0),
    "in a list, by a view of an alias": lambda x: torch._foreach_mul_([x.view(-1).detach()], 2.0),
    "through data": lambda x: x.data.add_(1),
    "through data of data of aliases": replaced,
    "through data of a view": lambda x: x.unsqueeze(0).data.mul_(2),
    "by a foreach optimizer": optimizer(lambda p: torch.optim.SGD(p, lr=0.5, foreach=True)),
    "by a fused optimizer": optimizer(lambda p: torch.optim.Adam(p, lr=0.5, fused=True)),
    "as running statistics": normalized,
    "as running statistics, through an alias": lambda x: normalized(x.view(4).detach()),
    "as out": lambda x: torch.neg(x, out=x),
    "in place after a change of shape": lambda x: x.detach().unsqueeze_(0).neg_(),
    "through a shallow copy": through_copy,
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_is_counted_as_on_one_device_and_seen_by_copies(name):
    def body(rank):
        mesh = T.Mesh((2,))
        full, x = numbers(4), distribute(numbers(4), mesh, "S0")
        row, expected = x[1], full[1]
        T.prefetch(x, [T.Replicate()])
        before = full._version, x._version
        for y in (full, x):
            WRITES[name](y)
        assert x._version - before[1] == full._version - before[0]
        assert not torch.equal(full, numbers(4)), "nothing was written"
        equal(x.redistribute(placements=[T.Replicate()]), full)
        equal(row, expected)

    run_ranks(2, body)


def test_a_number_of_one_rank_is_written_beside_what_is_watched():
    def body(rank):
        x, found = distribute(numbers(4), T.Mesh((2,)), "R"), torch.zeros((), dtype=torch.float64)
        T.prefetch(x, [T.Shard(0)])
        torch.sum(x, 0, out=found)
        assert found == numbers(4).sum()

    run_ranks(2, body)


def test_nothing_is_watched_once_copies_are_gone():
    def body(rank):
        x = distribute(numbers(4), T.Mesh((2,)), "S0")
        view = x[1]
        T.prefetch(x, [T.Replicate()])
        assert any(key in writes.watched for key in map(id, writes.memory_of(x)))
        x.redistribute(placements=[T.Replicate()])
        del view
        x.add_(1)
        assert not any(key in writes.watched for key in map(id, writes.memory_of(x)))

    run_ranks(2, body)


@pytest.mark.parametrize(
    "write",
    [lambda w: torch._foreach_mul_([w], 10.0), lambda w: torch._foreach_mul_([w.t().detach()], 10.0)],
    ids=["itself", "a view"],
)
def test_a_gradient_of_what_a_list_operator_has_overwritten_is_refused(write):
    def body(rank):
        for w in (numbers(4, 4), distribute(numbers(4, 4), T.Mesh((2,)), "S0")):
            w.requires_grad_()
            result = (w * w).sum()
            with torch.no_grad():
                write(w)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                result.backward()

    run_ranks(2, body)


def test_running_statistics_do_not_disturb_an_earlier_gradient():
    def body(rank):
        mesh = T.Mesh((2,))
        found: list[Any] = []
        for make in (lambda *shape: numbers(*shape), lambda *shape: distribute(numbers(*shape), mesh, "R")):
            x, mean, var = make(3, 4).requires_grad_(), make(4), make(4)
            first = torch.nn.functional.batch_norm(x, mean, var, training=True).square().sum()
            torch.nn.functional.batch_norm(x, mean, var, training=True)
            first.backward()
            found.append(x.grad)
        torch.testing.assert_close(whole(found[1]), found[0])

    run_ranks(2, body)


def test_statistics_that_are_only_read_are_not_counted():
    def body(rank):
        x, mean, var = (distribute(numbers(*shape), T.Mesh((2,)), "S0") for shape in ((4, 4), (4,), (4,)))
        T.prefetch(mean, [T.Replicate()])
        watch = writes.Watch(writes.memory_of(mean))
        torch.nn.functional.batch_norm(x, mean, var.abs(), training=False)
        assert watch.count(mean) == (0, 0)

    run_ranks(2, body)


def test_a_write_through_a_moved_view_in_a_list_reaches_the_base_once():
    def body(rank):
        full, x = numbers(4, 4), distribute(numbers(4, 4), T.Mesh((2,)), "S0")
        for y in (full, x):
            v = y[1]
            torch._foreach_mul_([y], 2.0)
            torch._foreach_add_([v], 5.0)
            torch._foreach_mul_([y, y.detach()[2]][:1], 3.0)
            v.data.neg_()
        equal(x, full)

    run_ranks(2, body)


def test_views_keep_the_memory_that_a_tensor_had_before_it_was_given_another():
    def body(rank):
        def function(x, other, make):
            row, columns, alias = x[1], x.t(), x.detach()
            x.data = other
            copy_of_former = alias[2]
            columns.mul_(2)
            x.add_(1)
            row.add_(1)
            return x, row, columns, alias, copy_of_former, x[1]

        mesh = T.Mesh((2,))
        expected = function(numbers(4, 4), numbers(4, 4) * 10, None)
        made = function(distribute(numbers(4, 4), mesh, "S0"), distribute(numbers(4, 4) * 10, mesh, "S0"), None)
        for found, of in zip(made, expected, strict=True):
            equal(found, of)

    run_ranks(2, body)


def test_a_tensor_that_is_given_the_memory_of_a_moved_view_is_one():
    def body(rank):
        results = []
        for x, other in (
            (numbers(4, 4), numbers(4)),
            [distribute(numbers(*s), T.Mesh((2,)), "S0") for s in ((4, 4), (4,))],
        ):
            other.data = x[1]
            other.add_(1)
            x.mul_(2)
            again: Any = x[2]
            again.data = other.clone()
            again.zero_()
            results.append((x, other, again))
        for found, of in zip(results[1], results[0], strict=True):
            equal(found, of)

    run_ranks(2, body)


def test_a_redistribution_to_the_same_layout_is_a_view_that_autograd_knows():
    def body(rank):
        x: Any = distribute(numbers(4), T.Mesh((2,)), "S0").requires_grad_()
        same = x.redistribute(placements=[T.Shard(0)])
        result = (x * x).sum()
        with torch.no_grad():
            same.mul_(10)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.backward()
        with pytest.raises(RuntimeError, match="view of a leaf Variable"):
            same.mul_(10)

    run_ranks(2, body)


def test_gradients_through_a_redistribution_to_the_same_layout():
    def function(x, same):
        y = x * 3
        alias = same(y)
        alias.mul_(2)
        (y * alias).sum().backward()
        return x.grad

    expected = function(numbers(4).requires_grad_(), lambda y: y.view_as(y))

    def body(rank):
        x: Any = distribute(numbers(4), T.Mesh((2,)), "S0").requires_grad_()
        torch.testing.assert_close(whole(function(x, lambda y: y.redistribute(placements=[T.Shard(0)]))), expected)
        # A gradient comes back under the placements of the tensor, and in its dtype.
        x.grad = None
        y: Any = x.redistribute(placements=[T.Shard(0)], backward_dtype=torch.float32, async_op=True)
        y.backward(distribute(numbers(4), T.Mesh((2,)), "R"))
        assert (x.grad.placements, x.grad.dtype) == ((T.Shard(0),), torch.float64)
        equal(x.grad, numbers(4))

    run_ranks(2, body)


def test_set_shares_the_memory_that_it_takes():
    def body(rank):
        mesh = T.Mesh((2,))
        x, source = distribute(numbers(4), mesh, "R"), distribute(numbers(4) * 10, mesh, "R")
        x.set_(source)  # type: ignore[call-overload]
        T.prefetch(source, [T.Shard(0)])
        x.neg_()
        equal(source.redistribute(placements=[T.Shard(0)]), numbers(4) * -10)

    run_ranks(2, body)


def one_after_another(make, text):
    """Writes to lists in which a position has the memory of another, by itself, as a view, and only to read."""
    first, second = make(numbers(2, 3), text), make(numbers(2, 3) * 2 + 1, text)
    torch._foreach_mul_([first, first], -2.0)
    torch._foreach_add_([first, second], [second, first])
    torch._foreach_mul_([first, first[1], second], [3.0, -1.0, 2.0])
    torch._foreach_add_([first[:1], first[0], second[1], second], 1.0)
    torch._foreach_addcmul_([first, second], [second, first], [first, second], [1.0, 2.0])
    return first, second


def test_positions_of_lists_that_share_memory_are_written_in_order():
    expected = one_after_another(lambda full, text: full.clone(), "R")

    def body(rank):
        mesh = T.Mesh((2,))
        for text in ("R", "S0", "S1", "P", "P(avg)"):
            for found, of in zip(
                one_after_another(lambda full, at: distribute(full, mesh, at), text), expected, strict=True
            ):
                torch.testing.assert_close(whole(found), of, rtol=1e-12, atol=0)

    run_ranks(2, body)


def test_what_was_written_in_place_goes_back_to_its_index():
    """`x[index] += 1` gives x what shares its memory, with dims of length 1 in front."""
    indices: dict[str, Any] = {"rows": slice(1, None, 2), "row": (None, slice(-1, 2)), "column": (..., slice(-1, None))}

    def body(rank):
        mesh = T.Mesh((2, 2))
        for text in ("P, S1", "R, S1", "S1, S0", "R, R", "S0, S0"):
            for name, index in indices.items():
                expected, x = numbers(3, 4).long(), distribute(numbers(3, 4), mesh, text).long()
                for written in (expected, x):
                    written[1:, :-1][index] += 1
                    written[index] *= 2
                assert torch.equal(whole(x), expected), (text, name)

    run_ranks(4, body)


def test_writes_to_elements_that_share_memory_are_refused_on_all_ranks():
    """Also where a rank has one of these elements, or none, and its own kernel would write."""
    calls = {
        "add_": lambda x: x.add_(1),
        "copy_": lambda x: x.copy_(x.clone()),
        "setitem": lambda x: x.__setitem__((..., slice(2)), x.clone()[..., :2]),
        "index_add_": lambda x: x.index_add_(0, torch.zeros_like(x[0]).long()[:1], x.clone()[:1]),
        "foreach": lambda x: torch._foreach_add_([x], 1.0),
    }

    def body(rank):
        mesh = T.Mesh((2,), ranks=(0, 1))
        for text in ("R", "S0(sizes=2/1)", "S1"):
            x = T.distribute_tensor(numbers(3, 1), mesh, T.parse_placements(text)).expand(3, 4)
            assert x.zero_() is x
            for call in calls.values():
                with pytest.raises(T.PropagationError, match="elements of which share memory"):
                    call(x)

    run_ranks(3, body)
