"""nn.Embedding on local tensors, its features (columns) or its vocabulary (rows) cut over the ranks."""

from typing import Any

import torch
from torch import nn

from tritondt.dtensor.tensor import DTensor
from tritondt.parallel.boundary import InputPlan, input_plan_of
from tritondt.parallel.local_run import CutRun, distributed_parameter
from tritondt.sharding.placement import Partial, Replicate


class ColumnEmbedding(CutRun):
    """Embedding of which every rank has some features of the whole vocabulary."""

    def input_plan(self, module: nn.Module, x: torch.Tensor) -> InputPlan:
        """Plan that brings in all indices."""
        return input_plan_of(x, self.mesh, self.given, Replicate())

    def output(self, module: nn.Module, output: torch.Tensor, input_plan: InputPlan, call: None) -> torch.Tensor:
        """Own features, redistributed as wanted."""
        shape: Any = (*output.shape[:-1], module.embedding_dim)
        return self.hand_out(output, self.features, self.wanted, shape, use_local_output=self.use_local_output)


class RowEmbedding(CutRun):
    """Embedding of which every rank has some rows; the term of an index is zero where the row is another rank's."""

    def input_plan(self, module: nn.Module, x: torch.Tensor) -> InputPlan:
        """Plan that brings in all indices."""
        return input_plan_of(x, self.mesh, self.given, Replicate())

    def inputs(self, module: nn.Module, local: torch.Tensor, parameters: dict[str, Any]) -> tuple[torch.Tensor, Any]:
        """Own indices counted from the first own row, 0 for all others; and a mask of the others."""
        start, stop = _rows(module)
        if start == stop:  # a rank without rows looks up a row of zeros, which it masks
            weight = parameters["weight"]
            parameters["weight"] = torch.cat([weight, weight.new_zeros(1, weight.shape[1])])
        padding: Any = module.padding_idx
        parameters["padding_idx"] = padding - start if padding is not None and start <= padding < stop else None
        length: Any = module.num_embeddings
        # What no rank has is not masked, so that every rank's look-up refuses it.
        others = ((local >= 0) & (local < start)) | ((local >= stop) & (local < length))
        return (local - start).masked_fill(others, 0), others

    def output(
        self, module: nn.Module, output: torch.Tensor, input_plan: InputPlan, call: torch.Tensor
    ) -> torch.Tensor:
        """Sum of the ranks' terms, redistributed as wanted."""
        own = output.masked_fill(call.unsqueeze(-1), 0)
        return self.hand_out(own, Partial(), self.wanted, own.shape, use_local_output=self.use_local_output)


def _rows(module: nn.Module) -> tuple[int, int]:
    """First own row of the table, and the end of the own rows."""
    weight = distributed_parameter(module, "weight")
    assert isinstance(weight, DTensor), f"the weight of {module} is distributed"
    assert weight._spec.coordinate is not None, "this rank is not on the mesh"
    intervals = weight._spec.layout.intervals(0, weight._spec.coordinate)
    return intervals[0] if intervals else (0, 0)
