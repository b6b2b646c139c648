"""Random operators: the numbers of one device whatever the layout, and only from generators that are in step."""

from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tritondt as T
from tests.ops.sharded import distribute, whole
from tritondt.comm.transports.threads import run_ranks
from tritondt.sharding.placement import parse_placements


def ones(mesh_shape, text, shape=(64, 32)) -> Any:
    return distribute(torch.ones(shape), T.Mesh(mesh_shape), text)


FILLED: dict[str, Callable[[Any], Any]] = {
    "uniform_": lambda x: x.uniform_(-1, 1),
    "normal_": lambda x: x.normal_(),
    "exponential_": lambda x: x.exponential_(),
    "bernoulli_": lambda x: x.bernoulli_(0.5),
    "random_": lambda x: x.random_(1000),
    "random_ any": lambda x: x.random_(),
    "log_normal_": lambda x: x.log_normal_(),
    "cauchy_": lambda x: x.cauchy_(1, 2),
    "geometric_": lambda x: x.geometric_(0.25),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 5, 1000),
    "bernoulli": lambda x: torch.bernoulli(x * 0.5),
    "bernoulli.p": lambda x: torch.bernoulli(x, 0.5),
    "normal": lambda x: torch.normal(x, 2.0),
    "dropout": F.dropout,
    "dropout_": lambda x: F.dropout(x, inplace=True),
    "alpha_dropout": lambda x: F.alpha_dropout(x, training=True),
}


@pytest.mark.parametrize("name", FILLED)
def test_shards_draw_different_numbers_and_replicas_the_same(name):
    def body(rank):
        found = FILLED[name](ones((2, 2), "S0, R"))
        assert found.placements == parse_placements("S0, R")
        return found.to_local()

    parts = run_ranks(4, body)
    torch.testing.assert_close(parts[0], parts[1], rtol=0, atol=0)
    torch.testing.assert_close(parts[2], parts[3], rtol=0, atol=0)
    # 1,024 elements agree by chance half the time where there are two values.
    assert (parts[0] == parts[2]).float().mean() < 0.65


def drawn(name, mesh_shape, text, dtype=torch.float32, order=None):
    """What an operator gives on ranks laid out so, whole."""

    def body(rank):
        full = torch.ones(12, 10, dtype=dtype)
        return whole(FILLED[name](distribute(full, T.Mesh(mesh_shape), text, order)))

    return run_ranks(prod(mesh_shape), body)[0]


LAYOUTS = [
    ((2,), "S0", None),
    ((2,), "S1(sizes=9/1)", None),
    ((3,), "S0(repeats=2)", None),
    ((2, 2), "S0, S1(unit=5)", None),
    ((2, 2), "S0, S0", (1, 0)),
]


@pytest.mark.parametrize("name", FILLED)
def test_numbers_are_those_of_one_device_whatever_the_layout(name):
    alone = drawn(name, (1,), "R")
    assert alone.unique().numel() > 1
    for layout in LAYOUTS:
        torch.testing.assert_close(drawn(name, layout[0], layout[1], order=layout[2]), alone, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.int8, torch.bool])
def test_numbers_of_other_types_are_those_of_one_device(dtype):
    names = ["random_ any", "bernoulli_"] if not dtype.is_complex else []
    names += ["uniform_", "dropout"] if dtype.is_floating_point else []
    names += ["normal_", "randn_like"] if dtype.is_floating_point or dtype.is_complex else []
    for name in names:
        found = drawn(name, (2,), "S0", dtype)
        assert found.dtype is dtype
        torch.testing.assert_close(found, drawn(name, (1,), "R", dtype), rtol=0, atol=0)


@pytest.mark.parametrize(("count", "replacement"), [(1, False), (3, False), (3, True)])
def test_choices_go_by_their_weights_and_are_those_of_one_device(count, replacement):
    weights = torch.tensor([[0.0, 1, 3, 0, 4, 0]]).expand(4000, 6).contiguous()

    def chosen(mesh_shape, text):
        def body(rank):
            return whole(torch.multinomial(distribute(weights, T.Mesh(mesh_shape), text), count, replacement))

        return run_ranks(prod(mesh_shape), body)[0]

    alone = chosen((1,), "R")
    torch.testing.assert_close(torch.bincount(alone[:, 0], minlength=6) / 4000, weights[0] / 8, rtol=0, atol=0.04)
    assert set(alone.unique().tolist()) == {1, 2, 4}
    if count > 1:
        assert bool((alone.sort(1)[0].diff() > 0).all()) is not replacement
    for text in ("S0(sizes=3999/1)", "S1", "P"):
        torch.testing.assert_close(chosen((2,), text), alone, rtol=0, atol=0)


def test_choices_that_cannot_be_are_refused():
    def body(rank):
        x = ones((2,), "S0")
        with pytest.raises(RuntimeError, match="finite and not negative, with a sum above 0"):
            torch.multinomial(x - 1, 2)
        with pytest.raises(RuntimeError, match="cannot draw 33 of 32 places without replacement"):
            torch.multinomial(x, 33)

    run_ranks(2, body)


def test_slopes_of_rrelu_are_those_of_one_device_and_their_gradients():
    def body(rank, mesh_shape=(2,), text="S1(sizes=9/1)"):
        x = distribute(torch.linspace(-2, 1, 120).reshape(12, 10), T.Mesh(mesh_shape), text).requires_grad_()
        y: Any = F.rrelu(x, training=True)
        y.sum().backward()
        assert x.grad is not None
        in_place: Any = F.rrelu(x.detach().clone(), training=True, inplace=True)
        return whole(y), whole(x.grad), whole(in_place), whole(F.rrelu(x))

    y, slopes, in_place, rests = run_ranks(1, lambda rank: body(rank, (1,), "R"))[0]
    x = torch.linspace(-2, 1, 120).reshape(12, 10)
    assert ((slopes == 1) == (x > 0)).all()
    assert slopes.min() > 1 / 8
    assert slopes[x <= 0].max() < 1 / 3
    torch.testing.assert_close(y, x * slopes)
    torch.testing.assert_close(rests, F.rrelu(x))
    assert not torch.equal(in_place, y)
    for found in run_ranks(2, body):
        torch.testing.assert_close(found, (y, slopes, in_place, rests), rtol=0, atol=0)


def test_dropped_weights_of_attention_are_those_of_one_device():
    def body(rank, mesh_shape=(2,), text="S1(sizes=3/1)"):
        q = torch.linspace(-1, 1, 2 * 4 * 6 * 3).reshape(2, 4, 6, 3)
        q = distribute(q, T.Mesh(mesh_shape), text)
        return whole(F.scaled_dot_product_attention(q, q, q, dropout_p=0.4, is_causal=True))

    alone = run_ranks(1, lambda rank: body(rank, (1,), "R"))[0]
    torch.testing.assert_close(run_ranks(2, body)[0], alone)


def test_numbers_outside_their_range_are_refused_as_torch_does():
    def body(rank):
        x = ones((2,), "S0")
        with pytest.raises(RuntimeError, match="p to be in"):
            x.bernoulli_(1.5)
        with pytest.raises(RuntimeError, match=r"probabilities from \[0, 1\]"):
            torch.bernoulli(x * 2)
        with pytest.raises(RuntimeError, match="'from' to be less than 'to'"):
            x.random_(5, 5)

    run_ranks(2, body)


@pytest.mark.extended
def test_processes_draw_as_threads_do(processes):
    """Real ranks have default generators of their own, which they seed alike."""
    for parts in (processes.run(draw_on_rank, name) for name in ("uniform_", "randn_like", "dropout")):
        torch.testing.assert_close(parts[0], parts[1], rtol=0, atol=0)
        torch.testing.assert_close(parts[2], parts[3], rtol=0, atol=0)
        assert (parts[0] == parts[2]).float().mean() < 0.65


def draw_on_rank(rank, name):
    torch.manual_seed(5)
    return FILLED[name](ones((2, 2), "S0, R")).to_local()


def test_the_next_operator_draws_anew_and_the_same_seed_draws_again():
    def body(rank):
        x = ones((4,), "S0")
        first, second = (draw(x).to_local() for draw in [FILLED["rand_like"]] * 2)
        assert not torch.equal(first, second)
        return first

    torch.manual_seed(3)
    parts = run_ranks(4, body)
    torch.manual_seed(3)
    torch.testing.assert_close(parts, run_ranks(4, body), rtol=0, atol=0)
    torch.manual_seed(4)
    assert not torch.equal(parts[0], run_ranks(4, body)[0])


@pytest.mark.parametrize("text", ["S0, R", "R, S1(sizes=20/12)", "S0, S0", "R, R", "P, S1", "P, P(avg)"])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_dropout_keeps_the_layout_and_scales_what_it_keeps(text, mode):
    def body(rank):
        x = ones((2, 2), text)
        with mode():
            y: Any = F.dropout(x, 0.25)
        return y.placements, y.detach().full_tensor()

    for placements, y in run_ranks(4, body):
        # Where gradients are recorded, dropout comes as a mask of x's layout and a product, which is linear in x.
        assert placements == parse_placements(text)
        kept = y != 0
        assert abs(kept.float().mean().item() - 0.75) < 0.05
        torch.testing.assert_close(y[kept], torch.full_like(y[kept], 1 / 0.75))


@pytest.mark.parametrize("text", ["S0", "S1(sizes=0/30/1/1)", "R", "P"])
def test_native_dropout_and_its_gradient_use_one_mask(text):
    def body(rank):
        x = ones((4,), text).requires_grad_()
        y: Any
        mask: Any
        y, mask = torch.native_dropout(x, 0.25, True)
        assert mask.placements == (T.Replicate() if text == "P" else y.placements[0],)
        (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
        return whole(mask), whole(y), whole(grad)

    for mask, y, grad in run_ranks(4, body):
        assert 0.7 < mask.float().mean() < 0.8
        torch.testing.assert_close(y, mask / 0.75)
        torch.testing.assert_close(grad, mask / 0.75)


def test_terms_of_a_sum_are_filled_with_what_adds_up_to_the_numbers():
    def body(rank):
        terms = ones((2,), "P").uniform_()
        assert terms.placements == (T.Partial(),)
        assert whole(terms).min() > 0
        assert whole(terms).max() < 1
        assert FILLED["rand_like"](ones((2,), "P")).placements == (T.Replicate(),)

    run_ranks(2, body)


def test_attention_drops_different_weights_on_every_rank():
    def body(rank):
        mesh = T.Mesh((2, 2))
        q, v = torch.zeros(2, 6, 16, 16), torch.eye(16).expand(2, 6, 16, 16)
        q, v = (distribute(tensor, mesh, "R, S1(sizes=5/1)").requires_grad_() for tensor in (q, v))
        out = F.scaled_dot_product_attention(q, q, v, dropout_p=0.5)
        # Row i of the output holds the weights of query i, of which one in two is left, doubled.
        weights = whole(out) * 16
        (grad,) = torch.autograd.grad(out, v, torch.ones_like(out))
        torch.testing.assert_close(whole(grad)[..., 0] * 16, weights.sum(2))
        return weights

    for weights in run_ranks(4, body):
        assert set(weights.unique().tolist()) == {0.0, 2.0}
        masks = weights.reshape(12, -1)
        agreement = (masks[:, None] == masks[None]).float().mean(-1)
        assert agreement.fill_diagonal_(0).max() < 0.65
