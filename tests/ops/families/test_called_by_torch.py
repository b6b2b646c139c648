"""Operators that torch calls by itself, in backward passes, in its modules and for its checks."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import tritondt as T
from tests.ops.sharded import Case, check
from tritondt.comm.transports.threads import run_ranks
from tritondt.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from tritondt.random import manual_seed

R, S0, S1 = T.Replicate(), T.Shard(0), T.Shard(1)
WEIGHT = torch.linspace(-1, 1, 24, dtype=torch.float64).view(6, 4).sin()
LENGTHS = torch.linspace(1, 2, 6, dtype=torch.float64).view(6, 1)


@pytest.mark.filterwarnings("ignore:Error detected in SqrtBackward0", "ignore:Anomaly Detection has been enabled")
def test_anomalies_are_detected() -> None:
    def body(rank: int) -> None:
        layers = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        model = parallelize_module(layers, T.Mesh((2,)), plan)
        model(torch.ones(2, 6)).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        x = T.distribute_tensor(torch.tensor([1.0, 4.0, 0.0, 9.0]), T.Mesh((2,)), [S0]).requires_grad_()
        with pytest.raises(RuntimeError, match=r"SqrtBackward0.* returned nan values"):
            (x.sqrt() * 0).sum().backward()  # 0 times infinity, on one rank of two

    # Around the ranks, which are threads, since it is one setting of the process.
    with torch.autograd.detect_anomaly():
        run_ranks(2, body)


@pytest.mark.parametrize("text", ["S0", "S1", "R"])
def test_answers_about_all_elements(text: str) -> None:
    def body(rank: int) -> None:
        x = T.distribute_tensor(WEIGHT > 0.8, T.Mesh((2,)), list(T.parse_placements(text)))
        assert (torch._is_any_true(x).item(), torch._is_all_true(x).item()) == (True, False)
        assert (torch._is_any_true(x & ~x).item(), torch._is_all_true(x | ~x).item()) == (False, True)

    run_ranks(2, body)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("texts", [("S0", "S0"), ("S1", "R"), ("R", "S0"), ("S0(sizes=0/6)", "S0(sizes=0/6)")])
def test_weight_norm(texts: tuple[str, str], dim: int) -> None:
    lengths = LENGTHS if dim == 0 else LENGTHS[:4].view(1, 4)
    of_weight, of_length = texts
    if dim:
        of_length = "R" if of_length != "S0" else "S1"
    case = Case((2,), (WEIGHT, lengths), (of_weight, of_length))
    check(lambda v, g: torch._weight_norm(v, g, dim).pow(2), case, gradients=True)


def test_a_module_with_weight_norm_trains() -> None:
    def body(rank: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layer = nn.utils.parametrizations.weight_norm(nn.Linear(6, 4))
        for name, parameter in [*layer.named_parameters()]:
            owner: Any = layer.get_submodule(name.rpartition(".")[0])
            made = T.distribute_tensor(parameter.detach(), T.Mesh((2,)), [S0])
            owner._parameters[name.rpartition(".")[2]] = nn.Parameter(made)
        with T.implicit_replication():
            layer(torch.linspace(0, 1, 18).view(3, 6)).pow(2).sum().backward()
        return [parameter.grad.full_tensor() for parameter in layer.parameters() if parameter.grad is not None]

    torch.manual_seed(0)
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(6, 4))
    layer(torch.linspace(0, 1, 18).view(3, 6)).pow(2).sum().backward()
    for found in run_ranks(2, body):
        torch.testing.assert_close(found, [parameter.grad for parameter in layer.parameters()])


def test_poisson_draws_one_sample_whatever_the_layout() -> None:
    rates = torch.tensor([0.0, 0.5, 4.0, 30.0, 1e4, 1e6]).repeat_interleave(400).view(60, 40)

    def body(rank: int) -> list[torch.Tensor]:
        mesh, found = T.Mesh((2,)), []
        for placement in (S0, S1, R):
            manual_seed(7, mesh)
            drawn: Any = torch.poisson(T.distribute_tensor(rates, mesh, [placement]))
            assert drawn.placements == (placement,)
            found.append(drawn.full_tensor())
        with pytest.raises(RuntimeError, match="expected rate to be non-negative"):
            torch.poisson(T.distribute_tensor(rates - 1, mesh, [R]))
        return found

    for first, *others in run_ranks(2, body):
        for other in others:
            torch.testing.assert_close(other, first, rtol=0, atol=0)
        for drawn, rate in zip(first.view(6, 400), rates.view(6, 400), strict=True):
            mean = rate[0].item()
            assert abs(drawn.mean().item() - mean) <= 5 * (mean / 400) ** 0.5
            assert abs(drawn.var().item() - mean) <= 0.5 * mean
            torch.testing.assert_close(drawn, drawn.round(), rtol=0, atol=0)


@pytest.mark.parametrize("texts", [("S0", "R"), ("R", "S1"), ("S1", "S0"), ("S0", "S1"), ("R", "R")])
def test_a_product_of_bytes(texts: tuple[str, str]) -> None:
    x, y = torch.arange(48).view(6, 8).sub(20).to(torch.int8), torch.arange(40).view(8, 5).sub(9).to(torch.int8)

    def body(rank: int) -> None:
        given = [
            T.distribute_tensor(full, T.Mesh((2,)), list(T.parse_placements(text)))
            for full, text in zip((x, y), texts, strict=True)
        ]
        found: Any = torch._int_mm(*given)
        torch.testing.assert_close(found.full_tensor(), x.int() @ y.int(), rtol=0, atol=0)

    run_ranks(2, body)


@pytest.mark.in_core(4)
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize(("of_x", "of_y", "result"), [("S0", "R", "S0"), ("R", "S1", "S1"), ("S1", "S0", "P")])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_scaled_product_of_8_bit_floats(*, by_row: bool, of_x: str, of_y: str, result: str, has_bias: bool) -> None:
    x = torch.arange(32 * 16).view(32, 16).remainder(5).float().to(torch.float8_e4m3fn)
    y = torch.arange(48 * 16).view(48, 16).remainder(7).float().to(torch.float8_e4m3fn).t()
    scales = [torch.full((32, 1), 2.0), torch.full((1, 48), 0.5)] if by_row else [torch.tensor(2.0), torch.tensor(0.5)]
    bias = torch.arange(48).bfloat16() if has_bias else None
    expected = torch._scaled_mm(x, y, scales[0], scales[1], bias=bias, out_dtype=torch.bfloat16)

    def body(rank: int) -> None:
        mesh = T.Mesh((2,))
        placed = [T.distribute_tensor(t, mesh, list(T.parse_placements(p))) for t, p in ((x, of_x), (y, of_y))]
        whole = [T.distribute_tensor(t, mesh, [R]) for t in scales]
        added = None if bias is None else T.distribute_tensor(bias, mesh, [R])
        found: Any = torch._scaled_mm(placed[0], placed[1], whole[0], whole[1], bias=added, out_dtype=torch.bfloat16)
        if not has_bias:
            assert found.placements == T.parse_placements(result)
        torch.testing.assert_close(found.full_tensor(), expected, rtol=0, atol=0)

    run_ranks(2, body)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("text", ["S0", "R"])
def test_layers_in_evaluation(*, norm_first: bool, text: str) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=norm_first, activation="gelu").eval()
    attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x, padding = torch.randn(4, 3, 8), torch.tensor([[False, False, True]] * 2 + [[False] * 3] * 2)
    with torch.no_grad():
        expected = [layer(x), layer(x, src_key_padding_mask=padding), *attention(x, x, x)]

    def body(rank: int) -> list[torch.Tensor]:
        mesh = T.Mesh((2,))
        own, own_attention = copy.deepcopy(layer), copy.deepcopy(attention)
        T.distribute_module(own, mesh)
        T.distribute_module(own_attention, mesh)
        given, mask = (T.distribute_tensor(full, mesh, list(T.parse_placements(text))) for full in (x, padding))
        with torch.no_grad():
            found = [own(given), own(given, src_key_padding_mask=mask), *own_attention(given, given, given)]
        assert all(it.placements == given.placements for it in found)
        return [it.full_tensor() for it in found]

    for found in run_ranks(2, body):
        torch.testing.assert_close(found, expected)


def test_bits_are_shifted_in_place() -> None:
    def body(rank: int) -> None:
        x: Any = T.distribute_tensor(torch.arange(24).view(6, 4), T.Mesh((2,)), [S0])
        x >>= 1
        x <<= T.distribute_tensor(torch.full((4,), 2), T.Mesh((2,)), [R])
        x >>= T.distribute_tensor(torch.full((6, 1), 1), T.Mesh((2,)), [S0])
        assert x.placements == (S0,)
        torch.testing.assert_close(x.full_tensor(), torch.arange(24).view(6, 4) >> 1 << 1, rtol=0, atol=0)

    run_ranks(2, body)


def test_a_number_among_ordered_ones() -> None:
    ordered = torch.tensor([0, 2, 2, 5, 9, 11])

    def body(rank: int) -> list[int]:
        x = T.distribute_tensor(ordered, T.Mesh((2,)), [S0])
        found: list[Any] = [torch.searchsorted(x, 2), torch.searchsorted(x, 2.5), torch.bucketize(2, x, right=True)]
        return [it.item() for it in found]

    assert run_ranks(2, body) == [[1, 3, 3]] * 2
