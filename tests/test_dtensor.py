"""DTensor as a tensor: parameters, copies, files, text, conversion, checks of from_local, and what cannot work."""

import copy
import inspect
import io
import pickle
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.tensor as reference
from torch import nn

import tritondt as T
from tests.gloo_ranks import GlooRanks
from tests.ops.sharded import distribute
from tritondt.comm.threads import run_ranks
from tritondt.placement import parse_placements

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


@pytest.mark.parametrize("weights_only", [True, False, None])
def test_saving_and_loading(weights_only):
    def body(rank):
        mesh = T.Mesh((2, 2), ["a", "b"])
        placements = parse_placements("S0(unit=7), S1(sizes=2/3)")
        x: Any = T.distribute_tensor(nn.Parameter(FULL), mesh, placements)
        x.note = [1, 2]
        y = distribute(FULL.bfloat16(), mesh, "S0, S0", (1, 0))
        if weights_only is None:
            found = pickle.loads(pickle.dumps({"x": x, "y": y}))
        else:
            file = io.BytesIO()
            torch.save({"x": x, "y": y}, file)
            file.seek(0)
            found = torch.load(file, weights_only=weights_only)
        for name, tensor in (("x", x), ("y", y)):
            assert type(found[name]) is T.DTensor
            assert found[name]._spec is tensor._spec
            assert found[name].to_local().equal(tensor.to_local())
        assert is_both(found["x"])
        assert found["x"].note == [1, 2]
        assert not found["y"].requires_grad

    run_ranks(4, body)


def test_what_another_rank_or_another_world_saved_is_refused():
    saved = on_two(pickle.dumps)

    def body(rank):
        assert pickle.loads(saved[rank]).shape == (7, 5)
        with pytest.raises(
            T.LocalTensorError, match=r"rank \d at coordinate .* loaded a local tensor of shape .*load what"
        ):
            pickle.loads(saved[1 - rank])

    run_ranks(2, body)

    def alone(rank):
        with pytest.raises(T.MeshError, match="needs rank 1, but the world has 1 ranks"):
            pickle.loads(saved[0])

    run_ranks(1, alone)
    with pytest.raises(T.WorldError, match="there is no world"):
        pickle.loads(saved[0])


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


# from_local(run_check=True), on threads and on processes.


def checked(rank, give, placements, mesh_shape=(2, 2)):
    """What from_local says on this rank, or holds, as plain values."""
    local, options = give(rank)
    try:
        found = T.DTensor.from_local(local, T.Mesh(mesh_shape), parse_placements(placements), run_check=True, **options)
    except T.TritondtError as error:
        return type(error).__name__, str(error)
    return found.to_local().tolist()


def give_other_shape(rank):
    return torch.zeros(3, 4 + (rank == 3)), {}


def give_other_dtype(rank):
    return torch.zeros(3, 4, dtype=torch.float64 if rank == 2 else torch.float32), {}


def give_too_few_rows(rank):
    return torch.zeros(2 - (rank == 1), 4), {"shape": (4, 4)}


def give_numbers(rank):
    return torch.tensor([[rank, -0.0], [float("nan") if rank else 1.5, rank]]), {}


def give_bools(rank):
    return torch.tensor([rank % 2 == 0, rank > 1]), {}


def give_placements(rank):
    return torch.zeros(4, 4), {}


def mixed_placements(rank):
    return checked(rank, give_placements, "S0, R" if rank != 1 else "S1, R")


CHECKS = [
    (
        give_other_shape,
        "S0, R",
        "a part of (S0, R) of (6, 4) float32 on rank 0, but with a part of (S0, R) of (6, 5) float32 on rank 3",
    ),
    (
        give_other_dtype,
        "S1, R",
        "a part of (S1, R) of (3, 8) float32 on rank 0, but with a part of (S1, R) of (3, 8) float64 on rank 2",
    ),
]


@pytest.fixture(scope="module")
def processes():
    with GlooRanks(4) as ranks:
        yield ranks


@pytest.mark.parametrize("on_processes", [False, True])
def test_parts_of_different_tensors_are_refused_on_all_ranks(on_processes, processes):
    def run(body, *arguments):
        return processes.run(body, *arguments) if on_processes else run_ranks(4, lambda rank: body(rank, *arguments))

    for give, placements, said in CHECKS:
        for found_kind, text in run(_checked_by_name, give.__name__, placements):
            assert found_kind == "MismatchError"
            assert text.startswith("from_local was called with ")
            assert said in text
            assert text.endswith("all ranks must call it for the same tensor")
    for found_kind, text in run(mixed_placements):
        assert found_kind == "MismatchError"
        assert "(S0, R) of (8, 4) float32 on rank 0, but with a part of (S1, R) of (4, 8) float32 on rank 1" in text
    found = run(_checked_by_name, "give_too_few_rows", "S0, R")
    assert [kind for kind, _ in found] == ["MismatchError", "LocalTensorError", "MismatchError", "MismatchError"]
    assert "rank 1 at coordinate (0, 1) gave a local tensor of shape (1, 4)" in found[1][1]
    assert "but with what it refused (rank 1 at coordinate (0, 1) gave a local tensor of shape (1, 4)" in found[0][1]


def _checked_by_name(rank, name, placements):
    return checked(rank, globals()[name], placements)


@pytest.mark.parametrize("on_processes", [False, True])
@pytest.mark.parametrize(
    ("placements", "senders"),
    [
        ("R, R", (0, 0, 0, 0)),
        ("S0, R", (0, 0, 2, 2)),
        ("R, S1", (0, 1, 0, 1)),
        ("P, R", (0, 0, 2, 2)),
        ("R, P(max)", (0, 1, 0, 1)),
        ("S1, S0", (0, 1, 2, 3)),
    ],
)
def test_replicas_take_the_values_of_the_first_coordinate(placements, senders, on_processes, processes):
    names = ["give_numbers"] if "P(" in placements or "P," in placements else ["give_numbers", "give_bools"]
    for name in names:
        if name == "give_bools" and "1" in placements:
            continue
        if on_processes:
            found = processes.run(_checked_by_name, name, placements)
        else:
            found = run_ranks(4, partial(_checked_by_name, name=name, placements=placements))
        expected = [globals()[name](sender)[0].tolist() for sender in senders]
        assert repr(found) == repr(expected)  # nan and the sign of zero included


def test_a_checked_tensor_passes_gradients_on():
    def body(rank):
        mesh = T.Mesh((2,))
        local = torch.full((2,), float(rank), requires_grad=True)
        x = T.DTensor.from_local(local, mesh, [T.Replicate()], run_check=True)
        assert x.to_local().tolist() == [0.0, 0.0]
        (x * 3).backward(T.ones(2, device_mesh=mesh))
        assert local.grad is not None
        assert local.grad.tolist() == [3.0, 3.0]

    run_ranks(2, body)


def test_from_local_without_a_check_shares_memory_and_sends_nothing():
    def body(rank):
        local = torch.full((2,), float(rank))
        assert T.DTensor.from_local(local, T.Mesh((2,)), [T.Replicate()]).to_local() is local

    run_ranks(2, body)


# Transforms and graphs.


def test_vmap_and_grad():
    whole = torch.arange(35.0).reshape(7, 5)

    def body(x):
        for function, in_dims in (
            (lambda row: row * 2 + 1, 0),
            (lambda column: column.sum(), 1),
            (lambda row: torch.softmax(row, 0), 0),
            (lambda row: row.reshape(5, 1).expand(5, 2).mean(1), 0),
        ):
            found = torch.func.vmap(function, in_dims=in_dims)(x)
            assert isinstance(found, T.DTensor)
            torch.testing.assert_close(found.full_tensor(), torch.func.vmap(function, in_dims=in_dims)(whole))
        found = torch.func.grad(lambda y: (y * y).sum())(x)
        torch.testing.assert_close(found.full_tensor(), 2 * whole, rtol=0, atol=0)
        found = torch.func.vmap(torch.func.grad(lambda row: (row * row).sum()))(x)
        torch.testing.assert_close(found.full_tensor(), 2 * whole, rtol=0, atol=0)
        with pytest.raises(
            T.MixedTensorsError, match=r"got a distributed tensor \(S0\) of \(7, 5\) float32 and a plain"
        ):
            torch.func.vmap(torch.add)(x, whole)

    on_two(body)


def compiled_on(rank):
    """A layer whose weights are cut and whose gradients travel, compiled and not; and shapes that change."""
    torch.manual_seed(1)
    mesh = T.init_device_mesh("cpu", (2,))
    layer = nn.Linear(5, 7)
    for name, parameter in list(layer.named_parameters()):
        setattr(layer, name, T.distribute_tensor(parameter, mesh, [T.Shard(0)]))

    def loss(x):
        hidden = layer(x).relu().redistribute(placements=[T.Shard(0)])
        return (torch.softmax(hidden, -1) * torch.linalg.vector_norm(hidden)).sum()

    found = []
    for function in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        layer.zero_grad()
        results = []
        for rows in (3, 4, 5):
            total: Any = function(T.distribute_tensor(torch.randn(rows, 5, generator=_seeded(rows)), mesh))
            total.backward()
            results.append(total.full_tensor().item())
        grads = [parameter.grad for parameter in layer.parameters()]
        found.append((results, [(grad._spec, grad.to_local()) for grad in grads]))  # type: ignore[union-attr]
    (eager, eager_grads), (graph, graph_grads) = found
    torch.testing.assert_close(graph, eager)
    for (_, of_graph), (_, of_eager) in zip(graph_grads, eager_grads, strict=True):
        torch.testing.assert_close(of_graph, of_eager)
    make = torch.compile(
        lambda local: T.DTensor.from_local(local, mesh, [T.Shard(0)]).to_local() * 2, backend="aot_eager"
    )
    assert make(torch.ones(3)).tolist() == [2.0] * 3
    drop = torch.compile(lambda x: torch.dropout(x, 0.5, True), backend="aot_eager")
    ones = T.ones(64, device_mesh=mesh)
    masks: list[Any] = [drop(ones) for _ in range(2)]
    first, second = (mask.to_local().tolist() for mask in masks)
    assert first != second, "one mask for all calls"
    return first


def _seeded(number):
    return torch.Generator().manual_seed(number)


@pytest.mark.slow
def test_compiled_graphs_redistribute_and_give_the_same():
    with GlooRanks(2) as ranks:
        first, second = ranks.run(compiled_on, timeout_s=110)
    assert first == second  # replicas drop the same


def test_public_names_and_their_parameters_are_those_of_torch():
    for owner, ours, names in (
        (reference, T, reference.__all__),
        (reference.DTensor, T.DTensor, ("from_local", "to_local", "redistribute", "full_tensor")),
    ):
        for name in names:
            expected, found = getattr(owner, name), getattr(ours, name)
            if isinstance(expected, type):
                assert isinstance(found, type)
                continue
            parameters = inspect.signature(found).parameters
            for parameter in inspect.signature(expected).parameters.values():
                assert parameters[parameter.name].kind is parameter.kind, (name, parameter)
                assert parameters[parameter.name].default == parameter.default, (name, parameter)
