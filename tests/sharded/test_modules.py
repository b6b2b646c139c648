"""Modules with sharded parameters by a plan: what they compute, and plans that are refused on all ranks."""

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import tritondt.sharded as sharded
from tests.sharded.cuts import chunks, expect_shards, whole
from tritondt.comm.transports.threads import run_ranks
from tritondt.errors import MismatchError


def net() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 5))


class Frozen(sharded.Sharder):
    def shard(self, module: nn.Module) -> nn.Module:
        return nn.Sequential(module.requires_grad_(False))


class Rows(sharded.ShardingPlanner):
    def build_plan(self, module: nn.Module) -> sharded.ShardingPlan:
        return sharded.ShardingPlan({f"{name}.weight": chunks(0, 0, 1, 2) for name in ("0", "2")})


def test_a_planned_module_computes_what_the_whole_one_does() -> None:
    """Columns, then rows: the output is this rank's own rows again; gradients are those of all ranks' rows."""
    rows = [whole((count, 6)) / 10 for count in (2, 1, 3)]
    expected: Any = net()
    expected(torch.cat(rows)).square().sum().backward()

    def body(rank: int) -> None:
        made: Any = net()
        plan = sharded.ShardingPlan(
            {"0.weight": chunks(0, 0, 1, 2), "2.weight": chunks(1, 0, 1, 2)}, return_local_tensor=["2"]
        )
        sharded.shard_module(made, plan)
        assert isinstance(made[0].weight, nn.Parameter)
        assert isinstance(made[0].weight, sharded.ShardedTensor)
        output = made(rows[rank])
        assert_close(output, net()(rows[rank]))
        output.square().sum().backward()
        for number, dim in ((0, 0), (2, 1)):
            grad = expected[number].weight.grad
            assert grad is not None
            assert_close(made[number].weight.local_tensor().grad, grad.chunk(3, dim)[rank])

    run_ranks(3, body)


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_optimizers_step_shard_by_shard(kind: str) -> None:
    rows = [whole((count, 6)) / 10 for count in (2, 1, 3)]
    options: Any = {"lr": 0.1, "momentum": 0.9} if kind == "SGD" else {"lr": 0.1}

    def made() -> Any:
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(6, 10, bias=False), nn.GELU(), nn.Linear(10, 5, bias=False))

    def trained(model: Any, x: torch.Tensor) -> Any:
        optimizer = getattr(torch.optim, kind)(model.parameters(), **options)
        for _ in range(3):
            model(x).square().sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            assert model[0].weight.grad is None
        return model

    expected = trained(made(), torch.cat(rows))

    def body(rank: int) -> None:
        plan = sharded.ShardingPlan(
            {"0.weight": chunks(0, 0, 1, 2), "2.weight": chunks(1, 0, 1, 2)}, return_local_tensor=["2"]
        )
        model = made()
        sharded.shard_module(model, plan)
        trained(model, rows[rank])
        for number, dim in ((0, 0), (2, 1)):
            assert_close(model[number].weight.local_tensor(), expected[number].weight.chunk(3, dim)[rank])

    run_ranks(3, body)


def test_outputs_are_resharded_and_collected() -> None:
    def body(rank: int) -> None:
        made: Any = net()
        plan = sharded.ShardingPlan(
            {"2.weight": chunks(0, 0, 1)}, output_plan={"": chunks(0, 0, 1)}, return_local_tensor=[""]
        )
        sharded.shard_module(made, plan)
        # Two rows, one from each rank; a row by itself loses the dim that was cut.
        own = whole((6,)) + rank
        output = made(own)
        assert output.shape == (5,)
        assert_close(output, net()(own))
        output.sum().backward()
        assert made[0].weight.grad is not None
        assert made[2].weight.local_tensor().grad is not None

    run_ranks(2, body)


def test_other_outputs_stay() -> None:
    module = sharded.collect_local_shard(sharded.reshard_output(nn.Linear(2, 2), chunks(0, 0)))
    assert type(module(torch.ones(1, 2))) is torch.Tensor


def test_values_are_those_of_the_source() -> None:
    def body(rank: int) -> None:
        torch.manual_seed(rank)
        made: Any = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 5))
        sharded.shard_module(made, Rows().build_plan(made), src_rank=2)
        torch.manual_seed(2)
        expect_shards(made[0].weight, nn.Linear(6, 10).weight.detach())

    run_ranks(3, body)


def test_a_sharder_replaces_its_submodule() -> None:
    def body(rank: int) -> None:
        made: Any = net()
        sharded.shard_module(made, sharded.ShardingPlan({"0": Frozen(), "2.weight": chunks(0, 0, 1)}))
        assert isinstance(made[0], nn.Sequential)
        assert not made[0][0].weight.requires_grad
        assert isinstance(made[2].weight, sharded.ShardedTensor)

    run_ranks(2, body)


ROWS = chunks(0, 0, 1)
PLANS = {
    "below a sharder": (
        sharded.ShardingPlan({"0": Frozen(), "0.weight": ROWS}),
        RuntimeError,
        "shards the parameter '0.weight', and has a Sharder for the submodule '0' that contains it",
    ),
    "the module": (
        sharded.ShardingPlan({"": Frozen()}),
        KeyError,
        "a Sharder replaces a submodule, and '' is the module",
    ),
    "neither": (
        sharded.ShardingPlan({"0.weight": "rows"}),  # type: ignore[dict-item]
        TypeError,
        "gives '0.weight' a str; allowed are a ShardingSpec and a Sharder",
    ),
    "output": (
        sharded.ShardingPlan({"0.weight": ROWS}, {"0": Frozen()}),  # type: ignore[dict-item]
        TypeError,
        "output_plan gives '0' a Frozen; allowed is a ShardingSpec",
    ),
    "no parameter": (
        sharded.ShardingPlan({"0.wait": ROWS}),
        AttributeError,
        "shards '0.wait', which Sequential does not",
    ),
    "no mapping": (
        sharded.ShardingPlan("0.weight"),  # type: ignore[arg-type]
        TypeError,
        "ShardingPlan got plan='0.weight', a str; allowed is dict",
    ),
    "a text of paths": (
        sharded.ShardingPlan({"0.weight": ROWS}, None, "0"),  # type: ignore[arg-type]
        TypeError,
        "ShardingPlan got return_local_tensor='0', a str; allowed is list",
    ),
    "no module": (sharded.ShardingPlan({"7.weight": ROWS}), AttributeError, "has no attribute `7`"),
    "no output": (sharded.ShardingPlan({}, {"7": ROWS}), AttributeError, "has no attribute `7`"),
    "no local": (sharded.ShardingPlan({}, None, ["7"]), AttributeError, "has no attribute `7`"),
}


@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("case", PLANS)
def test_a_plan_is_refused_on_all_ranks_before_anything_changes(case: str, everywhere: bool) -> None:
    plan, kind, text = PLANS[case]

    def body(rank: int) -> None:
        made: Any = net()
        is_own = everywhere or rank == 0
        with pytest.raises(kind if is_own else MismatchError, match=re.escape(text)):
            sharded.shard_module(made, plan if is_own else sharded.ShardingPlan({"2.weight": ROWS}))
        assert not any(isinstance(found, sharded.ShardedTensor) for found in made.parameters())

    run_ranks(2, body)


def test_similar_names_are_no_sharders_own() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.fc1 = nn.Linear(2, 2), nn.Linear(2, 4)

    def body(rank: int) -> None:
        made: Any = Two()
        sharded.shard_module(made, sharded.ShardingPlan({"fc": Frozen(), "fc1.weight": ROWS}))
        assert isinstance(made.fc1.weight, sharded.ShardedTensor)

    run_ranks(2, body)


PARAMETERS = {
    "name": ("wait", AttributeError, "Linear has no attribute 'wait'; its parameters are ['weight', 'bias']"),
    "number": ("in_features", ValueError, "Linear.in_features is to be a tensor, found int"),
    "strides": ("weight", ValueError, "shards are cut from a contiguous tensor"),
}


@pytest.mark.parametrize("case", PARAMETERS)
def test_a_parameter_is_refused_on_all_ranks(case: str) -> None:
    name, kind, text = PARAMETERS[case]

    def body(rank: int) -> None:
        linear = nn.Linear(4, 6)
        if case == "strides" and rank == 1:
            linear.weight = nn.Parameter(torch.ones(4, 6).t())
        at_fault = rank == 1 or case != "strides"
        wanted = name if rank == 1 or case == "strides" else "weight"
        with pytest.raises(kind if at_fault and rank == 1 else MismatchError, match=re.escape(text)):
            sharded.shard_parameter(linear, wanted, ROWS)
        assert not isinstance(linear.weight, sharded.ShardedTensor)

    run_ranks(2, body)


def test_ranks_that_differ_are_named() -> None:
    def body(rank: int) -> None:
        linear = nn.Linear(4, 6)
        with pytest.raises(ValueError, match=r"src_rank=0, .* on rank 0, but with src_rank=1, .* on rank 1"):
            sharded.shard_parameter(linear, "weight", ROWS, src_rank=rank)
        with pytest.raises(MismatchError, match=r"dim=0, .* on rank 0, but with .*dim=1, .* on rank 1"):
            sharded.shard_parameter(linear, "weight", chunks(rank, 0, 1))
        sharded.shard_parameter(linear, "weight", ROWS)
        with pytest.raises(ValueError, match=r"Linear\.weight is a sharded tensor already; reshard it"):
            sharded.shard_parameter(linear, "weight", ROWS)

    run_ranks(2, body)


def test_state_dicts_are_loaded_shard_by_shard() -> None:
    def body(rank: int) -> None:
        made, other = net(), nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 5))
        for module in (made, other):
            sharded.shard_module(module, sharded.ShardingPlan({"0.weight": chunks(1, 1, 0)}))
        state = made.state_dict()
        assert isinstance(state["0.weight"], sharded.ShardedTensor)
        other.load_state_dict(state)
        expect_shards(other.get_parameter("0.weight"), net().get_parameter("0.weight").detach())

    run_ranks(2, body)


def test_moved_modules_keep_their_parameters() -> None:
    def body(rank: int) -> None:
        linear: Any = nn.Linear(4, 6)
        expected = linear.weight.detach().double().clone()
        sharded.shard_parameter(linear, "weight", ROWS)
        linear.double()
        is_parameter = isinstance(linear.weight, nn.Parameter)
        assert is_parameter
        assert linear.weight.dtype is torch.float64
        assert F.linear(torch.ones(1, 4).double(), linear.weight).dtype is torch.float64
        out = torch.empty(6, 4).double() if rank == 0 else None
        linear.weight.gather(0, out)
        torch.manual_seed(0)
        if out is not None:
            assert out.shape == expected.shape

    run_ranks(2, body)
