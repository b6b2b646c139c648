"""`redistribute_many`: a list of distributed tensors under other placements, in few exchanges."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import is_grad_enabled, is_inference_mode_enabled
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh

from tritondt.dtensor.construct import construct
from tritondt.dtensor.copies import own_view
from tritondt.dtensor.pending import mark_pending, take_prefetched, waited, work_of
from tritondt.dtensor.tensor import DTensor
from tritondt.dtensor.views.copied_views import refresh
from tritondt.dtensor.writes import held_local
from tritondt.errors import LayoutError, MixedTensorsError, check_not_of_torch
from tritondt.errors.arguments import first
from tritondt.redistribution.autograd import gradient_spec
from tritondt.redistribution.many import redistribute_locals, redistribute_locals_async
from tritondt.sharding.mesh import Mesh, canonical_mesh
from tritondt.sharding.placement import Placement, as_placements
from tritondt.sharding.spec import DTensorSpec, target_spec

Move = tuple[DTensor, Sequence[Placement]] | tuple[DTensor, "DeviceMesh | Mesh", Sequence[Placement]]


@first("bucket_bytes")
def redistribute_many(
    moves: Sequence[Move], *, bucket_bytes: int | None = None, async_op: bool = False
) -> list[DTensor]:
    """Redistributes the tensors of a list, in as few exchanges as buckets of `bucket_bytes` allow.

    `moves` has (x, placements), or (x, device_mesh, placements) for another mesh, per tensor: any shapes, dtypes,
    layouts and meshes. Results equal those of x.redistribute for each tensor, in the order of the list, bit for bit,
    and so do the gradients, which also travel in few exchanges. The bytes are the same, which is the minimum. Tensors
    between the same ranks share exchanges until the parts of any rank exceed `bucket_bytes`: by default 4 MB, or 64 MB
    in shared memory without `async_op`. A bucket is one pack, one exchange and one unpack for each step of its longest
    plan.

    A collective call of all ranks of all meshes in the list, with the same list in the same order. With `async_op` it
    returns at once, and all tensors of a bucket arrive together. Raises MixedTensorsError for anything but a
    distributed tensor, LayoutError for a move of other than two or three values, and the errors of
    `DTensor.redistribute`.

    >>> import tritondt as T
    >>> from tritondt.comm.transports.threads import run_ranks
    >>> def whole_on(rank):
    ...     mesh = T.Mesh((2,))
    ...     rows, columns = (T.distribute_tensor(torch.ones(4, 4), mesh, [T.Shard(dim)]) for dim in (0, 1))
    ...     found = T.redistribute_many([(rows, [T.Replicate()]), (columns, [T.Shard(0)])])
    ...     return [tuple(x.to_local().shape) for x in found]
    >>> run_ranks(2, whole_on)
    [[(4, 4), (2, 4)], [(4, 4), (2, 4)]]
    """
    tensors, targets = [], []
    for place, move in enumerate(moves):
        if len(move) not in (2, 3):
            raise LayoutError(
                f"redistribute_many was given {len(move)} values as move {place}; allowed are (x, placements) and "
                "(x, device_mesh, placements)"
            )
        tensor, placements = move[0], move[-1]
        if type(tensor) is not DTensor:  # 200 calls take as long as an exchange
            check_not_of_torch(tensor, "redistribute_many")
            if not isinstance(tensor, DTensor):
                raise MixedTensorsError(
                    f"redistribute_many was given a {type(tensor).__name__} as tensor {place}; allowed are distributed "
                    "tensors: distribute_tensor, or DTensor.from_local"
                )
        tensors.append(tensor)
        target_mesh = canonical_mesh(cast("Mesh", move[1])) if len(move) == 3 else None
        targets.append(target_spec(tensor._spec, as_placements(placements), None, target_mesh))
    return redistribute_to(tensors, targets, bucket_bytes=bucket_bytes, async_op=async_op)


def redistribute_to(
    tensors: Sequence[DTensor], targets: Sequence[DTensorSpec], *, bucket_bytes: int | None, async_op: bool
) -> list[DTensor]:
    """The tensors under the target specs, differentiable; see `redistribute_many`."""
    found: list[Any] = list(tensors)
    moving = []
    for place, (tensor, target) in enumerate(zip(tensors, targets, strict=True)):
        if tensor._spec is target:
            found[place] = tensor.redistribute(placements=target.placements, order=target.order)
        else:
            moving.append(place)
    given, wanted = [tensors[place] for place in moving], tuple(targets[place] for place in moving)
    if is_grad_enabled() and any(tensor.requires_grad for tensor in given):
        moved = RedistributedMany.apply(wanted, bucket_bytes, async_op, *given)  # type: ignore[no-untyped-call]
    else:
        moved = _moved(given, wanted, bucket_bytes, async_op=async_op)
    for place, result in zip(moving, moved, strict=True):
        found[place] = result
    return found


def _moved(
    tensors: Sequence[DTensor], targets: Sequence[DTensorSpec], bucket_bytes: int | None, *, async_op: bool
) -> list[DTensor]:
    """The tensors under the target specs, without history."""
    found: list[Any] = [None] * len(tensors)
    pairs, held, befores, moving = list[Any](), list[Any](), list[Any](), list[int]()
    for place, (tensor, target) in enumerate(zip(tensors, targets, strict=True)):
        if tensor.__dict__:  # what most tensors have nothing in
            refresh(tensor)
            prefetched = take_prefetched(tensor, target, None)
            if prefetched is not None:
                found[place] = prefetched if async_op else waited(prefetched)
                continue
        moving.append(place)
        pairs.append((tensor._spec, target))
        if async_op:
            held.append(held_local(tensor))
            befores.append(work_of(tensor))
        else:
            held.append(tensor._local_tensor)
    works: Sequence[Any] = ()
    if async_op:
        locals_, works = redistribute_locals_async(held, tuple(pairs), befores, bucket_bytes)
    else:
        locals_ = redistribute_locals(held, tuple(pairs), bucket_bytes)
    given = [own_view(local) if local is before else local for local, before in zip(locals_, held, strict=True)]
    made = _wrapped(given, [target for _, target in pairs])
    for place, result in zip(moving, made, strict=True):
        found[place] = result
    for result, work in zip(made, works, strict=False):
        if work is not None:
            mark_pending(result, work)
    return found


def _wrapped(locals_: Sequence[torch.Tensor], specs: Sequence[DTensorSpec]) -> list[Any]:
    """As `wrap` does, with its questions asked once."""
    if forward_ad._current_level >= 0 or is_inference_mode_enabled():
        return [DTensor(local, spec) for local, spec in zip(locals_, specs, strict=True)]
    return [construct(DTensor, local, spec, requires_grad=False) for local, spec in zip(locals_, specs, strict=True)]


class RedistributedMany(torch.autograd.Function):
    """Redistribution of a list of distributed tensors: the identity on the global tensors and on their gradients."""

    @staticmethod
    def forward(
        ctx: Any, targets: tuple[DTensorSpec, ...], bucket_bytes: int | None, async_op: bool, *tensors: DTensor
    ) -> tuple[DTensor, ...]:
        """The tensors under `targets`; with `async_op` the results, and later their gradients, are pending."""
        ctx.sources, ctx.options = [tensor._spec for tensor in tensors], (bucket_bytes, async_op)
        ctx.set_materialize_grads(False)
        found = _moved(tensors, targets, bucket_bytes, async_op=async_op)
        plain = [x for x, given in zip(found, tensors, strict=True) if not given.requires_grad]
        ctx.mark_non_differentiable(*plain)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """The gradients under the sources' placements, with Partial as Replicate."""
        bucket_bytes, async_op = ctx.options
        back: list[Any] = list(grads)
        places = [place for place, grad in enumerate(grads) if grad is not None]
        wanted = []
        for place in places:
            target = gradient_spec(ctx.sources[place])
            wanted.append(target_spec(grads[place]._spec, target.placements, target.order, target.mesh))
        given = [grads[place] for place in places]
        found = redistribute_to(given, wanted, bucket_bytes=bucket_bytes, async_op=async_op)
        for place, grad in zip(places, found, strict=True):
            back[place] = grad if grad.dtype is ctx.sources[place].dtype else grad.to(ctx.sources[place].dtype)
        return None, None, None, *back
