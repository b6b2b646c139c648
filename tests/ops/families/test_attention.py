"""Attention over batch and heads: uneven and empty pieces, masks, grouped queries, and what the kernels are given."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tritondt as T
from tests.ops.sharded import Case, check, check_derivatives, distribute
from tritondt.comm.transports.threads import run_ranks
from tritondt.ops import propagator
from tritondt.ops.propagation.schema import OpSchema
from tritondt.sharding.placement import parse_placements

DOUBLE = torch.float64


def qkv(heads, key_heads=None, *, batch=2, queries=5, keys=7, width=4, dtype=DOUBLE):
    key_shape = (batch, key_heads or heads, keys, width)
    return torch.randn(batch, heads, queries, width, dtype=dtype), *torch.randn(2, *key_shape, dtype=dtype)


def plain(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)


def grouped(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def masked(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@pytest.mark.parametrize("function", [plain, causal])
@pytest.mark.parametrize(
    ("mesh_shape", "placements", "expect"),
    [
        ((4,), "S1", "S1"),
        ((4,), "S1(sizes=1/0/5/0)", "S1(sizes=1/0/5/0)"),
        ((2,), "S1(unit=3)", "S1(unit=3)"),
        ((4,), "S0", "S0"),
        ((2, 2), "S0, S1", "S0, S1"),
        ((2, 2), "S1, S1", "S1, S1"),
        ((2, 2), "R, S1(unit=2)", "R, S1(unit=2)"),
        ((3,), "S2", "R"),
        ((3,), "S3", "R"),
        ((3,), "P", "R"),
    ],
)
def test_heads_and_batch(function, mesh_shape, placements, expect):
    case = Case(mesh_shape, qkv(6), (placements,) * 3)
    check(function, case, gradients=True, expect=expect)


def test_six_heads_on_four_ranks_leave_one_without():
    def body(rank):
        mesh = T.Mesh((4,))
        q: Any
        k: Any
        q, k, v = (distribute(tensor, mesh, "S1").requires_grad_() for tensor in full)
        out: Any = plain(q, k, v)
        assert out.to_local().shape == (2, (2, 2, 2, 0)[rank], 5, 4)
        grads: Any = torch.autograd.grad(out.sum(), (q, k, v))
        assert [grad.to_local().shape for grad in grads] == [q.to_local().shape, *[k.to_local().shape] * 2]
        return [grad.placements for grad in grads]

    full = qkv(6)
    assert run_ranks(4, body) == [[(T.Shard(1),)] * 3] * 4


def test_arguments_laid_out_differently_meet_on_one_cut():
    check(plain, Case((2,), qkv(6), ("S1", "S0", "R")), gradients=True, expect="S0")
    check(plain, Case((3,), qkv(6), ("S1", "S1(sizes=1/2/3)", "S1")), gradients=True, expect="S1")


@pytest.mark.parametrize("shape", [(5, 7), (1, 1, 5, 7), (2, 1, 5, 7), (1, 6, 5, 7), (2, 6, 5, 7), (1, 1, 1, 7)])
@pytest.mark.parametrize("placements", ["S0, S1", "S1, R", "S1(sizes=4/2), S0"])
def test_masks_broadcast_over_batch_and_heads(shape, placements):
    case = Case((2, 2), (*qkv(6), torch.randn(shape, dtype=DOUBLE)), (*[placements] * 3, "R, R"))
    check(lambda q, k, v, mask: masked(q, k, v, mask.detach()), case, expect=placements)
    allowed = torch.rand(shape) < 0.8
    check(masked, Case((2, 2), (*qkv(6), allowed), (*[placements] * 3, "R, R")), gradients=True, expect=placements)


def test_a_mask_may_be_sharded_itself():
    mask = torch.rand(2, 6, 5, 7) < 0.8
    check(masked, Case((4,), (*qkv(6), mask), ("S1", "S1", "S1", "S1")), gradients=True, expect="S1")
    check(masked, Case((4,), (*qkv(6), mask), ("S1", "S1", "S1", "S2")), gradients=True, expect="S1")


@pytest.mark.parametrize(
    ("mesh_shape", "heads", "key_heads", "placements", "expect"),
    [
        # Whole groups on every rank: both stay cut.
        ((2,), 8, 4, ("S1", "S1"), "S1"),
        ((4,), 6, 3, ("S1", "S1"), "S1"),
        ((2,), 8, 2, ("S1(sizes=4/4)", "S1"), "S1(sizes=4/4)"),
        ((4,), 12, 6, ("S1(unit=4)", "S1(unit=2)"), "S1(unit=4)"),
        ((2,), 12, 4, ("R", "S1(sizes=3/1)"), "S1(unit=3, sizes=9/3)"),
        ((2, 2), 12, 6, ("S1(unit=4), S1(unit=2)", "S1(unit=2), S1"), "S1(unit=4), S1(unit=2)"),
        # Fewer key heads than ranks: every rank holds them all.
        ((4,), 8, 2, ("S1", "R"), "S1"),
        ((4,), 6, 1, ("S1", "R"), "S1"),
        # Pieces end within a group.
        ((3,), 9, 3, ("S1(sizes=4/0/5)", "R"), "S1(sizes=4/0/5)"),
        ((3,), 8, 2, ("S1", "S1"), "S1(unit=4)"),
        ((2, 2), 6, 2, ("S1, S1", "R, R"), "S1, S1"),
        ((2, 2), 8, 2, ("S1, S1", "S1, S1"), "S1, S1"),
        ((2, 2), 8, 4, ("S0, S1", "S0, S1"), "S0, S1"),
        ((2,), 8, 4, ("S1(repeats=2)", "R"), "S1(repeats=2)"),
    ],
)
def test_grouped_queries(mesh_shape, heads, key_heads, placements, expect):
    query, key = placements
    check(grouped, Case(mesh_shape, qkv(heads, key_heads), (query, key, key)), gradients=True, expect=expect)


def test_whole_key_heads_leave_their_gradients_as_terms():
    def body(rank):
        mesh = T.Mesh((4,))
        q, k, v = (distribute(x, mesh, text).requires_grad_() for x, text in zip(full, ("S1", "R", "R"), strict=True))
        grads: Any = torch.autograd.grad(grouped(q, k, v).sum(), (q, k, v))
        return [grad.placements for grad in grads]

    full = qkv(8, 2)
    assert run_ranks(4, body) == [[(T.Shard(1),), (T.Partial(),), (T.Partial(),)]] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_types(dtype):
    case = Case((4,), qkv(6, dtype=dtype), ("S1",) * 3)
    check(plain, case, expect="S1")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode):
    def run(q, k, v):
        with mode():
            return causal(q, k, v)

    check(run, Case((4,), qkv(6), ("S1",) * 3), expect="S1")


def test_derivatives():
    check_derivatives(causal, Case((2,), qkv(3, batch=1, queries=2, keys=2, width=2), ("S1",) * 3), second=False)
    case = Case((3,), qkv(4, 2, batch=1, queries=2, keys=2, width=2), ("S1", "R", "R"))
    check_derivatives(grouped, case, second=False)


def test_masks_that_take_gradients_run_as_views_and_products():
    mask = torch.randn(1, 1, 5, 7, dtype=DOUBLE)
    check(masked, Case((4,), (*qkv(6), mask), ("S1", "S1", "S1", "R")), gradients=True)
    check(masked, Case((2, 2), (*qkv(6), mask), (*["S0, S1"] * 3, "R, R")), gradients=True)


def test_three_dims_run_as_products():
    q, k, v = (tensor[0] for tensor in qkv(6))
    check(plain, Case((4,), (q, k, v), ("S0",) * 3), gradients=True)


def _schema(name, specs, *rest, **options):
    return OpSchema(getattr(torch.ops.aten, name).default, (*specs, *rest), options)


def _spec(mesh, shape, text, dtype=torch.float16):
    return T.DTensorSpec(mesh, parse_placements(text), T.TensorMeta.contiguous(shape, dtype))


def _result_placements(schema):
    specs: Any = propagator.propagate(schema).output_spec
    return [spec.placements for spec in specs]


CUDA_FORWARD = [
    ("_scaled_dot_product_flash_attention", (0.0, True)),
    ("_scaled_dot_product_efficient_attention", (None, True)),
    ("_scaled_dot_product_cudnn_attention", (None, True)),
]


@pytest.mark.parametrize(("name", "rest"), CUDA_FORWARD)
@pytest.mark.parametrize("text", ["S0, S1", "S1(unit=2), R", "S1, S0"])
def test_layouts_of_the_kernels_for_cuda(name, rest, text):
    """Without a GPU only what would run is looked at, not what comes of it."""

    def body(rank):
        mesh = T.Mesh((2, 2), device_type="cuda")
        query = _spec(mesh, (4, 8, 64, 64), text)
        decision = propagator.propagate(_schema(name, (query,) * 3, *rest))
        assert not decision.needs_redistribute
        assert isinstance(decision.output_spec, list)
        output, logsumexp, *others = decision.output_spec
        assert output.placements == logsumexp.placements == query.placements
        assert {spec.placements for spec in others if spec is not None} == {(T.Replicate(), T.Replicate())}
        return output, logsumexp, others

    run_ranks(4, body)


def test_the_backward_of_flash_attention_for_cuda():
    def body(rank):
        mesh = T.Mesh((2, 2), device_type="cuda")
        query, whole = _spec(mesh, (4, 8, 64, 64), "S0, S1"), _spec(mesh, (4, 8, 64, 64), "R, S1")
        logsumexp = _spec(mesh, (4, 8, 64), "S0, S1", torch.float32)
        state = _spec(mesh, (2,), "R, R", torch.int64)
        tensors = (whole, query, query, query, query, logsumexp, None, None, 64, 64)
        for dropout_p in (0.0, 0.1):
            name = "_scaled_dot_product_flash_attention_backward"
            assert _result_placements(_schema(name, tensors, dropout_p, True, state, state)) == [query.placements] * 3

    run_ranks(4, body)


def test_the_backward_of_dropout_runs_where_its_forward_ran():
    """Replicated queries are cut for free where the gradient is, unless masks depend on where they were drawn."""

    def body(rank):
        mesh = T.Mesh((4,), device_type="cuda")
        query, cut = _spec(mesh, (4, 8, 64, 64), "R"), _spec(mesh, (4, 8, 64, 64), "S1(sizes=1/3/0/4)")
        logsumexp, state = _spec(mesh, (4, 8, 64), "R", torch.float32), _spec(mesh, (2,), "R", torch.int64)
        tensors = (cut, query, query, query, query, logsumexp, None, None, 64, 64)
        name = "_scaled_dot_product_flash_attention_backward"
        return [_result_placements(_schema(name, tensors, p, True, state, state))[0] for p in (0.0, 0.1)]

    assert run_ranks(4, body) == [[(T.Shard(1, sizes=(1, 3, 0, 4)),), (T.Replicate(),)]] * 4


def test_the_bias_of_efficient_attention_gets_its_gradient_as_terms_where_it_broadcasts():
    def body(rank):
        mesh = T.Mesh((4,), device_type="cuda")
        query, logsumexp = _spec(mesh, (4, 8, 64, 64), "S0"), _spec(mesh, (4, 8, 64), "S0", torch.float32)
        bias, state = _spec(mesh, (1, 8, 64, 64), "R"), _spec(mesh, (), "R", torch.int64)
        name = "_scaled_dot_product_efficient_attention_backward"
        tensors = (query, query, query, query, bias, query, logsumexp, state, state)
        return _result_placements(_schema(name, tensors, 0.0, [True] * 4))

    assert run_ranks(4, body) == [[(T.Shard(0),), (T.Shard(0),), (T.Shard(0),), (T.Partial(),)]] * 4
