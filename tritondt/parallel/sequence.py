"""SequenceParallel: a module with all parameters on every rank, run on each rank's own part of the sequence."""

from typing import Any

import torch
from torch import nn

from tritondt.dtensor.tensor import DTensor
from tritondt.errors import ParallelizeError
from tritondt.errors.arguments import first
from tritondt.parallel.boundary import InputPlan, input_plan_of, output_plan_of
from tritondt.parallel.local_run import LocalRun, check_input
from tritondt.parallel.style import checked_layout
from tritondt.parallel.weights import WeightStyle
from tritondt.redistribution.refusals import refuse_redistribution
from tritondt.sharding.mesh import Mesh
from tritondt.sharding.placement import Partial, Placement, Replicate, Shard

# Of torch's own layers those that treat every position of the sequence by itself.
_BY_POSITION: tuple[type[nn.Module], ...] = (
    *(nn.LayerNorm, nn.RMSNorm, nn.Linear, nn.Embedding, nn.Identity),
    *(nn.Dropout, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.LeakyReLU, nn.ELU),
)


class SequenceParallel(WeightStyle):
    """Style that runs a layer on this rank's part of the sequence, dim `sequence_dim` of its input and output.

    It is for layers that treat every position separately: norms, dropout, activations, nn.Linear, nn.Embedding, and
    layers of your own without inner layers. A plain input counts as this rank's part of equally long ones. The output
    is distributed unless `use_local_output`, and laid out as `output_layouts` (default: as the input): with Replicate
    the layers that share it gather it once, and their gradients are added and scattered once. The parameters'
    gradients, which are terms, are summed before hooks see them, so backward is a collective call. Raises
    ParallelizeError for any other layer and for Partial, and in forward where the layer normalizes over `sequence_dim`.
    Source: torch.distributed.tensor.parallel.SequenceParallel.

    >>> from tritondt.comm.transports.threads import run_ranks
    >>> from tritondt.parallel.parallelize import parallelize_module
    >>> def output_on(rank):
    ...     norm = parallelize_module(nn.LayerNorm(6), Mesh((2,)), SequenceParallel())
    ...     output = norm(torch.ones(1, 4, 6))
    ...     return output.placements, tuple(output.shape)
    >>> run_ranks(2, output_on)[0]
    ((S1,), (1, 8, 6))
    """

    @first("sequence_dim")  # it is used in the first forward
    def __init__(
        self, *, sequence_dim: int = 1, output_layouts: Placement | None = None, use_local_output: bool = False
    ) -> None:
        self.sequence_dim, self.use_local_output = sequence_dim, use_local_output
        self.output_layouts = checked_layout(output_layouts, "output_layouts")
        if isinstance(self.output_layouts, Partial):
            raise ParallelizeError(f"output_layouts got {output_layouts}; allowed are Shard and Replicate")

    def parameter_placements(self, module: nn.Module, mesh: Mesh) -> dict[str, Placement]:
        """Replicate for every parameter."""
        is_torchs = type(module).__module__.startswith("torch.nn.")
        if next(module.children(), None) is not None or (is_torchs and not isinstance(module, _BY_POSITION)):
            known = ", ".join(kind.__name__ for kind in _BY_POSITION)
            raise ParallelizeError(
                f"SequenceParallel runs layers that treat every position by itself, not {type(module).__name__}; "
                f"allowed are {known}, and layers of your own without layers inside"
            )
        return {name: Replicate() for name in module._parameters}

    def local_run(self, module: nn.Module, mesh: Mesh) -> LocalRun:
        """Hooks that take and return this rank's positions."""
        kind = RandomRun if isinstance(module, nn.Dropout) else PositionRun
        return kind(mesh, self.sequence_dim, self.output_layouts, self.use_local_output)


class PositionRun(LocalRun):
    """A module that every rank runs on some positions of the sequence."""

    def __init__(self, mesh: Mesh, dim: int, wanted: Placement | None, use_local_output: bool) -> None:
        super().__init__(mesh)
        self.cut, self.wanted, self.use_local_output = Shard(dim), wanted, use_local_output

    def input_plan(self, module: nn.Module, x: torch.Tensor) -> InputPlan:
        """Plan of own positions."""
        dim = self.cut.dim + x.ndim if self.cut.dim < 0 else self.cut.dim
        normalized = getattr(module, "normalized_shape", ())
        if isinstance(normalized, tuple) and dim >= x.ndim - len(normalized):
            raise ParallelizeError(
                f"{module} normalizes the last {len(normalized)} of {x.ndim} dims, dim {dim} among them, which "
                "SequenceParallel cuts; allowed is a sequence_dim before them"
            )
        return input_plan_of(x, self.mesh, self.cut, self.cut)

    def gradient(self, name: str) -> Placement | None:
        """Partial, since own positions give terms."""
        return Partial()

    def output(self, module: nn.Module, output: torch.Tensor, input_plan: InputPlan, call: None) -> torch.Tensor:
        """Own positions of the output, or as wanted."""
        if self.use_local_output and self.wanted is None:
            return output
        cut = input_plan.target.placements[0]
        assert isinstance(cut, Shard), f"{input_plan} leaves the sequence whole"
        dim = cut.dim
        shape = (*output.shape[:dim], input_plan.target.shape[dim], *output.shape[dim + 1 :])
        wanted = cut if self.wanted is None else self.wanted
        return self.hand_out(output, cut, wanted, shape, use_local_output=self.use_local_output)

    def leave_out(self, module: nn.Module, input_plan: InputPlan, call: None, error: Exception) -> None:
        """The others hear why no positions of this rank come, where these are redistributed."""
        if self.wanted is not None:
            given = input_plan.target
            output_plan = output_plan_of(self.mesh, given.placements[0], self.wanted, given.shape, given.dtype)
            if output_plan.moves:
                refuse_redistribution(output_plan.source, output_plan.target, error)


class RandomRun(PositionRun):
    """A layer that draws random numbers, run on distributed tensors, whose numbers follow from the place in the whole.

    On local ones every rank, seeded alike, would draw the same for its own positions.
    """

    def _take_in(self, module: nn.Module, x: Any) -> torch.Tensor:
        check_input(module, x)
        plan = self._known_input_plan(module, x)
        if not isinstance(x, DTensor):
            source = plan.source
            x = DTensor.from_local(
                x, self.mesh, source.placements, shape=source.shape, stride=source.tensor_meta.stride
            )
        if plan.moves:
            x = x.redistribute(placements=plan.target.placements)
        found: torch.Tensor = x
        return found

    def _give_out(self, module: nn.Module, output: Any) -> torch.Tensor | None:
        if not isinstance(output, DTensor):
            return None
        found: torch.Tensor = output if self.wanted is None else output.redistribute(placements=(self.wanted,))
        return found.to_local() if self.use_local_output and isinstance(found, DTensor) else found
