"""Statements to which one device has no one answer are told from those to which it has."""

from contextlib import nullcontext

import pytest
import torch
from torch.autograd.grad_mode import _force_original_view_tracking

from tests.programs.soundness import is_of_detached_base, is_of_replaced_memory, reads_own_elements
from tests.programs.statements import Call


@pytest.mark.parametrize(
    ("source", "reads", "is_left_out"),
    [
        ("x.add_(x)", "x", False),
        ("x.add_(y)", "xy", False),
        ("x.scatter_add_(1, i, y)", "xy", True),
        ("x.add_(rest)", ("x", "rest"), False),
        ("x.add_(late)", ("x", "late"), True),
        ("x.add_(other)", ("x", "other"), False),
        ("x.data.copy_(vrest.mT)", ("x", "late"), True),
        ("x[..., :1] = vlate[..., :1]", ("x", "late"), True),
        ("torch._foreach_add_([x], [vlate])", ("x", "late"), True),
        ("torch._foreach_add_([x, late], 2)", ("x", "late"), False),
        ("torch.add(late, 2, out=v0)", ("late", "v0"), True),
        ("torch.add(rest, 2, out=v0)", ("rest", "v0"), False),
    ],
)
def test_writes_whose_order_is_the_kernels_are_left_out(source, reads, is_left_out):
    base = torch.arange(30.0).view(5, 6)
    views = {"x": base[:, :2], "y": base[:, :2].view(5, 2), "rest": base[:, 2:4], "late": base[:, 1:3]}
    tensors = {**views, "other": torch.ones(5, 2), "v0": base[:, :2]}
    kind = "foreach" if "foreach" in source else "out" if "out=" in source else "data" if "v" in source else "write"
    assert reads_own_elements(Call(kind, source, tuple(reads)), tensors) is is_left_out


def test_a_view_of_what_was_detached_and_written_to_is_left_out():
    # torch replays views of tensors without memory, and asserts where that gives one without a graph.
    for is_replayed in (False, True):
        with _force_original_view_tracking(is_replayed):
            base = torch.ones(1, 1, requires_grad=True)
            view = base.view_as(base)
            base.detach_()
            assert not is_of_detached_base(view)
            with pytest.raises(RuntimeError, match="new_fn") if is_replayed else nullcontext():
                base.unsqueeze(0).add_(2)
                assert is_of_detached_base(view)


def test_a_view_whose_memory_was_replaced_and_written_to_is_left_out():
    base = torch.ones(1, 2, requires_grad=True)
    view = base[:, 1:]
    view.data = torch.ones(1, 1)
    assert not is_of_replaced_memory(view)
    with torch.no_grad():
        torch._foreach_mul_([view], [3])
    assert is_of_replaced_memory(view)
    # What torch makes of it, and why there is nothing to compare with: the view is of the other element.
    (gradient,) = torch.autograd.grad(view.sum(), [base])
    assert gradient.tolist() == [[1, 0]]
    written = base[:, 1:]
    with torch.no_grad():
        torch._foreach_mul_([written], [3])
    assert written.grad_fn is not None
    assert written.grad_fn.name() == "AsStridedBackward0"
    assert not is_of_replaced_memory(written)
