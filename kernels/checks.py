"""What a table cannot see: tensors on other devices, boxes that leave their tensor, boxes written twice.

For the functions that take tensors. Tables trust their boxes, which a plan makes disjoint.
"""

from collections.abc import Iterator, Sequence

import torch

from tritondt.kernels.loop_nest import LoopNest, Operand, coalesce


def common_device(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> torch.device:
    """The device of all tensors; ValueError where there are two."""
    first_name, first = "", torch.device("cpu")
    for name, tensor in _named(sources, targets):
        if not first_name:
            first_name, first = name, tensor.device
        elif tensor.device != first:
            raise ValueError(
                f"{first_name} lies on {first} and {name} on {tensor.device}; all tensors must lie on one device"
            )
    return first


def common_dtype(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> torch.dtype | None:
    """The dtype of all tensors, None without any; ValueError where there are two."""
    first_name, first = "", None
    for name, tensor in _named(sources, targets):
        if first is None:
            first_name, first = name, tensor.dtype
        elif tensor.dtype != first:
            raise ValueError(f"{first_name} is {first} and {name} is {tensor.dtype}; a reduction is of one dtype")
    return first


def check_inside(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], nests: Sequence[LoopNest]) -> None:
    """ValueError where a box names no tensor, or reaches beyond its first or its last element."""
    for position, nest in enumerate(nests):
        if nest.num_bytes == 0:
            continue
        for number, operand in enumerate(nest.operands):
            side, tensors = ("source", sources) if number else ("target", targets)
            if operand.tensor >= len(tensors):
                raise ValueError(
                    f"box {position} uses {side} {operand.tensor}, but the number of {side}s is {len(tensors)}"
                )
            first, end = _extent(nest, operand)
            held = _num_bytes(tensors[operand.tensor])
            if first < 0 or end > held:
                raise ValueError(
                    f"box {position} reaches from byte {first} to {end} of {side} {operand.tensor}, which has {held}"
                )


def check_disjoint(targets: Sequence[torch.Tensor], nests: Sequence[LoopNest]) -> None:
    """ValueError where two boxes, or one twice, write the same byte."""
    placed = []
    for position, nest in enumerate(nests):
        if nest.num_bytes:
            target = nest.operands[0]
            alone = coalesce(LoopNest(nest.lengths, (target,)))
            first, end = _extent(alone, alone.operands[0])
            start = targets[target.tensor].data_ptr()
            placed.append((start + first, start + end, position, alone))
    for cluster in _clusters(sorted(placed, key=lambda found: found[:3])):
        if len(cluster) == 1 and _is_nested(cluster[0][3]):
            continue
        _check_runs([(start, position, nest) for start, _, position, nest in cluster])


_Placed = tuple[int, int, int, LoopNest]


def _clusters(placed: Sequence[_Placed]) -> Iterator[list[_Placed]]:
    """Boxes whose spans of memory meet."""
    cluster: list[_Placed] = []
    end = 0
    for found in placed:
        if cluster and found[0] >= end:
            yield cluster
            cluster = []
        cluster.append(found)
        end = max(end, found[1])
    if cluster:
        yield cluster


def _is_nested(nest: LoopNest) -> bool:
    """Whether every loop steps over all that the loops within it touch: then nothing is touched twice."""
    span = 1
    for length, stride in zip(reversed(nest.lengths), reversed(nest.operands[0].strides), strict=True):
        if stride < span:
            return False
        span += (length - 1) * stride
    return True


def _check_runs(boxes: Sequence[tuple[int, int, LoopNest]]) -> None:
    """Lays the runs of all boxes out in memory, sorted."""
    starts, lengths, owners = [], [], []
    for start, position, nest in boxes:
        own = torch.tensor([start], dtype=torch.int64)
        run = nest.run_bytes
        loops = zip(nest.lengths, nest.operands[0].strides, strict=True)
        for length, stride in list(loops)[: -1 if run > 1 else None]:
            own = (own[:, None] + torch.arange(length, dtype=torch.int64) * stride).flatten()
        starts.append(own)
        lengths.append(torch.full_like(own, run))
        owners.append(torch.full_like(own, position))
    sorted_starts, order = torch.cat(starts).sort()
    ends = sorted_starts + torch.cat(lengths)[order]
    meets = (sorted_starts[1:] < ends[:-1]).nonzero().flatten()
    if len(meets):
        owner = torch.cat(owners)[order]
        one, other = sorted((int(owner[meets[0]]), int(owner[meets[0] + 1])))
        raise ValueError(
            f"box {one} writes some bytes twice"
            if one == other
            else f"boxes {one} and {other} write the same bytes; target boxes may not overlap"
        )


def _extent(nest: LoopNest, operand: Operand) -> tuple[int, int]:
    """The first byte that an operand touches, and the one behind the last."""
    steps = [stride * (length - 1) for length, stride in zip(nest.lengths, operand.strides, strict=True)]
    below, above = (sum(step for step in steps if (step < 0) is is_below) for is_below in (True, False))
    return operand.offset + below, operand.offset + above + 1


def _num_bytes(tensor: torch.Tensor) -> int:
    """From the first element of a tensor to its last."""
    if tensor.numel() == 0:
        return 0
    steps = ((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (1 + sum(steps)) * tensor.element_size()


def _named(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    for side, tensors in (("source", sources), ("target", targets)):
        for number, tensor in enumerate(tensors):
            yield f"{side} {number}", tensor
