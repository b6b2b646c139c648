"""Lists of plain and distributed tensors, and of tensors on several meshes, against one device."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parameters_to_vector

import tritondt as T
from tritondt.comm.transports.threads import run_ranks


def _values(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-8, 9, shape, generator=generator).double() for shape in ((4, 6), (5,), (3, 2), (1, 4))]


def _mixed(values, mesh):
    """Rows, a plain tensor, columns, and rows of which one rank of two has none."""
    rows, plain, columns, short = values
    return [
        T.distribute_tensor(rows, mesh, [T.Shard(0)]),
        plain,
        T.distribute_tensor(columns, mesh, [T.Shard(1)]),
        T.distribute_tensor(short, mesh, [T.Shard(0)]),
    ]


def _whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, T.DTensor) else tensor


_FOREACH: Mapping[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, y: torch._foreach_add(x, y, alpha=2),
    "add_": lambda x, y: torch._foreach_add_(x, y),
    "mul_ numbers": lambda x, y: torch._foreach_mul_(x, [2.0, 3.0, 4.0, 5.0]),
    "mul_ number": lambda x, y: torch._foreach_mul_(x, torch.tensor(3.0, dtype=torch.float64)),
    "addcmul_": lambda x, y: torch._foreach_addcmul_(x, y, y, [1.0, 2.0, 4.0, 8.0]),
    "lerp_": lambda x, y: torch._foreach_lerp_(x, y, 0.5),
    "copy_": lambda x, y: torch._foreach_copy_(x, y),
    "zero_": lambda x, y: torch._foreach_zero_(x),
    "abs": lambda x, y: torch._foreach_abs(x),
    "max": lambda x, y: torch._foreach_max(x),
    "norm of order 1": lambda x, y: torch._foreach_norm(x, 1),
    "clamp_min_": lambda x, y: torch._foreach_clamp_min_(x, -2),
}


@pytest.mark.parametrize("name", _FOREACH)
def test_a_list_runs_position_by_position_each_of_its_kind(name):
    call = _FOREACH[name]
    expected = [_values(0), _values(1)]
    results: Any = call(*expected)
    writes = results is expected[0] or results is None

    def body(rank):
        mesh = T.Mesh((2,))
        x, y = (_mixed(_values(seed), mesh) for seed in (0, 1))
        versions = [one._version for one in x]
        found = call(x, y)
        found = x if writes else found
        kinds = [isinstance(one, T.DTensor) for one in found]
        raised = [one._version > before for one, before in zip(x, versions, strict=True)]
        return [_whole(one) for one in x], [_whole(one) for one in found], kinds, raised

    for written, found, kinds, raised in run_ranks(2, body):
        torch.testing.assert_close(written, expected[0], rtol=0, atol=0)
        torch.testing.assert_close(found, expected[0] if writes else results, rtol=0, atol=0)
        assert kinds == [True, False, True, True]
        assert raised == [writes] * 4


def test_gradients_flow_through_a_list_of_both_kinds():
    x = [one.requires_grad_() for one in _values(0)]
    torch.autograd.backward([one.sum() for one in torch._foreach_mul(x, _values(1))])

    def body(rank):
        x = [one.requires_grad_() for one in _mixed(_values(0), T.Mesh((2,)))]
        found = torch._foreach_mul(x, _mixed(_values(1), T.Mesh((2,))))
        torch.autograd.backward([one.sum() for one in found])
        return [isinstance(one.grad, T.DTensor) for one in x], [_whole(one.grad) for one in x]

    for kinds, found in run_ranks(2, body):
        assert kinds == [True, False, True, True]
        torch.testing.assert_close(found, [one.grad for one in x], rtol=0, atol=0)


def test_a_tensor_and_its_own_local_part_are_written_in_the_order_of_the_list():
    def body(rank):
        x = T.distribute_tensor(torch.ones(4), T.Mesh((2,)), [T.Shard(0)])
        y = x.to_local()
        torch._foreach_add_([x, y, x], [x, y, x])
        return x.full_tensor().tolist()

    assert run_ranks(2, body) == [[8.0] * 4] * 2


def _model(seed=0):
    torch.manual_seed(seed)
    return torch.nn.ModuleDict(
        {"up": torch.nn.Linear(6, 8), "norm": torch.nn.LayerNorm(8), "down": torch.nn.Linear(8, 3)}
    )


def _loss(model, x):
    return model["down"](model["norm"](model["up"](x))).square().mean()


def _cut(model, mesh):
    """Linear weights cut, the norm left plain, as plans do that leave norms out."""
    for name, dim in (("up", 0), ("down", 1)):
        module = model[name]
        for kind, parameter in tuple(module.named_parameters()):
            placement = T.Shard(dim) if parameter.ndim > dim else T.Replicate()
            cut = torch.nn.Parameter(T.distribute_tensor(parameter.detach(), mesh, [placement]))
            setattr(module, kind, cut)
    return model


def _clip_ours(parameters, foreach):
    with T.implicit_replication():
        T.clip_grad_norm_(parameters, 0.05, foreach=foreach)


_OPTIMIZERS: Mapping[str, Callable[[Any], Any]] = {
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=0.05, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.05, fused=True),
    "AdamW, fused, amsgrad": lambda p: torch.optim.AdamW(p, lr=0.05, fused=True, amsgrad=True),
    "AdamW, loop": lambda p: torch.optim.AdamW(p, lr=0.05, foreach=False),
    "SGD, foreach": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9, foreach=True),
    "SGD, fused": lambda p: torch.optim.SGD(p, lr=0.5, fused=True),
    "Adagrad, fused": lambda p: torch.optim.Adagrad(p, lr=0.5, fused=True),
}
_CLIPPINGS: Mapping[str, Callable[[Any], Any]] = {
    "norm, foreach": lambda p: clip_grad_norm_(p, 0.05, foreach=True),
    "norm, loop": lambda p: clip_grad_norm_(p, 0.05, foreach=False),
    "norm of the largest": lambda p: clip_grad_norm_(p, 0.05, float("inf")),
    "norm, ours": partial(_clip_ours, foreach=None),
    "value, foreach": lambda p: clip_grad_value_(p, 0.01, foreach=True),
    "value, loop": lambda p: clip_grad_value_(p, 0.01, foreach=False),
}


def _train(model, batches, optimizer, clip, scaler=None):
    optimizer = _OPTIMIZERS[optimizer](model.parameters())
    losses = []
    for x in batches:
        optimizer.zero_grad()
        with T.implicit_replication():
            loss = _loss(model, x)
            (loss if scaler is None else scaler.scale(loss)).backward()
        losses.append(loss.item())
        if scaler is not None:
            scaler.unscale_(optimizer)
        _CLIPPINGS[clip](model.parameters())
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    return [_whole(p.detach()) for p in model.parameters()], losses


def _batches(scale=1.0):
    torch.manual_seed(5)
    return [scale * torch.randn(4, 6) for _ in range(3)]


@pytest.mark.parametrize("clip", _CLIPPINGS)
@pytest.mark.parametrize("optimizer", _OPTIMIZERS)
def test_training_with_a_plain_norm_is_that_of_one_process(optimizer, clip):
    if clip == "norm, ours":
        expected, losses = _train(_model(), _batches(), optimizer, "norm, foreach")
    else:
        expected, losses = _train(_model(), _batches(), optimizer, clip)

    def body(rank):
        mesh = T.Mesh((2,))
        batches = [T.distribute_tensor(x, mesh, [T.Shard(0)]) for x in _batches()]  # each rank has other rows
        return _train(_cut(_model(), mesh), batches, optimizer, clip)

    for found, got in run_ranks(2, body):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(got, losses, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bad", ["none", "plain", "distributed"])
def test_a_gradient_scaler_unscales_both_kinds_and_skips_a_step_on_all_ranks(bad):
    def body(rank):
        mesh = T.Mesh((2,))
        gradients = _mixed(_values(1), mesh)
        parameters: list[Any] = [torch.nn.Parameter(one) for one in _mixed(_values(0), mesh)]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient * 1024.0
        if bad == "distributed" and rank == 1:
            parameters[0].grad.to_local()[0, 0] = float("inf")
        if bad == "plain":
            parameters[1].grad[0] = float("nan")
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizer = torch.optim.SGD(parameters, lr=1.0)
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale(), [_whole(one.detach()) for one in parameters]

    expected = _values(0) if bad != "none" else [x - y for x, y in zip(_values(0), _values(1), strict=True)]
    for scale, found in run_ranks(2, body):
        assert scale == (1024.0 if bad == "none" else 512.0)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_list_on_two_meshes_runs_mesh_by_mesh():
    def body(rank):
        wide, narrow = T.Mesh((2,)), T.Mesh((1, 2))
        x: list[Any] = [T.distribute_tensor(torch.arange(4.0), wide, [T.Shard(0)])]
        x.append(T.distribute_tensor(torch.arange(6.0), narrow, [T.Replicate(), T.Shard(0)]))
        torch._foreach_add_(x, 1)
        torch._foreach_mul_(x, T.full((), 2.0, device_mesh=wide))  # a number that all ranks of the other mesh hold
        return [one.full_tensor().tolist() for one in x], [
            one.device_mesh is mesh for one, mesh in zip(x, (wide, narrow), strict=True)
        ]

    expected = [[2.0 * (value + 1) for value in range(length)] for length in (4, 6)]
    assert run_ranks(2, body) == [(expected, [True, True])] * 2


def test_clipping_over_two_meshes_names_the_function_that_does_it():
    def body(rank):
        parameters = []
        for mesh in (T.Mesh((2,)), T.Mesh((1, 2))):
            parameter = torch.nn.Parameter(T.ones(4, device_mesh=mesh, placements=[T.Shard(0)] * mesh.ndim))
            parameter.grad = parameter.detach().clone()
            parameters.append(parameter)
        refused = []
        for foreach in (True, False):
            with pytest.raises(T.MeshError, match=r"several meshes call tritondt\.clip_grad_norm_ in place of torch's"):
                clip_grad_norm_(parameters, 1.0, foreach=foreach)
            refused.append(foreach)
        return T.clip_grad_norm_(parameters, 1.0).item() ** 2, refused

    for squared, refused in run_ranks(2, body):
        assert round(squared, 4) == 8.0
        assert refused == [True, False]


def test_a_number_is_refused_where_a_rank_does_not_hold_it():
    def body(rank):
        mesh = T.Mesh((1,), ranks=(0,))
        number, plain = T.full((), 3.0, device_mesh=mesh), torch.ones(2)
        if rank == 0:
            return plain.mul_(number).tolist()
        with pytest.raises(T.MeshError, match="a plain tensor on a rank outside that mesh, which does not hold"):
            plain.mul_(number)
        wide = T.ones(2, device_mesh=T.Mesh((1,), ranks=(1,)))
        with pytest.raises(T.MeshError, match="some ranks of which do not hold it; give the number's value"):
            torch._foreach_mul_([wide, T.ones(2, device_mesh=mesh)], number)
        return plain.tolist()

    assert run_ranks(2, body) == [[3.0, 3.0], [1.0, 1.0]]


def test_the_norm_within_implicit_replication_counts_plain_gradients_once():
    def body(rank):
        parameters = [torch.nn.Parameter(torch.zeros_like(one)) for one in _mixed(_values(0), T.Mesh((2,)))]
        for parameter, gradient in zip(parameters, _mixed(_values(1), T.Mesh((2,))), strict=True):
            parameter.grad = gradient
        with pytest.raises(T.MixedTensorsError, match=r"within tritondt\.implicit_replication\(\) where plain"):
            T.clip_grad_norm_(parameters, 1.0)
        with T.implicit_replication():
            total = T.clip_grad_norm_(parameters, 1.0)
            alone = T.clip_grad_norm_(parameters[1], 100.0)
        return total, alone, _whole(parameters[1].grad)

    expected = torch.cat([one.flatten() for one in _values(1)]).norm()
    plain = _values(1)[1] / (expected + 1e-6)
    for total, alone, gradient in run_ranks(2, body):
        torch.testing.assert_close(total, expected)
        torch.testing.assert_close(alone, plain.norm())
        torch.testing.assert_close(gradient, plain)


def test_parameters_become_one_vector_within_implicit_replication():
    expected = parameters_to_vector(_values(0))

    def body(rank):
        parameters = _mixed(_values(0), T.Mesh((2,)))
        with pytest.raises(T.MixedTensorsError, match=r"implicit_replication\(\)"):
            parameters_to_vector(parameters)
        with T.implicit_replication():
            return _whole(parameters_to_vector(parameters))

    for found in run_ranks(2, body):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
