"""Which modules a plan reaches, and the plans that are refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import tritondt as T
from tritondt.comm.transports.threads import run_ranks
from tritondt.errors import ParallelizeError
from tritondt.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


class Block(nn.Module):
    """Names as in a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({name: nn.Linear(6, 6) for name in ("wq", "wk", "wo")})
        self.norm = nn.LayerNorm(6)


class Model(nn.Module):
    """Two blocks between an embedding and a head."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 6)
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(6, 8, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def on_two_ranks(body: Callable[[T.Mesh], object]) -> None:
    run_ranks(2, lambda rank: body(T.Mesh((2,))))


def placements(model: nn.Module) -> dict[str, str]:
    return {
        name: repr(parameter.placements[0])
        for name, parameter in model.named_parameters()
        if isinstance(parameter, T.DTensor)
    }


def test_wildcards_reach_every_layer():
    def body(mesh: T.Mesh) -> None:
        model = Model()
        plan = {
            "layers.*.attention.w[qk]": ColwiseParallel(unit=3),
            "layers.1.attention.wo": RowwiseParallel(),
            "layers.*.norm": SequenceParallel(),
        }
        assert parallelize_module(model, mesh, plan) is model
        expected = {}
        for layer in (0, 1):
            for name in ("wq", "wk"):
                expected[f"layers.{layer}.attention.{name}.weight"] = "S0(unit=3)"
                expected[f"layers.{layer}.attention.{name}.bias"] = "S0(unit=3)"
            expected[f"layers.{layer}.norm.weight"] = expected[f"layers.{layer}.norm.bias"] = "R"
        expected |= {"layers.1.attention.wo.weight": "S1", "layers.1.attention.wo.bias": "R"}
        assert placements(model) == expected
        head = model.head
        parallelize_module(head, mesh, {"": ColwiseParallel()})
        assert placements(head) == {"weight": "S0"}
        assert (head.in_features, head.out_features, type(head)) == (6, 8, nn.Linear)

    on_two_ranks(body)


def test_the_values_of_one_rank_or_of_every_rank():
    def body(mesh: T.Mesh) -> None:
        (rank,) = mesh.coordinate  # type: ignore[misc]
        for src_data_rank, expected in ((0, [0, 0]), (1, [1, 1]), (None, [0, 1])):
            linear = nn.Linear(2, 2, bias=False)
            nn.init.constant_(linear.weight, rank)
            parallelize_module(linear, mesh, ColwiseParallel(), src_data_rank=src_data_rank)
            weight: Any = linear.weight
            torch.testing.assert_close(weight.full_tensor()[:, 0].tolist(), [float(value) for value in expected])
            assert weight.requires_grad
            assert isinstance(weight, nn.Parameter)

    on_two_ranks(body)


def test_frozen_and_meta_parameters_stay_so():
    def body(mesh: T.Mesh) -> None:
        frozen = nn.Linear(3, 5).requires_grad_(False)
        parallelize_module(frozen, mesh, RowwiseParallel())
        assert not frozen.weight.requires_grad
        assert frozen(torch.ones(2, 2 - mesh.coordinate[0])).shape == (2, 5)  # type: ignore[index]
        with torch.device("meta"):
            later = nn.Linear(3, 5)
        parallelize_module(later, mesh, ColwiseParallel())
        weight: Any = later.weight
        assert weight.is_meta
        assert weight.to_local().shape == (3 - mesh.coordinate[0], 3)  # type: ignore[index]

    on_two_ranks(body)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (
            "layers.*.atention.wq",
            r"the plan's 'layers.\*.atention.wq' matches no module of Model: nothing in layers.0 is called 'atention', "
            r"it has attention, norm; near it come 'layers.\*.attention.wq'",
        ),
        ("heads", r"nothing in it is called 'heads', it has embed, layers, head; near it come 'head'"),
        ("embed.weight", "nothing in embed is called 'weight', it has no modules$"),
        ("attention.wq", r"near it come 'layers.\*.attention.wq'"),
    ],
)
def test_a_pattern_that_matches_nothing_changes_nothing(pattern, message):
    def body(mesh: T.Mesh) -> None:
        model = Model()
        with pytest.raises(ParallelizeError, match=message):
            parallelize_module(model, mesh, {"head": ColwiseParallel(), pattern: ColwiseParallel()})
        assert placements(model) == {}

    on_two_ranks(body)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (ColwiseParallel(), RowwiseParallel()),
        (ColwiseParallel(), ColwiseParallel()),
        (SequenceParallel(), PrepareModuleInput(input_layouts=T.Shard(1), desired_input_layouts=T.Replicate())),
    ],
)
def test_a_module_is_parallelized_once(first, second):
    def body(mesh: T.Mesh) -> None:
        model = Model()
        parallelize_module(model, mesh, {"head": first})
        message = (
            rf"cannot lay out head \(Linear\): it is parallelized already, by {type(first).__name__}, and cannot have "
            rf"{type(second).__name__} as well; name it once in one plan"
        )
        with pytest.raises(ParallelizeError, match=message):
            parallelize_module(model, mesh, {"head": second})

    on_two_ranks(body)


def test_two_names_of_one_module_and_input_with_output():
    def body(mesh: T.Mesh) -> None:
        model = Model()
        model.layers.append(model.layers[0])
        parallelize_module(model, mesh, {"layers.*.norm": SequenceParallel()})
        replicate = T.Replicate()
        parallelize_module(model, mesh, PrepareModuleInput(input_layouts=replicate, desired_input_layouts=replicate))
        parallelize_module(model, mesh, PrepareModuleOutput(output_layouts=replicate, desired_output_layouts=replicate))

    on_two_ranks(body)


def test_tied_weights_stay_one():
    def body(mesh: T.Mesh) -> None:
        plans: list[Any] = [
            [{"embed": RowwiseParallel(), "head": ColwiseParallel()}],
            # One call each: the second finds what has become of the parameter.
            [{"embed": RowwiseParallel()}, {"head": ColwiseParallel()}],
            [{"embed": SequenceParallel(), "head": SequenceParallel()}],
        ]
        for calls in plans:
            model = Model(tied=True)
            for plan in calls:
                for name, style in plan.items() if len(calls) > 1 else ():
                    parallelize_module(model.get_submodule(name), mesh, style)
                if len(calls) == 1:
                    parallelize_module(model, mesh, plan)
            assert model.head.weight is model.embed.weight
            tokens = torch.tensor([[1, 2, 5, 7]])
            given = T.DTensor.from_local(tokens, mesh, [T.Replicate()])
            whole = Model(tied=True)
            weight: Any = model.embed.weight
            whole.embed.weight.data.copy_(weight.full_tensor())
            whole.head(whole.embed(tokens)).sum().backward()
            model.head(model.embed(given)).sum().backward()
            torch.testing.assert_close(weight.grad.full_tensor(), whole.embed.weight.grad)

    on_two_ranks(body)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            {"embed": ColwiseParallel(), "head": ColwiseParallel()},
            "embed.weight and head.weight are one parameter, and the plan cuts the first as S1 and the second as S0; "
            "allowed are styles that cut both alike, or copies that are not tied",
        ),
        ({"embed": RowwiseParallel()}, "the plan cuts the first as S0 and the second not at all"),
        ({"head": ColwiseParallel()}, "the plan cuts the first not at all and the second as S0"),
    ],
)
def test_tied_weights_cut_differently_are_refused(plan, message):
    def body(mesh: T.Mesh) -> None:
        model = Model(tied=True)
        with pytest.raises(ParallelizeError, match=message):
            parallelize_module(model, mesh, plan)
        assert placements(model) == {}
        parallelize_module(model.embed, mesh, ColwiseParallel())
        with pytest.raises(ParallelizeError, match=r"its weight is shared with another module, which has it as \(S1\)"):
            parallelize_module(model.head, mesh, ColwiseParallel())

    on_two_ranks(body)


def test_meshes_of_several_axes_are_refused():
    def body(rank: int) -> None:
        message = (
            r"takes a mesh of one axis, got Mesh\(dp=2, tp=2 over ranks 0..3, cpu\); give it one slice: "
            r"mesh\['dp'\], mesh\['tp'\]"
        )
        with pytest.raises(T.MeshError, match=message):
            parallelize_module(Model(), T.Mesh((2, 2), ("dp", "tp")), ColwiseParallel())
        with pytest.raises(T.MeshError, match="give it one slice: one made by init_device_mesh with names"):
            parallelize_module(Model(), T.Mesh((2, 2)), ColwiseParallel())

    run_ranks(4, body)


def test_what_is_no_plan():
    def body(mesh: T.Mesh) -> None:
        with pytest.raises(ParallelizeError, match=r"a ParallelStyle, or styles by module name; got \['head'\]"):
            parallelize_module(Model(), mesh, ["head"])  # type: ignore[arg-type]
        with pytest.raises(ParallelizeError, match="the plan has 'colwise' for 'head'; allowed is a ParallelStyle"):
            parallelize_module(Model(), mesh, {"head": "colwise"})  # type: ignore[dict-item]

    on_two_ranks(body)
    with pytest.warns(UserWarning, match="was given no parallelize_plan and changes nothing"):
        run_ranks(1, lambda rank: parallelize_module(Model(), T.Mesh((1,))))


class Doubled(ParallelStyle):
    """A style of one's own, which puts another module in place of its own."""

    def _apply(self, module: nn.Module, device_mesh: "DeviceMesh | T.Mesh") -> nn.Module:
        assert self.src_data_rank == 1
        return nn.Sequential(module, module)


def test_a_style_of_ones_own_replaces_its_module():
    def body(mesh: T.Mesh) -> None:
        model = Model(tied=True)
        parallelize_module(model, mesh, {"layers.0.norm": Doubled()}, src_data_rank=1)
        assert isinstance(model.layers[0].norm, nn.Sequential)
        assert isinstance(parallelize_module(Model(), mesh, Doubled(), src_data_rank=1), nn.Sequential)

    on_two_ranks(body)


class Untied(ParallelStyle):
    """A style of one's own, which gives its module parameters of its own."""

    def _apply(self, module: nn.Module, device_mesh: "DeviceMesh | T.Mesh") -> nn.Module:
        for name, parameter in list(module.named_parameters()):
            whole = T.distribute_tensor(parameter.detach(), device_mesh, [T.Shard(0)])
            module.register_parameter(name, nn.Parameter(whole))
        return module


class Frozen(ParallelStyle):
    def _apply(self, module: nn.Module, device_mesh: "DeviceMesh | T.Mesh") -> nn.Module:
        return module.requires_grad_(False)


def test_a_style_of_ones_own_leaves_the_check_of_others_on():
    def body(mesh: T.Mesh) -> None:
        model = Model(tied=True)
        message = (
            "embed.weight and head.weight are one parameter, and the plan cuts the first as S1 and the second as S0"
        )
        plan = {"layers.0.norm": Frozen(), "embed": ColwiseParallel(), "head": ColwiseParallel()}
        with pytest.raises(ParallelizeError, match=message):
            parallelize_module(model, mesh, plan)
        assert placements(model) == {}
        assert all(parameter.requires_grad for parameter in model.parameters())
        with pytest.raises(ParallelizeError, match="the first as S0 and the second not at all"):
            parallelize_module(model, mesh, {"layers.0.norm": Frozen(), "embed": RowwiseParallel()})
        parallelize_module(
            model, mesh, {"layers.0.norm": Frozen(), "embed": RowwiseParallel(), "head": ColwiseParallel()}
        )
        assert model.head.weight is model.embed.weight

    on_two_ranks(body)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            {"head": Untied()},
            "embed.weight and head.weight were one parameter, and the styles of the plan have made two of it: the "
            r"first is a plain Tensor now and the second distributed as \(S0\), so that they would be trained",
        ),
        ({"embed": RowwiseParallel(), "head": Untied()}, r"the first is distributed as \(S0\) now and the second dist"),
        (
            {"embed": RowwiseParallel(), "head": Frozen()},
            r"the first is distributed as \(S0\) now and the second a pla",
        ),
    ],
)
def test_ties_that_a_style_of_ones_own_has_cut_are_told(plan, message):
    def body(mesh: T.Mesh) -> None:
        with pytest.raises(ParallelizeError, match=message):
            parallelize_module(Model(tied=True), mesh, plan)
        parallelize_module(Model(), mesh, plan)

    on_two_ranks(body)
