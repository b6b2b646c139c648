"""Factories: every rank makes its own part, and the parts are of one tensor."""

from math import prod
from typing import Any

import pytest
import torch

import tritondt as T
from tests.harness.gloo_ranks import GlooRanks
from tritondt import events
from tritondt.comm.transports.threads import run_ranks
from tritondt.sharding.placement import parse_placements


@pytest.mark.parametrize(
    ("mesh_shape", "text", "order"),
    [
        ((3,), "S0", None),
        ((3,), "R", None),
        ((2,), "S1(sizes=0/5)", None),
        ((2, 2), "S0, S0", (1, 0)),
        ((2, 2), "P, S1", None),
        ((2, 2), "P(product), R", None),
        ((2, 2), "P(avg), P", None),
        ((2,), "P(max)", None),
    ],
)
def test_constants(mesh_shape, text, order):
    def body(rank):
        placements = parse_placements(text)
        layout: dict[str, Any] = {"device_mesh": T.Mesh(mesh_shape), "placements": placements, "order": order}
        for found, expected in (
            (T.zeros(7, 5, **layout), torch.zeros(7, 5)),
            (T.ones((7, 5), dtype=torch.float64, **layout), torch.ones(7, 5, dtype=torch.float64)),
            (T.full([7, 5], 2.5, **layout), torch.full((7, 5), 2.5)),
            (T.full(torch.Size([7, 5]), 2, dtype=torch.bfloat16, **layout), torch.full((7, 5), 2.0).bfloat16()),
            (T.empty(7, 5, **layout).zero_(), torch.zeros(7, 5)),
        ):
            assert isinstance(found, T.DTensor)
            assert found._spec.layout is T.Layout(mesh_shape, placements, (7, 5), order)
            assert tuple(found.to_local().shape) == found._spec.local_shape
            torch.testing.assert_close(found.full_tensor(), expected, rtol=0, atol=0)

    run_ranks(prod(mesh_shape), body)


@pytest.mark.parametrize(
    ("mesh_shape", "text"), [((3,), "S0"), ((2,), "R"), ((2, 2), "P, S0"), ((2,), "S0(sizes=0/7)")]
)
def test_ranges_are_those_of_torch_to_the_bit(mesh_shape, text):
    def body(rank):
        mesh = T.Mesh(mesh_shape)
        layout: dict[str, Any] = {"device_mesh": mesh, "placements": parse_placements(text)}
        for found, expected in (
            (T.linspace(-0.3, 1.7, 7, **layout), torch.linspace(-0.3, 1.7, 7)),
            (T.linspace(torch.tensor(2), 9, steps=7, dtype=torch.int32, **layout), torch.linspace(2, 9, 7).int()),
            (T.linspace(0, T.full((), 3.0, device_mesh=mesh), 7, **layout), torch.linspace(0, 3, 7)),
            (T.linspace(0, 1j, 7, **layout), torch.linspace(0, 1j, 7)),
            (T.logspace(-1, 2, 7, **layout), torch.logspace(-1, 2, 7)),
            (T.logspace(0, 3, 7, 2, dtype=torch.float64, **layout), torch.logspace(0, 3, 7, 2, dtype=torch.float64)),
        ):
            assert found._spec.layout is T.Layout(mesh_shape, parse_placements(text), (7,))
            assert tuple(found.to_local().shape) == found._spec.local_shape
            torch.testing.assert_close(found.full_tensor(), expected, rtol=0, atol=0)
        assert T.linspace(0, 1, 0, device_mesh=mesh).shape == (0,)
        assert T.linspace(0, 1, 5, device_mesh=mesh, requires_grad=True).requires_grad
        with pytest.raises(T.LocalTensorError, match=r"a bound of shape \(2,\); a tensor must have no dims"):
            T.logspace(torch.zeros(2), 1, 5, device_mesh=mesh)

    run_ranks(prod(mesh_shape), body)


def test_nothing_is_sent():
    sent = []

    def body(rank):
        mesh = T.Mesh((2, 2))
        for text in ("S0, S1", "P, P(avg)", "P(max), S0", "R, R"):
            T.ones(7, 5, device_mesh=mesh, placements=parse_placements(text))
        T.linspace(0, 1, 9, device_mesh=mesh, placements=parse_placements("S0, P"))

    unsubscribe = events.subscribe(lambda step: sent.append(step.sent_bytes + step.num_sent))
    try:
        run_ranks(4, body)
    finally:
        unsubscribe()
    assert sum(sent) == 0


def test_dtype_gradients_and_scalars():
    def body(rank):
        mesh = T.Mesh((2,))
        assert T.full((3,), 1, device_mesh=mesh).dtype is torch.int64
        assert T.full((3,), True, device_mesh=mesh).dtype is torch.bool
        assert T.zeros(3, device_mesh=mesh).placements == (T.Replicate(),)
        weight = T.zeros(3, device_mesh=mesh, placements=[T.Shard(0)], requires_grad=True)
        assert weight.requires_grad
        assert weight.is_leaf
        assert not weight.to_local().detach().requires_grad
        assert T.ones((), device_mesh=mesh).shape == torch.Size([])
        assert T.ones(device_mesh=mesh).shape == torch.Size([])
        with pytest.raises(T.LayoutError, match=r"is strided, got layout=torch\.sparse_coo"):
            T.zeros(3, layout=torch.sparse_coo, device_mesh=mesh)
        with pytest.raises(T.LayoutError):
            T.zeros(3, device_mesh=mesh, placements=[T.Shard(1)])

    run_ranks(2, body)


@pytest.mark.parametrize("make", [T.rand, T.randn])
def test_random_shards_differ_and_replicas_are_equal(make):
    def body(rank):
        layout: dict[str, Any] = {"device_mesh": T.Mesh((2, 3)), "dtype": torch.float64}
        return [
            make(12, 5, placements=[T.Shard(0), T.Replicate()], **layout).to_local(),
            make(12, 5, placements=[T.Shard(0), T.Shard(0)], **layout).full_tensor(),
            make(12, 5, placements=[T.Partial(), T.Shard(0)], **layout).full_tensor(),
        ]

    found = run_ranks(6, body)
    for rank in range(6):
        torch.testing.assert_close(found[rank][0], found[rank // 3 * 3][0], rtol=0, atol=0)
    assert found[0][0][0, 0] != found[3][0][0, 0]
    for place in (1, 2):
        for rank in range(6):
            torch.testing.assert_close(found[rank][place], found[0][place], rtol=0, atol=0)
        values = found[0][place].flatten()
        assert len(values.unique()) == 60
        low, high = (0.0, 1.0) if make is T.rand else (-6.0, 6.0)
        assert values.min() >= low
        assert values.max() < high
        assert (values.min() < 0) == (make is T.randn)


def test_a_seed_brings_the_numbers_back():
    def draw(seed):
        torch.manual_seed(seed)
        return run_ranks(2, lambda rank: [_numbers(), _numbers()])[0]

    def _numbers():
        return T.randn(6, device_mesh=T.Mesh((2,)), placements=[T.Shard(0)]).full_tensor().tolist()

    first, second = draw(3)
    assert first != second
    assert draw(3) == [first, second]
    assert draw(4)[0] != first


def in_processes(rank):
    torch.manual_seed(5)
    mesh = T.init_device_mesh("cpu", (2,))
    with mesh:
        shard = T.rand(4, 2, placements=[T.Shard(0)])
        whole = T.randn(3, requires_grad=True)
    torch.manual_seed(rank)
    try:
        T.rand(2, device_mesh=mesh)
    except T.MismatchError as error:
        return shard.to_local().tolist(), whole.to_local().tolist(), str(error)
    return None


def test_ranks_that_are_processes():
    with GlooRanks(2) as ranks:
        (shard, whole, said), (other_shard, other_whole, other_said) = ranks.run(in_processes)
    assert shard != other_shard
    assert whole == other_whole
    assert said == other_said
    assert "rank 0 has seed 0, rank 1 has seed 1; call torch.manual_seed(...)" in said


@pytest.mark.parametrize("make", [T.rand, T.randn])
def test_random_factories_give_the_same_numbers_whatever_the_placements(make):
    def made(text):
        placements = T.parse_placements(text)
        return run_ranks(2, lambda rank: make(7, 5, device_mesh=T.Mesh((2,)), placements=placements).full_tensor())[0]

    alone = made("R")
    for text in ("S0", "S1(sizes=4/1)", "P"):
        torch.testing.assert_close(made(text), alone, rtol=0, atol=0)
