"""What torch's docstrings say of DTensor, distribute_tensor, distribute_module, placements and factories."""

from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import tritondt as T
from tests.torch_api.behaviours import NUM_RANKS, Behaviour, behaviour, behaviours_of
from tritondt.comm.transports.threads import run_ranks

WHOLE = torch.arange(40.0).view(10, 4)  # 10 rows over 4 ranks: 3, 3, 3 and 1
ROWS = WHOLE.chunk(NUM_RANKS)


def line() -> T.Mesh:
    return T.Mesh((NUM_RANKS,), ("x",))


def exactly(found: Any, expected: torch.Tensor) -> None:
    assert type(found) is torch.Tensor
    assert_close(found, expected, rtol=0, atol=0)


def sharded(*, requires_grad: bool = False) -> T.DTensor:
    return T.distribute_tensor(WHOLE.clone().requires_grad_(requires_grad), line(), [T.Shard(0)])


# DTensor ----------------------------------------------------------------------------------------------------------


@behaviour("DTensor", "summary")
def _(rank: int) -> None:
    x = sharded()
    assert isinstance(x, torch.Tensor)
    assert tuple(x.shape) == (10, 4)  # that of the whole
    exactly(cast(Any, x + x).full_tensor(), WHOLE + WHOLE)
    exactly(cast(Any, x @ x.t()).full_tensor(), WHOLE @ WHOLE.t())


@behaviour("DTensor", "note 1")
def _(rank: int) -> None:
    with pytest.raises((TypeError, T.TritondtError)):
        T.DTensor(WHOLE)  # type: ignore[call-arg]  # the constructor is not the way to make one


@behaviour("DTensor.device_mesh", "summary", "note 1")
def _(rank: int) -> None:
    x: Any = sharded()
    assert x.device_mesh is line()
    with pytest.raises(AttributeError):
        x.device_mesh = None


@behaviour("DTensor.placements", "summary", "note 1")
def _(rank: int) -> None:
    x: Any = sharded()
    assert x.placements == (T.Shard(0),)
    with pytest.raises(AttributeError):
        x.placements = ()


@behaviour("DTensor.from_local", "summary", "local_tensor", "device_mesh", "placements", "returns")
def _(rank: int) -> None:
    x = T.DTensor.from_local(WHOLE[2 * rank : 2 * rank + 2], line(), [T.Shard(0)])
    assert type(x) is T.DTensor
    assert x.device_mesh is line()
    assert x.placements == (T.Shard(0),)
    exactly(x.full_tensor(), WHOLE[:8])
    terms = T.DTensor.from_local(WHOLE * rank, line(), [T.Partial()])
    exactly(terms.full_tensor(), WHOLE * 6)
    with pytest.raises(T.LayoutError):
        T.DTensor.from_local(WHOLE, line(), [T.Shard(0), T.Shard(1)])  # more placements than axes


@behaviour("DTensor.from_local", "run_check")
def _(rank: int) -> None:
    x = T.DTensor.from_local(WHOLE + rank, line(), [T.Replicate()], run_check=True)
    exactly(x.to_local(), WHOLE)  # those of the first rank
    with pytest.raises(T.TritondtError):
        T.DTensor.from_local(WHOLE[: 5 + rank], line(), [T.Replicate()], run_check=True)


@behaviour("DTensor.from_local", "shape", "stride")
def _(rank: int) -> None:
    x = T.DTensor.from_local(ROWS[rank], line(), [T.Shard(0)], shape=WHOLE.shape, stride=WHOLE.stride())
    assert tuple(x.shape) == (10, 4)
    assert x.stride() == (4, 1)
    exactly(x.full_tensor(), WHOLE)


@behaviour("DTensor.from_local", "grad_placements")
def _(rank: int) -> None:
    local = torch.ones(4, requires_grad=True)
    x = T.DTensor.from_local(local, line(), [T.Replicate()], grad_placements=[T.Partial()])
    (x * 2).sum().backward()
    assert local.grad is not None
    total = T.DTensor.from_local(local.grad, line(), [T.Partial()]).full_tensor()
    exactly(total, torch.full((4,), 2.0))


@behaviour("DTensor.from_local", "note 1")
def _(rank: int) -> None:
    local = WHOLE + rank
    assert T.DTensor.from_local(local, line(), [T.Replicate()]).to_local().equal(local)  # nothing was compared or sent


@behaviour("DTensor.from_local", "note 2")
def _(rank: int) -> None:
    local = WHOLE.clone()
    assert not T.DTensor.from_local(local, line(), [T.Replicate()]).requires_grad
    local.requires_grad_()
    T.DTensor.from_local(local, line(), [T.Replicate()]).to_local().sum().backward()
    assert local.grad is not None
    exactly(local.grad, torch.ones(10, 4))


@behaviour("DTensor.from_local", "note 3")
def _(rank: int) -> None:
    for placement, expected in ((T.Shard(0), 3.0), (T.Replicate(), 3.0), (T.Partial(), 3.0)):
        local = torch.ones(2, requires_grad=True)
        (T.DTensor.from_local(local, line(), [placement]).full_tensor() * 3).sum().backward()
        assert local.grad is not None
        exactly(local.grad, torch.full((2,), expected))  # that of a term is the whole's


@behaviour("DTensor.to_local", "summary", "returns")
def _(rank: int) -> None:
    exactly(sharded().to_local(), ROWS[rank])
    exactly(T.distribute_tensor(WHOLE, line()).to_local(), WHOLE)


@behaviour("DTensor.to_local", "grad_placements")
def _(rank: int) -> None:
    leaf = T.distribute_tensor(WHOLE.clone().requires_grad_(), line(), [T.Replicate()])
    # Every rank uses its own rows of what it has whole.
    (leaf.to_local(grad_placements=[T.Partial()]) * (rank + 1)).sum().backward()
    exactly(cast(Any, leaf.grad).full_tensor(), torch.full((10, 4), 10.0))


@behaviour("DTensor.to_local", "note 1")
def _(rank: int) -> None:
    assert not sharded().to_local().requires_grad
    leaf = sharded(requires_grad=True)
    (leaf.to_local() * 2).sum().backward()
    exactly(cast(Any, leaf.grad).full_tensor(), torch.full((10, 4), 2.0))


@behaviour("DTensor.full_tensor", "summary", "returns")
def _(rank: int) -> None:
    exactly(sharded().full_tensor(), WHOLE)
    exactly(sharded().redistribute(placements=[T.Replicate()]).to_local(), WHOLE)


@behaviour("DTensor.full_tensor", "grad_placements", "note 1")
def _(rank: int) -> None:
    for placements, expected in ((None, 1.0), ([T.Partial()], 4.0)):
        leaf = sharded(requires_grad=True)
        leaf.full_tensor(grad_placements=placements).sum().backward()
        exactly(cast(Any, leaf.grad).full_tensor(), torch.full((10, 4), expected))


@behaviour("DTensor.redistribute", "summary", "placements", "returns")
def _(rank: int) -> None:
    x = sharded()
    with pytest.raises(
        T.MeshError, match="redistribute needs placements, one per mesh axis"
    ):  # torch's needs them, too
        x.redistribute()
    for placement in (T.Replicate(), T.Shard(1), T.Shard(0)):
        moved = x.redistribute(placements=[placement])
        assert type(moved) is T.DTensor
        assert moved.placements == (placement,)
        exactly(moved.full_tensor(), WHOLE)
    exactly(T.distribute_tensor(WHOLE, line()).redistribute(placements=[T.Shard(0)]).to_local(), ROWS[rank])
    terms = T.DTensor.from_local(WHOLE, line(), [T.Partial()])
    exactly(terms.redistribute(placements=[T.Replicate()]).to_local(), WHOLE * 4)
    exactly(terms.redistribute(placements=[T.Shard(0)]).to_local(), ROWS[rank] * 4)
    grid = T.distribute_tensor(WHOLE, T.Mesh((2, 2)), [T.Shard(0), T.Shard(0)])
    exactly(grid.redistribute(placements=[T.Shard(1), T.Replicate()]).full_tensor(), WHOLE)


@behaviour("DTensor.redistribute", "device_mesh", "note 2")
def _(rank: int) -> None:
    grid = T.Mesh((2, 2))
    moved = sharded().redistribute(grid, [T.Shard(0), T.Shard(1)])  # torch refuses another mesh
    assert moved.device_mesh is grid
    exactly(moved.full_tensor(), WHOLE)


@behaviour("DTensor.redistribute", "async_op")
def _(rank: int) -> None:
    exactly(sharded().redistribute(placements=[T.Replicate()], async_op=True).to_local(), WHOLE)


@behaviour("DTensor.redistribute", "forward_dtype")
def _(rank: int) -> None:
    moved = sharded().redistribute(placements=[T.Replicate()], forward_dtype=torch.bfloat16)
    assert moved.dtype is torch.bfloat16
    exactly(moved.to_local(), WHOLE.bfloat16())


@behaviour("DTensor.redistribute", "backward_dtype")
def _(rank: int) -> None:
    leaf = sharded(requires_grad=True)
    moved = leaf.redistribute(placements=[T.Replicate()], backward_dtype=torch.bfloat16)
    moved.to_local().mul(1.01).sum().backward()
    found = cast(Any, leaf.grad).full_tensor()
    assert found.dtype is torch.float32
    exactly(found, torch.full((10, 4), 1.01).bfloat16().float())


@behaviour("DTensor.redistribute", "note 1")
def _(rank: int) -> None:
    leaf = sharded(requires_grad=True)
    (grad,) = torch.autograd.grad((leaf.redistribute(placements=[T.Replicate()]) ** 3).sum(), leaf, create_graph=True)
    (second,) = torch.autograd.grad(cast(Any, grad).sum(), leaf)
    exactly(cast(Any, second).full_tensor(), 6 * WHOLE)


# Placements -------------------------------------------------------------------------------------------------------


@behaviour("Placement", "summary")
def _(rank: int) -> None:
    assert all(isinstance(each, T.Placement) for each in (T.Shard(0), T.Replicate(), T.Partial()))


@behaviour("Placement.is_shard", "summary")
def _(rank: int) -> None:
    assert T.Shard(1).is_shard()
    assert T.Shard(1).is_shard(dim=1)
    assert not T.Shard(1).is_shard(dim=0)
    assert not T.Replicate().is_shard()


@behaviour("Placement.is_replicate", "summary")
def _(rank: int) -> None:
    assert T.Replicate().is_replicate()
    assert not T.Shard(0).is_replicate()


@behaviour("Placement.is_partial", "summary")
def _(rank: int) -> None:
    assert T.Partial("max").is_partial()
    assert T.Partial("max").is_partial("max")
    assert not T.Partial("max").is_partial("sum")
    assert not T.Shard(0).is_partial()


@behaviour("Replicate", "summary")
def _(rank: int) -> None:
    exactly(T.distribute_tensor(WHOLE, line(), [T.Replicate()]).to_local(), WHOLE)


@behaviour("Partial", "summary")
def _(rank: int) -> None:
    for op, expected in (("sum", 6.0), ("avg", 1.5), ("max", 3.0), ("min", 0.0), ("product", 0.0)):
        terms = T.DTensor.from_local(torch.full((3,), float(rank)), line(), [T.Partial(cast(Any, op))])
        exactly(terms.full_tensor(), torch.full((3,), expected))


@behaviour("Shard", "summary", "dim", "note 1")
def _(rank: int) -> None:
    for length in (1, 3, 4, 10):  # the last pieces are short, or empty
        whole = torch.arange(2.0 * length).view(2, length)
        pieces = [*whole.chunk(NUM_RANKS, 1), *[whole[:, :0]] * NUM_RANKS]
        exactly(T.distribute_tensor(whole, line(), [T.Shard(1)]).to_local(), pieces[rank])
    assert T.Shard(1).dim == 1


@behaviour("Shard.local_shard_size_and_offset", "summary")
def _(rank: int) -> None:
    shape, offset = T.compute_local_shape_and_global_offset((10, 4), line(), [T.Shard(0)])
    assert (shape, offset) == (tuple(ROWS[rank].shape), (3 * rank, 0))


# distribute_tensor, distribute_module -----------------------------------------------------------------------------


@behaviour("distribute_tensor", "summary", "tensor", "device_mesh", "returns")
def _(rank: int) -> None:
    found = T.distribute_tensor(WHOLE + rank, line(), [T.Shard(0)])
    assert type(found) is T.DTensor
    assert found.device_mesh is line()
    exactly(found.to_local(), ROWS[rank])  # of the first rank's values, in pieces of torch.chunk


@behaviour("distribute_tensor", "placements")
def _(rank: int) -> None:
    assert T.distribute_tensor(WHOLE, line()).placements == (T.Replicate(),)
    grid = T.distribute_tensor(WHOLE, T.Mesh((2, 2)), [T.Shard(0), T.Shard(1)])
    exactly(grid.to_local(), WHOLE.chunk(2)[rank // 2].chunk(2, 1)[rank % 2])
    with pytest.raises(T.LayoutError):
        T.distribute_tensor(WHOLE, line(), [T.Shard(0)] * 2)


@behaviour("distribute_tensor", "src_data_rank")
def _(rank: int) -> None:
    exactly(T.distribute_tensor(WHOLE + rank, line(), [T.Replicate()], src_data_rank=2).to_local(), WHOLE + 2)
    exactly(T.distribute_tensor(WHOLE + rank, line(), [T.Replicate()], src_data_rank=None).to_local(), WHOLE + rank)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(self.up(x).relu()) * self.scale
        return found


@behaviour("distribute_module", "summary", "module", "device_mesh", "partition_fn", "returns")
def _(rank: int) -> None:
    def cut(name: str, module: nn.Module, mesh: Any) -> None:
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(T.distribute_tensor(module.weight, mesh, [T.Shard(0)]))

    for partition, placement in ((None, T.Replicate()), (cut, T.Shard(0))):
        found: Any = T.distribute_module(Layers(), line(), partition)
        assert isinstance(found, Layers)
        assert all(isinstance(each, T.DTensor) for each in (*found.parameters(), *found.buffers()))
        layer: Any = found.up
        assert layer.weight.placements == (placement,)
        assert layer.bias.placements == (T.Replicate(),)


@behaviour("distribute_module", "input_fn", "output_fn")
def _(rank: int) -> None:
    def inputs(module: nn.Module, given: Any, mesh: Any) -> Any:
        return (T.DTensor.from_local(given[0], mesh, [T.Shard(0)]),)

    def outputs(module: nn.Module, found: Any, mesh: Any) -> Any:
        return found.to_local()

    model = T.distribute_module(Layers(), line(), None, inputs, outputs)
    own = WHOLE[2 * rank : 2 * rank + 2]
    assert_close(model(own), Layers()(own))


@pytest.mark.parametrize("found", behaviours_of(__name__), ids=str)
def test_behaviour(found: Behaviour) -> None:
    run_ranks(NUM_RANKS, found.run)
