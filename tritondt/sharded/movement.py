"""Movement of shards from boxes to boxes of one group of ranks: one exchange on the engine, compiled once."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from tritondt import identity
from tritondt.comm import world
from tritondt.comm.communicator import Communicator, Transfer
from tritondt.errors import LocalTensorError
from tritondt.kernels.memory import allocate
from tritondt.planning.box_exchange import Boxes, exchange_boxes
from tritondt.planning.exchange import renumber_peers
from tritondt.planning.fingerprint import exchange_fingerprint
from tritondt.planning.storage import Block
from tritondt.redistribution.refusals import refuse_on
from tritondt.sharding.intervals import Box
from tritondt.sharding.mesh import Mesh
from tritondt.sharding.strides import dense_strides


class Movement(NamedTuple):
    """Boxes that every position of a mesh holds before and after, of elements of a dtype."""

    mesh: Mesh
    source: Boxes
    target: Boxes
    dtype: torch.dtype
    device: torch.device

    @property
    def reverse(self) -> "Movement":
        """The movement back."""
        return self._replace(source=self.target, target=self.source)


class _Compiled(NamedTuple):
    """One rank's side of a movement, with all that does not change from call to call."""

    transfer: Transfer
    communicator: Communicator
    sources: tuple[int | None, ...]
    targets: tuple[int | None, ...]
    lengths: tuple[tuple[int, ...], ...]


def move(
    movement: Movement, sources: Sequence[torch.Tensor], into: Sequence[torch.Tensor] | None = None
) -> list[torch.Tensor]:
    """This rank's target boxes, written to `into` where that is given; a collective call of the mesh's ranks.

    `sources` are this rank's source boxes, of any strides. A rank outside the mesh has none and gets none. Raises
    PeerError where another rank failed or asked for something else.
    """
    if movement.mesh.coordinate is None:
        return []
    _check_or_refuse(movement, sources)
    # Memory holds other values than a tensor whose conjugation or sign is yet to be applied.
    sources = [source.resolve_conj().resolve_neg() for source in sources]
    strides = tuple(source.stride() for source in sources)
    compiled = _compile(movement, strides, None if into is None else tuple(target.stride() for target in into))
    device = movement.device
    targets = (
        [allocate(lengths, movement.dtype, device) for lengths in compiled.lengths] if into is None else list(into)
    )
    nothing = allocate((0,), movement.dtype, device)
    compiled.communicator.exchange(
        [nothing if number is None else sources[number] for number in compiled.sources],
        [nothing if number is None else targets[number] for number in compiled.targets],
        compiled.transfer,
    )
    return targets


def _check_or_refuse(movement: Movement, sources: Sequence[torch.Tensor]) -> None:
    """Raises LocalTensorError for shards that are not what the metadata say, once the waiting ranks know why."""
    mesh = movement.mesh
    own = [_lengths(box) for box in movement.source[mesh.ranks.index(mesh.identity.rank)]]
    found = [tuple(source.shape) for source in sources]
    fits = found == own and all(
        source.dtype is movement.dtype
        and source.device.type == mesh.device_type
        and source.layout is torch.strided
        and (source.data_ptr() or not source.numel())
        for source in sources
    )
    if not fits:
        kinds = [f"{tuple(source.shape)} {str(source.dtype)[6:]} on {source.device}" for source in sources]
        error = LocalTensorError(
            f"rank {mesh.identity.rank} holds shards of sizes {own}, {str(movement.dtype)[6:]}, on {mesh.device_type}; "
            f"found {kinds}; a shard's tensor is replaced by one of the same size and dtype, that has memory"
        )
        refuse_on(mesh, error)
        raise error


@lru_cache(maxsize=1024)
def _compile(
    movement: Movement, strides: tuple[tuple[int, ...], ...], into: tuple[tuple[int, ...], ...] | None
) -> _Compiled:
    mesh, dtype = movement.mesh, movement.dtype
    own = mesh.ranks.index(mesh.identity.rank)
    found, pairs = exchange_boxes(movement.source, movement.target, own)
    sources, targets = (tuple(pair[side] for pair in pairs) for side in (0, 1))
    text = f"shards {movement.source} -> {movement.target} {dtype} {mesh.ranks}"
    transfer = Transfer(
        exchange=renumber_peers(found, mesh.ranks),
        source_blocks=_blocks(movement.source[own], sources, strides),
        target_blocks=_blocks(movement.target[own], targets, into),
        dtypes=(dtype,) * len(pairs),
        reductions=(None,) * len(pairs),
        fingerprint=exchange_fingerprint(text),
        description=f"moving {_text(movement.source)} to {_text(movement.target)} of {str(dtype)[6:]}",
        device=movement.device,
    )
    return _Compiled(
        transfer,
        world.current().communicator(mesh.ranks, mesh.device_type),
        sources,
        targets,
        tuple(_lengths(box) for box in movement.target[own]),
    )


def _lengths(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def _blocks(
    boxes: Sequence[Box], numbers: Sequence[int | None], strides: Sequence[tuple[int, ...]] | None
) -> tuple[tuple[Block, ...], ...]:
    """Block of each tensor of an exchange, which holds one box or nothing; dense where no strides are given."""
    found: list[tuple[Block, ...]] = []
    for number in numbers:
        if number is None:
            found.append(())
            continue
        lengths = _lengths(boxes[number])
        own = dense_strides(lengths) if strides is None else strides[number]
        found.append((Block(tuple((interval,) for interval in boxes[number]), lengths, 0, own),))
    return tuple(found)


def _text(boxes: Boxes) -> str:
    return f"{sum(map(len, boxes))} shards of {sum(map(bool, boxes))} ranks"


class _Moved(torch.autograd.Function):
    """Movement of shards; the gradient moves back."""

    @staticmethod
    def forward(ctx: Any, movement: Movement, *sources: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.movement = movement
        return tuple(move(movement, [source.detach() for source in sources]))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, *_Moved.apply(ctx.movement.reverse, *gradients))  # type: ignore[no-untyped-call]


def move_with_gradient(movement: Movement, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Differentiable `move` of shards; backward is collective, on every rank that has a source and a target."""
    return list(_Moved.apply(movement, *sources))  # type: ignore[no-untyped-call]


identity.on_end(_compile.cache_clear)
