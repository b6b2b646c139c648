"""Steps of redistributions with all that does not change from call to call, and what they are compiled of."""

from math import prod
from typing import NamedTuple

import torch

from tritondt.comm.communicator import Communicator, Reduction, Role, Transfer
from tritondt.comm.packing.packed_transfer import packed_transfer
from tritondt.kernels.tables import Table
from tritondt.planning.exchange import Exchange
from tritondt.planning.flat_pieces import FlatPieces
from tritondt.planning.plan import Step
from tritondt.planning.storage import Block
from tritondt.sharding.layout import Coordinate
from tritondt.sharding.placement import ReduceOp


class CompiledStep(NamedTuple):
    """A step with all that does not change from call to call.

    `target_shape` is what a step allocates: the local tensor, or for a reduction into flat pieces the whole
    tensor around them, of which `piece` is the range that this rank reduces.
    """

    step: Step
    transfer: Transfer | None
    communicator: Communicator | None
    keep: Table | None
    target_shape: tuple[int, ...]
    piece: tuple[int, int] | None
    fill: float | int | bool | None


class CompiledPlan(NamedTuple):
    """Steps of a pair of specs on this rank, and their communicator, None where nothing is exchanged.

    `last` is the step that allocates the result: one that gathers writes into the tensor of the step before.
    """

    steps: tuple[CompiledStep, ...]
    communicator: Communicator | None
    last: int
    description: str


class Start(NamedTuple):
    """Start of a step: strides of its tensor, None for dense ones, its device, and the dtype of messages, None for
    the tensor's.
    """

    strides: tuple[int, ...] | None
    device: torch.device
    wire_dtype: torch.dtype | None


class Side(NamedTuple):
    """Side of one rank of a step: its exchange, by places in the communicator, its blocks, and its target.

    `coordinate` is that in the target's mesh, None outside of it; there the rank receives nothing.
    """

    exchange: Exchange
    source_blocks: tuple[Block, ...]
    target_blocks: tuple[Block, ...]
    coordinate: Coordinate | None
    fill_op: ReduceOp | None

    def shape(self, step: Step) -> tuple[int, ...]:
        """Shape of the tensor that the step writes."""
        return (0,) if self.coordinate is None else step.local_shape(self.coordinate)

    def piece(self, step: Step) -> tuple[int, int] | None:
        """Range of that tensor which the rank reduces, where the target is flat pieces."""
        if not isinstance(step.target, FlatPieces):
            return None
        return (0, 0) if self.coordinate is None else step.target.bounds(self.coordinate)


def compiled_step(
    step: Step,
    side: Side,
    start: Start,
    dtype: torch.dtype,
    fingerprint: int,
    description: str,
    communicator: Communicator | None,
    *,
    role: Role = "",
) -> CompiledStep:
    """A step of a rank; without a communicator it moves nothing. For `role` see `Transfer`."""
    divisor = step.divisor_of((start.wire_dtype or dtype) is torch.float16)
    transfer = Transfer(
        exchange=side.exchange,
        source_blocks=(side.source_blocks,),
        target_blocks=(side.target_blocks,),
        dtypes=(dtype,),
        reductions=(None if step.reduce_op is None else Reduction(step.reduce_op, divisor),),
        fingerprint=fingerprint,
        description=description,
        device=start.device,
        wire_dtype=start.wire_dtype,
        collective=None if communicator is None else step.collective,
        role=role,
        result_bytes=prod(side.shape(step)) * dtype.itemsize,
    )
    return CompiledStep(
        step,
        transfer,
        communicator,
        None if communicator is not None else packed_transfer(transfer).keep,
        side.shape(step),
        side.piece(step),
        None if side.fill_op is None else identity_element(side.fill_op, dtype),
    )


def step_text(step: Step, number: int, num_steps: int, shape: tuple[int, ...], start: Start, dtype: torch.dtype) -> str:
    """Text of a step in error messages and flight records."""
    dtypes = str(dtype) if start.wire_dtype is None else f"{dtype} as {start.wire_dtype}"
    return f"step {number} of {num_steps} ({step}) of {shape} {dtypes.replace('torch.', '')}"


def identity_element(op: ReduceOp, dtype: torch.dtype) -> float | int | bool:
    """Identity of a reduction: 0, 1, or the dtype's lowest or highest value.

    >>> identity_element("max", torch.int8), identity_element("min", torch.float32)
    (-128, inf)
    """
    if op in ("sum", "avg"):
        return 0
    if op == "product":
        return 1
    if dtype is torch.bool:
        return op == "min"
    if dtype.is_floating_point:
        return float("-inf") if op == "max" else float("inf")
    limits = torch.iinfo(dtype)
    return limits.min if op == "max" else limits.max
