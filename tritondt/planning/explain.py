"""Explanations of redistributions before anything moves: steps, bytes, messages, memory and predicted time."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from math import prod
from typing import Any

from tritondt.planning.across import make_plan_across
from tritondt.planning.alignment import DENSE, Alignment
from tritondt.planning.between_hosts import Hosts, HostStep, MeshRanks, host_forms
from tritondt.planning.cost import CostTable, step_cost
from tritondt.planning.flat_pieces import FlatPieces
from tritondt.planning.plan import Plan, Step
from tritondt.planning.planner import (
    between_hosts,
    fastest_on_hosts,
    forms_knowing_hosts,
    is_near,
    make_plan,
    seconds_on_hosts,
    why_collective,
    why_more_bytes,
)
from tritondt.planning.step_chart import step_chart
from tritondt.planning.step_report import StepReport, WireSize, cast_report, collective_report, near_ranks, step_report
from tritondt.planning.storage import rank_blocks
from tritondt.planning.traffic import elements_between_hosts
from tritondt.sharding.coordinates import ranks_text
from tritondt.sharding.layout import Coordinate, Layout

# A browser breaks the caption of a narrow table into lines as narrow as that, if it is let.
_MOST_COUNTED = 256  # ranks whose messages are counted for bytes between hosts
CAPTION = "text-align: left; white-space: nowrap"


@dataclass(frozen=True, slots=True)
class Explanation:
    """All steps of a redistribution on the rank at `coordinate`, for contiguous local tensors.

    `wire_itemsize` is the bytes of an element in messages, None where that is the tensor's own. Between two meshes
    `rank` is given, and `coordinate` is its coordinate in the target's mesh, or in the source's, or () outside of both.
    `first_connections_seconds` comes on top, once, for peers that this rank has never talked to. `reason` says why a
    form was taken that brings more bytes than another, and why NCCL's collective was or was not; None without either.
    On several hosts `far_bytes` are those that the rank receives from other hosts in all, and `between_hosts` has
    the bytes of all ranks from one host to another; they are () and 0 on one host, and () among over 256 ranks.
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
    far_bytes: int = 0
    between_hosts: tuple[tuple[int, int, int], ...] = ()

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
        """The text of `str`, as a table of a notebook."""
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
        ) + "".join(f"\n{line}" for line in (self._slots(), self._between(), self.reason, self._why_packed()) if line)

    def _slots(self) -> str:
        """The bytes that the steps pack where peers read them; nothing where all messages are sent."""
        most = max((step.slot_bytes for step in self.steps), default=0)
        placed = max((step.placed_bytes for step in self.steps), default=0)
        if placed:
            return f"up to {placed:,} bytes are packed into slots of peers' GPUs, where these unpack them"
        return f"up to {most:,} bytes go through slots of shared memory, where peers read them" if most else ""

    def _between(self) -> str:
        """Bytes by kind of link; nothing where all ranks are on one host."""
        if not self.far_bytes and not self.between_hosts:
            return ""
        near = self.received_bytes - self.far_bytes
        own = f"{self.far_bytes:,} bytes come in from other hosts, {near:,} from this one"
        if not self.between_hosts:
            return own
        pairs = ", ".join(f"{number_of:,} from host {sender} to {to}" for sender, to, number_of in self.between_hosts)
        return f"{own}\nbetween hosts {sum(pair[2] for pair in self.between_hosts):,} bytes of all ranks: {pairs}"

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
    """A table for notebooks, the first row its head; every text is escaped, and figures end below each other.

    >>> html_table("a < b", [("x",), ("1",)], "").partition("<tr>")[0]
    '<table><caption style="text-align: left; white-space: nowrap">a &lt; b</caption>'
    """
    are_figures = [all(row[column][:1].isdigit() for row in rows[1:]) for column in range(len(rows[0]))]

    def line(tag: str, cells: Sequence[str]) -> str:
        sides = ("right" if is_figure else "left" for is_figure in are_figures)
        texts = (
            f'<{tag} style="text-align: {side}; padding: .1em .6em">{escape(cell)}</{tag}>'
            for side, cell in zip(sides, cells, strict=True)
        )
        return f"<tr>{''.join(texts)}</tr>"

    body = line("th", rows[0]) + "".join(line("td", row) for row in rows[1:])
    below = "".join(f"<p>{escape(text)}</p>" for text in footer.splitlines())
    return f'<table><caption style="{CAPTION}">{escape(title)}</caption>{body}</table>{below}'


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
    dtype: str = "",
    hosts: Hosts = (),
) -> Explanation:
    """Explanation of a redistribution for the rank at `coordinate` (default: the first), from layouts alone.

    `alignment` is the transport's; local tensors start at multiples of it. `wire_itemsize` is given where messages hold
    narrower elements than the tensor, `scale_bytes` where each box has a scale. `dtype` names the elements where NCCL
    may move them by its collectives. `hosts` has the host of each position in the mesh, where there are several.

    >>> from tritondt.sharding.placement import parse_placements
    >>> source, target = (Layout((4,), parse_placements(text), (8, 4)) for text in ("S0", "S1"))
    >>> found = explain_layouts(source, target, 4, CostTable())
    >>> found.sent_bytes, found.received_bytes, found.messages
    (24, 24, 3)
    """
    costs = costs if wire_itemsize is None else costs.for_wire()
    wire = None if wire_itemsize is None else WireSize(itemsize, wire_itemsize, scale_bytes)
    plan = make_plan(source, target, itemsize if wire is None else wire.wire_itemsize, costs, dtype, hosts)
    position = 0 if coordinate is None else source.position(coordinate)
    return explain_plan(plan, position, itemsize, costs, wire, alignment=alignment, dtype=dtype, hosts=hosts)


def explain_plan(
    plan: Plan,
    rank: int,
    itemsize: int,
    costs: CostTable,
    wire: WireSize | None = None,
    *,
    alignment: Alignment = DENSE,
    dtype: str = "",
    hosts: Hosts = (),
) -> Explanation:
    """Explanation of a plan for one of its ranks, or for a rank of the world that is in neither mesh: all zeros.

    The plan is one for elements of `wire`, where that is given. For the rest see `explain_layouts`.

    >>> from tritondt.planning.across import make_plan_across
    >>> from tritondt.sharding.placement import parse_placements
    >>> rows, columns = (Layout((2,), parse_placements(text), (4, 4)) for text in ("S0", "S1"))
    >>> plan = make_plan_across(rows, (0, 1), columns, (2, 3), 4, CostTable())
    >>> found = explain_plan(plan, 3, 4, CostTable())
    >>> found.sent_bytes, found.received_bytes, found.num_peers
    (0, 32, 2)
    """
    ranks, moved_itemsize = plan.ranks, itemsize if wire is None else wire.wire_itemsize
    near = near_ranks(costs, len(ranks), rank)
    host_of = dict(zip(ranks, hosts, strict=True)) if hosts else {}
    own_host = hosts.count(host_of[rank]) if rank in host_of else len(ranks)
    is_across = plan.source_ranks is not None
    reports, peers, peak = [], set[int](), 0
    for step in plan.steps:
        found = step.exchange_of(rank)
        peers.update(message.peer for message in (*found.sends, *found.receives))
        moving_wire = wire if step.moving_axes else None
        sent_itemsize = itemsize if moving_wire is None else moved_itemsize
        seconds = step_cost(step, sent_itemsize, costs, host_of if len(set(hosts)) > 1 else {}).seconds
        if step.collective is not None:
            report = collective_report(step, step.collective, itemsize, seconds, plan.coordinate(rank))
        elif moving_wire is None:
            stored = rank_blocks(step, rank)
            chunk_bytes = costs.chunk_bytes(own_host) if not hosts or is_near(step, hosts, ranks) else 0
            report = step_report(step, found, stored, itemsize, seconds, chunk_bytes, alignment, near)
        else:
            report = cast_report(step, found, moving_wire, seconds)
        reports.append(report)
        peak = max(peak, report.packed_bytes + report.staged_bytes + _between_bytes(plan.steps, step, rank, itemsize))
    far = elements_between_hosts(plan.steps, host_of, [rank])
    between = elements_between_hosts(plan.steps, host_of, ranks if len(hosts) <= _MOST_COUNTED else ())
    reasons = [_why_stages(plan, moved_itemsize, costs, hosts, dtype)]
    if not is_across:
        reasons += (
            why_more_bytes(plan, moved_itemsize, costs, hosts),
            why_collective(plan, moved_itemsize, costs, dtype, hosts),
        )
    return Explanation(
        source=_side_text(plan.source, plan.source_ranks),
        target=_side_text(plan.target, plan.target_ranks),
        shape=plan.source.shape,
        coordinate=plan.coordinate(rank),
        steps=tuple(reports),
        peak_bytes=peak,
        num_peers=len(peers),
        first_connections_seconds=len(peers) * costs.first_connection_s,
        wire_itemsize=None if wire is None else wire.wire_itemsize,
        rank=rank if is_across else None,
        reason="\n".join(filter(None, reasons)) or None,
        far_bytes=sum(far.values()) * moved_itemsize,
        between_hosts=tuple((*pair, numel * moved_itemsize) for pair, numel in sorted(between.items())),
    )


def _why_stages(plan: Plan, itemsize: int, costs: CostTable, hosts: Hosts, dtype: str) -> str | None:
    """The reason why a plan over several hosts knows them or not, where predicted time decides; None where not."""
    if not costs.stages_by_time or len(set(hosts)) < 2 or any(step.collective for step in plan.steps):
        return None
    sides = plan.source, plan.target
    if plan.source_ranks is None or plan.target_ranks is None:
        ranks: Sequence[int] = range(len(hosts))
        plain, knowing = make_plan(*sides, itemsize, costs, dtype), forms_knowing_hosts(*sides, hosts)
    else:
        ranks = plan.ranks
        meshes = MeshRanks(plan.source_ranks, plan.target_ranks)
        plain = make_plan_across(plan.source, meshes.source, plan.target, meshes.target, itemsize, costs)
        knowing = [(number, len(steps), steps) for number, steps in host_forms(*sides, hosts, meshes)]
    if not knowing or any(step.collective for step in plain.steps):
        return None
    knows = any(isinstance(step, HostStep) for step in plan.steps)
    staged = plan.steps if knows else fastest_on_hosts(knowing, itemsize, costs, hosts, ranks)
    others = (plain.steps, "without them") if knows else (staged, "in stages")
    (own_s, own_bytes), (other_s, other_bytes) = (
        (
            seconds_on_hosts(steps, itemsize, costs, hosts, ranks) * 1e6,
            between_hosts(steps, hosts, () if plan.source_ranks is None else ranks) * itemsize,
        )
        for steps in (plan.steps, others[0])
    )
    if not knows and other_bytes >= own_bytes:
        return None
    return (
        f"{'stages' if knows else 'no stages'} over hosts: {own_s:.0f} us predicted and {own_bytes:,} bytes between "
        f"hosts, against {other_s:.0f} us and {other_bytes:,} bytes {others[1]}"
    )


def _side_text(layout: Layout, ranks: tuple[int, ...] | None) -> str:
    return str(layout) if ranks is None else f"{layout} on ranks {ranks_text(ranks)}"


def _between_bytes(steps: tuple[Step, ...], step: Step, rank: int, itemsize: int) -> int:
    """Bytes of tensors that are neither the source nor the target of the plan while a step runs.

    Flat pieces take none: they are reduced in place, inside the target.
    """
    sides = (
        (step.source, None if step is steps[0] else step.source_coordinate(rank)),
        (step.target, None if step is steps[-1] else step.target_coordinate(rank)),
    )
    return sum(
        prod(holding.local_shape(coordinate)) * itemsize
        for holding, coordinate in sides
        if coordinate is not None and not isinstance(holding, FlatPieces)
    )
