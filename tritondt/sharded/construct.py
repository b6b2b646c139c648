"""Sharded tensors from shards that are there, and from a whole tensor of one rank."""

from collections.abc import Sequence
from typing import Any

import torch

from tritondt.errors import LayoutError, LocalTensorError
from tritondt.errors.arguments import check_types, checked
from tritondt.sharded.agreement import ShardingMismatchError, agreed, values_on_all
from tritondt.sharded.groups import Group, boxes_of, device_type_of, mesh_of, own_device
from tritondt.sharded.metadata import Shard, ShardedTensorMetadata, ShardMetadata, TensorProperties
from tritondt.sharded.movement import Movement, move
from tritondt.sharded.specs import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    ShardingSpec,
    built_metadata,
    check_covers,
    check_disjoint,
    check_spec,
    flat_size,
    infer_sharding_spec,
)
from tritondt.sharded.tensor import ShardedTensor
from tritondt.sharding.mesh import Mesh

# What all shards of a tensor have in common, by the names of TensorProperties.
_PROPERTIES = ("dtype", "requires_grad", "pin_memory")


@checked
def shard_tensor(
    tensor: torch.Tensor, sharding_spec: ShardingSpec, src_rank: int = 0, process_group: Group = None
) -> ShardedTensor:
    """Makes a sharded tensor from the values of `tensor` on group rank `src_rank`: a collective call, one exchange.

    Every rank passes a contiguous tensor of the same size and dtype; shards are leaves with memory of their own. Raises
    ShardingMismatchError on all ranks where size, dtype, spec or `src_rank` differ, naming two ranks; LayoutError where
    the spec does not fit, LocalTensorError for a tensor that is not contiguous; both end the call on the other ranks.

    >>> from tritondt.comm.transports.threads import run_ranks
    >>> spec = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
    >>> found = run_ranks(2, lambda rank: shard_tensor(torch.arange(3), spec))
    >>> [x.local_tensor().tolist() for x in found]
    [[0, 1], [2]]
    """

    def prepare() -> tuple[str, ShardedTensorMetadata]:
        check_spec(sharding_spec)
        if not tensor.is_contiguous():
            raise LocalTensorError(
                f"shards are cut from a contiguous tensor, got one of size {tuple(tensor.shape)} and strides "
                f"{tensor.stride()}; call contiguous() first"
            )
        metadata = built_metadata(sharding_spec, tensor.shape, TensorProperties.create_from_tensor(tensor))
        boxes_of(metadata, mesh)
        device_type_of(metadata)
        if not 0 <= src_rank < len(mesh.ranks):
            raise LayoutError(f"src_rank={src_rank} is no rank of the group; allowed are 0..{len(mesh.ranks) - 1}")
        return f"src_rank={src_rank}, {_request(sharding_spec, metadata)}", metadata

    mesh = mesh_of(process_group)
    metadata = agreed(mesh, "shard_tensor", prepare)
    made = ShardedTensor._assembled(sharding_spec, metadata, process_group)
    is_source = mesh.coordinate == (src_rank,)
    device = own_device(metadata, mesh)
    whole = (tuple((0, size) for size in tensor.shape),)
    source = tuple(whole if position == src_rank else () for position in range(len(mesh.ranks)))
    movement = Movement(made._mesh, source, made._boxes, tensor.dtype, device)
    parts = move(movement, [tensor.detach().to(device)] if is_source else [])
    made._put([part.requires_grad_(tensor.requires_grad) for part in parts], metadata)
    return made


def _request(spec: ShardingSpec, metadata: ShardedTensorMetadata) -> str:
    """A text of what ranks must agree on; specs of users are told by the shards that they give."""
    is_known = type(spec) in (ChunkShardingSpec, EnumerableShardingSpec)
    which = repr(spec) if is_known else f"{type(spec).__name__} with {metadata.shards_metadata}"
    properties = metadata.tensor_properties
    grad = ", requiring gradients" if properties.requires_grad else ""
    return f"sharding_spec={which} for size {tuple(metadata.size)} {str(properties.dtype)[6:]}{grad}"


@checked
def init_from_local_shards(
    local_shards: list[Shard], *global_size: Any, process_group: Group = None, init_rrefs: bool = False
) -> ShardedTensor:
    """Makes a sharded tensor from the shards that every rank passes, and shares their memory: a collective call.

    `global_size` is the size of the whole. With None for a dim, ranks pass one shard each, and these follow each other
    along dim 0. A rank may give none. Raises LayoutError on all ranks where shards overlap or do not cover the tensor,
    and ShardingMismatchError where sizes or dtypes differ. A rank whose own shards are at fault raises
    LocalTensorError, and the others ShardingMismatchError.

    >>> from tritondt.comm.transports.threads import run_ranks
    >>> def body(rank):
    ...     shard = Shard.from_tensor_and_offsets(torch.ones(rank + 1, 2), [rank, 0], rank)
    ...     return init_from_local_shards([shard], 3, 2)
    >>> run_ranks(2, body)[0].metadata().shards_metadata[1].shard_sizes
    [2, 2]
    """
    mesh = mesh_of(process_group)
    metadata = _metadata_of_all(mesh, local_shards, global_size, init_rrefs)
    own = [shard for shard in metadata.shards_metadata if shard.rank == mesh.identity.rank]
    shards = [Shard(given.tensor, place) for given, place in zip(local_shards, own, strict=True)]
    return ShardedTensor._assembled(infer_sharding_spec(metadata), metadata, process_group, shards)


def _refuse_rrefs(init_rrefs: bool) -> None:
    if init_rrefs:
        raise NotImplementedError("init_rrefs=True asks for torch.distributed.rpc, which is not used here")


def _metadata_of_all(
    mesh: Mesh, local_shards: Sequence[Shard], global_size: Sequence[Any], init_rrefs: bool
) -> ShardedTensorMetadata:
    """Metadata of all ranks' shards, compared among them."""
    error = None
    try:
        _refuse_rrefs(init_rrefs)
        check_types(init_from_local_shards, local_shards=local_shards)
        own = _described(local_shards, global_size, mesh)
    except Exception as refused:  # noqa: BLE001  raised when the others know
        own, error = {"refused": str(refused)}, refused
    found = dict(zip(mesh.ranks, values_on_all(mesh, own), strict=True))
    if error is not None:
        raise error
    for rank, given in found.items():
        if "refused" in given:
            raise ShardingMismatchError(f"init_from_local_shards was refused on rank {rank}: {given['refused']}")
    holding = {rank: given for rank, given in found.items() if given["shards"]}
    if not holding:
        raise LayoutError("init_from_local_shards was given no shard on any rank")
    _check_alike(found, "size")
    _check_alike(holding, "properties")
    shards = [ShardMetadata(*shard) for given in holding.values() for shard in given["shards"]]
    first = next(iter(holding.values()))
    size = first["size"]
    if None in size:
        size = _in_a_row(shards)
    dtype, requires_grad, pin_memory = first["properties"]
    properties = TensorProperties(getattr(torch, dtype), requires_grad=requires_grad, pin_memory=pin_memory)
    check_disjoint(shards)
    check_covers(shards, size)
    return ShardedTensorMetadata(shards, torch.Size(size), properties)


def _described(local_shards: Sequence[Shard], global_size: Sequence[Any], mesh: Mesh) -> dict[str, Any]:
    """This rank's shards as values; LocalTensorError for what no rank may give."""
    known = [0 if size is None else size for size in _one_sequence(global_size)]
    flat_size(known)
    size = [None if size is None else size for size in _one_sequence(global_size)]
    if None in size and len(local_shards) != 1:
        raise LocalTensorError(
            f"a size with None takes one shard of every rank; rank {mesh.identity.rank} gave {len(local_shards)}"
        )
    properties = None
    for shard in local_shards:
        found = _properties_of(shard, mesh)
        if properties is not None and found != properties:
            raise LocalTensorError(
                f"shards of one tensor have one dtype and alike flags; rank {mesh.identity.rank} gave "
                f"{dict(zip(_PROPERTIES, properties, strict=True))} and {dict(zip(_PROPERTIES, found, strict=True))}"
            )
        properties = found
    shards = [
        (shard.metadata.shard_offsets, shard.metadata.shard_sizes, str(shard.metadata.placement))
        for shard in local_shards
    ]
    return {"size": size, "shards": shards, "properties": properties}


def _one_sequence(size: Sequence[Any]) -> list[Any]:
    return list(size[0]) if len(size) == 1 and isinstance(size[0], (list, tuple)) else list(size)


def _properties_of(shard: Shard, mesh: Mesh) -> list[Any]:
    tensor, rank = shard.tensor, mesh.identity.rank
    if tensor.layout is not torch.strided or not tensor.is_contiguous():
        raise LocalTensorError(
            f"shards are strided and contiguous; rank {rank} gave one of size {tuple(tensor.shape)}, layout "
            f"{tensor.layout}; call contiguous() first"
        )
    if shard.metadata.rank != rank:
        raise LocalTensorError(f"a rank gives its own shards; rank {rank} gave one of rank {shard.metadata.rank}")
    return [str(tensor.dtype)[6:], tensor.requires_grad, tensor.is_pinned()]


def _check_alike(found: dict[int, Any], what: str) -> None:
    first = next(iter(found))
    for rank, given in found.items():
        if given[what] != found[first][what]:
            raise ShardingMismatchError(
                f"init_from_local_shards was called with {what} {found[first][what]} on rank {first}, but with "
                f"{given[what]} on rank {rank}; all ranks must call it for the same tensor"
            )


def _in_a_row(shards: Sequence[ShardMetadata]) -> list[int]:
    """Size of the tensor of which these are the shards, one after the other along dim 0, which they are told."""
    at = 0
    for shard in shards:
        shard.shard_offsets = [at, *[0] * (len(shard.shard_sizes) - 1)]
        at += shard.shard_sizes[0]
    return [at, *shards[0].shard_sizes[1:]]


@checked
def init_from_local_shards_and_global_metadata(
    local_shards: list[Shard],
    sharded_tensor_metadata: ShardedTensorMetadata,
    process_group: Group = None,
    init_rrefs: bool = False,
    sharding_spec: ShardingSpec | None = None,
) -> ShardedTensor:
    """Makes a sharded tensor from shards whose metadata every rank knows; nothing is sent and ranks are not compared.

    Raises LayoutError for metadata that do not describe a tensor, and LocalTensorError where this rank's shards differ
    from the metadata in place, size, dtype, or flags.

    >>> from tritondt.comm.transports.threads import run_ranks
    >>> def body(rank):
    ...     given = init_from_local_shards([Shard.from_tensor_and_offsets(torch.ones(2, 3), [2 * rank, 0], rank)], 4, 3)
    ...     doubled = [Shard(2 * shard.tensor, shard.metadata) for shard in given.local_shards()]
    ...     made = init_from_local_shards_and_global_metadata(doubled, given.metadata())
    ...     return tuple(made.shape), made.local_tensor().sum().item()
    >>> run_ranks(2, body)
    [((4, 3), 12.0), ((4, 3), 12.0)]
    """
    _refuse_rrefs(init_rrefs)
    metadata = sharded_tensor_metadata
    check_disjoint(metadata.shards_metadata)
    check_covers(metadata.shards_metadata, metadata.size)
    properties = metadata.tensor_properties
    if properties.layout is not torch.strided:
        raise LayoutError(f"shards are strided, got layout={properties.layout}")
    mesh = mesh_of(process_group, device_type_of(metadata))
    boxes_of(metadata, mesh)
    own = [shard for shard in metadata.shards_metadata if shard.rank == mesh.identity.rank]
    if [shard.metadata for shard in local_shards] != own:
        raise LocalTensorError(
            f"the metadata give rank {mesh.identity.rank} the shards {own}; it gave "
            f"{[shard.metadata for shard in local_shards]}"
        )
    wanted = [str(properties.dtype)[6:], properties.requires_grad, properties.pin_memory]
    for shard in local_shards:
        found = _properties_of(shard, mesh)
        if found != wanted:
            raise LocalTensorError(
                f"the metadata say {dict(zip(_PROPERTIES, wanted, strict=True))}; rank {mesh.identity.rank} gave a "
                f"shard with {dict(zip(_PROPERTIES, found, strict=True))}"
            )
    spec = infer_sharding_spec(metadata) if sharding_spec is None else sharding_spec
    return ShardedTensor._assembled(spec, metadata, process_group, local_shards)


@checked
def init_from_local_tensor(
    local_tensor: torch.Tensor,
    sharding_spec: ShardingSpec,
    *global_size: Any,
    process_group: Group = None,
    init_rrefs: bool = False,
) -> ShardedTensor:
    """Makes a sharded tensor from each rank's tensor of its one shard; nothing is sent.

    Raises LayoutError where the spec does not fit `global_size`, LocalTensorError where it gives this rank no shard or
    several, or where the tensor is not contiguous or not of the shard's size.

    >>> from tritondt.comm.transports.threads import run_ranks
    >>> from tritondt.sharded.specs import ChunkShardingSpec
    >>> rows = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
    >>> run_ranks(2, lambda rank: tuple(init_from_local_tensor(torch.ones(2, 3), rows, 4, 3).shape))
    [(4, 3), (4, 3)]
    """
    check_spec(sharding_spec)
    properties = TensorProperties.create_from_tensor(local_tensor)
    metadata = built_metadata(sharding_spec, flat_size(global_size), properties)
    rank = mesh_of(process_group).identity.rank
    own = [shard for shard in metadata.shards_metadata if shard.rank == rank]
    if len(own) != 1 or own[0].shard_sizes != list(local_tensor.shape):
        raise LocalTensorError(
            f"{sharding_spec} gives rank {rank} the shards {own} of size {tuple(metadata.size)}; it gave one tensor of "
            f"size {tuple(local_tensor.shape)}"
        )
    return init_from_local_shards_and_global_metadata(
        [Shard(local_tensor, own[0])], metadata, process_group, init_rrefs, sharding_spec
    )


ShardingSpec._shard = staticmethod(lambda tensor, spec, src_rank, group: shard_tensor(tensor, spec, src_rank, group))
