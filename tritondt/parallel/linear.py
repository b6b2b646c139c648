"""nn.Linear on local tensors, its output features (columns) or its input features (rows) cut over the ranks.

With `overlap` a plain nn.Linear multiplies while its input is gathered, or its output is scattered, by position.
"""

from abc import abstractmethod
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from tritondt.dtensor.tensor import DTensor
from tritondt.errors import ParallelizeError
from tritondt.parallel.boundary import InputPlan, activation_spec, input_plan_of, output_plan_of
from tritondt.parallel.graphs import outside_of_graphs
from tritondt.parallel.local_run import CutRun, call_of, distributed_parameter
from tritondt.parallel.overlap import all_gather_matmul, is_divisible, is_eager, matmul_reduce_scatter
from tritondt.redistribution.autograd import gradient_spec
from tritondt.redistribution.refusals import refuse_redistribution
from tritondt.sharding.placement import Partial, Placement, Replicate, Shard
from tritondt.sharding.spec import DTensorSpec


def linear_features(module: nn.Module) -> tuple[int, int]:
    """Numbers of input and output features of an nn.Linear, or of a module whose weight is (input, output).

    >>> linear_features(nn.Linear(6, 5))
    (6, 5)
    """
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    weight: Any = module.weight
    num_inputs, num_outputs = weight.shape
    return num_inputs, num_outputs


class TransposedForward:
    """Forward of a module whose weight is (input, output), whatever its class has; copied with its module.

    The class may reshape by the number of features of the whole.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """Product with the weight that the module holds now, and its bias, if any."""
        module: Any = self.module
        return nn.functional.linear(input, module.weight.t(), getattr(module, "bias", None))


class OverlappedForward:
    """Replacement of the forward of an nn.Linear whose product is made while tensors travel; copied with its module."""

    def __init__(self, module: nn.Module, run: "LinearRun") -> None:
        self.module, self.run = module, run

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """Product as the module's output hook takes it."""
        return outside_of_graphs(self._run)(input) if is_dynamo_compiling() else self._run(input)

    def _run(self, input: torch.Tensor) -> torch.Tensor:
        call = call_of(self.module)
        found = None if call is None else self.run.overlapped(self.module, input, *call)
        if found is None:
            found = nn.Linear.forward(self.module, input)  # type: ignore[arg-type]
        return found


class LinearRun(CutRun):
    """An nn.Linear, or a subclass of nn.Linear, whose weight is cut; or a module whose weight is (input, output)."""

    in_features: int
    out_features: int

    def install(self, module: nn.Module) -> None:
        """Registers the hooks; takes over the forward where it is nn.Linear's own and can overlap."""
        super().install(module)
        self.in_features, self.out_features = linear_features(module)
        if not isinstance(module, nn.Linear):
            module.__dict__["forward"] = TransposedForward(module)
            return
        is_plain = type(module).forward is nn.Linear.forward and "forward" not in module.__dict__
        if self.overlap and is_plain and len(self.mesh.ranks) > 1:
            module.__dict__["forward"] = OverlappedForward(module, self)

    def takes_over(self, module: nn.Module) -> bool:
        """Whether the module's forward is an OverlappedForward."""
        return isinstance(module.__dict__.get("forward"), OverlappedForward)

    @abstractmethod
    def overlapped(
        self, module: nn.Module, local: torch.Tensor, input_plan: InputPlan, call: Any
    ) -> torch.Tensor | None:
        """Product in chunks; None where nothing can overlap."""


class ColumnLinear(LinearRun):
    """Linear of which every rank has some output features: the whole input comes in, own features go out."""

    def input_plan(self, module: nn.Module, x: torch.Tensor) -> InputPlan:
        """Plan of the whole input, of which each rank's gradient is a term; or of own positions, gathered meanwhile."""
        input_plan = input_plan_of(x, self.mesh, self.given, Replicate(), gradient=Partial(), features=self.in_features)
        if not self.takes_over(module) or not is_divisible(input_plan.source):
            return input_plan
        source, gradient = input_plan.source, gradient_spec(input_plan.source)
        return InputPlan(source, source, gradient, gradient, moves=False, as_terms=False, is_shared=False)

    def overlapped(
        self, module: nn.Module, local: torch.Tensor, input_plan: InputPlan, call: None
    ) -> torch.Tensor | None:
        """Product of all positions, gathered while they are multiplied."""
        if not is_divisible(input_plan.target):
            return None
        weight: Any = module.weight
        bias: Any = module.bias
        return all_gather_matmul(local, weight, bias, source=input_plan.target)

    def output(self, module: nn.Module, output: torch.Tensor, input_plan: InputPlan, call: None) -> torch.Tensor:
        """Own features, redistributed as wanted."""
        shape = (*output.shape[:-1], self.out_features)
        return self.hand_out(output, self.features, self.wanted, shape, use_local_output=self.use_local_output)


class _RowCall(NamedTuple):
    """Bias to be added at the end, and the spec of a product that goes out by position, None without overlap."""

    bias: torch.Tensor | None
    scattered: DTensorSpec | None


class RowLinear(LinearRun):
    """Linear of which every rank has some input features: own features come in, terms of the output are added up.

    The bias is added once, after that.
    """

    def input_plan(self, module: nn.Module, x: torch.Tensor) -> InputPlan:
        """Plan of own features of the input."""
        return input_plan_of(x, self.mesh, self.given, self.features, features=self.in_features)

    def gradient(self, name: str) -> Placement | None:
        """Placement of the gradient of the bias: terms where ranks have parts of the output, else as the parameter."""
        return Partial() if name == "bias" and isinstance(self.wanted, Shard) else None

    def inputs(
        self, module: nn.Module, local: torch.Tensor, parameters: dict[str, Any]
    ) -> tuple[torch.Tensor, _RowCall]:
        """Input of a matmul without bias; the bias is kept for its result."""
        bias = parameters.get("bias")
        parameters["bias"] = None
        return local, _RowCall(bias, self._scattered(module, local))

    def _scattered(self, module: nn.Module, local: torch.Tensor) -> DTensorSpec | None:
        if not self.takes_over(module) or not isinstance(self.wanted, Shard) or not is_eager(local):
            return None
        shape = (*local.shape[:-1], self.out_features)
        spec = activation_spec(self.mesh, self.wanted, shape, local.dtype)
        return spec if is_divisible(spec) else None

    def overlapped(
        self, module: nn.Module, local: torch.Tensor, input_plan: InputPlan, call: _RowCall
    ) -> torch.Tensor | None:
        """Own positions of the sum of the products."""
        weight: Any = module.weight
        return None if call.scattered is None else matmul_reduce_scatter(local, weight, target=call.scattered)

    def output(self, module: nn.Module, output: torch.Tensor, input_plan: InputPlan, call: _RowCall) -> torch.Tensor:
        """Sum of all ranks' terms, redistributed as wanted, and the bias."""
        bias, wanted, scattered = call.bias, self.wanted, call.scattered
        if output.ndim != input_plan.target.ndim or output.shape[-1] != self.out_features:
            error = ParallelizeError(
                f"{type(module).__name__} under RowwiseParallel took {tuple(input_plan.target.shape)} and gave "
                f"{tuple(output.shape)}; allowed are as many dims, the last of {self.out_features} features"
            )
            self.leave_out(module, input_plan, call, error)
            raise error
        found, shape = (Partial(), output.shape) if scattered is None else (wanted, scattered.shape)
        cuts_features = isinstance(wanted, Shard) and wanted.dim in (-1, output.ndim - 1)
        if bias is not None and (cuts_features or isinstance(wanted, Partial)):
            bias = self._part_of_bias(module)
        return self.hand_out(output, found, wanted, shape, bias=bias, use_local_output=self.use_local_output)

    def leave_out(self, module: nn.Module, input_plan: InputPlan, call: _RowCall, error: Exception) -> None:
        """The others hear why no terms of this rank come, unless these travel while they are multiplied."""
        if call.scattered is None:
            given = input_plan.target
            shape, dtype = (*given.shape[:-1], self.out_features), given.dtype
            output_plan = output_plan_of(self.mesh, Partial(), self.wanted, shape, dtype)
            refuse_redistribution(output_plan.source, output_plan.target, error)

    def _part_of_bias(self, module: nn.Module) -> torch.Tensor:
        """Bias of own features, or its term."""
        bias, wanted = distributed_parameter(module, "bias"), self.wanted
        assert isinstance(bias, DTensor), f"the bias of {module} is distributed with its weight"
        if isinstance(wanted, Shard):
            wanted = wanted.on(0)
        return bias.redistribute(placements=(wanted,)).to_local()
