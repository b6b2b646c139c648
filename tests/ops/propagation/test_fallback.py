"""Operators that nobody has laid out: taken apart, run where everything is whole, refused with the fix, or gathered."""

import logging
from typing import Any

import pytest
import torch

import tritondt as T
from tests.ops.sharded import Case, check, compare, distribute, whole
from tritondt import events
from tritondt.comm.transports.threads import run_ranks
from tritondt.ops import propagator, set_fallback
from tritondt.ops.propagation.fallback import decomposition_of

aten = torch.ops.aten
X = torch.arange(24.0, dtype=torch.float64).reshape(4, 6)


@pytest.fixture
def unknown():
    """Operators that only this test knows: of one result, of two, in place, and of values that tell the shape."""
    library = torch.library.Library("tritondt_unknown", "FRAGMENT")
    library.define("turned(Tensor x) -> Tensor")
    library.define("halves(Tensor x) -> (Tensor, Tensor)")
    library.define("turn_(Tensor(a!) x) -> Tensor(a!)")
    library.define("positive(Tensor x) -> Tensor")
    for kind in ("CPU", "Meta"):
        library.impl("turned", lambda x: x.flip(0), kind)
        library.impl("halves", lambda x: (x[:2].clone(), x[2:].clone()), kind)
        library.impl("turn_", lambda x: x.copy_(x.flip(0).clone()), kind)
    library.impl("positive", lambda x: x[x > 7], "CPU")
    yield torch.ops.tritondt_unknown
    library._destroy()


def test_what_is_whole_everywhere_runs(unknown):
    check(unknown.turned, Case((2,), (X,), ("R",)), exact=True, expect="R")
    check(unknown.positive, Case((2,), (X,), ("R",)), exact=True, expect="R")


def test_a_rank_that_is_a_thread_sets_a_mode_of_its_own(unknown):
    def body(rank):
        x = distribute(X, T.Mesh((2,)), "S0")
        with set_fallback("replicate"):
            torch.testing.assert_close(whole(unknown.turned(x)), X.flip(0))  # hands over to the other rank
            x.full_tensor()
        with pytest.raises(T.PropagationError, match="has no strategy"):
            unknown.turned(x)
        if rank == 0:
            set_fallback("replicate")
        x.full_tensor()
        return propagator.fallback.mode

    assert run_ranks(2, body) == ["replicate", "raise"]
    assert propagator.fallback.mode == "raise"
    with set_fallback("replicate"):
        assert run_ranks(2, lambda rank: propagator.fallback.mode) == ["replicate"] * 2


def test_without_a_strategy_the_call_is_named_that_makes_it_run(unknown):
    def body(rank):
        x = distribute(X, T.Mesh((2,)), "S0")
        with pytest.raises(T.PropagationError) as caught:
            unknown.turned(x)
        assert str(caught.value) == (
            "tritondt_unknown.turned.default has no strategy for distributed tensors; it was called with (S0) of "
            "(4, 6) float64. Register one with tritondt.ops.register_op_strategy(tritondt_unknown.turned.default, "
            "...), or gather its arguments, each by x.redistribute(placements=[Replicate()]), or let that happen for "
            "every such operator: tritondt.ops.set_fallback('replicate')"
        )
        torch.testing.assert_close(whole(unknown.turned(x.redistribute(placements=[T.Replicate()]))), X.flip(0))

    run_ranks(2, body)


def test_gathering_is_counted_told_once_and_ends_with_the_block(unknown, caplog):
    moved: list[events.ImplicitRedistribution] = []
    unsubscribe = events.subscribe(moved.append, events.ImplicitRedistribution)
    try:
        with caplog.at_level(logging.WARNING, logger="tritondt"), set_fallback("replicate"):
            for text in ("S0", "S1(sizes=0/6)", "P"):
                check(unknown.turned, Case((2,), (X,), (text,)), expect="R")
            check(unknown.halves, Case((2,), (X,), ("S1",)), expect="R")
            check(unknown.positive, Case((2,), (X,), ("S0",)), expect="R")
    finally:
        unsubscribe()
    assert [event.op for event in moved].count("tritondt_unknown.turned.default") == 3 * 2
    told = [record.message for record in caplog.records]
    assert (
        told.count("tritondt_unknown.turned.default has no strategy and runs on gathered tensors, as the fallback says")
        == 1
    )

    def body(rank):
        with pytest.raises(T.PropagationError, match="has no strategy"):
            unknown.turned(distribute(X, T.Mesh((2,)), "S0"))

    run_ranks(2, body)


def test_an_operator_without_a_fake_runs_where_it_is_whole_or_gathered():
    @torch.library.custom_op("tritondt_unknown::unfaked", mutates_args=())
    def unfaked(x: torch.Tensor) -> torch.Tensor:
        return x.flip(0)

    check(unfaked, Case((2,), (X,), ("R",)), exact=True, expect="R")
    with set_fallback("replicate"):
        check(unfaked, Case((2,), (X,), ("S0",)), exact=True, expect="R")


def test_what_is_written_to_is_brought_back(unknown):
    with set_fallback("replicate"):
        for text in ("S0(sizes=3/1)", "S1", "P", "R"):
            check(lambda x: unknown.turn_(x.clone()), Case((2,), (X,), (text,)), expect=text)


def test_what_writes_goes_by_what_makes_a_new_tensor():
    for text in ("S0", "S1", "P"):
        check(lambda x: x.clone().cumsum_(1), Case((2,), (X,), (text,)), expect=text)
        check(lambda x: torch.mm(x, x.T, out=x.new_zeros(4, 4)), Case((2,), (X,), (text,)))
        check(lambda x: torch.cumsum(x, 0, out=x.clone()), Case((2,), (X,), (text,)), expect=text)

    def body(rank):
        x = distribute(X, T.Mesh((2,)), "S0")
        compare(torch.mm(x, x.T, out=x.clone()), X @ X.T)

    with pytest.warns(UserWarning, match=r"gives shape \(4, 4\), and out has \(4, 6\) with elements"):
        run_ranks(2, body)


def test_a_fallback_that_is_not_known():
    with pytest.raises(T.PropagationError, match="'gather' is not known; allowed are 'raise' and 'replicate'"):
        set_fallback("gather")  # type: ignore[arg-type]


def test_a_check_that_does_not_hold_fails_on_every_rank():
    def body(rank):
        x = distribute(X, T.Mesh((2,)), "S0")
        torch._assert_async((x >= 0).all(), "a negative number")
        with pytest.raises(RuntimeError, match="a number above 20"):
            torch._assert_async((x <= 20).all(), "a number above 20")

    run_ranks(2, body)


def test_operators_are_taken_apart_before_anything_is_gathered():
    op = aten.nansum.default
    assert not propagator.knows(op)
    assert decomposition_of(op) is not None
    check(lambda x: torch.nansum(x, 0), Case((2,), (X,), ("S1",)), expect="S0")


def test_a_rank_outside_the_mesh_gets_nothing_where_values_tell_the_shape(unknown):
    def body(rank):
        mesh = T.Mesh((1,), ranks=(0,))
        local = X if rank == 0 else torch.empty(0, dtype=torch.float64)
        x = T.DTensor(local, T.DTensorSpec(mesh, [T.Replicate()], T.TensorMeta.contiguous(X.shape, X.dtype)))
        assert unknown.positive(x).shape == ((16,) if rank == 0 else (0,))

    run_ranks(2, body)


def test_plain_tensors_are_replicated_where_the_user_says_so():
    def body(rank):
        x = distribute(X, T.Mesh((2,)), "S0")
        plain = torch.arange(6.0, dtype=torch.float64)
        with T.implicit_replication():
            found: Any = x + plain
            joined = torch.cat([x, plain[None]])
        torch.testing.assert_close(whole(found), X + plain)
        torch.testing.assert_close(whole(joined), torch.cat([X, plain[None]]))
        assert found.placements == (T.Shard(0),)
        for mixed in (lambda: x + plain, lambda: torch.cat([x, plain[None]]), lambda: torch.where(x > 0, x, plain)):
            with pytest.raises(T.MixedTensorsError, match=r"and a plain one of shape \((1, )?6,?\)"):
                mixed()

    run_ranks(2, body)


def test_what_autograd_makes_of_shapes_is_replicated():
    # The gradient of a cumulative product compares with plain zeros, that of a product goes by plain ones.
    for function in (lambda x: x.cumprod(1), lambda x: x.prod(0), torch.prod, lambda x: torch.mvlgamma(x + 4, 3)):
        check(function, Case((2,), (X / 9 + 1,), ("S0",)), gradients=True)


def test_what_a_users_backward_mixes_is_refused():
    class Mixing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad * torch.ones(6, dtype=torch.float64)

    def body(rank):
        x = distribute(X, T.Mesh((2,)), "S0").requires_grad_()
        y: Any = Mixing.apply(x)
        with pytest.raises(T.MixedTensorsError, match=r"a plain one of shape \(6,\)"):
            y.sum().backward()

    run_ranks(2, body)


@pytest.mark.skipif(not hasattr(torch.nn.functional, "linear_cross_entropy"), reason="torch 2.13 has it")
def test_a_formula_of_torch_that_writes_to_plain_tensors_is_refused() -> None:
    """The buffers that its backward fills would come back as gradients of one rank."""
    from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions  # noqa: PLC0415  torch 2.13

    options = LinearCrossEntropyOptions(batch_chunk_size=3)

    def body(rank: int) -> None:
        mesh = T.Mesh((2,))
        hidden, weight = (distribute(torch.ones(8, 8, dtype=torch.float64), mesh, text) for text in ("R", "S1"))
        hidden.requires_grad_()
        target = distribute(torch.zeros(8, dtype=torch.int64), mesh, "S0")
        lost = torch.nn.functional.linear_cross_entropy(hidden, weight, target, reduction="none", options=options)
        with pytest.raises(T.MixedTensorsError, match=r"^aten.mm.out got a distributed tensor"):
            lost.sum().backward()
        assert hidden.grad is None

    with set_fallback("replicate"):
        run_ranks(2, body)


def test_operators_of_higher_derivatives_are_taken_apart():
    def product(x, y):
        leaves = x.clone().requires_grad_(), y.clone().requires_grad_()
        first = torch.autograd.grad(torch.fmod(leaves[0] ** 2, leaves[1] ** 2).sum(), leaves, create_graph=True)
        return torch.autograd.grad((first[0] * first[1]).sum(), leaves)

    case = Case((2,), (torch.tensor([5.5, 3.25, 1.0]), torch.tensor([2.0, 2.5, 0.75])), ("S0", "S0"))
    check(product, case)
