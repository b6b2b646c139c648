"""Derivatives of every family of operators, second ones of most, against finite differences, fp64, uneven shards."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.ops.sharded import Case, check_derivatives


def numbers(*shape):
    generator = torch.Generator().manual_seed(len(shape) + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


TOKENS = torch.tensor([[0, 4, 2], [3, 1, 1], [2, 2, 0]])
CLASSES = torch.tensor([1, 0, 3])


def written_through_a_view(x, y):
    found = x * 2
    found[:, 0].mul_(y)
    return found.pow(2)


def attention_by_matmuls(q, k):
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, q * k, is_causal=True)


FAMILIES: dict[str, Any] = {
    "pointwise": (lambda x, y: torch.tanh(x * y) + x / (y * y + 1), [numbers(3, 2), numbers(2)], ["S0", "R"]),
    "pending sums": (lambda x, y: (x + y * 2) * y, [numbers(3, 2), numbers(3, 2)], ["P", "P"]),
    "mm": (lambda x, y: x @ y, [numbers(3, 5), numbers(5, 2)], ["S1", "S0"]),
    "mm, rows": (lambda x, y: x @ y, [numbers(3, 2), numbers(2, 2)], ["S0", "R"]),
    "linear": (F.linear, [numbers(2, 3, 2), numbers(3, 2), numbers(3)], ["S1", "R", "R"]),
    "linear, columns": (F.linear, [numbers(3, 2), numbers(3, 2), numbers(3)], ["R", "S0(sizes=0/3)", "S0(sizes=0/3)"]),
    "bmm": (lambda x, y: torch.bmm(x, y), [numbers(3, 2, 2), numbers(3, 2, 2)], ["S0", "S0"]),
    "views": (lambda x: x.view(3, 2, 2).transpose(0, 1).flatten(1).pow(2), [numbers(3, 4)], ["S1(unit=2)"]),
    "slices": (lambda x: x[1:].pow(2).sum(0) * x[0], [numbers(3, 3)], ["S1"]),
    "split": (lambda x: x.split([1, 2])[1].pow(3), [numbers(3, 2)], ["S0(sizes=1/2)"]),
    "cat": (lambda x, y: torch.cat([x, y]).pow(2), [numbers(3, 2), numbers(2, 2)], ["S1", "S1"]),
    "sum": (lambda x: x.pow(2).sum(0).pow(2), [numbers(3, 2)], ["S0"]),
    "mean": (lambda x: x.pow(2).mean(0).pow(2), [numbers(3, 2)], ["S0"]),
    "norm": (lambda x: torch.linalg.vector_norm(x, dim=0), [numbers(3, 2)], ["S0"]),
    "variance": (lambda x: x.var(0), [numbers(3, 2)], ["S0"]),
    "amax": (lambda x: x.amax(1) * 2, [numbers(3, 2)], ["S0"]),
    "logsumexp": (lambda x: torch.logsumexp(x, 0), [numbers(3, 2)], ["S0"]),
    "softmax": (lambda x: x.softmax(1), [numbers(3, 3)], ["S0"]),
    "softmax, sharded": (lambda x: x.log_softmax(1), [numbers(2, 3)], ["S1"]),
    "layer_norm": (
        lambda x, weight, bias: F.layer_norm(x, (3,), weight, bias),
        [numbers(3, 3), numbers(3), numbers(3)],
        ["S0", "R", "R"],
    ),
    "rms_norm": (lambda x, w: F.rms_norm(x, (3,), w), [numbers(3, 3), numbers(3)], ["S0", "R"]),
    "attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        [numbers(1, 3, 2, 2), numbers(1, 3, 2, 2) * 2, numbers(1, 3, 2, 2) * 3],
        ["S1", "S1", "S1"],
    ),
    "views that move": (lambda x: x[:, 1].pow(2).unbind()[0] * x[2].sin().unbind()[1], [numbers(6, 2)], ["S0"]),
    "inverse": (lambda x: torch.linalg.inv(x), [numbers(3, 2, 2)], ["S0"]),
    "cholesky": (lambda x: torch.linalg.cholesky(x @ x.mT), [numbers(3, 2, 2)], ["S0"]),
    "fft": (lambda x: torch.fft.rfft(x).abs(), [numbers(3, 4)], ["S0(sizes=0/3)"]),
    "conv2d": (F.conv2d, [numbers(3, 2, 3, 2), numbers(2, 2, 2, 2), numbers(2)], ["S0", "R", "R"]),
    "conv2d, channels": (F.conv2d, [numbers(1, 2, 3, 2), numbers(3, 2, 2, 2)], ["R", "S0"]),
    "pooling": (lambda x: F.avg_pool2d(x, 2).pow(2), [numbers(3, 1, 2, 4)], ["S0"]),
    "interpolation": (lambda x: F.interpolate(x, 3, mode="linear").pow(2), [numbers(3, 1, 2)], ["S0"]),
    "padding": (lambda x: F.pad(x, (1, 0, 2, 1), value=2.0).pow(2), [numbers(3, 2)], ["S0"]),
    "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), [numbers(5, 2)], ["S0"]),
    "group_norm": (lambda x, w: F.group_norm(x, 2, w), [numbers(3, 4, 2), numbers(4)], ["S0", "R"]),
    "triangles": (lambda x: x.tril(1).pow(2) + x.triu(-1), [numbers(3, 3)], ["S0"]),
    "diagonal": (lambda x: x.diagonal(0, 1, 2).pow(2), [numbers(3, 2, 2)], ["S0"]),
    "running extremes": (lambda x: x.cummax(1)[0].pow(2), [numbers(3, 3)], ["S0"]),
    "logarithms of running sums": (lambda x: x.logcumsumexp(1), [numbers(3, 3)], ["S0"]),
    "order": (lambda x: x.sort(1)[0].pow(2) + x.kthvalue(2, 1, True)[0], [numbers(3, 3)], ["S0(sizes=1/2)"]),
    "distances": (lambda x, y: torch.cdist(x, y), [numbers(3, 2), numbers(2, 2)], ["S0", "R"]),
    "products of three": (F.bilinear, [numbers(3, 2), numbers(3, 2), numbers(2, 2, 2)], ["S0", "S0", "R"]),
    "writing": (lambda x, y: x.slice_scatter(y, 1, 0, 2).pow(2), [numbers(3, 3), numbers(3, 2)], ["S0", "S0"]),
}  # fmt: skip
# torch has no second derivatives of these kernels, or none at the numbers drawn here, or we have none of them where a
# batch is cut.
ONCE = ("attention", "distances", "batch_norm", "logarithms of running sums")


PAIR = [numbers(3, 2), numbers(3, 2)]

# Whose first derivatives go through operators that have second ones above, or that are linear.
FAMILIES_ONCE: dict[str, Any] = {
    "einsum": (lambda x, y: torch.einsum("bij,bkj->bik", x, y), [numbers(3, 2, 2), numbers(3, 2, 2)], ["S0", "S0"]),
    "baddbmm": (torch.baddbmm, [numbers(3, 2, 2), numbers(3, 2, 1), numbers(3, 1, 2)], ["S0", "S0", "S0"]),
    "running sums": (lambda x: x.cumsum(1).pow(2) + x.cumprod(1), [numbers(3, 3)], ["S0"]),
    "extremes by place": (lambda x: x.max(1)[0] * x.topk(2, 1)[0].sum(1), [numbers(3, 3)], ["S0"]),
    "deviation over shards": (lambda x: x.std((0, 1)) * x.prod(1).sum(), [numbers(3, 2)], ["S0"]),
    "stack": (lambda x, y: torch.stack([x, y], 1).pow(2), PAIR, ["S0", "S0(sizes=1/2)"]),
    "expand and repeat": (lambda x: x[:, None].expand(3, 2, 2).pow(2) + x.repeat(2, 1)[2], [numbers(3, 2)], ["S0"]),
    "flip and roll": (lambda x: x.flip(0).pow(2) * x.roll(1, 0), [numbers(3, 2)], ["S0"]),
    "gather": (lambda x, i: x.gather(1, i).pow(2), [numbers(3, 3), TOKENS % 3], ["S0", "S0"]),
    "take_along_dim": (lambda x, i: torch.take_along_dim(x, i, 0).pow(2), [numbers(3, 3), TOKENS % 3], ["S1", "S1"]),
    "scatter": (
        lambda x, i, y: x.scatter(1, i, y).pow(2),
        [numbers(3, 5), torch.tensor([[0, 4, 2]] * 3), numbers(3, 3)],
        ["S0", "S0", "S0"],
    ),
    "scatter_add": (
        lambda x, i, y: x.scatter_add(1, i, y).pow(2), [numbers(3, 5), TOKENS, numbers(3, 3)], ["S0", "S0", "S0"],
    ),
    "index": (lambda x, i: x[:, i].pow(2), [numbers(3, 5), torch.tensor([0, 4, 4])], ["S0", "R"]),
    "index of rows": (lambda x, i: x[i].pow(2), [numbers(3, 2), torch.tensor([0, 2, 2, 1])], ["S0", "R"]),
    "index_put": (
        lambda x, i, y: x.index_put((i,), y, accumulate=True).pow(2),
        [numbers(3, 2), torch.tensor([0, 2, 2]), numbers(3, 2)],
        ["S1", "R", "S1"],
    ),
    "index_select": (lambda x, i: x.index_select(1, i).pow(2), [numbers(3, 5), torch.tensor([0, 4])], ["S0", "R"]),
    "where": (lambda x, y: torch.where(x > 0, x * y, y), PAIR, ["S0", "S0"]),
    "masked_fill": (lambda x: x.masked_fill(x > 0.5, 2.0).pow(2), [numbers(3, 2)], ["S0(sizes=0/3)"]),
    "in place": (lambda x, y: x.clone().mul_(y).add_(x).pow(2), PAIR, ["S0", "P"]),
    "writing through views": (written_through_a_view, [numbers(3, 2), numbers(3)], ["S0", "S0"]),
    "foreach": (lambda x, y: torch._foreach_mul([x, y], [y, x])[0] + torch._foreach_exp([x])[0], PAIR, ["S0", "S0"]),
    "complex": (lambda x, y: torch.view_as_real(torch.complex(x, y) * torch.complex(y, x)), PAIR, ["S0", "S0"]),
    "losses": (lambda x, y: F.mse_loss(x, y) + F.smooth_l1_loss(x, y) + F.huber_loss(x, y), PAIR, ["S0", "S0"]),
    "copies and types": (lambda x: x.to(torch.complex128).real.contiguous().clone().pow(2), [numbers(3, 2)], ["S0"]),
    "attention, by matmuls": (attention_by_matmuls, [numbers(2, 3, 2, 2), numbers(2, 3, 2, 2) * 2], ["S1", "S1"]),
}  # fmt: skip


@pytest.mark.in_ci(22)
@pytest.mark.parametrize("family", FAMILIES)
def test_derivatives(family):
    function, tensors, placements = FAMILIES[family]
    check_derivatives(function, Case((2,), tensors, placements), second=family not in ONCE)


@pytest.mark.in_ci(12)
@pytest.mark.parametrize("family", FAMILIES_ONCE)
def test_first_derivatives(family):
    function, tensors, placements = FAMILIES_ONCE[family]
    check_derivatives(function, Case((2,), tensors, placements), second=False)


@pytest.mark.parametrize("text", ["S0", "S1", "S0(sizes=0/5)"])
def test_derivatives_of_an_embedding_table(text):
    check_derivatives(
        lambda indices, table: F.embedding(indices, table).pow(2), Case((2,), (TOKENS, numbers(5, 2)), ("R", text))
    )


@pytest.mark.parametrize("text", ["S0", "S1", "S1(sizes=1/3)"])
def test_derivatives_of_cross_entropy(text):
    rows = "S0" if text == "S0" else "R"
    case = Case((2,), (numbers(3, 4), CLASSES), (text, rows))
    check_derivatives(lambda logits, classes: F.cross_entropy(logits, classes), case, second=False)


def test_derivatives_on_two_axes():
    case = Case((2, 2), (numbers(3, 2), numbers(2, 3)), ("S0, S1", "R, S0"))
    check_derivatives(lambda x, y: torch.tanh(x @ y), case)
