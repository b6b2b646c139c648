"""Views: values, strides, aliasing, gradients, and what passes through the reshapes of a model."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tritondt as T
from tests.ops.distinct import numbers
from tests.ops.sharded import Case, check, compare, distribute, whole
from tritondt.comm.transports.threads import run_ranks

VIEWS = [
    ("view", lambda x: x.view(12, 10), (3, 4, 10), "S1"),
    ("view to -1", lambda x: x.view(-1, 5), (3, 4, 10), "S0"),
    ("view apart", lambda x: x.view(3, 4, 2, 5), (3, 4, 10), "S2(unit=5)"),
    ("reshape that copies", lambda x: x.transpose(0, 1).reshape(12, 10), (3, 4, 10), "S1"),
    ("reshape_alias", lambda x: torch.ops.aten._reshape_alias(x, [12, 10], [10, 1]), (3, 4, 10), "S1"),
    ("reshape of a number", lambda x: x.reshape(()), (1,), "R"),
    ("flatten", lambda x: x.flatten(1), (3, 4, 10), "S2(repeats=2)"),
    ("unflatten", lambda x: x.unflatten(-1, (5, 2)), (3, 4, 10), "S2(unit=2)"),
    ("view_as", lambda x: x.view_as(x), (3, 4), "S1"),
    ("t", lambda x: x.t(), (7, 5), "S0(sizes=2/0/4/1)"),
    ("T", lambda x: x.T, (7, 5), "S1"),
    ("mT", lambda x: x.mT, (3, 7, 5), "S1"),
    ("t of a vector", lambda x: x.t(), (7,), "S0"),
    ("transpose", lambda x: x.transpose(-1, 0), (3, 4, 10), "S2(unit=2)"),
    ("swapaxes", lambda x: x.swapaxes(0, 1), (3, 4, 10), "S1"),
    ("permute", lambda x: x.permute(2, 0, -2), (3, 4, 10), "S2(repeats=2)"),
    ("movedim", lambda x: x.movedim(0, 2), (3, 4, 10), "S0"),
    ("unsqueeze", lambda x: x.unsqueeze(1), (7, 5), "S1"),
    ("unsqueeze last", lambda x: x.unsqueeze(-1), (7, 5), "S1"),
    ("squeeze", lambda x: x.squeeze(), (1, 7, 1), "S1"),
    # Some ranks hold one row: it is no dim of length 1.
    ("squeeze of one row", lambda x: x.squeeze(), (5, 2), "S0"),
    ("squeeze of a dim", lambda x: x.squeeze(0), (5, 2), "S0"),
    ("squeeze of a dim of 1", lambda x: x.squeeze(1), (5, 1, 2), "S0"),
    ("squeeze of dims", lambda x: x.squeeze((0, -1)), (1, 5, 1), "S1"),
    ("squeeze of a cut dim", lambda x: x.squeeze(0), (1, 5), "S0"),
    ("expand", lambda x: x.expand(3, 2, 5, 4), (2, 5, 1), "S1"),
    ("expand of a cut dim", lambda x: x.expand(6, 5), (1, 5), "S0"),
    ("broadcast_to", lambda x: x.broadcast_to(2, 7, 3), (7, 1), "S0(sizes=2/0/4/1)"),
    ("repeat_interleave", lambda x: x.repeat_interleave(2, dim=1), (2, 6, 3), "S1"),
    ("select", lambda x: x.select(1, -1), (5, 3, 4), "S2"),
    ("index of a number", lambda x: x[:, 1], (5, 3, 4), "S0"),
    ("slice", lambda x: x[:, 1:-1], (5, 6), "S0"),
    ("slice by steps", lambda x: x[:, 1::2], (5, 6), "S0"),
    ("whole slice", lambda x: x[:, 0:100], (5, 6), "S1"),
    ("slice of a cut dim", lambda x: x[2:7], (9, 2), "S0"),
    ("slice of a cut dim by steps", lambda x: x[1:8:3], (9, 2), "S0"),
    ("slice of a dim of sizes", lambda x: x[3:], (9, 2), "S0(sizes=2/0/6/1)"),
    ("slice from the end", lambda x: x[:-1], (9, 2), "S0(unit=3)"),
    ("empty slice", lambda x: x[4:2], (9, 2), "S0"),
    ("slice in one of the blocks", lambda x: x[7:11], (18, 2), "S0(repeats=3)"),
    ("narrow", lambda x: x.narrow(0, 3, 4), (9, 2), "S0"),
    ("split", lambda x: x.split(2, dim=1), (5, 6), "S0"),
    ("split of a cut dim", lambda x: x.split(4), (9, 2), "S0"),
    ("split of sizes", lambda x: x.split([2, 0, 5, 2]), (9, 2), "S0"),
    ("unsafe_split", lambda x: torch.unsafe_split(x, 4), (9, 2), "S0"),
    ("chunk", lambda x: x.chunk(3, dim=-1), (5, 6), "S0"),
    ("chunk of a cut dim", lambda x: x.chunk(2), (9, 2), "S0(sizes=2/0/6/1)"),
    ("chunk of merged q, k, v", lambda x: x.chunk(3, -1), (2, 30), "S1(unit=2, repeats=3)"),
    ("tensor_split", lambda x: x.tensor_split(2), (9, 2), "S0"),
    ("unbind", lambda x: x.unbind(1), (5, 3), "S0"),
    ("view of nothing", lambda x: x.view(0, 2, 4), (0, 8), "S1"),
    ("view of nothing as something else", lambda x: x.view(7, 0), (0, 8), "S1"),
]


@pytest.mark.parametrize(("function", "shape", "text"), [pytest.param(*item[1:], id=item[0]) for item in VIEWS])
def test_views_are_those_of_one_device(function, shape, text):
    check(function, Case((4,), (numbers(*shape),), (text,)), exact=True, gradients=True)
    # Replicas and terms pass through everything.
    check(function, Case((2,), (numbers(*shape),), ("P",)), gradients=True, expect="P")
    check(function, Case((2,), (numbers(*shape),), ("R",)), exact=True, expect="R")


HEADS, HEAD_DIM = 6, 5


def attend(x: torch.Tensor) -> torch.Tensor:
    """The reshapes of attention, with elementwise work for the attention itself."""
    batch, length, width = x.shape
    heads = x.view(batch, length, HEADS, HEAD_DIM).transpose(1, 2)
    return (heads * 2).transpose(1, 2).reshape(batch, length, width)


def through_matrix(x: torch.Tensor) -> torch.Tensor:
    """What F.linear does around its matmul."""
    return (x.view(-1, x.shape[-1]) * 3).view(x.shape)


@pytest.mark.parametrize("mode", ["autograd", "no_grad", "inference_mode"])
def test_heads_that_do_not_divide_pass_through_attention(mode):
    x = numbers(2, 3, HEADS * HEAD_DIM)
    context = {"autograd": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}[mode]

    def function(x):
        with context():
            return attend(x)

    text = "S2(unit=5)"
    check(function, Case((4,), (x,), (text,)), exact=True, gradients=mode == "autograd", expect=text)
    text = "S0, S2(unit=5)"
    check(function, Case((2, 4), (x,), (text,)), exact=True, gradients=mode == "autograd", expect=text)


@pytest.mark.parametrize(
    ("mesh_shape", "text"),
    [
        ((4,), "S1"),
        ((3,), "S1(sizes=4/1/2)"),
        ((2, 2), "S0, S1"),
        ((2, 3), "S0, S1"),
        ((3, 2), "S1, S0"),
        ((2, 2, 2), "S0, S1, S2"),
        ((2, 2), "S1, S1"),
    ],
)
def test_sequences_that_do_not_divide_pass_through_a_linear_layer(mesh_shape, text):
    case = Case(mesh_shape, (numbers(3, 7, 4),), (text,))
    check(through_matrix, case, exact=True, gradients=True, expect=text)
    with torch.no_grad():
        check(through_matrix, case, exact=True, expect=text)


def aliases(x: torch.Tensor) -> list[torch.Tensor]:
    """Views of all kinds of a tensor of (4, 6)."""
    views = [x.view(24), x.t(), x.transpose(0, 1), x.permute(1, 0), x.unsqueeze(0), x.unsqueeze(0).squeeze(0), x[1:3]]
    return [
        *views,
        x[:, 2],
        x[:, ::2],
        *x.split([1, 3]),
        *x.chunk(2, 1),
        *x.unbind(1),
        x.unflatten(1, (3, 2)),
        x.squeeze(),
    ]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_is_written_through_a_view_is_seen_in_its_base(mode):
    full = numbers(4, 6)
    versions, values = [], []
    with mode():
        for number in range(len(aliases(full))):
            base = full.clone() if mode is torch.no_grad else _made_outside(full)
            view = aliases(base)[number]
            view.mul_(10)
            versions.append((base._version, view._version, view._is_view(), tuple(view.stride())))
            values.append(base)

    def body(rank):
        mesh = T.Mesh((2,))
        for number, (version, value) in enumerate(zip(versions, values, strict=True)):
            base = distribute(full, mesh, "S0")
            with mode():
                view = aliases(base)[number]
                view.mul_(10)
                found = base._version, view._version, view._is_view(), tuple(view.stride())
                assert found == version, f"view {number}: {found}, expected {version}"
                torch.testing.assert_close(base.full_tensor(), value, rtol=0, atol=0)
                base.zero_()
                assert not whole(view).any(), f"view {number} does not see its base"

    run_ranks(2, body)


def _made_outside(tensor: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode(False):
        return tensor.clone()


def test_a_view_written_to_under_autograd_passes_its_gradient_on():
    def function(x):
        base = x * 1
        base.view(24)[3:9].mul_(5)
        base.t()[0].add_(1)
        return base

    check(lambda x: function(x), Case((2,), (numbers(4, 6),), ("R",)), gradients=True, exact=True)

    def on_shards(x):
        base = x * 1
        base.view(24).mul_(5)
        base[1:].mul_(2)
        return base

    check(on_shards, Case((2,), (numbers(4, 6),), ("S0",)), gradients=True, exact=True, expect="S0")


def test_composites_under_inference_mode_run_as_views():
    def function(x):
        with torch.inference_mode():
            return [
                *(x.reshape(4, 6, 2).movedim(0, 1).swapaxes(0, 2), x.flatten(1), x.T, x.narrow(0, 1, 2)),
                *(*x.chunk(2, dim=1), x.expand_as(x), x.view_as(x), *x.tensor_split(2), *x.split([1, 3])),
            ]

    check(function, Case((2,), (numbers(4, 12),), ("S0",)), exact=True)


def test_a_local_tensor_that_cannot_be_viewed_is_copied_and_follows():
    def body(rank):
        mesh = T.Mesh((2,))
        held = numbers(4, 6)[:, 3 * rank : 3 * rank + 3]
        x = T.DTensor.from_local(held, mesh, [T.Shard(1)], shape=(4, 6), stride=(6, 1))
        flat, pairs = x.view(24), x.flatten(0, 1).reshape(8, 3)
        compare((flat, pairs), (numbers(24), numbers(24).view(8, 3)), exact=True)
        assert x.is_contiguous()
        assert x.contiguous().to_local().is_contiguous()
        flat.add_(1)
        compare((x, pairs), (numbers(4, 6) + 1, numbers(24).view(8, 3) + 1), exact=True)
        x.mul_(2)
        compare((flat, pairs), (numbers(24) * 2 + 2, numbers(24).view(8, 3) * 2 + 2), exact=True)
        # This rank's part shares memory with what was given: no other rank has to know that it was written to.
        held.zero_()
        compare(flat, numbers(24) * 0, exact=True)
        leaf = T.DTensor.from_local(numbers(4, 12)[:, 3 * rank : 3 * rank + 3], mesh, [T.Shard(1)]).requires_grad_()
        (leaf.view(24) * distribute(numbers(24), mesh, "R")).sum().backward()
        compare(leaf.grad, numbers(4, 6), exact=True)

    run_ranks(2, body)


def test_ranks_outside_the_mesh_follow():
    def body(rank):
        mesh = T.Mesh((2,), ranks=(0, 1))
        local = numbers(3, 4) if rank < 2 else numbers(0)
        x = T.DTensor.from_local(local, mesh, [T.Shard(0)], shape=(6, 4))
        shapes = [tuple(view.shape) for view in (x.view(24), x[1:], x.t(), x[:, 1], x.expand(2, 6, 4), *x.split(4))]
        assert shapes == [(24,), (5, 4), (4, 6), (6,), (2, 6, 4), (4, 4), (2, 4)]

    run_ranks(3, body)


def test_linear_on_three_dims_keeps_the_cut_of_the_sequence():
    x, weight = torch.randn(3, 7, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    check(F.linear, Case((2, 2), (x, weight), ("S0, S1", "R, R")), gradients=True, expect="S0, S1")


def test_heads_of_attention_whose_query_moved_are_merged():
    query, key = torch.randn(2, 4, 12, 8), torch.randn(2, 2, 12, 8)

    def merged(query, key):
        found = F.scaled_dot_product_attention(query, key, key, enable_gqa=True)
        return found.transpose(1, 2).contiguous().view(2, 12, -1)

    for text in ("S2, S0", "S1, S2", "S3, R"):
        check(merged, Case((2,), (query, key), tuple(text.split(", "))), gradients=True)


def test_pairs_of_a_conjugated_tensor_are_refused_as_on_one_device():
    """What they gave would be no view: a write to it would be lost."""

    def body(rank):
        x: Any = distribute(torch.full((2, 2), 1 + 2j), T.Mesh((2,)), "S0")
        with pytest.raises(RuntimeError, match="doesn't work on unresolved conjugated tensors"):
            torch.view_as_real(x.conj())
        torch.testing.assert_close(x.conj().imag.full_tensor(), torch.full((2, 2), -2.0), rtol=0, atol=0)

    run_ranks(2, body)


PARTS = {
    "columns": lambda x: x[:, 2:-2],
    "rows": lambda x: x[1:],
    "a column": lambda x: x[:, 3],
    "half of the columns, transposed": lambda x: x.chunk(2, 1)[1].t(),
}


@pytest.mark.in_core(3)
@pytest.mark.parametrize("placement", ["R", "S0", "S1"])
@pytest.mark.parametrize("name", PARTS)
def test_conjugates_and_signs_of_parts_behind_the_start_count(name, placement):
    torch.manual_seed(0)
    x, w, part = torch.randn(4, 10, dtype=torch.complex128), torch.randn(4, 10, dtype=torch.complex128), PARTS[name]

    def results(x, w):
        # The gradient of a product is conjugated, too; the imaginary part of a conjugate is a view that says negated.
        product = part(x).conj() * part(w)
        (gradient,) = torch.autograd.grad((part(x) * part(w)).abs().sum(), x)
        return [product, part(x.conj()) * part(w), part(x).conj().imag * part(w).real, gradient]

    def body(rank):
        mesh = T.Mesh((2,))
        found = results(distribute(x, mesh, placement).requires_grad_(), distribute(w, mesh, placement))
        return [whole(tensor.detach()) for tensor in found]

    expected = [tensor.detach() for tensor in results(x.clone().requires_grad_(), w)]
    for found in run_ranks(2, body):
        torch.testing.assert_close(found, expected)
