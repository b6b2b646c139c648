"""Counts of the redistributions of the demo, by kind and by the phase of a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from tritondt.events import StepRan

Phase = Literal["forward", "backward", "gradients"]


@dataclass(frozen=True)
class Kind:
    """One kind of movement: in which phase of a training step, from and to which placements."""

    phase: Phase
    source: str
    target: str


@dataclass(frozen=True)
class Flow:
    """Cost of one kind of movement: calls, messages and bytes sent, seconds including waiting."""

    kind: Kind
    calls: int
    messages: int
    sent_bytes: int
    seconds: float


class Traffic:
    """Sums of the events of one rank; `enter` names the phase that the next events belong to."""

    def __init__(self) -> None:
        self._phase: Phase = "forward"
        self._events: defaultdict[Kind, list[StepRan]] = defaultdict(list)

    def enter(self, phase: Phase) -> None:
        """Counts events for `phase` from now on."""
        self._phase = phase

    def record(self, event: StepRan) -> None:
        """Counts one event; the function to subscribe with."""
        self._events[Kind(self._phase, event.source, event.target)].append(event)

    def flows(self) -> tuple[Flow, ...]:
        """Counts so far on this rank, one flow a kind."""
        return tuple(
            Flow(
                kind,
                calls=len(events),
                messages=sum(event.num_sent for event in events),
                sent_bytes=sum(event.sent_bytes for event in events),
                seconds=sum(event.seconds for event in events),
            )
            for kind, events in self._events.items()
        )


def merge_ranks(flows_of_ranks: Sequence[Iterable[Flow]]) -> tuple[Flow, ...]:
    """Flows of all ranks, one a kind: messages and bytes summed, seconds the mean over the ranks.

    A call that all ranks make together counts once. Ordered by phase, then by bytes.
    """
    by_kind: defaultdict[Kind, list[Flow]] = defaultdict(list)
    for flows in flows_of_ranks:
        for flow in flows:
            by_kind[flow.kind].append(flow)
    merged = (
        Flow(
            kind,
            calls=max(flow.calls for flow in flows),
            messages=sum(flow.messages for flow in flows),
            sent_bytes=sum(flow.sent_bytes for flow in flows),
            seconds=sum(flow.seconds for flow in flows) / len(flows_of_ranks),
        )
        for kind, flows in by_kind.items()
    )
    phases = get_args(Phase)
    return tuple(sorted(merged, key=lambda flow: (phases.index(flow.kind.phase), -flow.sent_bytes)))
