"""DTensor as a tensor: parameters, copies, files, text, conversion, and what cannot work."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tritondt as T
from tests.ops.sharded import distribute
from tritondt.comm.transports.threads import run_ranks

FULL = torch.arange(35.0).reshape(7, 5)


def on_two(body):
    """Runs `body(x)` on two ranks with FULL cut along its rows, uneven as they are."""

    def run(rank):
        return body(distribute(FULL, T.Mesh((2,)), "S0"))

    return run_ranks(2, run)


def parameter(x) -> Any:
    """The tensor as a parameter, of a type that mypy does not narrow."""
    return nn.Parameter(x)


def is_both(x):
    return isinstance(x, nn.Parameter) and isinstance(x, T.DTensor)


def test_is_a_tensor_and_a_parameter_where_it_is_one():
    def body(x):
        assert issubclass(T.DTensor, torch.Tensor)
        assert not isinstance(x, nn.Parameter)
        weight = parameter(x)
        assert is_both(weight)
        assert weight.requires_grad
        assert weight.is_leaf
        assert weight._spec is x._spec
        assert weight.to_local().data_ptr() == x.to_local().data_ptr()
        module = nn.Module()
        module.weight = weight
        assert dict(module.named_parameters())["weight"] is weight

    on_two(body)


def test_placements_tell_what_they_are():
    def body(x):
        (placement,) = x.placements
        assert isinstance(placement, T.Shard)
        assert isinstance(placement, T.Placement)
        assert placement.is_shard()
        assert placement.is_shard(0)
        assert not placement.is_shard(1)
        assert not placement.is_replicate()
        assert not placement.is_partial()

    on_two(body)


def test_data_detach_and_requires_grad():
    def body(x):
        assert x.requires_grad_() is x
        assert x.requires_grad
        assert x.is_leaf
        for plain in (x.detach(), x.data):
            assert isinstance(plain, T.DTensor)
            assert not plain.requires_grad
            assert plain._spec is x._spec
            assert plain.to_local().data_ptr() == x._local_tensor.data_ptr()
        assert not x.to_local().detach().requires_grad

    on_two(body)


def test_setting_data_takes_the_layout_as_well():
    def body(x):
        other = distribute(torch.ones(2, 3).double(), x._spec.mesh, "S1")
        x.data = other
        assert x.shape == (2, 3)
        assert x.dtype is torch.float64
        assert x._spec is other._spec
        torch.testing.assert_close((x + 1).full_tensor(), torch.full((2, 3), 2.0).double(), rtol=0, atol=0)
        with pytest.raises(
            T.MixedTensorsError, match=r"x\.data of .* was given a plain tensor of shape \(2,\); give it a"
        ):
            x.data = torch.zeros(2)

    on_two(body)


def test_gradients_and_hooks_are_distributed():
    seen: list[Any] = []

    def body(x):
        x.requires_grad_()

        def doubled(grad):
            seen.append(grad)
            return grad * 2

        x.register_hook(doubled)
        x.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad))
        y = x * 3
        y.retain_grad()
        y.backward(distribute(FULL, x._spec.mesh, "S0"))
        for grad, factor in ((x.grad, 6), (y.grad, 1)):
            assert isinstance(grad, T.DTensor)
            torch.testing.assert_close(grad.full_tensor(), FULL * factor, rtol=0, atol=0)
        x.grad = distribute(FULL, x._spec.mesh, "S1")
        assert x.grad.placements == (T.Shard(1),)
        x.grad = None
        assert x.grad is None

    on_two(body)
    assert len(seen) == 4
    assert all(isinstance(grad, T.DTensor) for grad in seen)


def test_conversions():
    def body(x):
        assert x.to(torch.float64).dtype is torch.float64
        assert x.double().to_local().dtype is torch.float64
        assert x.half().dtype is torch.float16
        assert x.bfloat16().float().dtype is torch.float32
        assert x.float() is x
        assert x.cpu() is x
        assert x.to("cpu") is x
        assert x.type_as(x.double()).dtype is torch.float64
        assert x.double().placements == (T.Shard(0),)
        assert float(distribute(torch.tensor(2.5), x._spec.mesh, "R")) == 2.5
        assert x.redistribute(placements=[T.Shard(1)], async_op=True).placements == (T.Shard(1),)

    on_two(body)


def test_a_module_is_converted_with_its_parameters():
    def body(x):
        module = nn.Linear(5, 7, bias=False)
        module.weight = weight = parameter(x)
        module.double()
        assert id(module.weight) == id(weight)
        assert weight.dtype is torch.float64
        assert weight.to_local().dtype is torch.float64
        torch.testing.assert_close(weight.full_tensor().detach(), FULL.double(), rtol=0, atol=0)

    on_two(body)


@pytest.mark.parametrize("convert", [lambda x: x.numpy(), np.asarray, lambda x: x.tolist()])
def test_no_array_and_no_list_of_a_part(convert):
    def body(x):
        with pytest.raises(
            T.PropagationError, match=r"of a distributed tensor \(S0\) of \(7, 5\).*full_tensor\(\)\.\w+\(\)"
        ):
            convert(x)

    on_two(body)


def test_text():
    def body(rank):
        mesh = T.Mesh((2,), ["tp"])
        x = distribute(torch.tensor([1.0, 2.0, 3.0]), mesh, "S0")
        big = repr(T.zeros(100, 100, device_mesh=mesh))
        empty = repr(T.zeros(1, 2, device_mesh=mesh, placements=[T.Shard(0)]))
        return (
            repr(x),
            repr(nn.Parameter(x)),
            repr(x.requires_grad_() * 1),
            big,
            empty,
            repr(distribute(FULL, mesh, "S1")),
        )

    (short, parameter, result, big, _, several), (*_, empty, _) = run_ranks(2, body)
    assert short == "DTensor((S0) of (3,) on Mesh(tp=2 over ranks 0..1, cpu), local (2,) = tensor([1., 2.]))"
    assert parameter == "Parameter containing:\n" + short[:-1] + ", requires_grad=True)"
    assert result == short[:-1] + ", grad_fn=<MulBackward0>)"
    assert len(big) < 1000
    assert "..." in big
    assert "local (0, 2) = tensor([], size=(0, 2))" in empty
    assert "local (7, 3) =\ntensor([[ 0.,  1.,  2.],\n" in several


def test_order_is_in_the_text():
    def body(rank):
        return repr(distribute(FULL, T.Mesh((2, 2)), "S0, S0", (1, 0)))

    assert "DTensor((S0, S0), order=(1, 0) of (7, 5)" in run_ranks(4, body)[0]


def test_deepcopy_has_memory_of_its_own_and_keeps_what_is_shared():
    def body(x):
        weight = parameter(x)
        weight.note = "kept"
        weight.grad = distribute(FULL, x._spec.mesh, "S0")
        module = nn.ModuleList([nn.Linear(5, 7, bias=False), nn.Linear(5, 7, bias=False)])
        module[0].weight = module[1].weight = weight
        found: Any = copy.deepcopy(module)
        made = found[0].weight
        assert made is found[1].weight
        assert is_both(made)
        assert made._spec is weight._spec
        assert made.note == "kept"
        assert made.requires_grad
        assert made.is_leaf
        assert made.to_local().data_ptr() != weight.to_local().data_ptr()
        assert made.grad is not weight.grad
        torch.testing.assert_close(made.grad.full_tensor(), FULL, rtol=0, atol=0)
        with torch.no_grad():
            made.add_(1)
        torch.testing.assert_close(weight.full_tensor(), FULL, rtol=0, atol=0)
        with pytest.raises(T.PropagationError, match=r"deepcopy of .* which is the result of an operator.*detach"):
            copy.deepcopy(weight * 2)

    on_two(body)


def test_copy_shares_memory():
    def body(x):
        found = copy.copy(x)
        assert found is not x
        assert found._spec is x._spec
        assert found.to_local().data_ptr() == x.to_local().data_ptr()

    on_two(body)


def test_flattening():
    def body(x):
        names, context = x.requires_grad_().__tensor_flatten__()
        found = T.DTensor.__tensor_unflatten__(
            {name: getattr(x, name) for name in names}, context, x.size(), x.stride()
        )
        assert found._spec is x._spec
        assert found.requires_grad
        assert found.to_local().data_ptr() == x._local_tensor.data_ptr()
        wider = T.DTensor.__tensor_unflatten__({"_local_tensor": torch.ones(4, 6)}, context, (8, 6), (6, 1))
        assert wider.shape == (8, 6)

    on_two(body)


def test_from_local_without_a_check_shares_memory_and_sends_nothing():
    def body(rank):
        local = torch.full((2,), float(rank))
        held = T.DTensor.from_local(local, T.Mesh((2,)), [T.Replicate()]).to_local()
        assert held.data_ptr() == local.data_ptr()

    run_ranks(2, body)


def test_the_number_of_a_replicated_tensor_is_formatted_and_that_of_another_refused():
    def body(rank):
        mesh = T.Mesh((2,))
        loss = distribute(torch.tensor(2.5), mesh, "R")
        assert f"{loss:.4f}" == "2.5000"
        assert f"{loss}" == repr(loss)
        with pytest.raises(T.PropagationError, match=r"'.4f' of \(P\(sum\)\) .*on every rank: \{x\.item\(\):\.4f\}"):
            format(distribute(torch.tensor(2.5), mesh, "P"), ".4f")
        with pytest.raises(TypeError, match="unsupported format string"):
            format(distribute(FULL, mesh, "S0"), ".4f")

    run_ranks(2, body)


def test_memory_shared_with_other_processes_is_that_of_the_part():
    def body(x):
        assert not x.is_shared()
        assert x.share_memory_() is x
        assert x.is_shared()
        assert x.to_local().is_shared()
        torch.testing.assert_close(x.full_tensor(), FULL, rtol=0, atol=0)
        module: Any = nn.Module()
        module.weight = nn.Parameter(x.clone())
        module.share_memory()
        assert module.weight.is_shared()

    on_two(body)
