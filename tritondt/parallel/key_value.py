"""KeyValueParallel: projections to key and value heads that several ranks need, where there are fewer than ranks."""

import torch
from torch import nn

from tritondt.errors import ParallelizeError
from tritondt.errors.arguments import first
from tritondt.parallel.boundary import InputPlan, activation_spec
from tritondt.parallel.feature_cut import FeatureCut, members_of_group
from tritondt.parallel.linear import ColumnLinear
from tritondt.parallel.local_run import LocalRun
from tritondt.parallel.style import checked_layout
from tritondt.parallel.weights import WeightStyle
from tritondt.redistribution.autograd import redistribute
from tritondt.sharding.mesh import Mesh
from tritondt.sharding.placement import Partial, Placement, Replicate, Shard


class KeyValueParallel(WeightStyle):
    """Style of an nn.Linear to key or value heads that gives each rank the heads its queries attend to.

    `unit` is the number of features of a head. With fewer heads than ranks, each head belongs to a group of neighboring
    ranks. They cut its features, each rank projects its own, and they exchange the results. All of them then have the
    head, and its weight is stored once. The gradient of a head is summed over its group. With at least as many heads as
    ranks, each rank has whole heads, and nothing is exchanged. `ColwiseParallel(unit=unit, groups=NUMBER)` cuts the
    queries to match, and `RowwiseParallel(...)` the output's projection, where NUMBER is the number of key heads: 6
    heads of 2 key heads over 4 ranks are 2, 1, 2 and 1, with one key head each. The shapes on a rank determine how many
    queries share a key head there, as `enable_gqa` of scaled_dot_product_attention expects.

    A plain input counts as `input_layouts` (default: Replicate) and is gathered; the output is a plain local tensor.
    Every forward may be a collective call of the mesh. Raises ParallelizeError for another module, and for features
    that are not whole heads.

    >>> from tritondt.comm.transports.threads import run_ranks
    >>> from tritondt.parallel.parallelize import parallelize_module
    >>> def shapes_on(rank):
    ...     keys = parallelize_module(nn.Linear(6, 2 * 4), Mesh((4,)), KeyValueParallel(unit=4))
    ...     return tuple(keys.weight.to_local().shape), tuple(keys(torch.ones(3, 6)).shape)
    >>> run_ranks(4, shapes_on) == [((2, 6), (3, 4))] * 4
    True
    """

    @first("unit")  # it is used with a module
    def __init__(self, *, unit: int, input_layouts: Placement | None = None) -> None:
        self.unit = unit
        self.input_layouts = checked_layout(input_layouts, "input_layouts") or Replicate()
        if unit < 1:
            raise ParallelizeError(f"unit got {unit}; allowed is the number of features of a head, at least 1")

    def parameter_placements(self, module: nn.Module, mesh: Mesh) -> dict[str, Placement]:
        """Placement of weight and bias by output features, whole heads or parts of one."""
        return dict.fromkeys(("weight", "bias"), self._cut(module).shard(0, self._features(module), mesh.shape[0]))

    def local_run(self, module: nn.Module, mesh: Mesh) -> LocalRun:
        """Hooks that take the whole input and return whole heads."""
        features = self._cut(module).shard(-1, self._features(module), mesh.shape[0])
        return _KeyValueRun(mesh, self.input_layouts, features, self._features(module) // self.unit)

    def _features(self, module: nn.Module) -> int:
        if not isinstance(module, nn.Linear):
            raise ParallelizeError(
                f"KeyValueParallel knows nn.Linear, not {type(module).__name__}; name the projection"
            )
        return module.out_features

    def _cut(self, module: nn.Module) -> FeatureCut:
        groups, left = divmod(self._features(module), self.unit)
        if left or not groups:
            raise ParallelizeError(
                f"unit={self.unit} was given for {self._features(module)} output features; allowed is the number of "
                "features of a head, which divides them"
            )
        return FeatureCut(groups=groups)


class _KeyValueRun(ColumnLinear):
    """Linear to `num_heads` heads, whose ranks hand out whole heads."""

    def __init__(self, mesh: Mesh, given: Placement, features: Shard, num_heads: int) -> None:
        super().__init__(mesh, given, features, features, use_local_output=True)
        self.num_heads = num_heads

    def output(self, module: nn.Module, output: torch.Tensor, input_plan: InputPlan, call: None) -> torch.Tensor:
        """Own heads, gathered from the ranks of the group."""
        num_ranks = self.mesh.shape[0]
        if self.num_heads >= num_ranks or self.mesh.coordinate is None:
            return output
        members = members_of_group(self.num_heads, num_ranks, self.mesh.coordinate[0])
        ranks = self.mesh.ranks[members.start : members.stop]
        group = Mesh((len(members),), ranks=ranks, device_type=self.mesh.device_type)
        sizes = self.features.sizes
        assert sizes is not None, f"groups of ranks have sizes, {self.features} has none"
        own = sizes[members.start : members.stop]
        shape = (*output.shape[:-1], sum(own))
        placements: tuple[Placement, ...] = (Shard(output.ndim - 1, sizes=own), Replicate())
        source, target = (activation_spec(group, placement, shape, output.dtype) for placement in placements)
        # Each rank's queries give a term of the gradient of the head.
        return redistribute(output, source, target, grad_placements=(Partial(),))
