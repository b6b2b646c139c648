"""Operators on lists: every overload, lists laid out differently, and the norms that clip gradients."""

from typing import Any

import pytest
import torch
from torch import nn

import tritondt as T
from tests.harness.work import num_calls
from tests.ops.sharded import compare, distribute
from tritondt import events
from tritondt.comm.transports.threads import run_ranks

# To mypy, a list of a subclass is no list of tensors.
untyped: Any = torch

# Parameters of one model: shapes, and how a mesh of 2 x 2 holds them; unequal, empty and scalar pieces among them.
MESH = (2, 2)
PARAMETERS = [
    ((7, 5), "S0, R"),
    ((5, 6), "R, S1(unit=3)"),
    ((4, 3), "S0, S1"),
    ((1, 4), "S0, R"),
    ((6,), "S0(sizes=6/0), R"),
    ((9,), "S0, S0"),
    ((3, 2), "R, R"),
    ((), "R, R"),
]


def randoms(seed, shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def lists_of(seed, num_lists, positive=False):
    """Lists of tensors of the parameters' shapes, plain."""
    found = [randoms(seed + number, [shape for shape, _ in PARAMETERS]) for number in range(num_lists)]
    return [[tensor.sigmoid() for tensor in tensors] for tensors in found] if positive else found


def spread(tensors, texts=None):
    """The tensors laid out like the parameters, or as the texts say."""
    texts = [text for _, text in PARAMETERS] if texts is None else texts
    # Rank threads must not write to one tensor.
    return [distribute(tensor.clone(), T.Mesh(MESH), text) for tensor, text in zip(tensors, texts, strict=True)]


# Kernels that take other instructions for the last elements of a tensor, which the cut moves.
_APPROXIMATE = ("acos", "asin", "cos", "erf", "exp", "gamma", "log", "pow", "sigmoid", "sin", "tan")


def elementwise_ops():
    """Every overload of a list operator that treats elements alike, as this torch has them."""
    found = []
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        base, _, overload = name.removeprefix("aten::").partition(".")
        others = ("_foreach_norm", "_foreach_powsum", "_foreach_max", "_foreach_mm")
        if base.startswith("_foreach_") and base not in others and "out" not in overload:
            found.append(getattr(getattr(torch.ops.aten, base), overload or "default"))
    return found


def arguments_of(op: Any) -> list[Any]:
    """What an overload is given, from its schema: lists of tensors, numbers, or what all positions share."""
    found: list[Any] = []
    for place, declared in enumerate(op._schema.arguments):
        kind = str(declared.type)
        if declared.kwarg_only or kind == "bool":
            continue
        if kind == "List[Tensor]":
            found.append(lists_of(10 * place, 1, positive=True)[0])
        elif kind.startswith("List["):
            found.append([1.0 + 0.25 * number for number in range(len(PARAMETERS))])
        elif declared.name == "scalars":
            found.append(torch.arange(1.0, 1.0 + len(PARAMETERS)))
        else:
            found.append(torch.tensor(1.5) if kind == "Tensor" else 1.5)
    return found


def laid_out(argument, mesh):
    """The argument on this rank."""
    if isinstance(argument, list) and isinstance(argument[0], torch.Tensor):
        return spread(argument)
    return T.DTensor.from_local(argument, mesh) if isinstance(argument, torch.Tensor) else argument


@pytest.mark.parametrize("op", elementwise_ops(), ids=str)
def test_every_elementwise_overload(op):
    given, exact = arguments_of(op), not any(name in str(op) for name in _APPROXIMATE)
    in_place = not op._schema.returns
    plain = [[tensor.clone() for tensor in given[0]], *given[1:]] if isinstance(given[0], list) else given
    expected = op(*plain)
    expected = plain[0] if in_place else expected

    def body(rank):
        mine = [laid_out(argument, T.Mesh(MESH)) for argument in given]
        specs = [tensor._spec for tensor in mine[0]] if in_place else []
        found = op(*mine)
        if in_place:
            assert found is None
            found = mine[0]
            assert [tensor._spec for tensor in found] == specs
        compare(list(found), list(expected), exact=exact)
        for tensor, of in zip(found, expected, strict=True):
            assert tensor.stride() == of.stride()
            assert tensor.dtype is of.dtype

    run_ranks(4, body)


SWAPPED = ["S1, R", "S0, R", "S1, S0", "R, S1", "R, R", "S0, R", "P, R", "P(avg), P"]


@pytest.mark.parametrize("in_place", [True, False])
def test_the_other_lists_come_to_what_is_written(in_place):
    first, second = lists_of(1, 2)
    expected = torch._foreach_add(first, second, alpha=2)

    def body(rank):
        mine, other = spread(first), spread(second, SWAPPED)
        if in_place:
            specs = [tensor._spec for tensor in mine]
            torch._foreach_add_(mine, other, alpha=2)
            assert [tensor._spec for tensor in mine] == specs
            compare(mine, expected)
        else:
            compare(list(torch._foreach_add(mine, other, alpha=2)), expected)

    run_ranks(4, body)


def test_pending_sums_pass_through_what_is_linear():
    first, second = lists_of(3, 2)
    texts = ["P, P(avg)"] * len(PARAMETERS)

    def body(rank):
        x, y = spread(first, texts), spread(second, texts)
        for found, expected, stays in (
            (untyped._foreach_mul(x, 2.0), torch._foreach_mul(first, 2.0), True),
            (untyped._foreach_neg(x), torch._foreach_neg(first), True),
            (untyped._foreach_div(x, [2.0] * 8), torch._foreach_div(first, 2.0), True),
            (untyped._foreach_mul(x, torch.tensor(3.0)), torch._foreach_mul(first, 3.0), True),
            (untyped._foreach_add(x, y), torch._foreach_add(first, second), True),
            (untyped._foreach_lerp(x, y, 0.25), torch._foreach_lerp(first, second, 0.25), True),
            (untyped._foreach_add(x, 1.0), torch._foreach_add(first, 1.0), False),
            (untyped._foreach_mul(x, y), torch._foreach_mul(first, second), True),
            (untyped._foreach_abs(x), torch._foreach_abs(first), False),
        ):
            for tensor in found:
                assert any(placement.is_partial() for placement in tensor.placements) is stays
            compare(list(found), list(expected))
        before = [tensor.placements for tensor in x]
        torch._foreach_exp_(x)
        assert [tensor.placements for tensor in x] == before
        compare(list(x), list(torch._foreach_exp(first)))

    run_ranks(4, body)


def test_lists_that_do_not_fit():
    def body(rank):
        x = spread(lists_of(0, 1)[0])
        with pytest.raises(RuntimeError, match="got 8 and 7"):
            torch._foreach_add(x, x[:-1])
        with pytest.raises(T.PropagationError, match="takes a number for each of 8 tensors, got 2"):
            torch._foreach_add(x, [1.0, 2.0])
        with pytest.raises(T.MixedTensorsError, match=r"_foreach_add\.List got a distributed tensor"):
            torch._foreach_add(x, lists_of(0, 1)[0])

    run_ranks(4, body)


@pytest.mark.extended
def test_the_work_of_a_list_of_different_tensors_grows_with_its_length():
    def body(rank):
        return [calls(length) for length in (100, 300)]

    def calls(length):
        mesh = T.Mesh((2,))
        x = [T.zeros(5 + place, 4, device_mesh=mesh, placements=[T.Shard(0)]) for place in range(length)]
        y = [T.ones(5 + place, 4, device_mesh=mesh, placements=[T.Replicate()]) for place in range(length)]
        found = []
        for call in (lambda: untyped._foreach_add_(x, x), lambda: untyped._foreach_mul(x, 2.0),
                     lambda: untyped._foreach_lerp_(x, y, 0.5)):  # fmt: skip
            found.append(num_calls(call))
        return found

    for few, many in run_ranks(2, body):
        assert all(after < 3.5 * before for before, after in zip(few, many, strict=True)), (few, many)


# Norms.

NORM_TEXTS = ["S0, R", "S0, S1", "P, R", "R, S0", "S0(sizes=6/0), R", "P, S0", "R, R", "R, R"]


@pytest.mark.parametrize("order", [2, 1, 0, 3.5, -1, float("inf"), float("-inf")])
def test_norms_of_a_list(order):
    (plain,) = lists_of(5, 1, positive=order == -1)
    expected = torch._foreach_norm(plain, order)

    def body(rank):
        found = untyped._foreach_norm(spread(plain, NORM_TEXTS), order)
        for tensor in found:
            assert tensor.placements == (T.Replicate(), T.Replicate())
        compare(list(found), list(expected))

    run_ranks(4, body)


def test_one_exchange_carries_all_numbers():
    steps = list[int]()
    (plain,) = lists_of(5, 1)

    def body(rank):
        x = spread(plain, ["S0, R"] * 7 + ["R, R"])
        torch._foreach_norm(x)
        if rank == 0:
            steps.clear()  # ranks take turns: nobody else has sent since
        torch._foreach_norm(x)

    unsubscribe = events.subscribe(lambda step: steps.append(step.sent_bytes))
    try:
        run_ranks(4, body)
    finally:
        unsubscribe()
    # Of 7 numbers of 8 bytes, either of two ranks reduces about half and sends it back.
    assert max(steps) <= 7 * 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_norms_keep_their_dtype(dtype):
    plain = [tensor.to(dtype) for tensor in randoms(4, [(64, 64), (7, 5)], torch.float64)]
    expected = torch._foreach_norm(plain, 2)

    def body(rank):
        x = [distribute(tensor, T.Mesh((3,)), "S0") for tensor in plain]
        found = untyped._foreach_norm(x, 2)
        assert [tensor.dtype for tensor in found] == [tensor.dtype for tensor in expected]
        compare(list(found), list(expected))

    run_ranks(3, body)


def test_maxima_of_a_list():
    (plain,) = lists_of(6, 1)
    plain[0][2, 2] = float("nan")
    ints = torch.tensor([-(2**62) - 1, -(2**62) - 2])

    def body(rank):
        found = untyped._foreach_max([*spread(plain, NORM_TEXTS), distribute(ints, T.Mesh(MESH), "S0(sizes=0/2), R")])
        for tensor, of in zip(found, torch._foreach_max([*plain, ints]), strict=True):
            torch.testing.assert_close(tensor.full_tensor(), of, rtol=1e-6, atol=1e-6, equal_nan=True)

    run_ranks(4, body)


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clipping_gradients(foreach, norm_type):
    values, grads = lists_of(7, 2)

    def clipped(parameters):
        return nn.utils.clip_grad_norm_(parameters, 1.5, norm_type=norm_type, foreach=foreach)

    plain = [nn.Parameter(value.clone()) for value in values]
    for parameter, grad in zip(plain, grads, strict=True):
        parameter.grad = grad.clone()
    total = clipped(plain)
    assert total > 1.5

    def body(rank):
        mine: Any = [nn.Parameter(value) for value in spread(values)]
        for parameter, grad in zip(mine, spread(grads, NORM_TEXTS), strict=True):
            parameter.grad = grad
        alone = nn.utils.get_total_norm([p.grad for p in mine], norm_type, foreach=foreach)
        assert isinstance(alone, T.DTensor)
        compare(alone, total)
        compare(clipped(mine), total)
        for parameter, of, text in zip(mine, plain, NORM_TEXTS, strict=True):
            assert parameter.grad.placements == T.parse_placements(text)
            compare(parameter.grad, of.grad)

    run_ranks(4, body)
