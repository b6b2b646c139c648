"""linear, embedding and embedding_bag with a weight in chunks of one dim, on rows that every rank gives as its own."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map

from tritondt.dtensor.tensor import DTensor
from tritondt.errors import PropagationError
from tritondt.redistribution.agreement import lengths_on_all
from tritondt.redistribution.refusals import refusing_comparison
from tritondt.redistribution.run import check_memory
from tritondt.sharded.agreement import ShardingMismatchError
from tritondt.sharded.registries import Function, check_group, name_of, tensors_among
from tritondt.sharded.tensor import ShardedTensor
from tritondt.sharding.mesh import Mesh
from tritondt.sharding.placement import Partial, Replicate, Shard

_MAX_DIMS = 8
# Parameters of F.embedding_bag in their order.
_BAG_NAMES = (
    *("input", "weight", "offsets", "max_norm", "norm_type", "scale_grad_by_freq", "mode", "sparse"),
    *("per_sample_weights", "include_last_offset", "padding_idx"),
)


def run_on_dtensors(func: Function, args: Any, kwargs: Any) -> Any:
    """Result of any operator that distributed tensors have, on the distributed tensors that share the shards.

    Sharded results come back as sharded tensors, whole ones as plain tensors, equal on all ranks.
    """
    check_group(func, args, kwargs)

    def shared(leaf: Any) -> Any:
        return leaf.to_dtensor() if isinstance(leaf, ShardedTensor) else leaf

    group = tensors_among(args, kwargs)[0]._mesh
    found = func(*tree_map(shared, args), **tree_map(shared, kwargs))
    return tree_map(lambda leaf: _handed_out(leaf, group), found)


def _handed_out(leaf: Any, group: Mesh) -> Any:
    """A distributed result as a sharded tensor of a group, or as a plain one where every rank has all of it."""
    if not isinstance(leaf, DTensor):
        return leaf
    if any(isinstance(placement, Partial) for placement in leaf.placements):
        placements = [Replicate() if isinstance(place, Partial) else place for place in leaf.placements]
        leaf = leaf.redistribute(placements=placements)
    if all(isinstance(placement, Replicate) for placement in leaf.placements):
        return leaf.to_local()
    return ShardedTensor.from_dtensor(leaf, group)


def linear(types: Any, args: Any, kwargs: Any, process_group: Any) -> ShardedTensor:
    """F.linear with a sharded weight. A plain input is this rank's rows, which follow those of lower ranks.

    The result has the rows of all ranks: in chunks of its features where the weight is cut by output features, else
    every rank has its own rows again, also after a linear layer of the first kind. Rows may differ in number.
    """
    found = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
    weight = _chunked(F.linear, found["weight"])
    mesh = weight._spec.mesh
    if mesh.ranks != found["weight"]._mesh.ranks:
        raise PropagationError(
            f"linear takes rows in the order of the group's ranks {found['weight']._mesh.ranks}, and a weight whose "
            f"shards follow each other on ranks {mesh.ranks}; reshard it to placements in the group's order"
        )
    given = found["input"]
    x = _rows_of_all(F.linear, given, mesh)
    # A sharded input that came of ranks' rows remembers how many each of them gave; else rows are cut as torch.chunk.
    num_rows = given._num_rows if isinstance(given, ShardedTensor) else _num_rows(x)
    bias = found.get("bias")
    if isinstance(bias, ShardedTensor):
        bias = bias.to_dtensor()
    elif bias is not None:
        bias = DTensor.from_local(bias, mesh, [Replicate()])
    (cut,) = weight.placements
    if cut.is_shard(0):
        output: Any = F.linear(x.redistribute(placements=[Replicate()]), weight, bias)
    else:
        assert isinstance(cut, Shard), f"a weight in chunks is cut, not {cut}"
        x = x.redistribute(placements=[Shard(x.dim() - 1, sizes=cut.sizes)])
        terms: Any = F.linear(x, weight)
        output = terms.redistribute(placements=[Shard(0, sizes=num_rows)])
        output = output if bias is None else output + bias
    made = ShardedTensor.from_dtensor(output, found["weight"]._mesh)
    made._num_rows = num_rows
    return made


def _num_rows(x: DTensor) -> Sequence[int] | None:
    """Rows of each rank where these are what is cut."""
    (placement,) = x.placements
    return placement.sizes if isinstance(placement, Shard) and placement.dim == 0 else None


def _refuse_options(name: str, found: Mapping[str, Any]) -> None:
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if found.get(option):
            raise PropagationError(
                f"{name} with a sharded table takes no {option}, got {found[option]!r}; leave it out"
            )


def embedding(types: Any, args: Any, kwargs: Any, process_group: Any) -> torch.Tensor:
    """F.embedding with a sharded table, cut by rows or by features: the rows for this rank's own indices, plain.

    Ranks may look up different numbers of indices. PropagationError for max_norm, scale_grad_by_freq and sparse.
    """
    names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    found = dict(zip(names, args, strict=False)) | kwargs
    weight = _chunked(F.embedding, found["weight"])
    indices, mesh = found["input"], weight._spec.mesh
    with refusing_comparison(mesh):
        _refuse_options("embedding", found)
        _check_indices("embedding", indices)
    if isinstance(indices, ShardedTensor):
        rows = indices.to_dtensor()
    else:
        rows = _rows_of_all(F.embedding, indices if indices.dim() else indices[None], mesh)
    looked_up: Any = F.embedding(rows.redistribute(placements=[Replicate()]), weight, found.get("padding_idx"))
    own: torch.Tensor = looked_up.redistribute(placements=rows.placements).to_local()
    return own if isinstance(indices, ShardedTensor) or indices.dim() else own[0]


def embedding_bag(types: Any, args: Any, kwargs: Any, process_group: Any) -> torch.Tensor:
    """F.embedding_bag with a sharded table, cut by rows or by features: the results of this rank's own bags, plain.

    Ranks may have different numbers of bags, and of indices in them. A row travels for every index, as for embedding,
    and bags are reduced where they belong, in torch's own order. PropagationError for what embedding refuses, and for
    offsets that do not go with the input.
    """
    found = dict(zip(_BAG_NAMES, args, strict=False)) | kwargs
    indices, weight, offsets = found["input"], found["weight"], found.get("offsets")
    with refusing_comparison(_chunked(F.embedding_bag, weight)._spec.mesh):
        _refuse_options("embedding_bag", found)
        _check_bags(indices, offsets)
    samples = found.get("per_sample_weights")
    if indices.dim() == 2:
        bags, length = indices.shape
        offsets = torch.arange(0, bags * length, max(1, length), device=indices.device)[:bags]
        offsets = offsets if length else indices.new_zeros(bags)
        samples = None if samples is None else samples.flatten()
    flat = indices.flatten()
    rows = embedding((), (flat, weight), {}, process_group)
    # Indices of padding name a row behind the others.
    places, padding_idx = torch.arange(len(flat), device=flat.device), found.get("padding_idx")
    if padding_idx is not None:
        padding_idx = padding_idx % weight.shape[0]
        places = places.masked_fill(flat == padding_idx, len(flat))
        rows, padding_idx = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), len(flat)
    return F.embedding_bag(
        places,
        rows,
        offsets,
        mode=found.get("mode", "mean"),
        per_sample_weights=samples,
        include_last_offset=indices.dim() == 1 and found.get("include_last_offset", False),
        padding_idx=padding_idx,
    )


def _check_indices(name: str, indices: Any) -> None:
    """Refuses what are no indices of rows."""
    if not isinstance(indices, torch.Tensor) or indices.is_floating_point() or indices.is_complex():
        dtype = str(getattr(indices, "dtype", type(indices).__name__)).removeprefix("torch.")
        raise PropagationError(f"{name} with a sharded table got an input of {dtype}; allowed are integers")


def _check_bags(indices: Any, offsets: torch.Tensor | None) -> None:
    """Refuses an input that is neither rows of bags nor a list of indices with offsets."""
    _check_indices("embedding_bag", indices)
    is_plain = not isinstance(indices, ShardedTensor)
    if is_plain and indices.dim() == (2 if offsets is None else 1) and (offsets is None or offsets.dim() == 1):
        return
    kind = f"{'' if is_plain else 'sharded '}{tuple(getattr(indices, 'shape', ()))}"
    raise PropagationError(
        f"embedding_bag with a sharded table got input {kind} with offsets "
        f"{None if offsets is None else tuple(offsets.shape)}; allowed are plain indices (bags, length) without "
        "offsets, and a list of indices with a list of offsets"
    )


def _chunked(func: Function, weight: Any) -> DTensor:
    if not isinstance(weight, ShardedTensor):
        raise PropagationError(f"{name_of(func)} takes a sharded weight beside sharded inputs; got a plain weight")
    found = weight.to_dtensor()
    if found.dim() != 2 or len(found._spec.mesh.ranks) != len(weight._mesh.ranks):
        raise PropagationError(
            f"{name_of(func)} takes a weight of two dims with a shard on every rank of its group, got one of size "
            f"{tuple(weight.shape)} on ranks {found._spec.mesh.ranks} of {weight._mesh.ranks}"
        )
    return found


def _rows_of_all(func: Function, own: Any, mesh: Mesh) -> DTensor:
    """The distributed tensor of which a plain tensor has this rank's rows; a collective call of a few bytes."""
    if isinstance(own, ShardedTensor):
        return own.to_dtensor()
    if isinstance(own, DTensor):
        return own
    with refusing_comparison(mesh):
        check_memory(own, name_of(func))
        own = (own[None] if func is F.linear and own.dim() == 1 else own).contiguous()
    described = [own.dim(), *own.shape[:_MAX_DIMS], *[0] * (_MAX_DIMS - own.dim())]
    of_ranks = lengths_on_all(mesh, described)
    for rank, found in zip(mesh.ranks, of_ranks, strict=True):
        if [found[0], *found[2:]] != [of_ranks[0][0], *of_ranks[0][2:]]:
            shapes = [tuple(each[1 : 1 + each[0]]) for each in (of_ranks[0], found)]
            raise ShardingMismatchError(
                f"{name_of(func)} takes rows of one shape from all ranks, and got {shapes[0]} on rank {mesh.ranks[0]} "
                f"and {shapes[1]} on rank {rank}"
            )
    sizes = tuple(found[1] for found in of_ranks)
    # `sizes` are of the mesh's order, whatever the order of its ranks.
    shape = (sum(sizes), *own.shape[1:])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(own, mesh, [Shard(0, sizes=sizes)], shape=shape, stride=stride)
