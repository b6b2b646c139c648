"""Layers of experts of transformers, whose parameters are (experts, ...): cut by features, or by experts.

All ranks have all tokens. By features each rank runs its part of every expert, by experts those that it has, on the
tokens that chose them; the ranks' results are terms of a sum.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from tritondt.dtensor.tensor import DTensor
from tritondt.errors import ParallelizeError
from tritondt.errors.arguments import first
from tritondt.interop.transformers.entries import EXPERTS, Entry
from tritondt.parallel import ParallelStyle
from tritondt.parallel.boundary import InputPlan, activation_spec, input_plan_of
from tritondt.parallel.experts.expert_parallel import DependentOn
from tritondt.parallel.feature_cut import FeatureCut, evenly
from tritondt.parallel.gradients import summed_gradients
from tritondt.parallel.graphs import outside_of_graphs
from tritondt.parallel.local_run import LocalRun
from tritondt.parallel.weights import WeightStyle
from tritondt.sharding.mesh import Mesh
from tritondt.sharding.placement import Partial, Placement, Replicate, Shard
from tritondt.sharding.spec import DTensorSpec

_BY_FEATURES = ("packed_colwise", "colwise", "rowwise")
_BY_EXPERTS = "grouped_gemm"
# torch's grouped multiplication takes rows of whole multiples of 16 bytes: of 8 elements of two bytes.
_ALIGNED = 8


def experts_of(entries: list[Entry]) -> tuple[dict[str, ParallelStyle], list[Entry]]:
    """Styles of layers of experts by name, and the entries that are about other modules.

    Raises ParallelizeError for parameters of a layer that are not all cut in one way, and for those of other modules.
    """
    names = {entry.name: entry.module for entry in entries if entry.key}
    found: dict[str, ParallelStyle] = {}
    for name, module in names.items():
        cut = {entry.key: entry.style for entry in entries if entry.key and entry.name == name}
        found[name] = _checked(name, module, cut)
    others = [entry for entry in entries if entry.name not in names]
    without = [entry for entry in others if entry.style in (*EXPERTS, _BY_EXPERTS)]
    if without:
        raise ParallelizeError(
            f"the tp_plan has {without[0].style!r} for {without[0].name}, none of whose parameters it names; allowed "
            f"is a layer of experts with its parameters: {{'{without[0].name}.down_proj': 'rowwise', ...}}"
        )
    return found, others


def _checked(name: str, module: nn.Module, cut: Mapping[str, str]) -> "ShardedExperts":
    shapes = {key: tuple(value.shape) for key, value in module._parameters.items() if value is not None}
    by_experts = set(cut.values()) == {_BY_EXPERTS}
    wrong = [key for key, style in cut.items() if not by_experts and style not in _BY_FEATURES]
    if wrong:
        raise ParallelizeError(
            f"the tp_plan has {cut[wrong[0]]!r} for {name}.{wrong[0]}; allowed for parameters are {_BY_EXPERTS} for "
            f"all of a layer, or {', '.join(_BY_FEATURES)}"
        )
    if set(cut) != set(shapes) or any(len(shape) != 3 for shape in shapes.values()) or not _is_known(module):
        raise ParallelizeError(
            f"the tp_plan cuts {', '.join(cut)} of {name} ({type(module).__name__}), which has {shapes}; known are "
            "layers of experts of transformers all of whose parameters are weights of (experts, output, input) "
            "features, gates before the rest of them, and are named"
        )
    return ShardedExperts(None if by_experts else cut)


def feature_styles(module: nn.Module) -> dict[str, str] | None:
    """Names of the styles that cut the features of a layer of experts, by parameter; None for any other module.

    >>> feature_styles(nn.Linear(2, 2)) is None
    True
    """
    if set(module._parameters) != {"gate_up_proj", "down_proj"} or not _is_known(module):
        return None
    return {"gate_up_proj": "packed_colwise", "down_proj": "rowwise"}


def _is_known(module: nn.Module) -> bool:
    return (
        isinstance(getattr(module, "num_experts", None), int)
        and getattr(module, "_is_expert_parallel", None) is False
        and not module.is_transposed
        and bool(module.is_concatenated)
    )


class ShardedExperts(WeightStyle):
    """Style of a layer of experts whose forward takes (tokens, numbers of experts, factors), the same on all ranks.

    `features` are names of styles by parameter, which cut features; without them ranks have whole experts. Every
    forward is a collective call of the mesh: results are summed over the ranks, and in backward the gradients of tokens
    and factors. Raises ParallelizeError for fewer experts than ranks where these have whole ones.

    >>> from tritondt.comm.transports.threads import run_ranks
    >>> from tritondt.parallel.parallelize import parallelize_module
    >>> def shapes_on(rank):
    ...     experts = nn.Module()
    ...     experts.gate_up_proj = nn.Parameter(torch.ones(3, 8, 6))
    ...     experts.down_proj = nn.Parameter(torch.ones(3, 6, 4))
    ...     style = ShardedExperts({"gate_up_proj": "packed_colwise", "down_proj": "rowwise"})
    ...     parallelize_module(experts, Mesh((2,)), style)
    ...     return tuple(experts.gate_up_proj.to_local().shape), tuple(experts.down_proj.to_local().shape)
    >>> run_ranks(2, shapes_on)
    [((3, 4, 6), (3, 6, 2)), ((3, 4, 6), (3, 6, 2))]
    """

    @first("features")
    def __init__(self, features: Mapping[str, str] | None = None) -> None:
        self.features = features

    def parameter_placements(self, module: nn.Module, mesh: Mesh) -> dict[str, Placement]:
        """Placement of every parameter by features, or by its first dim."""
        num_ranks = mesh.shape[0]
        if self.features is None:
            return dict.fromkeys(module._parameters, Shard(0, sizes=self._numbers(module, mesh)))
        found: dict[str, Placement] = {}
        for name, style in self.features.items():
            parameter = module._parameters[name]
            assert parameter is not None, f"{name} was there when the plan was checked"
            dim, repeats = (2, 1) if style == "rowwise" else (1, 2 if style == "packed_colwise" else 1)
            length = parameter.shape[dim] // repeats
            # Of 4 bytes, half as many elements are aligned; with fewer units than ranks some would have none.
            unit = next(unit for unit in (_ALIGNED, 4, 2, 1) if length % unit == 0 and length // unit >= num_ranks)
            found[name] = FeatureCut(unit, balanced=True, repeats=repeats).shard(dim, parameter.shape[dim], num_ranks)
        return found

    def local_run(self, module: nn.Module, mesh: Mesh) -> LocalRun:
        """Hooks that show each rank its experts, or its part of all, and add up the results."""
        return _ShardedExpertsRun(mesh, None if self.features else self._numbers(module, mesh))

    def _numbers(self, module: nn.Module, mesh: Mesh) -> tuple[int, ...]:
        num_experts: Any = module.num_experts
        found = evenly(num_experts, mesh.shape[0])
        if 0 in found:
            raise ParallelizeError(
                f"{type(module).__name__} has {num_experts} experts, which over {mesh.shape[0]} ranks are "
                f"{', '.join(map(str, found))}; allowed is a mesh on which each rank has an expert"
            )
        return found


class _ShardedExpertsRun(LocalRun):
    """A layer of experts on tokens that all ranks have; `numbers` are those of the ranks' experts, or None."""

    def __init__(self, mesh: Mesh, numbers: tuple[int, ...] | None) -> None:
        super().__init__(mesh)
        self.numbers = numbers

    def input_plan(self, module: nn.Module, x: torch.Tensor) -> InputPlan:
        """Plan of tokens that are on every rank; their gradients are summed with those of the factors."""
        return input_plan_of(x, self.mesh, Replicate(), Replicate())

    def _before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        take = outside_of_graphs(self._take_routed) if is_dynamo_compiling() else self._take_routed
        found = take(module, [*args, *kwargs.values()])
        return tuple(found[: len(args)]), dict(zip(kwargs, found[len(args) :], strict=True))

    def _take_routed(self, module: nn.Module, given: list[Any]) -> list[Any]:
        """Arguments of the forward for what this rank has."""
        plain = [value for value in given if isinstance(value, torch.Tensor) and not isinstance(value, DTensor)]
        if len(plain) != 3 or len(given) != 3:
            kinds = ", ".join(type(value).__name__ for value in given)
            raise ParallelizeError(
                f"{type(module).__name__} was called with ({kinds}); allowed are three plain tensors: tokens, the "
                "numbers of their experts, and factors"
            )
        tokens, indices, factors = plain
        if torch.is_grad_enabled() and (tokens.requires_grad or factors.requires_grad):
            specs = [activation_spec(self.mesh, Partial(), tuple(x.shape), x.dtype) for x in (tokens, factors)]
            tokens, factors = _Shared.apply(specs, tokens, factors)  # type: ignore[no-untyped-call]
        if self.numbers is not None and self.mesh.coordinate is not None:
            place = self.mesh.coordinate[0]
            first, number = sum(self.numbers[:place]), self.numbers[place]
            is_here = (indices >= first) & (indices < first + number)
            # The number beyond the last is that of no expert, as transformers' expert parallelism has it.
            indices = torch.where(is_here, indices - first, number)
            factors = factors.masked_fill(~is_here, 0)
        return [self._take_in(module, tokens), indices, factors]

    def inputs(self, module: nn.Module, local: torch.Tensor, parameters: dict[str, Any]) -> tuple[torch.Tensor, Any]:
        """Tokens; the module's code finds the number of this rank's experts."""
        sources = [local, *parameters.values()]
        if self.numbers is not None and self.mesh.coordinate is not None:
            parameters.update(num_experts=self.numbers[self.mesh.coordinate[0]], _is_expert_parallel=True)
        return local, sources

    def output(self, module: nn.Module, output: torch.Tensor, input_plan: InputPlan, call: Any) -> torch.Tensor:
        """Sum of all ranks' results."""
        if torch.is_grad_enabled() and not output.requires_grad:
            # No token came to these experts: the others' backward waits for this rank's gradients, of zeros.
            output = DependentOn.apply(output, *call)  # type: ignore[no-untyped-call]
        return self.hand_out(output, Partial(), Replicate(), tuple(output.shape), use_local_output=True)


class _Shared(torch.autograd.Function):
    """Plain tensors that ranks use differently, so that their gradients are terms of sums."""

    @staticmethod
    def forward(ctx: Any, specs: list[DTensorSpec], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The tensors themselves."""
        ctx.specs = specs
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        """Sums over the ranks, in one exchange where the dtypes are equal."""
        return None, *[found.to_local() for found in summed_gradients(grads, ctx.specs)]
