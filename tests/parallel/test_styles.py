"""Every style on uneven shards against the same module on one process: outputs, gradients, and what is refused."""

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn

import tritondt as T
from tests.ops.sharded import distribute
from tritondt.comm.transports.threads import run_ranks
from tritondt.debug import CommDebugMode
from tritondt.errors import ParallelizeError
from tritondt.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

RANKS = 3
R, S0, S1, LAST, P = T.Replicate(), T.Shard(0), T.Shard(1), T.Shard(-1), T.Partial()
# 7 positions over 3 ranks are 3, 3 and 1; 10 features are 4, 4 and 2.
X = torch.randn(2, 7, 10, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
TOKENS = torch.tensor([[0, 4, 6, 3, 6, 1, 5], [2, 2, 0, 6, 5, 4, 1]])


def linear(out_features: int = 8, bias: bool = True) -> nn.Module:
    torch.manual_seed(2)
    return nn.Linear(10, out_features, bias=bias, dtype=torch.float64)


def embedding(**options: Any) -> nn.Module:
    torch.manual_seed(3)
    return nn.Embedding(7, 10, dtype=torch.float64, **options)


def compare_on_ranks(
    make: Callable[[], nn.Module], style: ParallelStyle, x: torch.Tensor, given: T.Placement | None
) -> None:
    """The module under `style`, fed with a tensor laid out as `given` (None: a plain whole one)."""
    single, plain = make(), x.clone().requires_grad_(x.is_floating_point())
    expected = single(plain)
    seed = torch.randn(expected.shape, dtype=expected.dtype)
    expected.backward(seed)

    def body(rank: int) -> None:
        mesh = T.Mesh((RANKS,))
        module = parallelize_module(make(), mesh, style)
        fed: Any = x.clone() if given is None else distribute(x, mesh, repr(given))
        if x.is_floating_point():
            fed.requires_grad_()
        found = module(fed)
        if isinstance(found, T.DTensor):
            whole, grad = found.full_tensor(), cast(torch.Tensor, distribute(seed, mesh, "R"))
        else:
            whole, grad = found, seed
        torch.testing.assert_close(whole, expected)
        found.backward(grad)
        if x.is_floating_point():
            grad_of_x = fed.grad.full_tensor() if isinstance(fed.grad, T.DTensor) else fed.grad
            torch.testing.assert_close(grad_of_x, plain.grad)
        names = [name for name, _ in module.named_parameters()]
        for name, whole_parameter in zip(names, single.parameters(), strict=True):
            parameter: Any = module.get_parameter(name)
            assert parameter.grad.placements == parameter.placements, name
            torch.testing.assert_close(parameter.full_tensor(), whole_parameter, rtol=0, atol=0)
            torch.testing.assert_close(parameter.grad.full_tensor(), whole_parameter.grad)

    run_ranks(RANKS, body)


DISTRIBUTED_OUTPUTS = (LAST, R, S1, S0, P, T.Shard(2, unit=2))


@pytest.mark.parametrize("output", DISTRIBUTED_OUTPUTS, ids=repr)
@pytest.mark.parametrize("given", [R, S1, T.Shard(2), P, None], ids=repr)
@pytest.mark.parametrize("kind", [ColwiseParallel, RowwiseParallel])
def test_linear_in_and_out_of_every_layout(kind, given, output):
    input_layouts = R if given is None else None
    style = kind(input_layouts=input_layouts, output_layouts=output, use_local_output=False)
    compare_on_ranks(linear, style, X, given)


@pytest.mark.parametrize("kind", [ColwiseParallel, RowwiseParallel])
def test_a_plain_replicated_output_and_no_bias(kind):
    style = kind(input_layouts=R, output_layouts=R)
    compare_on_ranks(lambda: linear(bias=False), style, X, None)
    compare_on_ranks(linear, style, X[0, 0], None)


@pytest.mark.parametrize("output", [LAST, R, S1, P], ids=repr)
@pytest.mark.parametrize("given", [R, S1, None], ids=repr)
@pytest.mark.parametrize("kind", [ColwiseParallel, RowwiseParallel])
def test_embedding_in_and_out_of_every_layout(kind, given, output):
    compare_on_ranks(embedding, kind(output_layouts=output, use_local_output=False), TOKENS, given)


@pytest.mark.parametrize("padding_idx", [0, 6])
@pytest.mark.parametrize("kind", [ColwiseParallel, RowwiseParallel, SequenceParallel])
def test_the_padding_row_of_an_embedding_has_no_gradient(kind, padding_idx):
    style = SequenceParallel() if kind is SequenceParallel else kind(output_layouts=R, use_local_output=False)
    compare_on_ranks(lambda: embedding(padding_idx=padding_idx), style, TOKENS, S1)


def test_a_rank_without_rows_of_the_vocabulary():
    def make() -> nn.Module:
        torch.manual_seed(3)
        return nn.Embedding(2, 3, dtype=torch.float64)

    compare_on_ranks(make, RowwiseParallel(use_local_output=False), TOKENS % 2, None)


@pytest.mark.parametrize("index", [7, -1])
def test_an_index_outside_the_vocabulary_is_refused_on_every_rank(index):
    def body(rank: int) -> None:
        module = parallelize_module(embedding(), T.Mesh((RANKS,)), RowwiseParallel())
        with pytest.raises(IndexError, match="out of range"):
            module(torch.tensor([0, index]))
        assert module(torch.tensor([0, 6])).shape == (2, 10)

    run_ranks(RANKS, body)


@pytest.mark.parametrize("dim", [1, -2])
@pytest.mark.parametrize("given", [S1, R, P, T.Shard(2)], ids=repr)
def test_layers_run_on_their_part_of_the_sequence(given, dim):
    def norm() -> nn.Module:
        return nn.LayerNorm(10, dtype=torch.float64)

    for make in (norm, lambda: nn.RMSNorm(10, dtype=torch.float64), linear):
        compare_on_ranks(make, SequenceParallel(sequence_dim=dim), X, given)
    compare_on_ranks(embedding, SequenceParallel(), TOKENS, S1 if given is S1 else R)


@pytest.mark.parametrize("output", [R, S0, T.Shard(2)], ids=repr)
@pytest.mark.parametrize("local", [False, True])
def test_positions_go_out_in_every_layout(output, local):
    if local and output != R:
        return
    for make in (lambda: nn.LayerNorm(10, dtype=torch.float64), linear, lambda: nn.Dropout(0.0)):
        style = SequenceParallel(output_layouts=output, use_local_output=local)
        compare_on_ranks(make, style, X, S1)


def test_layers_that_share_gathered_positions_gather_and_scatter_once():
    def body(rank: int) -> None:
        mesh = T.Mesh((RANKS,))
        model = nn.ModuleDict({"norm": nn.LayerNorm(10), "left": nn.Linear(10, 8), "right": nn.Linear(10, 8)})
        column = ColwiseParallel(use_local_output=False)
        plan = {"norm": SequenceParallel(output_layouts=R), "left": column, "right": column}
        parallelize_module(model, mesh, plan)
        x = T.distribute_tensor(torch.randn(2, RANKS, 10), mesh, [S1]).requires_grad_()
        with CommDebugMode() as comm:
            shared = model["norm"](x)
            left, right = model["left"](shared), model["right"](shared)
            (left + right).backward(torch.ones_like(left))
        kinds = {str(kind): count.steps for kind, count in comm.by_kind().items()}
        # Terms of the norm's own gradients are added beside them.
        assert kinds["(S1) -> (R)"] == kinds["(P(sum)) -> (S1)"] == 1, kinds

    run_ranks(RANKS, body)


class Scale(nn.Module):
    """A layer as people write it, with a name of its own for everything."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(1, 2, 10, dtype=torch.float64))
        self.offset = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.gain


def test_a_layer_of_ones_own_and_an_input_by_name():
    compare_on_ranks(Scale, SequenceParallel(), X, S1)

    def body(rank: int) -> None:
        mesh = T.Mesh((RANKS,))
        module = parallelize_module(Scale(), mesh, SequenceParallel(use_local_output=True))
        found = module(hidden=distribute(X, mesh, "S1"))
        torch.testing.assert_close(found, distribute(Scale()(X), mesh, "S1").to_local())

    run_ranks(RANKS, body)


def test_a_plain_part_is_one_of_equal_parts():
    def body(rank: int) -> None:
        module = parallelize_module(linear(), T.Mesh((2,)), ColwiseParallel(input_layouts=S1, output_layouts=S1))
        part = X[:, :6].chunk(2, 1)[rank]
        torch.testing.assert_close(module(part), linear()(X)[:, :6].chunk(2, 1)[rank])

    run_ranks(2, body)


class Recorded(nn.Module):
    """Keeps what it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((args, kwargs))
        return args if len(args) > 1 else args[0]


def test_inputs_are_prepared_by_place_and_by_name():
    def body(rank: int) -> None:
        mesh = T.Mesh((RANKS,))
        style = PrepareModuleInput(
            input_layouts=(R, None, S1),
            desired_input_layouts=(S1, None, R),
            input_kwarg_layouts={"mask": R},
            desired_input_kwarg_layouts={"mask": T.Shard(2)},
        )
        module = cast(Recorded, parallelize_module(Recorded(), mesh, style))
        module(X, 5, distribute(X, mesh, "S1"), mask=X, other=3)
        module(X, 5, distribute(X, mesh, "P"))
        ((first, number, third), kwargs), ((_, _, summed), no_kwargs) = module.calls
        assert (first.placements, number, third.placements) == ((S1,), 5, (R,))
        assert (kwargs["mask"].placements, kwargs["other"], no_kwargs) == ((T.Shard(2),), 3, {})
        assert summed.placements == (R,)
        for tensor in (first, third, kwargs["mask"]):
            torch.testing.assert_close(tensor.full_tensor(), X, rtol=0, atol=0)
        torch.testing.assert_close(summed.to_local(), X)

    run_ranks(RANKS, body)


def test_outputs_are_prepared():
    def body(rank: int) -> None:
        mesh = T.Mesh((RANKS,))
        style = PrepareModuleInputOutput(
            input_layouts=(R, R),
            desired_input_layouts=(S1, S1),
            use_local_input=True,
            output_layouts=(T.Shard(1, sizes=(3, 3, 1)), None),
            desired_output_layouts=(R, None),
            use_local_output=False,
        )
        module = cast(Recorded, parallelize_module(Recorded(), mesh, style))
        found, left = module(X, X)
        assert type(module.calls[0][0][0]) is torch.Tensor
        assert found.placements == (R,)
        assert type(left) is torch.Tensor
        torch.testing.assert_close(found.to_local(), X, rtol=0, atol=0)
        lone = parallelize_module(Recorded(), mesh, PrepareModuleOutput(output_layouts=R, desired_output_layouts=S1))
        torch.testing.assert_close(lone(X), distribute(X, mesh, "S1").to_local(), rtol=0, atol=0)

    run_ranks(RANKS, body)


def test_one_gradient_of_an_input_that_three_layers_share():
    """Their terms meet as terms: one exchange takes them back to the layout that the input had."""
    model = nn.ModuleList([linear(), linear(), linear()])
    x = X.clone().requires_grad_()
    cast(torch.Tensor, sum(layer(x).square().sum() for layer in model)).backward()

    def body(rank: int) -> None:
        mesh = T.Mesh((RANKS,))
        layers = parallelize_module(copy.deepcopy(model), mesh, {"*": ColwiseParallel()})
        mine: Any = distribute(X, mesh, "S1").requires_grad_()
        whole = mine.redistribute(placements=[R])
        total = cast(torch.Tensor, sum(layer(whole).square().sum() for layer in layers))  # type: ignore[attr-defined]
        with CommDebugMode() as comm:
            total.backward()
        assert comm.get_comm_counts() == {"(P(sum)) -> (S1)": 1}
        torch.testing.assert_close(mine.grad.full_tensor(), x.grad)

    run_ranks(RANKS, body)


@pytest.mark.parametrize(
    ("make", "style", "message"),
    [
        (
            lambda: nn.LayerNorm(10),
            ColwiseParallel(),
            r"the module \(LayerNorm\): ColwiseParallel knows nn.Linear and nn.Embedding, not LayerNorm; name the",
        ),
        (lambda: nn.Sequential(linear()), RowwiseParallel(), r"RowwiseParallel knows .* not Sequential"),
        (
            lambda: nn.BatchNorm1d(10),
            SequenceParallel(),
            "runs layers that treat every position by itself, not BatchNorm1d; allowed are LayerNorm, RMSNorm, Linear",
        ),
        (lambda: nn.Sequential(linear()), SequenceParallel(), "and layers of your own without layers inside"),
        (linear, ColwiseParallel(unit=3), r"length 8 by S0\(unit=3\); the unit must divide the length"),
        (
            lambda: embedding(max_norm=1.0),
            RowwiseParallel(),
            "cannot cut an nn.Embedding with max_norm=1.0; allowed is one without max_norm, scale_grad_by_freq and",
        ),
        (lambda: embedding(sparse=True), ColwiseParallel(), "with sparse=True"),
    ],
)
def test_modules_that_a_style_cannot_run(make, style, message):
    def body(rank: int) -> None:
        module = make()
        with pytest.raises(ParallelizeError, match=message):
            parallelize_module(module, T.Mesh((RANKS,)), style)
        if isinstance(module, nn.Linear):  # what failed leaves no trace
            parallelize_module(module, T.Mesh((RANKS,)), ColwiseParallel())

    run_ranks(RANKS, body)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: ColwiseParallel(input_layouts="R"),  # type: ignore[arg-type]
            "input_layouts got 'R', builtins's str; allowed are tritondt's Shard, Replicate and Partial",
        ),
        (
            lambda: PrepareModuleInput(input_layouts=(R, R), desired_input_layouts=(R,)),
            "input_layouts lists 2 layouts and desired_input_layouts 1; allowed are as many",
        ),
        (
            lambda: PrepareModuleInput(input_kwarg_layouts={"a": R}, desired_input_kwarg_layouts={"b": R}),
            r"input_kwarg_layouts names \['a'\] and desired_input_kwarg_layouts \['b'\]; allowed are the same names",
        ),
        (
            lambda: PrepareModuleOutput(output_layouts=R, desired_output_layouts=(R, R)),
            "output_layouts lists 1 layouts and desired_output_layouts 2",
        ),
    ],
)
def test_styles_that_cannot_be(make, message):
    with pytest.raises(ParallelizeError, match=message):
        make()


def test_torchs_placements_become_ours_where_they_say_as_much():
    taken = RowwiseParallel(output_layouts=torch.distributed.tensor.Shard(1))  # type: ignore[arg-type]
    assert taken.output_layouts == T.Shard(1)
    strided = torch.distributed.tensor.placement_types._StridedShard(1, split_factor=2)
    with pytest.raises(ParallelizeError, match=r"output_layouts: .* is torch's _StridedShard.*write tritondt's Shard"):
        RowwiseParallel(output_layouts=strided)  # type: ignore[arg-type]


def test_calls_that_do_not_fit():
    def body(rank: int) -> None:
        mesh = T.Mesh((RANKS,))
        prepared = parallelize_module(
            Recorded(), mesh, PrepareModuleInput(input_layouts=(R, R), desired_input_layouts=(S1, S1))
        )
        message = "input_layouts lists 2 layouts, but Recorded was met with 1 values; allowed is one layout for each"
        with pytest.raises(ParallelizeError, match=message):
            prepared(X)
        with pytest.raises(ParallelizeError, match=r"input_layouts has R for 3, which is no tensor; allowed is None"):
            prepared(X, 3)
        cut = parallelize_module(linear(), mesh, ColwiseParallel())
        with pytest.raises(ParallelizeError, match="a parallelized Linear takes a tensor as its first argument, got 3"):
            cut(3)
        with pytest.raises(T.MeshError, match="both must be on one mesh"):
            cut(distribute(X, T.Mesh((RANKS,), ("other",)), "R"))
        norm = parallelize_module(nn.LayerNorm((7, 10)), mesh, SequenceParallel())
        with pytest.raises(ParallelizeError, match="normalizes the last 2 of 3 dims, dim 1 among them, which"):
            norm(X)

    run_ranks(RANKS, body)
