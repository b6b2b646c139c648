"""Styles with `overlap=True` against the same without: outputs, gradients, bytes, copies, where nothing overlaps."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

import tritondt as T
from tests.ops.sharded import distribute
from tests.parallel.test_styles import compare_on_ranks, linear
from tests.parallel.test_transformer import FOLLOWING, HEAD_WIDTH, TOKENS, Model, plan, train
from tritondt.comm.transports.threads import run_ranks
from tritondt.debug import CommDebugMode
from tritondt.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from tritondt.parallel import overlap as overlapping

RANKS = 3
R, S0, S1, LAST, P = T.Replicate(), T.Shard(0), T.Shard(1), T.Shard(-1), T.Partial()
X = torch.randn(2, 7, 10, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.fixture(autouse=True)
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets positions travel in pieces, as among hosts: rank threads share one, where nothing is worth it."""
    monkeypatch.setattr(overlapping, "_shares", lambda spec: (2, 1, 1))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The matmuls in chunks that ran, by name."""
    found: list[str] = []
    for name in ("AllGatherMatmul", "MatmulReduceScatter"):
        kind = getattr(overlapping, name)

        class Counted:
            @staticmethod
            def apply(*arguments: Any, kind: Any = kind, name: str = name) -> Any:
                found.append(name)
                return kind.apply(*arguments)

        monkeypatch.setattr(overlapping, name, Counted)
    return found


def all_ranks(name: str) -> list[str]:
    return [name] * RANKS


@pytest.mark.parametrize("output", [LAST, R, S1, P], ids=repr)
@pytest.mark.parametrize(
    ("given", "overlaps"), [(S1, True), (S0, True), (T.Shard(1, sizes=(0, 5, 2)), True), (R, False), (LAST, False)]
)
def test_columns(calls, given, overlaps, output):
    compare_on_ranks(linear, ColwiseParallel(output_layouts=output, use_local_output=False, overlap=True), X, given)
    assert calls == (all_ranks("AllGatherMatmul") if overlaps else [])


@pytest.mark.parametrize("given", [LAST, R, S1], ids=repr)
@pytest.mark.parametrize(
    ("output", "overlaps"),
    [
        (S1, True),
        (S0, True),
        (T.Shard(-2), True),
        (R, False),
        (LAST, False),
        (P, False),
        (T.Shard(1, repeats=7), False),
    ],
)
def test_rows(calls, given, output, overlaps):
    compare_on_ranks(linear, RowwiseParallel(output_layouts=output, use_local_output=False, overlap=True), X, given)
    assert calls == (all_ranks("MatmulReduceScatter") if overlaps else [])


@pytest.mark.parametrize("kind", [ColwiseParallel, RowwiseParallel])
def test_without_a_bias_and_with_rows_for_some_ranks_only(calls, kind):
    given, output = (S0, LAST) if kind is ColwiseParallel else (LAST, S0)
    made = kind(output_layouts=output, use_local_output=False, overlap=True)
    compare_on_ranks(lambda: linear(2, bias=False), made, X[0, :2], given)
    compare_on_ranks(lambda: linear(2), kind(overlap=True, output_layouts=R, use_local_output=False), X[0, 0], R)
    assert len(calls) == RANKS


def test_embeddings_are_as_without():
    def body(rank: int) -> None:
        mesh = T.Mesh((RANKS,))
        for kind in (ColwiseParallel, RowwiseParallel):
            torch.manual_seed(0)
            plain = nn.Embedding(7, 10)
            module = parallelize_module(copy.deepcopy(plain), mesh, kind(output_layouts=R, overlap=True))
            torch.testing.assert_close(module(TOKENS % 7), plain(TOKENS % 7), rtol=0, atol=0)

    run_ranks(RANKS, body)


def overlapping_plan() -> dict[str, ParallelStyle]:
    """The transformer's plan with every layer for itself, so that q, k and v gather too."""
    found = plan()
    del found["attention"]
    options: Any = {"use_local_output": False, "overlap": True}
    return found | {
        "attention.w[qkv]": ColwiseParallel(unit=HEAD_WIDTH, **options),
        "attention.wo": RowwiseParallel(unit=HEAD_WIDTH, output_layouts=S1, **options),
        "up": ColwiseParallel(overlap=True),
        "down": RowwiseParallel(output_layouts=S1, **options),
        "head": ColwiseParallel(**options),
    }


@pytest.mark.parametrize("num_ranks", [3, 4])
def test_a_transformer_trains_as_on_one_process(calls, num_ranks):
    single = Model()
    expected = train(single, FOLLOWING, foreach=True)

    def body(rank: int) -> None:
        mesh = T.Mesh((num_ranks,))
        model = parallelize_module(Model(), mesh, overlapping_plan())
        found = train(model, T.distribute_tensor(FOLLOWING, mesh, [R]), foreach=True)
        torch.testing.assert_close(found, expected)
        for name, parameter in single.named_parameters():
            mine: Any = model.get_parameter(name)
            torch.testing.assert_close(mine.full_tensor(), parameter)

    run_ranks(num_ranks, body)
    # q, k, v, up and head gather, wo and down scatter, in each of three steps.
    assert calls.count("AllGatherMatmul") == 5 * 3 * num_ranks
    assert calls.count("MatmulReduceScatter") == 2 * 3 * num_ranks


class MLP(nn.Module):
    """Two layers, and what lies between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(10, 14), nn.Linear(14, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(nn.functional.gelu(self.up(x)))
        return out


def mlp(mesh: T.Mesh, overlap: bool) -> nn.Module:
    torch.manual_seed(6)
    up = ColwiseParallel(input_layouts=S1, overlap=overlap)
    down = RowwiseParallel(output_layouts=S1, use_local_output=False, overlap=overlap)
    return parallelize_module(MLP().double(), mesh, {"up": up, "down": down})


def gradients_of(module: nn.Module, mesh: T.Mesh) -> list[torch.Tensor]:
    """The output and all gradients of a step, whole."""
    x: Any = distribute(X, mesh, "S1").requires_grad_()
    module.zero_grad()
    out = module(x)
    out.pow(2).sum().backward()
    return [tensor.full_tensor().detach() for tensor in (out, x.grad, *(p.grad for p in module.parameters()))]


def test_bytes_are_those_without():
    def body(rank: int) -> None:
        mesh = T.Mesh((RANKS,))
        found = []
        for overlap in (False, True):
            module = mlp(mesh, overlap)
            with CommDebugMode() as comm:
                x: Any = distribute(X, mesh, "S1").requires_grad_()
                module(x).pow(2).sum().backward()
            modules = {
                name: {kind: (count.steps, count.sent_bytes) for kind, count in kinds.items()}
                for name, kinds in comm.by_module().items()
            }
            found.append(modules)
        assert found[0] == found[1]
        assert sum(sent for kinds in found[1].values() for _, sent in kinds.values()) > 0

    run_ranks(RANKS, body)


def test_copies_and_files_overlap_by_themselves(calls):
    def body(rank: int) -> None:
        mesh = T.Mesh((RANKS,))
        module = mlp(mesh, True)
        expected = gradients_of(module, mesh)
        copies = [copy.deepcopy(module)]
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        copies.append(torch.load(file, weights_only=False))
        for twin in copies:
            torch.testing.assert_close(gradients_of(twin, mesh), expected, rtol=0, atol=0)
            with torch.no_grad():
                for parameter in twin.parameters():
                    parameter.zero_()
        torch.testing.assert_close(gradients_of(module, mesh), expected, rtol=0, atol=0)

    run_ranks(RANKS, body)
    assert len(calls) == 4 * 2 * RANKS


class Doubled(nn.Linear):
    """With a forward of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


def test_a_forward_of_ones_own_runs_as_without(calls):
    def make() -> nn.Module:
        torch.manual_seed(2)
        return Doubled(10, 8, bias=False, dtype=torch.float64)

    compare_on_ranks(make, ColwiseParallel(use_local_output=False, overlap=True), X, S1)
    compare_on_ranks(make, RowwiseParallel(output_layouts=S1, use_local_output=False, overlap=True), X, LAST)
    assert calls == []


def test_on_one_rank_nothing_is_taken_over():
    def body(rank: int) -> None:
        module = parallelize_module(linear(), T.Mesh((1,)), ColwiseParallel(overlap=True))
        assert "forward" not in vars(module)
        torch.testing.assert_close(module(X), linear()(X))

    run_ranks(1, body)


@pytest.mark.parametrize("kind", [ColwiseParallel, RowwiseParallel])
def test_under_autocast_as_without(calls, kind):
    def body(rank: int) -> None:
        mesh = T.Mesh((RANKS,))
        given, output = ("S1", LAST) if kind is ColwiseParallel else ("S2", S1)
        found = []
        for overlap in (True, False):
            module = parallelize_module(
                linear().float(), mesh, kind(output_layouts=output, use_local_output=False, overlap=overlap)
            )
            with torch.autocast("cpu", torch.bfloat16):
                out = module(distribute(X.float(), mesh, given))
            out.float().pow(2).sum().backward()
            weight: Any = module.weight
            found.append((out.full_tensor(), weight.grad.full_tensor()))
        torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)

    run_ranks(RANKS, body)
    assert calls == []


def test_second_derivatives():
    def body(rank: int) -> None:
        mesh = T.Mesh((RANKS,))
        found = []
        for overlap in (True, False):
            module = mlp(mesh, overlap)
            x: Any = distribute(X, mesh, "S1").requires_grad_()
            (first,) = torch.autograd.grad(module(x).pow(3).sum(), x, create_graph=True)
            first.pow(2).sum().backward()
            found.append([tensor.full_tensor() for tensor in (x.grad, *(p.grad for p in module.parameters()))])
        torch.testing.assert_close(found[0], found[1])

    run_ranks(RANKS, body)


def test_the_forward_outside_a_call_is_linears_own():
    def body(rank: int) -> None:
        mesh = T.Mesh((RANKS,))
        module = parallelize_module(linear(), mesh, ColwiseParallel(overlap=True))
        found: Any = module.forward(distribute(X, mesh, "R"))
        torch.testing.assert_close(found.full_tensor(), linear()(X))

    run_ranks(RANKS, body)
