"""What a step costs: messages, bytes and copies, priced by a table that all ranks of a world share.

Prices come in closed form from the layouts alone: those of the busiest rank where all pieces are equal, an estimate
where they are not. A price by a rank's own bytes would let ranks choose different plans, and the exchange would hang.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from tritondt.layout import Layout
from tritondt.placement import Replicate
from tritondt.planning.exchange import Route
from tritondt.planning.pieces import FlatPieces
from tritondt.planning.plan import Step, common_cuts


@dataclass(frozen=True, slots=True)
class Link:
    """One class of connection: seconds per message, bytes per second."""

    latency_s: float
    bandwidth: float


@dataclass(frozen=True, slots=True)
class CostTable:
    """Prices per link class, and how ranks are grouped; rank r is on host r // ranks_per_host.

    `first_connection_s` is paid once per new peer. Above `max_peers` peers per rank a plan takes several hops.
    """

    device: Link = Link(2e-6, 400e9)
    host: Link = Link(30e-6, 2e9)
    network: Link = Link(60e-6, 1e9)
    copy_bandwidth: float = 5e9
    ranks_per_device: int = 1
    ranks_per_host: int = 8
    max_peers: int = 1024
    first_connection_s: float = 1e-3

    def to_json(self) -> str:
        """The table as text, the form in which ranks agree on it."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "CostTable":
        """The table that `to_json` wrote."""
        fields: dict[str, Any] = {
            name: Link(**value) if isinstance(value, dict) else value for name, value in json.loads(text).items()
        }
        return cls(**fields)

    @property
    def fingerprint(self) -> str:
        """Hash by which ranks compare tables."""
        return hashlib.blake2b(self.to_json().encode(), digest_size=8).hexdigest()

    def link(self, span: int) -> Link:
        """The slowest link inside groups of `span` consecutive ranks."""
        if span <= self.ranks_per_device and self.ranks_per_device % span == 0:
            return self.device
        if span <= self.ranks_per_host and self.ranks_per_host % span == 0:
            return self.host
        return self.network


@dataclass(frozen=True, slots=True)
class StepCost:
    """What a step asks of a rank; the same on all ranks, and exact where all pieces are equal."""

    num_peers: int
    received_elements: float
    seconds: float


def step_cost(step: Step, itemsize: int, costs: CostTable) -> StepCost:
    """The cost of a step of elements of `itemsize` bytes."""
    if not step.moving_axes:
        copied = step.target.max_local_numel * itemsize
        return StepCost(0, 0.0, copied / costs.copy_bandwidth)
    num_peers, received = _peers(step), received_elements(step)
    link = costs.link(prod(step.source.mesh_shape[step.moving_axes[0] :]))
    received_bytes = received * itemsize
    seconds = num_peers * link.latency_s + received_bytes / link.bandwidth + received_bytes / costs.copy_bandwidth
    return StepCost(num_peers, received, seconds)


def received_elements(step: Step) -> float:
    """Elements that a rank receives, as a real number so that equal forms compare equal."""
    if isinstance(step.source, FlatPieces):
        return step.source.layout.max_local_numel * (1 - 1 / step.source.parts)
    wanted = step.target_layout.max_local_numel / (1 if isinstance(step.target, Layout) else step.target.parts)
    return wanted * (step.route.contributions - _own_fraction(step.route))


def _own_fraction(route: Route) -> float:
    """The least fraction of its target region that a rank holds a term of."""
    fraction = 1.0
    for source_parts, target_parts in _parts_of_dims(route):
        if source_parts > 1 and target_parts > 1:
            return 0.0
        fraction /= source_parts
    return fraction


def _peers(step: Step) -> int:
    """Ranks that a rank talks to: those that serve it, or those that it serves, whichever are more."""
    if isinstance(step.source, FlatPieces):
        return step.source.parts - 1
    route = step.route
    sizes = route.source_layout.mesh_shape
    servers = receivers = prod(sizes[axis] for axis in route.reduced_axes)
    pieces = step.target.axes if isinstance(step.target, FlatPieces) else ()
    fixed = {*route.replica_axes, *route.kept_axes, *route.reduced_axes}
    for source_parts, target_parts in _parts_of_dims(route):
        servers *= _overlapping(source_parts, target_parts)
        receivers *= _overlapping(target_parts, source_parts)
    if not pieces:  # along a reduced axis that the target cuts, the cut has counted its pieces already
        receivers //= prod(sizes[axis] for axis in route.reduced_axes)
        fixed -= set(route.reduced_axes)
    for axis in route.target_layout.axes_where(Replicate):
        if axis not in fixed:
            receivers *= sizes[axis]
    own = 1 if _own_fraction(route) > 0 else 0
    return max(servers, receivers) - own


def _parts_of_dims(route: Route) -> Iterator[tuple[int, int]]:
    """Per dim, in how many parts source and target cut what they do not cut alike."""
    source, target = route.source_layout, route.target_layout
    for dim, (source_axes, target_axes) in enumerate(zip(source.axes_of_dim, target.axes_of_dim, strict=True)):
        common = len(common_cuts(source, target, dim))
        moving = [axis for axis in source_axes[common:] if axis not in route.kept_axes]
        yield (
            prod(source.mesh_shape[axis] for axis in moving),
            prod(target.mesh_shape[axis] for axis in target_axes[common:]),
        )


def _overlapping(parts: int, others: int) -> int:
    """How many of `parts` equal pieces of an interval meet one of `others` equal pieces of it, at most."""
    if others % parts == 0 or parts % others == 0:
        return max(1, parts // others)
    return min(parts, -(-parts // others) + 1)
