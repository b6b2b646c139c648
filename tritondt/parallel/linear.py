"""nn.Linear on local tensors, its output features (columns) or its input features (rows) cut over the ranks."""

from typing import Any

import torch
from torch import nn

from tritondt.dtensor import DTensor
from tritondt.parallel.boundary import Entry, entry_of
from tritondt.parallel.local_run import CutRun
from tritondt.placement import Partial, Placement, Replicate, Shard


def _features(module: nn.Module) -> int:
    features = module.in_features
    assert isinstance(features, int), f"{module} has {features} input features"
    return features


class ColumnLinear(CutRun):
    """Every rank has some output features: the whole input comes in, own features go out."""

    def entry(self, module: nn.Module, x: torch.Tensor) -> Entry:
        """The whole input; each rank's gradient of it is a term."""
        return entry_of(x, self.mesh, self.given, Replicate(), gradient=Partial(), features=_features(module))

    def output(self, module: nn.Module, output: torch.Tensor, entry: Entry, call: None) -> torch.Tensor:
        """Own features, or what is wanted in place of them."""
        shape: Any = (*output.shape[:-1], module.out_features)
        return self.hand_out(output, self.features, self.wanted, shape, use_local_output=self.use_local_output)


class RowLinear(CutRun):
    """Every rank has some input features: own features come in, terms of the output go out and are added up.

    The bias is added once, after that.
    """

    def entry(self, module: nn.Module, x: torch.Tensor) -> Entry:
        """Own features of the input."""
        return entry_of(x, self.mesh, self.given, self.features, features=_features(module))

    def gradient(self, name: str) -> Placement | None:
        """Of the bias: ranks with parts of the output have terms, ranks with all of it have all of it."""
        return Partial() if name == "bias" and isinstance(self.wanted, Shard) else None

    def inputs(self, module: nn.Module, local: torch.Tensor, parameters: dict[str, Any]) -> tuple[torch.Tensor, Any]:
        """The matmul runs without a bias, which is kept for its result."""
        bias = parameters.get("bias")
        parameters["bias"] = None
        return local, bias

    def output(self, module: nn.Module, output: torch.Tensor, entry: Entry, call: Any) -> torch.Tensor:
        """The sum of all ranks' terms, as it is wanted, and the bias."""
        bias: torch.Tensor | None = call
        wanted = self.wanted
        cuts_features = isinstance(wanted, Shard) and wanted.dim in (-1, output.ndim - 1)
        if bias is not None and (cuts_features or isinstance(wanted, Partial)):
            bias = self._part_of_bias(module)
        return self.hand_out(output, Partial(), wanted, output.shape, bias=bias, use_local_output=self.use_local_output)

    def _part_of_bias(self, module: nn.Module) -> torch.Tensor:
        """The bias of own features, or its term."""
        bias, wanted = module._parameters["bias"], self.wanted
        assert isinstance(bias, DTensor), f"the bias of {module} is distributed with its weight"
        if isinstance(wanted, Shard):
            wanted = Shard(0, wanted.unit, wanted.sizes, wanted.repeats)
        return bias.redistribute(placements=(wanted,)).to_local()
