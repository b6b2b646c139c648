"""A step of one rank in numbers, of each part and of the whole, and the table of them."""

from collections.abc import Sequence
from dataclasses import dataclass

from tritondt.found_plan.mesh_axes import MeshAxes
from tritondt.found_plan.traffic import Traffic


@dataclass(frozen=True, slots=True)
class PartCost:
    """One part of the model, how it is laid out, how often it is there, and what one of it moves in a step.

    `flops` are those that a rank saves by the cut of one; `instead_seconds` and `instead_bytes` what a step of a rank
    would take more, or less, with this part whole on every rank.
    """

    name: str
    layout: str
    number: int
    forward: Traffic
    backward: Traffic
    saved_flops: int
    instead_seconds: float
    instead_bytes: int


@dataclass(frozen=True, slots=True)
class RecomputedCost:
    """Blocks that compute their activations again in backward, `number` of the `total` that are alike, by pattern.

    The FLOPs, the traffic on the tensor axis and the seconds are those that each adds to a step of a rank, and
    `saved_bytes` are the activations that it does not keep. Over the data axis nothing more moves: backward gathers the
    parameters of a block anyway.
    """

    name: str
    number: int
    total: int
    flops: int
    traffic: Traffic
    seconds: float
    saved_bytes: int


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a rank: parameters, gradients, optimizer, activations kept for backward, and gathered parameters.

    `most` are those that live at one time: activations are freed while gradients are made, and operators have temporary
    tensors. Parameters that fully_shard gathers, and gradients that it packs and reduces, count while they are there.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    gathered: int
    most: int


@dataclass(frozen=True, slots=True)
class StepCost:
    """One step of one rank: what moves over each axis in forward and backward, FLOPs, seconds and memory.

    `hidden_seconds` of the exchanges over the data axis pass while the rank computes. `forward_seconds` are of all of
    forward, `compute_seconds` of forward and backward without what moves, and `rates` says by which they are predicted.
    """

    tensor_forward: Traffic
    tensor_backward: Traffic
    data_forward: Traffic
    data_backward: Traffic
    forward_flops: int
    backward_flops: int
    compute_seconds: float
    hidden_seconds: float
    memory: Memory
    forward_seconds: float = 0.0
    optimizer_seconds: float = 0.0
    rates: str = ""

    @property
    def traffic(self) -> Traffic:
        """All that the rank sends and receives."""
        return self.tensor_forward + self.tensor_backward + self.data_forward + self.data_backward

    @property
    def seconds(self) -> float:
        """Predicted seconds of the step."""
        return self.compute_seconds + self.optimizer_seconds + self.traffic.seconds - self.hidden_seconds

    @property
    def backward_seconds(self) -> float:
        """Predicted seconds of backward, with the reductions of gradients."""
        return self.seconds - self.forward_seconds - self.optimizer_seconds

    def key(self, objective: str) -> tuple[float, ...]:
        """Numbers of which the first is the objective, and the others decide where that is equal."""
        received, memory = self.traffic.received_bytes, self.memory.most
        return {
            "step time": (self.seconds, received, memory),
            "bytes": (received, memory, self.seconds),
            "memory": (memory, self.seconds, received),
        }[objective]


def explanation_text(
    mesh: MeshAxes,
    rank: int,
    step: StepCost,
    parts: Sequence[PartCost],
    recomputed: Sequence[RecomputedCost],
    notes: Sequence[str],
    *,
    is_exact: bool,
) -> str:
    """Tables of the parts and of recomputed blocks, and lines with the sums of the step and the memory of a rank."""
    lines = [f"one step of rank {rank} of {mesh}"]
    lines += columns(part_rows(parts)) if parts else []
    lines += ["", *columns(recomputed_rows(recomputed))] if recomputed else []
    lines += ["", *columns(traffic_rows(step)), *closing_lines(step, notes, is_exact=is_exact)]
    return "\n".join(lines)


def closing_lines(step: StepCost, notes: Sequence[str], *, is_exact: bool) -> list[str]:
    """Lines with FLOPs, seconds and memory of a step, and those that say what was not cut, or not looked at."""
    compute_ms, hidden_ms = (step.compute_seconds + step.optimizer_seconds) * 1e3, step.hidden_seconds * 1e3
    held = step.memory
    lines = [
        f"{step.forward_flops + step.backward_flops:,} FLOPs; predicted {step.seconds * 1e3:,.3f} ms: computing "
        f"{compute_ms:,.3f}, moving {step.traffic.seconds * 1e3:,.3f}, of which {hidden_ms:,.3f} hidden",
        f"memory at most {held.most:,} bytes: parameters {held.parameters:,}, gradients {held.gradients:,}, optimizer "
        f"{held.optimizer:,}, activations {held.activations:,}, gathered {held.gathered:,}",
    ]
    if not is_exact:
        lines.append("the search has not looked at all choices: a better plan may exist")
    if step.rates:
        lines.append(step.rates)
    return [*lines, *notes]


def part_rows(parts: Sequence[PartCost]) -> list[tuple[str, ...]]:
    """Head and rows of the table of the parts."""
    head = ("part", "layout", "times", "forward in", "backward in", "messages", "FLOPs saved", "whole instead")
    return [head, *map(_part_cells, parts)]


def _part_cells(part: PartCost) -> tuple[str, ...]:
    received = (part.forward.received_bytes, part.backward.received_bytes)
    instead = f"{part.instead_seconds * 1e3:+,.3f} ms, {part.instead_bytes:+,} bytes"
    messages = part.forward.messages + part.backward.messages
    return (
        part.name,
        part.layout,
        f"{part.number:,}",
        *(f"{it:,}" for it in received),
        f"{messages:,}",
        f"{part.saved_flops:,}",
        instead,
    )


def recomputed_rows(recomputed: Sequence[RecomputedCost]) -> list[tuple[str, ...]]:
    """Head and rows of the table of the blocks that compute their activations again."""
    head = ("recomputed", "blocks", "each: FLOPs", "bytes in", "messages", "predicted", "bytes not kept")
    return [
        head,
        *(
            (
                each.name,
                f"{each.number:,} of {each.total:,}",
                *(f"{it:,}" for it in (each.flops, each.traffic.received_bytes, each.traffic.messages)),
                f"{each.seconds * 1e3:+,.3f} ms",
                f"{each.saved_bytes:,}",
            )
            for each in recomputed
        ),
    ]


def traffic_rows(step: StepCost) -> list[tuple[str, ...]]:
    """Head and rows of the table of what a step moves."""
    named = (
        ("tensor axis, forward", step.tensor_forward),
        ("tensor axis, backward", step.tensor_backward),
        ("data axis, forward", step.data_forward),
        ("data axis, backward", step.data_backward),
        ("all", step.traffic),
    )
    return [
        ("whole step", "bytes out", "bytes in", "of other hosts", "messages", "predicted"),
        *(
            (
                name,
                *(f"{it:,}" for it in (found.sent_bytes, found.received_bytes, found.far_bytes, found.messages)),
                f"{found.seconds * 1e3:,.3f} ms",
            )
            for name, found in named
        ),
    ]


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table, whose cells are as wide as the widest of their column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
