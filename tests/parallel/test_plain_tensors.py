"""Models that mix plain tensors in: rotary embeddings, labels, local norms; what is refused, told and switched on."""

import copy
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tritondt as T
from tests.ops.sharded import distribute
from tritondt.comm.transports.threads import run_ranks
from tritondt.debug import check_plain_gradients
from tritondt.errors import DifferenceError, ParallelizeError
from tritondt.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel, parallelize_module

HEADS, WIDTH, POSITIONS = 4, 6, 5
X = torch.randn(2, POSITIONS, HEADS * WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
LABELS = torch.randint(7, (2 * POSITIONS,), generator=torch.Generator().manual_seed(2))


def halves_swapped(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


class Rotary(nn.Module):
    """Attention with plain tables of cos and sin, and a loss on plain labels, as models of others have them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        width = HEADS * WIDTH
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, dtype=torch.float64) for _ in range(4))
        self.q_norm = nn.LayerNorm(WIDTH, dtype=torch.float64)
        self.head = nn.Linear(width, 7, dtype=torch.float64)
        angles = torch.outer(torch.arange(POSITIONS).double(), torch.arange(1.0, WIDTH + 1).double())
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            project(x).view(2, POSITIONS, -1, WIDTH).transpose(1, 2) for project in (self.wq, self.wk, self.wv)
        )
        query = self.q_norm(query)
        cos, sin = cast(torch.Tensor, self.cos), cast(torch.Tensor, self.sin)
        query, key = (part * cos + halves_swapped(part) * sin for part in (query, key))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        found = self.head(self.wo(mixed.transpose(1, 2).reshape(2, POSITIONS, -1)))
        return F.cross_entropy(found.flatten(0, 1), labels)


def plan(*, local: bool) -> dict[str, ParallelStyle]:
    return {
        "w[qkv]": ColwiseParallel(unit=WIDTH, use_local_output=local),
        "wo": RowwiseParallel(use_local_output=local),
        "head": ColwiseParallel(output_layouts=T.Replicate() if local else None, use_local_output=local),
    }


def expected_gradients() -> dict[str, Any]:
    single = Rotary()
    single(X, LABELS).backward()
    return {name: parameter.grad for name, parameter in single.named_parameters()}


def compare(model: nn.Module, expected: dict[str, Any]) -> None:
    for name, grad in expected.items():
        found: Any = model.get_parameter(name).grad
        assert isinstance(found, T.DTensor) == isinstance(model.get_parameter(name), T.DTensor), name
        torch.testing.assert_close(found.full_tensor() if isinstance(found, T.DTensor) else found, grad, msg=name)


def test_plain_tensors_of_a_model_count_as_replicated_where_its_plan_says_so() -> None:
    expected = expected_gradients()

    def body(rank: int) -> None:
        model = parallelize_module(Rotary(), T.Mesh((2,)), plan(local=False), plain_tensors="replicated")
        for run in (model, copy.deepcopy(model)):
            run(X, LABELS).backward()
            compare(run, expected)
        # Outside of the model, and after a failure within it, they are refused as ever.
        weight = model.get_parameter("wo.weight")
        with pytest.raises(IndexError):
            model(X, LABELS + 7)
        with pytest.raises(T.MixedTensorsError, match="got a distributed tensor"):
            weight + torch.ones(HEADS * WIDTH)
        check_plain_gradients(model)

    run_ranks(2, body)


def test_the_error_says_what_a_user_of_the_model_can_do() -> None:
    message = (
        r"where all plain ones are alike on every rank, as labels and the cos and sin of rotary embeddings are, call "
        r"it within tritondt.implicit_replication\(\), or lay the model out by parallelize_module\(..., "
        r"plain_tensors='replicated'\)"
    )

    def body(rank: int) -> None:
        model = parallelize_module(Rotary(), T.Mesh((2,)), plan(local=False))
        with pytest.raises(T.MixedTensorsError, match=message):
            model(X, LABELS)
        logits = distribute(torch.randn(10, 7), T.Mesh((2,)), "S1")
        with pytest.raises(T.MixedTensorsError, match=message):
            F.cross_entropy(logits, LABELS)
        with T.implicit_replication():
            model(X, LABELS)

    run_ranks(2, body)


def test_what_is_no_choice_for_plain_tensors() -> None:
    with pytest.raises(ParallelizeError, match="plain_tensors='yes'; allowed are 'refused' and 'replicated'"):
        parallelize_module(Rotary(), None, {}, plain_tensors="yes")  # type: ignore[arg-type]


def test_a_local_norm_that_the_plan_leaves_out_is_named_and_mended() -> None:
    expected = expected_gradients()

    def body(rank: int) -> None:
        mesh, left_out = T.Mesh((2,)), plan(local=True)
        model = parallelize_module(Rotary(), mesh, left_out)
        model(X, LABELS).backward()
        message = (
            r"gradients of plain parameters differ between rank 0 and rank 1: q_norm.weight, q_norm.bias; each rank "
            r"uses them on its own part, and they will drift apart: name their modules in the plan, by SequenceParallel"
        )
        with pytest.raises(DifferenceError, match=message):
            check_plain_gradients(model)
        with_norm = {**left_out, "q_norm": SequenceParallel(sequence_dim=1, use_local_output=True)}
        model = parallelize_module(Rotary(), mesh, with_norm)
        model(X, LABELS).backward()
        check_plain_gradients(model)
        compare(model, expected)

    run_ranks(2, body)


def test_plain_gradients_without_a_mesh_or_a_gradient() -> None:
    def body(rank: int) -> None:
        mesh, linear = T.Mesh((2,)), nn.Linear(2, 2)
        with pytest.raises(T.MeshError, match="found no distributed parameter in Linear; give it a mesh"):
            check_plain_gradients(linear)
        check_plain_gradients(linear, mesh)
        linear.bias.grad = torch.full((2,), float(rank))
        with pytest.raises(DifferenceError, match="between rank 0 and rank 1: bias;"):
            check_plain_gradients(linear, mesh)

    run_ranks(2, body)


@pytest.mark.parametrize("given", ["S1", "R", "P", None])
@pytest.mark.parametrize("use_local_output", [False, True])
def test_dropout_draws_other_numbers_for_every_position(given: str | None, use_local_output: bool) -> None:
    """Those of the library's operators on the whole, whatever the layout."""
    ones = torch.ones(2, 8, 16, dtype=torch.float64)
    torch.manual_seed(3)
    whole = run_ranks(1, lambda rank: cast(Any, F.dropout(distribute(ones, T.Mesh((1,)), "R"), 0.5)).to_local())[0]
    assert not torch.equal(*whole.chunk(2, 1))

    def body(rank: int) -> None:
        mesh = T.Mesh((2,))
        layer = parallelize_module(nn.Dropout(0.5), mesh, SequenceParallel(use_local_output=use_local_output))
        x: Any = ones.chunk(2, 1)[rank].clone() if given is None else distribute(ones, mesh, given)
        x.requires_grad_()
        found: Any = layer(x)
        local = found if use_local_output else found.to_local()
        torch.testing.assert_close(local.detach(), whole.chunk(2, 1)[rank], rtol=0, atol=0)
        assert type(found) is (torch.Tensor if use_local_output else T.DTensor)
        found.sum().backward()
        grad = x.grad if given is None else x.grad.redistribute(placements=[T.Shard(1)]).to_local()
        torch.testing.assert_close(grad, local.detach(), rtol=0, atol=0)
        layer.eval()
        kept: Any = layer(x)
        torch.testing.assert_close(
            (kept if use_local_output else kept.to_local()).detach(), torch.ones(2, 4, 16).double()
        )

    torch.manual_seed(3)
    run_ranks(2, body)
