"""Explanations of redistributions before anything moves: steps, bytes, messages, memory and predicted time."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from html import escape
from math import prod
from typing import Any, NamedTuple

from tritondt.planning.alignment import DENSE, Alignment
from tritondt.planning.cost import CostTable, step_cost
from tritondt.planning.exchange import Exchange, Message, Part
from tritondt.planning.plan import Step
from tritondt.planning.planner import make_plan, why_more_bytes
from tritondt.planning.slots import longest_of
from tritondt.planning.step_chart import step_chart
from tritondt.planning.storage import Block, contiguous_offset, step_blocks
from tritondt.sharding import intervals as regions
from tritondt.sharding.layout import Coordinate, Layout


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step on one rank: exact messages and bytes, and the seconds that the cost table predicts for any rank.

    `packed_bytes` and `staged_bytes` are the temporary memory of what is packed before sending and of what
    arrives before it is unpacked or reduced; messages that are one run of memory need neither, unless they hold another
    dtype than the tensor, or start where the transport moves bytes slowly: `aligned_bytes` are of such messages.
    `slot_bytes` are packed in shared memory that stays, where peers read them: neither side has temporary memory for
    those messages.
    """

    kind: str
    source: str
    target: str
    num_sent: int
    num_received: int
    sent_bytes: int
    received_bytes: int
    packed_bytes: int
    staged_bytes: int
    seconds: float
    slot_bytes: int = 0
    aligned_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Explanation:
    """All steps of a redistribution on the rank at `coordinate`, for contiguous local tensors.

    `wire_itemsize` is the bytes of an element in messages, None where that is the tensor's own. Between two meshes
    `rank` is given, and `coordinate` is its coordinate in the target's mesh, or in the source's, or () outside of both.
    `first_connections_seconds` comes on top, once, for peers that this rank has never talked to. `reason` says why a
    form was taken that brings more bytes than another; None for the fewest.
    """

    source: str
    target: str
    shape: tuple[int, ...]
    coordinate: Coordinate
    steps: tuple[StepReport, ...]
    peak_bytes: int
    num_peers: int
    first_connections_seconds: float
    wire_itemsize: int | None = None
    rank: int | None = None
    reason: str | None = None

    @property
    def sent_bytes(self) -> int:
        """Bytes that the rank sends in all steps."""
        return sum(step.sent_bytes for step in self.steps)

    @property
    def received_bytes(self) -> int:
        """Bytes that the rank receives in all steps."""
        return sum(step.received_bytes for step in self.steps)

    @property
    def messages(self) -> int:
        """Number of messages that the rank sends in all steps."""
        return sum(step.num_sent for step in self.steps)

    @property
    def seconds(self) -> float:
        """Predicted seconds of all steps, without first connections."""
        return sum(step.seconds for step in self.steps)

    def to_json(self) -> str:
        """All fields and totals as one JSON object."""
        fields = asdict(self)
        for total in ("sent_bytes", "received_bytes", "messages", "seconds"):
            fields[total] = getattr(self, total)
        return json.dumps(fields)

    def __str__(self) -> str:
        if not self.steps:
            return f"{self._title()}: nothing to do"
        rows = self._rows()
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([self._title(), *lines, self._footer()])

    def _repr_html_(self) -> str:
        """What `str` says, as a table of a notebook."""
        if not self.steps:
            return f"<p>{escape(str(self))}</p>"
        return html_table(self._title(), self._rows(), self._footer())

    def plot(self) -> Any:
        """Figure of matplotlib with the bytes that each step sends, receives and holds for a time, on this rank.

        Nothing is shown or written: `figure.savefig(path)` does, and a notebook displays it. Raises ImportError where
        matplotlib, an extra, is not installed.
        """
        return step_chart(self._title(), self.steps)

    def _title(self) -> str:
        place = self.coordinate if self.rank is None else f"rank {self.rank}"
        title = f"{self.source} -> {self.target} of {self.shape} at {place}"
        return title if self.wire_itemsize is None else f"{title}, {self.wire_itemsize} bytes an element in messages"

    def _rows(self) -> list[tuple[str, ...]]:
        head = ("step", "from", "to", "sends", "bytes out", "receives", "bytes in", "temporary", "predicted")
        return [head, *map(_cells, self.steps)]

    def _footer(self) -> str:
        return (
            f"peak temporary {self.peak_bytes:,} bytes; {self.num_peers} peers, "
            f"first connections {self.first_connections_seconds * 1e3:.1f} ms"
        ) + "".join(f"\n{line}" for line in (self._slots(), self.reason, self._why_packed()) if line)

    def _slots(self) -> str:
        """What the steps pack where peers read it; nothing where all messages are sent."""
        most = max((step.slot_bytes for step in self.steps), default=0)
        return f"up to {most:,} bytes packed in a slot of shared memory, where peers read them" if most else ""

    def _why_packed(self) -> str | None:
        """Why messages that are one run of memory go by a buffer; None where none does."""
        num_bytes = sum(step.aligned_bytes for step in self.steps)
        if num_bytes == 0:
            return None
        return f"{num_bytes:,} temporary bytes are for alignment: of messages that start between multiples of 16 bytes"


def _cells(step: StepReport) -> tuple[str, ...]:
    return (
        step.kind,
        step.source,
        step.target,
        str(step.num_sent),
        f"{step.sent_bytes:,}",
        str(step.num_received),
        f"{step.received_bytes:,}",
        f"{step.packed_bytes + step.staged_bytes:,}",
        f"{step.seconds * 1e6:,.0f} us",
    )


def html_table(title: str, rows: Sequence[Sequence[str]], footer: str) -> str:
    """A table for notebooks, the first row its head; every text is escaped.

    >>> html_table("a < b", [("x",), ("1",)], "")
    '<table><caption>a &lt; b</caption><tr><th>x</th></tr><tr><td>1</td></tr></table>'
    """

    def line(tag: str, cells: Sequence[str]) -> str:
        return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"

    body = line("th", rows[0]) + "".join(line("td", row) for row in rows[1:])
    below = "".join(f"<p>{escape(text)}</p>" for text in footer.splitlines())
    return f"<table><caption>{escape(title)}</caption>{body}</table>{below}"


def explain_layouts(
    source: Layout,
    target: Layout,
    itemsize: int,
    costs: CostTable,
    coordinate: Coordinate | None = None,
    *,
    wire_itemsize: int | None = None,
    scale_bytes: int = 0,
    alignment: Alignment = DENSE,
) -> Explanation:
    """Explanation of a redistribution for the rank at `coordinate` (default: the first), from layouts alone.

    `alignment` is the transport's; local tensors start at multiples of it. `wire_itemsize` is given where messages hold
    narrower elements than the tensor, `scale_bytes` where each box has a scale.

    >>> from tritondt.sharding.placement import parse_placements
    >>> source, target = (Layout((4,), parse_placements(text), (8, 4)) for text in ("S0", "S1"))
    >>> found = explain_layouts(source, target, 4, CostTable())
    >>> found.sent_bytes, found.received_bytes, found.messages
    (24, 24, 3)
    """
    at = (0,) * len(source.mesh_shape) if coordinate is None else coordinate
    plan = make_plan(source, target, itemsize if wire_itemsize is None else wire_itemsize, costs)
    longest = longest_of(costs, prod(source.mesh_shape))
    reports, peers = [], set[int]()
    for step in plan.steps:
        found = step.exchange(at)
        peers.update(message.peer for message in (*found.sends, *found.receives))
        wire = None if wire_itemsize is None else WireSize(itemsize, wire_itemsize, scale_bytes)
        if wire is None or not step.moving_axes:
            seconds = step_cost(step, itemsize, costs).seconds
            stored = step_blocks(step, at)
            reports.append(step_report(step, found, stored, itemsize, seconds, longest, alignment))
        else:
            reports.append(cast_report(step, found, wire, step_cost(step, wire.wire_itemsize, costs).seconds))
    peak = 0
    for step, report in zip(plan.steps, reports, strict=True):
        peak = max(peak, report.packed_bytes + report.staged_bytes + _between_bytes(plan.steps, step, at, itemsize))
    return Explanation(
        source=str(source),
        target=str(target),
        shape=source.shape,
        coordinate=at,
        steps=tuple(reports),
        peak_bytes=peak,
        num_peers=len(peers),
        first_connections_seconds=len(peers) * costs.first_connection_s,
        wire_itemsize=wire_itemsize,
        reason=why_more_bytes(plan, itemsize if wire_itemsize is None else wire_itemsize, costs),
    )


def step_report(
    step: Step,
    found: Exchange,
    stored: tuple[tuple[Block, ...], tuple[Block, ...]],
    itemsize: int,
    seconds: float,
    longest_in_slot: int = 0,
    alignment: Alignment = DENSE,
) -> StepReport:
    """Report of a step on a rank that exchanges `found` between the source and target blocks `stored`.

    Messages of at most `longest_in_slot` bytes go through a slot, in which those that several peers receive lie once.
    """
    source_blocks, target_blocks = stored
    limit = longest_in_slot // itemsize
    in_slot = {message.parts: message.numel * itemsize for message in found.sends if message.numel <= limit}
    leaving = [message for message in found.sends if message.numel > limit]
    arriving = [message for message in found.receives if message.numel > limit]
    sent, received, left, arrived = (
        sum(message.numel for message in messages) * itemsize
        for messages in (found.sends, found.receives, leaving, arriving)
    )
    in_place, landing, aligned = 0, 0, 0
    for message in leaving:
        here, there = _in_place_bytes(source_blocks, message, itemsize, alignment)
        in_place, aligned = in_place + here, aligned + there
    for message in arriving if step.kind != "reduce" else ():
        here, there = _in_place_bytes(target_blocks, message, itemsize, alignment)
        landing, aligned = landing + here, aligned + there
    num_bytes = _Bytes(sent, received, left - in_place, arrived - landing, sum(in_slot.values()), aligned)
    return _step_report(step, found, num_bytes, seconds)


def _in_place_bytes(
    stored: tuple[Block, ...], message: Message, itemsize: int, alignment: Alignment
) -> tuple[int, int]:
    """Bytes of a message that goes without a buffer, and of one that would but for where it starts."""
    num_bytes = message.numel * itemsize
    offset = contiguous_offset(stored, message.parts[0].region) if len(message.parts) == 1 else None
    if offset is None:
        return 0, 0
    return (num_bytes, 0) if alignment.keeps_in_place(offset * itemsize, num_bytes) else (0, num_bytes)


class WireSize(NamedTuple):
    """Bytes of an element in the tensor and in messages, and of the scale of a box in messages."""

    itemsize: int
    wire_itemsize: int
    scale_bytes: int

    def num_bytes(self, parts: Iterable[Part]) -> int:
        """Bytes that parts take in messages."""
        return sum(
            part.numel * self.wire_itemsize + regions.num_boxes(part.region) * self.scale_bytes for part in parts
        )


def cast_report(step: Step, found: Exchange, wire: WireSize, seconds: float) -> StepReport:
    """Report of a step whose messages have another dtype: sends and keeps are packed, those that several receive once.

    Terms of a reduction are staged as they come, and as wide as the tensor.
    """
    packed = {*(message.parts for message in found.sends), *((part,) for part in found.keeps)}
    arriving = [part for message in found.receives for part in message.parts]
    received = wire.num_bytes(arriving)
    widened = 0
    if step.kind == "reduce":
        widened = sum(part.numel for part in (*arriving, *found.keeps)) * wire.itemsize
    sent = sum(wire.num_bytes(message.parts) for message in found.sends)
    num_bytes = _Bytes(sent, received, sum(wire.num_bytes(parts) for parts in packed), received + widened)
    return _step_report(step, found, num_bytes, seconds)


class _Bytes(NamedTuple):
    """Bytes of one step on one rank, for a StepReport."""

    sent: int
    received: int
    packed: int
    staged: int
    in_slot: int = 0
    aligned: int = 0


def _step_report(step: Step, found: Exchange, num_bytes: _Bytes, seconds: float) -> StepReport:
    return StepReport(
        kind=step.kind,
        source=str(step.source),
        target=str(step.target),
        num_sent=len(found.sends),
        num_received=len(found.receives),
        sent_bytes=num_bytes.sent,
        received_bytes=num_bytes.received,
        packed_bytes=num_bytes.packed,
        staged_bytes=num_bytes.staged,
        seconds=seconds,
        slot_bytes=num_bytes.in_slot,
        aligned_bytes=num_bytes.aligned,
    )


def _between_bytes(steps: tuple[Step, ...], step: Step, coordinate: Coordinate, itemsize: int) -> int:
    """Bytes of tensors that are neither the source nor the target of the plan while a step runs.

    Flat pieces take none: they are reduced in place, inside the target.
    """
    held = 0
    for neighbour in (step.source if step is not steps[0] else None, step.target if step is not steps[-1] else None):
        if isinstance(neighbour, Layout):
            numel = 1
            for length in neighbour.local_shape(coordinate):
                numel *= length
            held += numel * itemsize
    return held
