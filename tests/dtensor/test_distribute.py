"""distribute_tensor and distribute_module: values, bytes, gradients, tied weights, and what is refused."""

from math import prod
from typing import Any

import pytest
import torch
from torch import nn

import tritondt as T
from tests.harness.gloo_ranks import GlooRanks
from tests.harness.oracle.arithmetic import indices_of, take
from tritondt import events
from tritondt.comm.transports.threads import run_ranks
from tritondt.sharding.placement import parse_placements

FULL = torch.arange(35.0).reshape(7, 5)


def expected_local(full, spec):
    """What this rank holds, cut with index_select."""
    return take(full, indices_of(spec.layout, spec.coordinate))


@pytest.mark.parametrize("source", [0, 1, None])
@pytest.mark.parametrize(
    ("mesh_shape", "text", "order"),
    [
        ((3,), "S0", None),
        ((3,), "S1(sizes=4/0/1)", None),
        ((3,), "R", None),
        ((2, 2), "S0, S0", (1, 0)),
        ((2, 2), "R, S1(unit=5)", None),
        ((2, 3), "S1, S0", None),
    ],
)
def test_every_rank_has_its_part_of_the_sender_values(mesh_shape, text, order, source):
    def body(rank):
        mesh = T.Mesh(mesh_shape)
        sender = None if source is None else mesh.coordinate == (source,) * mesh.ndim
        mine = FULL.clone() if sender in (None, True) else torch.full_like(FULL, -1.0)
        found = T.distribute_tensor(mine, mesh, parse_placements(text), src_data_rank=source, order=order)
        assert found._spec.layout is T.Layout(mesh_shape, parse_placements(text), (7, 5), order)
        torch.testing.assert_close(found.to_local(), expected_local(FULL, found._spec), rtol=0, atol=0)
        assert found.stride() == (5, 1)
        assert found.is_leaf
        mine.fill_(77)  # the parts are no views
        torch.testing.assert_close(found.to_local(), expected_local(FULL, found._spec), rtol=0, atol=0)

    run_ranks(prod(mesh_shape), body)


@pytest.mark.parametrize("source", [0, None])
@pytest.mark.parametrize(
    ("text", "elsewhere"),
    [("P, S0", 0.0), ("P(product), R", 1.0), ("P(avg), S0", None), ("P(max), R", None), ("P(avg), P", 0.0)],
)
def test_terms_of_a_sum_are_the_values_at_coordinate_0(text, elsewhere, source):
    def body(rank):
        mesh = T.Mesh((2, 2))
        found = T.distribute_tensor(FULL + rank if source is None and rank else FULL, mesh, parse_placements(text))
        axis = 1 if text.endswith("P") else 0
        assert mesh.coordinate is not None
        if elsewhere is not None and mesh.coordinate[axis]:
            assert found.to_local().unique().tolist() in ([elsewhere], [])
        torch.testing.assert_close(found.full_tensor(), FULL, rtol=0, atol=0)

    run_ranks(4, body)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.complex64, torch.float8_e4m3fn])
def test_any_dtype_and_any_strides(dtype):
    whole = (FULL.t() % 3).to(dtype)

    def body(rank):
        mesh = T.Mesh((2,))
        found = T.distribute_tensor(whole, mesh, [T.Shard(0)])
        assert found.dtype is dtype
        start = (0, 3)[rank]
        assert found.to_local().view(torch.uint8).tolist() == (
            whole[start : start + found.to_local().shape[0]].contiguous().view(torch.uint8).tolist()
        )
        conjugated = T.distribute_tensor(torch.tensor([1 + 2j, 3 - 1j]).conj(), mesh, [T.Shard(0)])
        assert conjugated.to_local().tolist() == [[1 - 2j], [3 + 1j]][rank]

    run_ranks(2, body)


def test_only_the_parts_are_sent():
    sent = []

    def body(rank):
        mesh = T.Mesh((2, 2))
        T.distribute_tensor(FULL, mesh, [T.Shard(0), T.Replicate()])

    unsubscribe = events.subscribe(lambda step: sent.append(step) if step.kind == "send" else None)
    try:
        run_ranks(4, body)
    finally:
        unsubscribe()
    # 4 rows of 5 floats go to rank 1, 3 rows to ranks 2 and 3 each; rank 0 has its own.
    assert sorted((step.sent_bytes, step.num_sent, step.received_bytes) for step in sent) == [
        (0, 0, 60),
        (0, 0, 60),
        (0, 0, 80),
        (200, 3, 0),
    ]
    sent.clear()
    unsubscribe = events.subscribe(sent.append)
    try:
        run_ranks(4, lambda rank: T.distribute_tensor(FULL, T.Mesh((4,)), [T.Shard(0)], src_data_rank=None))
    finally:
        unsubscribe()
    assert sum(step.sent_bytes for step in sent) == 0


def test_placements_default_to_replicate_and_a_lone_rank_needs_nobody():
    def body(rank):
        found = T.distribute_tensor(FULL, T.Mesh((1, 1)))
        assert found.placements == (T.Replicate(), T.Replicate())
        assert found.to_local().data_ptr() != FULL.data_ptr()
        torch.testing.assert_close(found.full_tensor(), FULL, rtol=0, atol=0)

    run_ranks(1, body)


@pytest.mark.parametrize("source", [0, None])
def test_ranks_outside_the_mesh_hold_nothing(source):
    def body(rank):
        found = T.distribute_tensor(FULL, T.Mesh((2,), ranks=[2, 0]), [T.Shard(0)], src_data_rank=source)
        return tuple(found.to_local().shape), found.shape

    assert run_ranks(3, body) == [((3, 5), FULL.shape), ((0,), FULL.shape), ((4, 5), FULL.shape)]


def test_parameters_stay_parameters_and_gradients_stay_wanted():
    def body(rank):
        mesh = T.Mesh((2,))
        for wants in (True, False):
            weight = T.distribute_tensor(nn.Parameter(FULL, requires_grad=wants), mesh, [T.Shard(0)])
            assert isinstance(weight, nn.Parameter)
            assert isinstance(weight, T.DTensor)
            assert weight.requires_grad is wants
            assert weight.is_leaf
        tensor = T.distribute_tensor(FULL.clone().requires_grad_(), mesh, [T.Shard(0)])
        assert not isinstance(tensor, nn.Parameter)
        assert tensor.requires_grad
        (tensor * 3).backward(T.ones(7, 5, device_mesh=mesh, placements=[T.Shard(0)]))
        assert isinstance(tensor.grad, T.DTensor)
        assert tensor.grad.full_tensor().unique().tolist() == [3.0]

    run_ranks(2, body)


def test_meta_tensors_cost_nothing():
    def body(rank):
        found = T.distribute_tensor(torch.empty(7, 5, device="meta"), T.Mesh((2,)), [T.Shard(0)])
        assert found.is_meta
        assert found.shape == (7, 5)
        return tuple(found.to_local().shape)

    assert run_ranks(2, body) == [(4, 5), (3, 5)]


def test_distributed_already():
    def body(rank):
        mesh = T.Mesh((2,))
        found = T.distribute_tensor(FULL, mesh, [T.Shard(0)])
        assert T.distribute_tensor(found, mesh, [T.Shard(-2)]) is found
        with pytest.raises(
            T.LayoutError, match=r"is distributed as \(S0\) already.*x\.redistribute\(placements=\[Shard"
        ):
            T.distribute_tensor(found, mesh, [T.Shard(1)])
        with pytest.raises(
            T.MeshError, match=r"distributed over Mesh\(2 .* already, and asked for Mesh\(2x1 .*full_tens"
        ):
            T.distribute_tensor(found, T.Mesh((2, 1)), [T.Shard(0), T.Replicate()])

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("odd", "named"),
    [
        (torch.zeros(7, 6), r"\(7, 5\) float32 as \(S0\) on rank 0, but with \(7, 6\) float32 as \(S0\) on rank 2"),
        (torch.zeros(7, 5).double(), r"float32 as \(S0\) on rank 0, but with \(7, 5\) float64 as \(S0\) on rank 2"),
        (nn.Parameter(FULL), r"on rank 0, but with \(7, 5\) float32 as \(S0\), requiring gradients on rank 2"),
    ],
)
def test_what_is_not_alike_is_refused_on_all_ranks(odd, named):
    def body(rank):
        with pytest.raises(T.MismatchError, match=named):
            T.distribute_tensor(odd if rank == 2 else FULL, T.Mesh((3,)), [T.Shard(0)])
        # Nothing is broken by it.
        T.distribute_tensor(FULL, T.Mesh((3,)), [T.Shard(0)])

    run_ranks(3, body)


def test_sources_that_differ_are_refused_on_all_ranks():
    def body(rank):
        message = (
            r"distribute_tensor was called with \(7, 5\) float32 as \(S0\) on rank 0, but with \(7, 5\) float32 as "
            r"\(S0\) with src_data_rank=1 on rank 1; all ranks must call it for the same tensor"
        )
        with pytest.raises(T.MismatchError, match=message):
            T.distribute_tensor(FULL + rank, T.Mesh((3,)), [T.Shard(0)], src_data_rank=rank)
        found = T.distribute_tensor(FULL + rank, T.Mesh((3,)), [T.Shard(0)], src_data_rank=2)
        torch.testing.assert_close(found.full_tensor(), FULL + 2, rtol=0, atol=0)

    run_ranks(3, body)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (
            lambda mesh: T.distribute_tensor(FULL.to_sparse(), mesh, [T.Shard(0)]),
            T.TransportError,
            r"distribute_tensor takes a strided tensor, got torch.sparse_coo; call to_dense\(\) first",
        ),
        (
            lambda mesh: T.distribute_tensor(FULL.clone().requires_grad_() * 2, mesh, [T.Shard(0)]),
            T.LocalTensorError,
            "takes a leaf of the autograd graph, got the result of an operator",
        ),
        (lambda mesh: T.distribute_tensor(FULL, mesh, [T.Shard(2)]), T.LayoutError, "axis 0 shards dim 2"),
        (
            lambda mesh: T.distribute_tensor(FULL, mesh, [T.Shard(0)], src_data_rank=5),
            T.MeshError,
            r"src_data_rank=5 is a coordinate on every axis of .*; allowed are 0\.\.2",
        ),
    ],
    ids=["sparse", "not a leaf", "no such dim", "no such source"],
)
@pytest.mark.parametrize("refusing", [0, 1])
def test_a_refusal_of_one_rank_reaches_all_and_the_world_goes_on(call, kind, message, refusing):
    def body(rank):
        mesh = T.Mesh((3,))
        for _ in range(2):
            if rank == refusing:
                with pytest.raises(kind, match=message):
                    call(mesh)
            else:
                with pytest.raises(T.MismatchError, match=rf"what it refused \((.|\n)*on rank {refusing}"):
                    T.distribute_tensor(FULL, mesh, [T.Shard(0)])
        found = T.distribute_tensor(FULL + rank, mesh, [T.Shard(0)])
        torch.testing.assert_close(found.full_tensor(), FULL, rtol=0, atol=0)

    run_ranks(3, body)


def test_other_refusals():
    def body(rank):
        mesh = T.Mesh((2, 3))
        with pytest.raises(T.MeshError, match=r"src_data_rank=2 is a coordinate on every axis .*allowed are 0\.\.1"):
            T.distribute_tensor(FULL, mesh, src_data_rank=2)
        with pytest.raises(T.LocalTensorError, match=r"takes a leaf of the autograd graph.*from_local"):
            T.distribute_tensor(FULL.clone().requires_grad_() * 2, mesh)
        with pytest.raises(T.LayoutError):
            T.distribute_tensor(FULL, mesh, [T.Shard(0)])
        with pytest.raises(T.LayoutError):
            T.distribute_tensor(FULL, mesh, [T.Shard(2), T.Replicate()])

    run_ranks(6, body)


class Tied(nn.Module):
    """An embedding whose weight is the head's, and a buffer that two modules share."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.inner = nn.Sequential(nn.Linear(4, 4))
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight
        self.inner.register_buffer("shared", self.norm.running_mean)
        self.inner.register_parameter("none", None)


def test_a_module_is_replicated_from_coordinate_0_and_stays_tied():
    def body(rank):
        torch.manual_seed(rank)
        model: Any = Tied()
        model.inner[0].bias.requires_grad_(False)
        assert id(T.distribute_module(model, T.Mesh((2,)))) == id(model)
        for tensor in (*model.parameters(), *model.buffers()):
            assert isinstance(tensor, T.DTensor)
            assert tensor.placements == (T.Replicate(),)
        assert model.head.weight is model.embedding.weight
        assert model.inner.shared is model.norm.running_mean
        assert isinstance(model.inner[0].bias, nn.Parameter)
        assert not model.inner[0].bias.requires_grad
        with pytest.raises(T.TritondtError, match="distribute_module was called twice for one Tied"):
            T.distribute_module(model, T.Mesh((2,)))
        return model.head.weight.to_local().tolist()

    first, second = run_ranks(2, body)
    assert first == second


def test_partition_fn_sees_every_submodule_and_tied_weights_follow():
    def body(rank):
        mesh, names = T.Mesh((2,)), list[str]()
        model: Any = Tied()

        def partition(name, module, device_mesh):
            assert device_mesh is mesh
            names.append(name)
            if isinstance(module, nn.Embedding):
                module.weight = T.distribute_tensor(module.weight, mesh, [T.Shard(0)])

        T.distribute_module(model, mesh, partition)
        assert names == ["", "embedding", "norm", "inner", "inner.0", "head"]
        assert model.embedding.weight.placements == (T.Shard(0),)
        assert model.head.weight is model.embedding.weight
        assert model.norm.weight.placements == (T.Replicate(),)

    run_ranks(2, body)


def test_tied_weights_laid_out_differently_are_refused():
    def body(rank):
        model, mesh = Tied(), T.Mesh((2,))

        def partition(name, module, device_mesh):
            if name in ("embedding", "head"):
                module.weight = T.distribute_tensor(module.weight, mesh, [T.Shard(len(name) % 2)])

        with pytest.raises(T.LayoutError, match=r"embedding\.weight and head\.weight were one tensor.*\(S1\).*\(S0\)"):
            T.distribute_module(model, mesh, partition)

    run_ranks(2, body)


def in_processes(rank):
    mesh = T.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = FULL if rank == 3 else torch.zeros_like(FULL)
    found = T.distribute_tensor(whole, mesh, [T.Shard(0), T.Shard(0)], src_data_rank=1, order=("tp", "dp"))
    with mesh:
        T.distribute_tensor(FULL)
    try:
        T.distribute_tensor(FULL[: 7 - (rank == 2)], mesh)
    except T.MismatchError as error:
        return found.to_local().tolist(), str(error)
    return None


def test_ranks_that_are_processes():
    with GlooRanks(4) as ranks:
        found = ranks.run(in_processes)
    assert [rows for rows, _ in found] == [
        FULL[0:2].tolist(),
        FULL[4:6].tolist(),
        FULL[2:4].tolist(),
        FULL[6:7].tolist(),
    ]
    (said,) = {error for _, error in found}
    assert "with (7, 5) float32 as (R, R) on rank 0, but with (6, 5) float32 as (R, R) on rank 2" in said
