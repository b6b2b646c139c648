"""Shards that a rank holds beside the boxes of all ranks, gathered into a whole tensor or moved to other boxes."""

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch

from tritondt.errors import LayoutError, LocalTensorError
from tritondt.planning.box_exchange import Boxes
from tritondt.sharded.agreement import agreed
from tritondt.sharded.groups import own_device
from tritondt.sharded.metadata import ShardedTensorMetadata
from tritondt.sharded.movement import Movement, move, move_with_gradient
from tritondt.sharding.mesh import Mesh


class HeldShards(NamedTuple):
    """Tensors of this rank's shards, the boxes of every position of the group's mesh, and the metadata."""

    mesh: Mesh
    boxes: Boxes
    metadata: ShardedTensorMetadata
    tensors: Sequence[torch.Tensor]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the shards."""
        return self.metadata.tensor_properties.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Size of the whole tensor."""
        return tuple(self.metadata.size)


def gather_whole(held: HeldShards, dst: int, out: torch.Tensor | None, dtype: torch.dtype | None) -> None:
    """Writes the whole tensor to `out` on group rank `dst`; ShardedTensor.gather says the rest."""
    mesh, dtype = held.mesh, held.dtype if dtype is None else dtype
    if mesh.coordinate is None:
        return

    def prepare() -> tuple[str, None]:
        _check_gathered(held, dst, out)
        return f"dst={dst}, dtype={dtype}", None

    # Ranks that only send would not learn from the exchange that another was refused.
    agreed(mesh, "gather", prepare)
    whole = (tuple((0, size) for size in held.shape),)
    target: Boxes = tuple(whole if position == dst else () for position in range(len(mesh.ranks)))
    device = own_device(held.metadata, mesh)
    is_direct = (
        out is not None
        and out.dtype is dtype
        and out.device == device
        and type(out) in (torch.Tensor, torch.nn.Parameter)
        and not (out.is_conj() or out.is_neg())
    )
    with torch.no_grad():
        found = move(
            Movement(mesh, held.boxes, target, dtype, device),
            [tensor.detach().to(dtype) for tensor in held.tensors],
            [cast(torch.Tensor, out).detach()] if is_direct else None,
        )
        if is_direct:
            torch.autograd.graph.increment_version(cast(torch.Tensor, out))
        elif out is not None:
            out.copy_(found[0])


def _check_gathered(held: HeldShards, dst: int, out: torch.Tensor | None) -> None:
    ranks, rank, size = held.mesh.ranks, held.mesh.identity.rank, held.shape
    if not 0 <= dst < len(ranks):
        raise LayoutError(f"gather was asked for dst={dst}; allowed are 0..{len(ranks) - 1}, ranks of its group")
    is_target = held.mesh.coordinate == (dst,)
    if is_target and out is None:
        raise LocalTensorError(f"gather to dst={dst} takes out=, of size {size}, on that rank; rank {rank} gave none")
    if not is_target and out is not None:
        raise LocalTensorError(f"gather to dst={dst} takes out= on that rank only; rank {rank} gave one, too")
    if out is not None and (tuple(out.shape) != size or out.layout is not torch.strided or _overlaps(out)):
        strides = out.stride() if out.layout is torch.strided else out.layout
        raise LocalTensorError(
            f"gather to dst={dst} takes a strided out= of size {size}, with memory for each element; rank {rank} gave "
            f"one of {tuple(out.shape)} and strides {strides}"
        )


def _overlaps(out: torch.Tensor) -> bool:
    return any(stride == 0 and size > 1 for size, stride in zip(out.shape, out.stride(), strict=True))


def moved_shards(held: HeldShards, boxes: Boxes, device: torch.device) -> list[torch.Tensor]:
    """This rank's tensors once the shards have become other boxes of the group; through which gradients pass.

    LayoutError, on all ranks, where a gradient would have to pass a rank without a shard.
    """
    movement = Movement(held.mesh, held.boxes, boxes, held.dtype, device)
    requires_grad = held.metadata.tensor_properties.requires_grad
    if not (requires_grad and torch.is_grad_enabled()):
        # A parameter that moves under no_grad stays one.
        return [found.requires_grad_(requires_grad) for found in move(movement, [x.detach() for x in held.tensors])]
    for of_ranks in (held.boxes, boxes):
        if not all(of_ranks):
            ranks = [rank for rank, found in zip(held.mesh.ranks, of_ranks, strict=True) if not found]
            raise LayoutError(
                f"a gradient moves back through every rank of the group, and ranks {ranks} hold no shard; give them an "
                "empty one, or call this under torch.no_grad()"
            )
    return move_with_gradient(movement, held.tensors)
