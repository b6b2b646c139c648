"""ReplicateParallel: modules with all parameters on every rank, whatever part of the activations a rank has."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tritondt.errors import ParallelizeError
from tritondt.errors.arguments import checked
from tritondt.parallel.boundary import InputPlan, input_plan_of
from tritondt.parallel.local_run import LocalRun, run_of
from tritondt.parallel.parameters import distribute_parameter
from tritondt.parallel.style import check_free, checked_layout, claim
from tritondt.parallel.weights import WeightStyle
from tritondt.sharding.mesh import Mesh, canonical_mesh
from tritondt.sharding.placement import Partial, Placement, Replicate, Shard


class ReplicateParallel(WeightStyle):
    """Style for all other modules: parameters are replicated, and each rank runs the module on its own activations.

    With `input_layouts` Shard(dim) ranks have parts of the activations, so gradients of the parameters are terms, which
    are summed. With Replicate (the default) ranks have all activations, and gradients are equal. A plain input counts
    as this layout, and a distributed one is redistributed to it. Inner layers get the tensors that the module's forward
    passes; those that an earlier plan laid out keep their layout. Outputs are local unless `use_local_output=False`;
    distributed outputs are cut along the input's dim. With Shard backward is a collective call. Raises ParallelizeError
    for any other placement.

    >>> import torch
    >>> from tritondt.comm.transports.threads import run_ranks
    >>> from tritondt.parallel.parallelize import parallelize_module
    >>> def gradient_on(rank):
    ...     scale = parallelize_module(nn.LayerNorm(2), Mesh((2,)), ReplicateParallel(input_layouts=Shard(0)))
    ...     scale(torch.ones(1, 2)).sum().backward()
    ...     return scale.bias.grad.placements, scale.bias.grad.to_local().tolist()
    >>> run_ranks(2, gradient_on)
    [((R,), [2.0, 2.0]), ((R,), [2.0, 2.0])]
    """

    @checked
    def __init__(self, *, input_layouts: Placement | None = None, use_local_output: bool = True) -> None:
        self.input_layouts = checked_layout(input_layouts, "input_layouts") or Replicate()
        self.use_local_output = use_local_output
        if isinstance(self.input_layouts, Partial):
            raise ParallelizeError(f"input_layouts got {self.input_layouts}; allowed are Shard and Replicate")

    def parameter_placements(self, module: nn.Module, mesh: Mesh) -> dict[str, Placement]:
        """Replicate for every parameter of the module itself."""
        return {name: Replicate() for name in module._parameters}

    def local_run(self, module: nn.Module, mesh: Mesh) -> LocalRun:
        """Hooks that show the parameters as local tensors."""
        return ReplicatedRun(mesh, self.input_layouts, self.use_local_output)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh | Mesh) -> nn.Module:
        """Replicates the parameters of the module, and of all layers inside that have no style of their own."""
        chosen = [each for each in module.modules() if each is module or (each._parameters and run_of(each) is None)]
        for each in chosen:
            check_free(each, self, "input", "weights", "output")
        for each in chosen:
            for name in each._parameters:
                distribute_parameter(each, name, device_mesh, Replicate(), self.src_data_rank)
            is_local = self.use_local_output or each is not module
            ReplicatedRun(canonical_mesh(device_mesh), self.input_layouts, is_local).install(each)
            claim(each, self, "input", "weights", "output")
        return module


class ReplicatedRun(LocalRun):
    """A module that every rank runs on the activations it has."""

    def __init__(self, mesh: Mesh, layout: Placement, use_local_output: bool) -> None:
        super().__init__(mesh)
        self.layout, self.use_local_output = layout, use_local_output
        self.hands_out_as_is = use_local_output

    def input_plan(self, module: nn.Module, x: torch.Tensor) -> InputPlan:
        """Plan of what this rank has of the input."""
        return input_plan_of(x, self.mesh, self.layout, self.layout)

    def gradient(self, name: str) -> Placement | None:
        """Partial where ranks have parts of the activations."""
        return Partial() if isinstance(self.layout, Shard) else None

    def output(self, module: nn.Module, output: torch.Tensor, input_plan: InputPlan, call: None) -> torch.Tensor:
        """The output as this rank has it."""
        if self.use_local_output:
            return output
        shape, (placement,) = tuple(output.shape), input_plan.target.placements
        if isinstance(placement, Shard):
            shape = (*shape[: placement.dim], input_plan.target.shape[placement.dim], *shape[placement.dim + 1 :])
        return self.hand_out(output, placement, placement, shape, use_local_output=False)
