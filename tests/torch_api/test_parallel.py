"""What torch's docstrings say of parallelize_module, the styles, and losses of sharded classes."""

from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import tritondt as T
from tests.torch_api.behaviours import NUM_RANKS, Behaviour, behaviour, behaviours_of
from tritondt.comm.transports.threads import run_ranks
from tritondt.errors import ParallelizeError
from tritondt.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

X = torch.arange(60.0).view(2, 5, 6) / 30


def line() -> T.Mesh:
    return T.Mesh((NUM_RANKS,), ("tp",))


def linear() -> nn.Linear:
    torch.manual_seed(2)
    return nn.Linear(6, 10)  # 10 features over 4 ranks: 3, 3, 3 and 1


def embedding() -> nn.Embedding:
    torch.manual_seed(3)
    return nn.Embedding(10, 6)


def cut(x: torch.Tensor, dim: int, rank: int) -> torch.Tensor:
    pieces = [*x.chunk(NUM_RANKS, dim), *[x.narrow(dim, 0, 0)] * NUM_RANKS]
    return pieces[rank]


def whole(x: Any) -> torch.Tensor:
    assert isinstance(x, T.DTensor)
    return x.full_tensor()


# ColwiseParallel, RowwiseParallel ---------------------------------------------------------------------------------


@behaviour("ColwiseParallel", "summary", "returns", "note 1")
def _(rank: int) -> None:
    style = ColwiseParallel()
    assert isinstance(style, ParallelStyle)
    found: Any = parallelize_module(linear(), line(), style)
    assert found.weight.placements == found.bias.placements == (T.Shard(0),)
    y = found(X)
    assert type(y) is torch.Tensor
    assert_close(y, cut(linear()(X), -1, rank))  # sharded on its last dim
    table: Any = parallelize_module(embedding(), line(), ColwiseParallel())
    indices = torch.tensor([[1, 9], [0, 3]])
    assert_close(table(indices), cut(embedding()(indices), -1, rank), rtol=0, atol=0)
    both = nn.Sequential(linear(), nn.Linear(10, 6))
    expected = both(X)
    parallelize_module(both, line(), {"0": ColwiseParallel(), "1": RowwiseParallel()})
    assert_close(both(X), expected)


@behaviour("ColwiseParallel", "input_layouts")
def _(rank: int) -> None:
    found = parallelize_module(linear(), line(), ColwiseParallel(input_layouts=T.Shard(0)))
    own = X.flatten(0, 1)[2 * rank : 2 * rank + 2]
    assert_close(found(own), cut(linear()(X.flatten(0, 1)[:8]), -1, rank))


@behaviour("ColwiseParallel", "output_layouts")
def _(rank: int) -> None:
    found = parallelize_module(linear(), line(), ColwiseParallel(output_layouts=T.Replicate()))
    assert_close(found(X), linear()(X))


@behaviour("ColwiseParallel", "use_local_output")
def _(rank: int) -> None:
    y = parallelize_module(linear(), line(), ColwiseParallel(use_local_output=False))(X)
    assert_close(whole(y), linear()(X))
    assert y.placements == (T.Shard(2),)


@behaviour("RowwiseParallel", "summary", "input_layouts", "returns")
def _(rank: int) -> None:
    style = RowwiseParallel()
    assert isinstance(style, ParallelStyle)
    found: Any = parallelize_module(linear(), line(), style)
    assert found.weight.placements == (T.Shard(1),)
    assert found.bias.placements == (T.Replicate(),)
    assert_close(found(cut(X, -1, rank)), linear()(X))  # an input sharded on its last dim, an output on all ranks
    given = parallelize_module(linear(), line(), RowwiseParallel(input_layouts=T.Replicate()))
    assert_close(given(X), linear()(X))
    indices = torch.tensor([[1, 9], [0, 3]])
    table: Any = parallelize_module(embedding(), line(), RowwiseParallel(input_layouts=T.Replicate()))
    assert table.weight.placements == (T.Shard(0),)
    assert_close(table(indices), embedding()(indices), rtol=0, atol=0)


@behaviour("RowwiseParallel", "output_layouts")
def _(rank: int) -> None:
    found = parallelize_module(linear(), line(), RowwiseParallel(output_layouts=T.Shard(1)))
    assert_close(found(cut(X, -1, rank)), cut(linear()(X), 1, rank))


@behaviour("RowwiseParallel", "use_local_output")
def _(rank: int) -> None:
    found = parallelize_module(linear(), line(), RowwiseParallel(use_local_output=False))
    assert_close(whole(found(cut(X, -1, rank))), linear()(X))


# SequenceParallel -------------------------------------------------------------------------------------------------


@behaviour("SequenceParallel", "summary", "sequence_dim", "returns")
def _(rank: int) -> None:
    for kind in (nn.LayerNorm, nn.RMSNorm):
        expected = kind(6)(X)
        found: Any = parallelize_module(kind(6), line(), SequenceParallel())
        assert found.weight.placements == (T.Replicate(),)
        # A plain input is one of equal parts; a distributed one is brought to the sequence.
        own = X[:, :4, :].chunk(4, 1)[rank]
        assert_close(whole(found(own)), expected[:, :4])
        y = found(T.distribute_tensor(X, line(), [T.Replicate()]))
        assert y.placements == (T.Shard(1),)
        assert_close(whole(y), expected)
    first = parallelize_module(nn.LayerNorm(6), line(), SequenceParallel(sequence_dim=0))
    assert first(T.distribute_tensor(X, line())).placements == (T.Shard(0),)
    assert isinstance(SequenceParallel(), ParallelStyle)


@behaviour("SequenceParallel", "use_local_output")
def _(rank: int) -> None:
    found = parallelize_module(nn.LayerNorm(6), line(), SequenceParallel(use_local_output=True))
    assert_close(found(T.distribute_tensor(X, line())), cut(nn.LayerNorm(6)(X), 1, rank))


@behaviour("SequenceParallel", "note 1")
def _(rank: int) -> None:
    norm = nn.LayerNorm(6)
    nn.init.constant_(norm.weight, 1.0 + rank)
    found: Any = parallelize_module(norm, line(), SequenceParallel())
    # Better than described: the values of rank 0 are sent, whatever they are.
    assert_close(whole(found.weight), torch.ones(6), rtol=0, atol=0)


# PrepareModule* ---------------------------------------------------------------------------------------------------


class Seen(nn.Module):
    """Keeps what it is given."""

    def forward(self, x: Any, other: Any = None, *, mask: Any = None) -> Any:
        self.seen = x, other, mask
        return x


@behaviour("PrepareModuleInput", "summary", "input_layouts", "desired_input_layouts", "use_local_output", "returns")
def _(rank: int) -> None:
    layouts: dict[str, Any] = {
        "input_layouts": (T.Shard(1), None),
        "desired_input_layouts": (T.Replicate(), None),
    }
    for is_local in (False, True):
        style = PrepareModuleInput(**layouts, use_local_output=is_local)
        assert isinstance(style, ParallelStyle)
        module: Any = parallelize_module(Seen(), line(), style)
        module(X[:, :4].chunk(4, 1)[rank], "as it is")
        x, other, _ = module.seen
        assert other == "as it is"
        assert isinstance(x, T.DTensor) is not is_local
        assert_close(x if is_local else x.to_local(), X[:, :4], rtol=0, atol=0)
    with pytest.raises(ParallelizeError, match="allowed are as many"):
        PrepareModuleInput(input_layouts=(T.Shard(0),), desired_input_layouts=(T.Shard(0), None))


@behaviour("PrepareModuleInput", "input_kwarg_layouts", "desired_input_kwarg_layouts")
def _(rank: int) -> None:
    style = PrepareModuleInput(
        input_layouts=T.Replicate(),
        desired_input_layouts=T.Replicate(),
        input_kwarg_layouts={"mask": T.Replicate()},
        desired_input_kwarg_layouts={"mask": T.Shard(0)},
    )
    module: Any = parallelize_module(Seen(), line(), style)
    module(X, mask=torch.arange(8))
    mask = module.seen[2]
    assert mask.placements == (T.Shard(0),)
    assert mask.to_local().tolist() == [2 * rank, 2 * rank + 1]


@behaviour("PrepareModuleOutput", "summary", "output_layouts", "desired_output_layouts", "use_local_output", "returns")
def _(rank: int) -> None:
    for is_local in (True, False):
        style = PrepareModuleOutput(
            output_layouts=T.Replicate(), desired_output_layouts=T.Shard(1), use_local_output=is_local
        )
        assert isinstance(style, ParallelStyle)
        y = parallelize_module(Seen(), line(), style)(X)
        assert isinstance(y, T.DTensor) is not is_local
        assert_close(y if is_local else y.to_local(), cut(X, 1, rank), rtol=0, atol=0)


@behaviour(
    "PrepareModuleInputOutput",
    *("summary", "input_layouts", "desired_input_layouts", "input_kwarg_layouts", "desired_input_kwarg_layouts"),
    *("use_local_input", "output_layouts", "desired_output_layouts", "use_local_output", "returns"),
)
def _(rank: int) -> None:
    for is_local in (False, True):
        style = PrepareModuleInputOutput(
            input_layouts=T.Replicate(),
            desired_input_layouts=T.Shard(0),
            input_kwarg_layouts={"mask": T.Replicate()},
            desired_input_kwarg_layouts={"mask": T.Shard(0)},
            use_local_input=is_local,
            output_layouts=T.Shard(0),
            desired_output_layouts=T.Replicate(),
            use_local_output=is_local,
        )
        assert isinstance(style, ParallelStyle)
        module: Any = parallelize_module(Seen(), line(), style)
        y, rows = module(torch.arange(8.0), mask=torch.arange(4)), [2.0 * rank, 2.0 * rank + 1]
        x, _, mask = module.seen
        assert isinstance(x, T.DTensor) is isinstance(y, T.DTensor) is not is_local
        assert (x if is_local else x.to_local()).tolist() == rows
        assert (mask.to_local() if isinstance(mask, T.DTensor) else mask).tolist() == [rank]
        assert (y if is_local else y.to_local()).tolist() == [float(number) for number in range(8)]


# parallelize_module, ParallelStyle --------------------------------------------------------------------------------


@behaviour("ParallelStyle", "summary")
def _(rank: int) -> None:
    class Named(ParallelStyle):
        def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
            cast(Any, module).laid_over = device_mesh
            return module

    model: Any = parallelize_module(nn.Sequential(linear(), nn.ReLU()), line(), {"1": Named()})
    assert model[1].laid_over is line()
    assert not hasattr(model[0], "laid_over")


@behaviour("parallelize_module", "summary", "module", "parallelize_plan", "returns", "note 1")
def _(rank: int) -> None:
    model = nn.Sequential(linear(), nn.GELU(), nn.Linear(10, 6))
    expected = model(X)
    found: Any = parallelize_module(model, line(), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    assert found is model
    assert_close(found(X), expected)
    alone: Any = parallelize_module(linear(), line(), ColwiseParallel())
    assert alone.weight.placements == (T.Shard(0),)
    with pytest.warns(UserWarning, match="no parallelize_plan and changes nothing"):
        assert type(parallelize_module(linear(), line()).weight) is nn.Parameter


@behaviour("parallelize_module", "device_mesh")
def _(rank: int) -> None:
    with pytest.raises(T.MeshError, match=r"takes a mesh of one axis, got .*; give it one slice: mesh\['a'\], mesh"):
        parallelize_module(linear(), T.Mesh((2, 2), ("a", "b")), ColwiseParallel())
    first = rank // 2 * 2
    found: Any = parallelize_module(linear(), T.Mesh((2,), ranks=(first, first + 1)), ColwiseParallel())
    assert_close(found(X), linear()(X).chunk(2, -1)[rank % 2])


@behaviour("parallelize_module", "src_data_rank")
def _(rank: int) -> None:
    for source, expected in ((0, 0.0), (2, 2.0), (None, float(rank))):
        layer = linear()
        nn.init.constant_(layer.weight, float(rank))
        found: Any = parallelize_module(layer, line(), ColwiseParallel(), src_data_rank=source)
        assert found.weight.to_local().unique().tolist() == [expected]


# loss_parallel ----------------------------------------------------------------------------------------------------

LOGITS, TARGETS = torch.randn(6, 10, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 9, 3, 3, 7, 1])


@behaviour("loss_parallel", "summary", "input", "target", "weight", "returns")
def _(rank: int) -> None:
    weight = torch.arange(1.0, 11.0)
    for options in ({}, {"weight": weight}, {"reduction": "sum"}, {"reduction": "none"}):
        expected = LOGITS.clone().requires_grad_()
        F.cross_entropy(expected, TARGETS, **cast(Any, options)).sum().backward()
        for targets in (TARGETS, T.distribute_tensor(TARGETS, line(), [T.Replicate()])):
            x = T.distribute_tensor(LOGITS.clone().requires_grad_(), line(), [T.Shard(1)])
            with loss_parallel():
                loss = F.cross_entropy(x, targets, **cast(Any, options))
                loss.sum().backward()
            assert_close(whole(loss), F.cross_entropy(LOGITS, TARGETS, **cast(Any, options)))
            assert_close(whole(cast(Any, x).grad), expected.grad)
    grid = T.Mesh((2, 2))
    x = T.distribute_tensor(LOGITS, grid, [T.Shard(0), T.Shard(1)])
    with loss_parallel():
        found = F.cross_entropy(x, T.distribute_tensor(TARGETS, grid, [T.Shard(0), T.Replicate()]))
    assert_close(whole(found), F.cross_entropy(LOGITS, TARGETS))


@behaviour("loss_parallel", "label_smoothing")
def _(rank: int) -> None:
    x = T.distribute_tensor(LOGITS, line(), [T.Replicate()])
    targets = T.distribute_tensor(TARGETS, line())
    with loss_parallel():  # not supported by torch's
        found = F.cross_entropy(x, targets, label_smoothing=0.1)
    assert_close(whole(found), F.cross_entropy(LOGITS, TARGETS, label_smoothing=0.1))


@pytest.mark.parametrize("found", behaviours_of(__name__), ids=str)
def test_behaviour(found: Behaviour) -> None:
    run_ranks(NUM_RANKS, found.run)
