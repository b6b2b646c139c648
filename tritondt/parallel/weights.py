"""ColwiseParallel and RowwiseParallel: the styles that cut the weight of a matmul or of a table."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tritondt.errors import ParallelizeError
from tritondt.errors.arguments import checked
from tritondt.parallel.embedding import ColumnEmbedding, RowEmbedding
from tritondt.parallel.feature_cut import feature_cut
from tritondt.parallel.linear import ColumnLinear, RowLinear, linear_features
from tritondt.parallel.local_run import LocalRun
from tritondt.parallel.parameters import distribute_parameter
from tritondt.parallel.style import ParallelStyle, check_free, check_own_weights, checked_layout, claim
from tritondt.sharding.mesh import Mesh, canonical_mesh
from tritondt.sharding.placement import Placement, Replicate


class WeightStyle(ParallelStyle):
    """A style that knows the placement of every parameter of a module before it is applied."""

    @abstractmethod
    def parameter_placements(self, module: nn.Module, mesh: Mesh) -> dict[str, Placement]:
        """Placement of every parameter by name; ParallelizeError for a module that the style cannot run."""

    @abstractmethod
    def local_run(self, module: nn.Module, mesh: Mesh) -> LocalRun:
        """Hooks around the module's forward."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh | Mesh) -> nn.Module:
        check_own_weights(module, self)
        placements = self.parameter_placements(module, canonical_mesh(device_mesh))
        check_free(module, self, "input", "weights", "output")
        for name, placement in placements.items():
            distribute_parameter(module, name, device_mesh, placement, self.src_data_rank)
        self.local_run(module, canonical_mesh(device_mesh)).install(module)
        claim(module, self, "input", "weights", "output")
        return module


class ColwiseParallel(WeightStyle):
    """Style that cuts the output features of an nn.Linear, or the features of an nn.Embedding.

    A plain input counts as `input_layouts` (default: Replicate) and is gathered. The output has `output_layouts`
    (default: sharded on its last dim), as a plain local tensor unless `use_local_output=False`. `unit` is the number of
    features that stay together: 6 heads over 4 ranks with `unit=head_dim` are 2, 2, 2 and 0, with `balanced=True` 2, 2,
    1 and 1. `sizes` lists the features of each rank instead of both. `repeats` is the number of equal blocks that are
    each cut this way: 3 for queries, keys and values in one matrix. `groups` is the number of equal blocks; no rank
    gets parts of two, such as query heads that share a key head (`KeyValueParallel`). `transposed` is for modules whose
    weight is (input, output) features instead of nn.Linear's (output, input), such as Conv1D of transformers' GPT-2.
    Every forward may be a collective call of the mesh.

    With `overlap` an nn.Linear whose input is sharded on a dim before the last multiplies the chunks that have arrived
    while the rest is gathered (`all_gather_matmul`). A subclass with its own forward, and any other input, run without
    overlap. Nothing overlaps where the cost table predicts no gain, as between processes of one host.

    Raises ParallelizeError for another kind of module or placement. Source:
    torch.distributed.tensor.parallel.ColwiseParallel.

    >>> import torch
    >>> from tritondt.comm.transports.threads import run_ranks
    >>> from tritondt.parallel.parallelize import parallelize_module
    >>> def shapes_on(rank):
    ...     linear = parallelize_module(nn.Linear(6, 5), Mesh((2,)), ColwiseParallel())
    ...     return tuple(linear.weight.to_local().shape), tuple(linear(torch.ones(3, 6)).shape)
    >>> run_ranks(2, shapes_on)
    [((3, 6), (3, 3)), ((2, 6), (3, 2))]
    """

    @checked
    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        unit: int = 1,
        repeats: int = 1,
        sizes: Sequence[int] | None = None,
        balanced: bool = False,
        groups: int | None = None,
        overlap: bool = False,
        transposed: bool = False,
    ) -> None:
        self.cut = feature_cut(unit, sizes, balanced, repeats, groups)
        self.input_layouts = checked_layout(input_layouts, "input_layouts") or Replicate()
        self.output_layouts = checked_layout(output_layouts, "output_layouts")
        self.use_local_output, self.overlap, self.transposed = use_local_output, overlap, transposed

    def parameter_placements(self, module: nn.Module, mesh: Mesh) -> dict[str, Placement]:
        """Placement of the weight by its output features, which an embedding has last; of the bias alike."""
        if _is_linear(module, self):
            features = linear_features(module)[1]
            weight, bias = (self.cut.shard(dim, features, mesh.shape[0]) for dim in (int(self.transposed), 0))
            return {name: cut for name, cut in (("weight", weight), ("bias", bias)) if name in module._parameters}
        if isinstance(module, nn.Embedding):
            _check_embedding(module, self)
            return {"weight": self.cut.shard(1, module.embedding_dim, mesh.shape[0])}
        raise _unknown(module, self)

    def local_run(self, module: nn.Module, mesh: Mesh) -> LocalRun:
        """Hooks that take the whole input and return this rank's features of the output."""
        kind, length = (
            (ColumnLinear, linear_features(module)[1])
            if _is_linear(module, self)
            else (ColumnEmbedding, cast("nn.Embedding", module).embedding_dim)
        )
        features = self.cut.shard(-1, length, mesh.shape[0])
        wanted = self.output_layouts or features
        return kind(mesh, self.input_layouts, features, wanted, self.use_local_output, self.overlap)


class RowwiseParallel(WeightStyle):
    """Style that cuts the input features of an nn.Linear, or the vocabulary of an nn.Embedding; the ranks' terms are
    summed.

    A plain input counts as `input_layouts` (default: sharded on its last dim; for an embedding's indices Replicate).
    The output has `output_layouts` (default: Replicate; Shard(1) for a sequence), as a plain local tensor unless
    `use_local_output=False`. `unit` is the number of features, or rows, that stay together; `sizes`, `balanced`,
    `groups` and `transposed` are those of ColwiseParallel. Every forward is a collective call of the mesh.

    With `overlap` an nn.Linear whose output is sharded on a dim before the last sends each part while it computes the
    next (`matmul_reduce_scatter`). A subclass with its own forward, and any other output, run without overlap. Nothing
    overlaps where the cost table predicts no gain, as between processes of one host.

    Raises ParallelizeError for another kind of module or placement. Source:
    torch.distributed.tensor.parallel.RowwiseParallel.

    >>> import torch
    >>> from tritondt.comm.transports.threads import run_ranks
    >>> from tritondt.parallel.parallelize import parallelize_module
    >>> def shapes_on(rank):
    ...     linear = parallelize_module(nn.Linear(6, 5), Mesh((2,)), RowwiseParallel())
    ...     return tuple(linear.weight.to_local().shape), tuple(linear(torch.ones(2, 3)).shape)
    >>> run_ranks(2, shapes_on)
    [((5, 3), (2, 5)), ((5, 3), (2, 5))]
    """

    @checked
    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        unit: int = 1,
        sizes: Sequence[int] | None = None,
        balanced: bool = False,
        groups: int | None = None,
        overlap: bool = False,
        transposed: bool = False,
    ) -> None:
        self.cut = feature_cut(unit, sizes, balanced, groups=groups)
        self.input_layouts = checked_layout(input_layouts, "input_layouts")
        self.output_layouts = checked_layout(output_layouts, "output_layouts") or Replicate()
        self.use_local_output, self.overlap, self.transposed = use_local_output, overlap, transposed

    def parameter_placements(self, module: nn.Module, mesh: Mesh) -> dict[str, Placement]:
        """Placement of the weight by its input features, which an embedding has first; the bias is replicated."""
        if _is_linear(module, self):
            weight = self.cut.shard(int(not self.transposed), linear_features(module)[0], mesh.shape[0])
            placements = {"weight": weight, "bias": Replicate()}
            return {name: found for name, found in placements.items() if name in module._parameters}
        if isinstance(module, nn.Embedding):
            _check_embedding(module, self)
            return {"weight": self.cut.shard(0, module.num_embeddings, mesh.shape[0])}
        raise _unknown(module, self)

    def local_run(self, module: nn.Module, mesh: Mesh) -> LocalRun:
        """Hooks that take this rank's features of the input and sum the terms of the output."""
        if _is_linear(module, self):
            cut = self.cut.shard(-1, linear_features(module)[0], mesh.shape[0])
            given = self.input_layouts or cut
            return RowLinear(mesh, given, cut, self.output_layouts, self.use_local_output, self.overlap)
        cut = self.cut.shard(-1, cast("nn.Embedding", module).num_embeddings, mesh.shape[0])
        return RowEmbedding(mesh, self.input_layouts or Replicate(), cut, self.output_layouts, self.use_local_output)


def _is_linear(module: nn.Module, style: ColwiseParallel | RowwiseParallel) -> bool:
    """Whether the style takes a module for a multiplication; ParallelizeError for a weight of another form."""
    if not style.transposed:
        return isinstance(module, nn.Linear)
    weight = module._parameters.get("weight")
    if isinstance(module, nn.Linear | nn.Embedding) or weight is None or weight.ndim != 2:
        shape = "none" if weight is None else f"one of {tuple(weight.shape)}"
        raise ParallelizeError(
            f"{type(style).__name__} with transposed=True takes a module with a weight of (input, output) features, as "
            f"Conv1D of transformers; {type(module).__name__} has {shape}: leave transposed out"
        )
    return True


def _unknown(module: nn.Module, style: ParallelStyle) -> ParallelizeError:
    return ParallelizeError(
        f"{type(style).__name__} knows nn.Linear and nn.Embedding, not {type(module).__name__}; name the layers inside "
        "it, or write a ParallelStyle of your own"
    )


def _check_embedding(module: nn.Embedding, style: ParallelStyle) -> None:
    """Refuses options of an nn.Embedding that need whole rows, or count indices of the whole batch."""
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(module, option):
            raise ParallelizeError(
                f"{type(style).__name__} cannot cut an nn.Embedding with {option}={getattr(module, option)}; allowed "
                "is one without max_norm, scale_grad_by_freq and sparse"
            )
