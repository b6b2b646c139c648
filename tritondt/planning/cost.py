"""Cost of a step: messages, bytes and copies, priced by a table that all ranks of a world share.

Prices come in closed form from the layouts alone: those of the busiest rank where all pieces are equal, an estimate
where they are not. A price by a rank's own bytes would let ranks choose different plans, and the exchange would hang.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from math import inf, prod
from types import MappingProxyType
from typing import Any, TypeVar

from tritondt.errors import ArgumentError
from tritondt.planning.alignment import STAGING_ALIGNMENT
from tritondt.planning.between_hosts import HostStep
from tritondt.planning.collectives import ALL, EXACT, NONE, WIDE, Collective, group_of
from tritondt.planning.exchange import Exchange
from tritondt.planning.plan import Step
from tritondt.planning.slots import chunk_bytes, device_slots, slot_bytes
from tritondt.planning.traffic import estimated_elements, estimated_peers
from tritondt.sharding.coordinates import coordinate_at

_MAY_BE_ZERO = (
    "launch_s",
    "one_shot_bytes",
    "arena_bytes",
    "device_arena_bytes",
    "slot_launch_s",
    "collective_launch_s",
    "registered_bytes",
    "stages_by_time",
    "operator_s",
    "exchange_s",
    "group_s",
    "group_parameter_s",
    "cores_per_host",
    "float64",
    "float32",
    "bfloat16",
    "float16",
)
# Ranks on several hosts whose messages are all listed to price a step.
_MOST_LISTED = 64
_Table = TypeVar("_Table", "Link", "FlopRates", "CostTable")


@dataclass(frozen=True, slots=True)
class Link:
    """One class of connection: `latency_s` seconds per message, `bandwidth` bytes per second.

    `busy_share` is the part of the time in which the ranks' processors move the bytes, and can compute nothing.
    """

    latency_s: float
    bandwidth: float
    busy_share: float = 0.0


@dataclass(frozen=True, slots=True)
class FlopRates:
    """Floating-point operations a second in large matmuls, by dtype; 0 where a table's `flop_rate` counts."""

    float64: float = 0.0
    float32: float = 0.0
    bfloat16: float = 0.0
    float16: float = 0.0


@dataclass(frozen=True, slots=True)
class CostTable:
    """Prices per class of link, and grouping of ranks; rank r is on host r // ranks_per_host.

    `first_connection_s` is paid once per new peer. Above `max_peers` peers per rank a plan takes several hops.
    `flop_rate` is how many operations a second one thread, or a device, does in a matmul: where that is too high, what
    overlaps is cut finer than it need be, and where it is too low, less is hidden. `launch_s` is what a step takes
    whatever it moves: kernels that are launched. A form that brings a rank at most `one_shot_bytes` may be taken for
    its predicted time, though another one brings fewer; 0 for the fewest always. `arena_bytes` is the shared memory of
    a rank in a communicator, in which the others of its host read its messages; 0 where they are sent to them.
    `device_arena_bytes` are of its GPU, and the others pack messages for it there: those that fit take the link
    `slots` and `slot_launch_s` in place of the host's and `launch_s`; 0 where NCCL carries all.
    `collectives` are those of NCCL that may be taken for messages of our own: 0 none, 1 what has one result in any
    order, 2 sums of floats of 32 bits and more as well, 3 those of 16 bits too, which it rounds at every addition. Each
    takes `collective_launch_s`, and moves bytes `collective_speedup` times as fast as messages do on the same link.
    With `registered_bytes` they may also go through so much memory of each rank, of NCCL's allocation and registered
    with a communicator once: copied in and out, `registered_speedup` times as fast again, in two hops within a host.
    On several hosts the form with the fewest bytes between these is taken where `stages_by_time` is 0. Where it is 1,
    that form is taken if it is predicted to be the fastest, and if NCCL is offered no collective for the transfer.

    Steps of whole models are predicted by `flop_rates`, matmuls by dtype, and by two prices of all other operators:
    `operator_s` seconds of the host for each, and `operator_bandwidth` bytes a second that it reads and writes. The
    host takes `exchange_s` for each redistribution of a parallel style, beside what moves, and for each of a group of
    fully_shard `group_s`, and `group_parameter_s` for each of its parameters. With `cores_per_host` cores, fewer than
    ranks, the ranks of a host take turns; 0 where each rank has its own.
    `is_measured` says that a calibration has written these prices.
    """

    device: Link = Link(2e-6, 400e9)
    host: Link = Link(30e-6, 2e9, busy_share=1.0)
    network: Link = Link(60e-6, 1e9)
    copy_bandwidth: float = 5e9
    ranks_per_device: int = 1
    ranks_per_host: int = 8
    max_peers: int = 1024
    first_connection_s: float = 1e-3
    flop_rate: float = 1e11
    launch_s: float = 0.0
    one_shot_bytes: int = 0
    arena_bytes: int = 0
    device_arena_bytes: int = 0
    slots: Link = Link(0.2e-6, 300e9, busy_share=0.25)
    slot_launch_s: float = 0.0
    collectives: int = 0
    collective_launch_s: float = 0.0
    collective_speedup: float = 1.0
    registered_bytes: int = 0
    registered_speedup: float = 1.0
    stages_by_time: int = 0
    flop_rates: FlopRates = FlopRates()
    operator_s: float = 0.0
    operator_bandwidth: float = 3e10
    exchange_s: float = 0.0
    group_s: float = 0.0
    group_parameter_s: float = 0.0
    cores_per_host: int = 0
    is_measured: bool = False

    def to_json(self) -> str:
        """Text of the table, the form in which ranks agree on one."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "CostTable":
        """Table that `to_json` wrote."""
        return cls().with_json(text)

    def with_json(self, text: str) -> "CostTable":
        """Table with the prices of a JSON object in place of its own; ValueError for values that are no prices.

        >>> CostTable().with_json('{"host": {"bandwidth": 1e8}, "max_peers": 64}').host
        Link(latency_s=3e-05, bandwidth=100000000.0, busy_share=1.0)
        """
        return self.with_prices(json.loads(text))

    def with_prices(self, prices: Any) -> "CostTable":
        """Table with the prices of an object, as JSON has them, in place of its own; ValueError for what are none."""
        return _with_prices(self, prices)

    def rate(self, dtype: str) -> float:
        """Floating-point operations a second in matmuls of a dtype.

        >>> table = CostTable(flop_rate=1e11, flop_rates=FlopRates(float64=5e10))
        >>> table.rate("float64"), table.rate("float32")
        (50000000000.0, 100000000000.0)
        """
        found: float = getattr(self.flop_rates, dtype, 0.0)
        return found or self.flop_rate

    def shares_memory(self, num_ranks: int) -> bool:
        """Whether so many ranks read each other's messages where they were packed."""
        return self.arena_bytes > 0 and num_ranks <= self.ranks_per_host

    def chunk_bytes(self, num_ranks: int) -> int:
        """Bytes of a chunk of a message between so many ranks; 0 where they share no memory.

        >>> CostTable(arena_bytes=1 << 20, ranks_per_host=4).chunk_bytes(4), CostTable().chunk_bytes(4)
        (173376, 0)
        """
        return chunk_bytes(num_ranks, slot_bytes(self.arena_bytes, num_ranks)) if self.shares_memory(num_ranks) else 0

    def one_shot_limit(self, num_ranks: int) -> int:
        """`one_shot_bytes` of a plan on so many ranks: 0 where they are for shared memory, and these share none.

        >>> table = CostTable(one_shot_bytes=1 << 18, arena_bytes=16 << 20, ranks_per_host=8)
        >>> table.one_shot_limit(8), table.one_shot_limit(16)
        (262144, 0)
        """
        return 0 if self.arena_bytes and not self.shares_memory(num_ranks) else self.one_shot_bytes

    def slot_bytes(self, num_ranks: int) -> int:
        """The longest message that a rank packs into memory of another one of its host, of so many ranks in all.

        >>> table = CostTable(device_arena_bytes=16 << 20, ranks_per_host=8)
        >>> table.slot_bytes(32), CostTable().slot_bytes(32)
        (1048064, 0)
        """
        near = min(num_ranks, self.ranks_per_host)
        return device_slots(self.device_arena_bytes, near).slot_bytes if near > 1 else 0

    @property
    def fingerprint(self) -> str:
        """Hash by which ranks compare tables."""
        return hashlib.blake2b(self.to_json().encode(), digest_size=8).hexdigest()

    def link(self, span: int) -> Link:
        """Slowest link within groups of `span` consecutive ranks."""
        if span <= self.ranks_per_device and self.ranks_per_device % span == 0:
            return self.device
        if span <= self.ranks_per_host and self.ranks_per_host % span == 0:
            return self.host
        return self.network

    def for_wire(self) -> "CostTable":
        """The table for messages of a narrower dtype than the tensor's, which go through no slots of GPUs."""
        return replace(self, device_arena_bytes=0)

    def link_of(self, span: int, num_ranks: int, message_bytes: float) -> Link:
        """Slowest link for messages of so many bytes within groups of `span` of `num_ranks` ranks.

        >>> table = CostTable(device_arena_bytes=16 << 20, ranks_per_host=8)
        >>> [table.link_of(8, 8, num_bytes) is table.slots for num_bytes in (1 << 19, 1 << 21)]
        [True, False]
        """
        link = self.link(span)
        fits = 0 < message_bytes <= self.slot_bytes(num_ranks) and link is not self.network
        return self.slots if fits else link


def _with_prices(table: _Table, prices: Any) -> _Table:
    """A table, or a link in one, with some prices changed."""
    if not isinstance(prices, dict):
        raise ArgumentError(f"{prices!r} is given for {type(table).__name__}; allowed is an object of prices by name")
    known, changed = {field.name: getattr(table, field.name) for field in fields(table)}, dict[str, Any]()
    for name, price in prices.items():
        if name not in known:
            raise ArgumentError(f"{name!r} is no price of {type(table).__name__}; allowed are {', '.join(known)}")
        if isinstance(known[name], Link | FlopRates):
            changed[name] = _with_prices(known[name], price)
        else:
            _check_price(name, price, of_kind=type(known[name]))
            changed[name] = type(known[name])(price)
    return replace(table, **changed)


def _check_price(name: str, price: Any, of_kind: type) -> None:
    is_number = isinstance(price, int | float) and not isinstance(price, bool) and 0 <= price < inf
    if name == "is_measured":
        is_allowed, allowed = isinstance(price, bool), "boolean"
    elif name == "busy_share":
        is_allowed, allowed = is_number and price <= 1, "number from 0 to 1"
    elif name == "collectives":
        is_allowed, allowed = price in (NONE, EXACT, WIDE, ALL) and is_number, "whole number from 0 to 3"
    elif name == "stages_by_time":
        is_allowed, allowed = price in (0, 1) and is_number, "whole number from 0 to 1"
    elif name in _MAY_BE_ZERO:
        is_allowed = is_number and of_kind(price) == price
        allowed = "whole number of 0 or more" if of_kind is int else "number of 0 or more"
    else:
        is_allowed = is_number and price > 0 and of_kind(price) == price
        allowed = "whole number above 0" if of_kind is int else "number above 0"
    if not is_allowed:
        raise ArgumentError(f"{price!r} is given for {name!r}; allowed is a {allowed}")


@dataclass(frozen=True, slots=True)
class StepCost:
    """Peers, received elements and seconds of a step on any rank, exact where all pieces are equal."""

    num_peers: int
    received_elements: float
    seconds: float


def step_cost(
    step: Step, itemsize: int, costs: CostTable, host_of: Mapping[int, int] = MappingProxyType({})
) -> StepCost:
    """Cost of a step whose elements have `itemsize` bytes.

    `host_of` has the host of each position in the mesh, or of each rank of two meshes, ascending, where these are on
    several. Up to 64 ranks the links of all messages are then priced, above them the link between hosts.
    """
    if host_of and step.moving_axes:
        if step.collective is not None:
            num_hosts = _most_hosts(step.collective, step.source.mesh_shape, host_of)
            return _collective_cost(step.collective, itemsize, costs, num_hosts)
        if len(host_of) <= _MOST_LISTED:
            return _cost_on_hosts(step, itemsize, costs, host_of)
        if not isinstance(step, HostStep):
            costs = replace(costs, ranks_per_host=1)
    if step.source_ranks is not None:
        return _cost_across(step, itemsize, costs)
    if step.collective is not None:
        return _collective_cost(step.collective, itemsize, costs)
    if isinstance(step, HostStep):
        return _between_hosts_cost(step, itemsize, costs)
    if not step.moving_axes:
        copied = step.target.max_local_numel * itemsize
        return StepCost(0, 0.0, costs.launch_s + copied / costs.copy_bandwidth)
    num_peers, received = estimated_peers(step), estimated_elements(step)
    received_bytes, sizes = received * itemsize, step.source.mesh_shape
    link = costs.link_of(prod(sizes[step.moving_axes[0] :]), prod(sizes), received_bytes / max(num_peers, 1))
    launch_s = costs.slot_launch_s if link is costs.slots else costs.launch_s
    moving_s = received_bytes / link.bandwidth + received_bytes / costs.copy_bandwidth
    return StepCost(num_peers, received, launch_s + num_peers * link.latency_s + moving_s)


def _cost_on_hosts(step: Step, itemsize: int, costs: CostTable, host_of: Mapping[int, int]) -> StepCost:
    """Cost of messages over the links that they take, of the busiest rank."""
    found = [_cost_of_rank(step.exchange_of(rank), rank, itemsize, costs, host_of) for rank in host_of]
    return StepCost(
        max(cost.num_peers for cost in found),
        max(cost.received_elements for cost in found),
        max(cost.seconds for cost in found),
    )


def _cost_of_rank(found: Exchange, rank: int, itemsize: int, costs: CostTable, host_of: Mapping[int, int]) -> StepCost:
    """Cost of a rank's part in a step: of what it sends or of what it receives, whichever takes longer."""
    fits, own, moving_s, placed = costs.slot_bytes(len(host_of)), host_of[rank], [0.0], True
    for messages in (found.sends, found.receives):
        seconds = 0.0
        for message in messages:
            num_bytes = message.numel * itemsize
            link = costs.network if host_of[message.peer] != own else costs.slots if num_bytes <= fits else costs.host
            placed = placed and link is costs.slots
            seconds += link.latency_s + num_bytes / link.bandwidth
        moving_s.append(seconds)
    received = sum(message.numel for message in found.receives)
    copied = received + sum(part.numel for part in found.keeps)
    launch_s = costs.slot_launch_s if placed and fits else costs.launch_s
    seconds = launch_s + max(moving_s) + copied * itemsize / costs.copy_bandwidth
    return StepCost(max(len(found.sends), len(found.receives)), float(received), seconds)


def _most_hosts(collective: Collective, mesh_shape: tuple[int, ...], host_of: Mapping[int, int]) -> int:
    """The most hosts that ranks of one group of a collective are on."""
    groups = {group_of(mesh_shape, collective.axes, coordinate_at(place, mesh_shape)) for place in host_of}
    return max(len({host_of[place] for place in group}) for group in groups)


def _cost_across(step: Step, itemsize: int, costs: CostTable) -> StepCost:
    """Cost of a step of a plan between meshes, of the rank that receives most; its messages are listed."""
    if not step.moving_axes:
        return StepCost(0, 0.0, step.target.max_local_numel * itemsize / costs.copy_bandwidth)
    exchanges = [step.exchange_of(rank) for rank in step.ranks]
    num_messages = max(max(len(found.sends), len(found.receives)) for found in exchanges)
    received = max(step.received_elements)
    link, num_bytes = costs.link(max(step.ranks) + 1), received * itemsize
    moving_s = num_messages * link.latency_s + num_bytes / link.bandwidth + num_bytes / costs.copy_bandwidth
    return StepCost(num_messages, float(received), moving_s)


def _between_hosts_cost(step: HostStep, itemsize: int, costs: CostTable) -> StepCost:
    """Cost of a step that knows hosts, that of the first rank; its messages are counted."""
    found = step.exchange((0,) * len(step.source.mesh_shape))
    received = sum(message.numel for message in found.receives)
    copied = received + sum(part.numel for part in found.keeps)
    link, num_peers = costs.host if step.is_near else costs.network, max(len(found.sends), len(found.receives))
    moving_s = num_peers * link.latency_s + received * itemsize / link.bandwidth
    return StepCost(num_peers, float(received), costs.launch_s + moving_s + copied * itemsize / costs.copy_bandwidth)


def _collective_cost(collective: Collective, itemsize: int, costs: CostTable, num_hosts: int = 0) -> StepCost:
    """Cost of a collective among ranks of so many hosts, 0 for those of consecutive ranks by the prices."""
    if collective.registered_bytes:
        return _registered_cost(collective, itemsize, costs, num_hosts)
    copying_s = 0.0 if collective.is_dense else costs.launch_s + collective.numel * itemsize / costs.copy_bandwidth
    moving_s = _ring_s(collective, itemsize, costs, num_hosts, collective.num_hops, costs.collective_speedup)
    return StepCost(1, float(collective.moved_elements), costs.collective_launch_s + moving_s + copying_s)


def _ring_s(
    collective: Collective, itemsize: int, costs: CostTable, num_hosts: int, num_hops: int, speedup: float
) -> float:
    """Seconds of the hops and bytes of a collective; between known hosts rings share the ranks' links."""
    moved_bytes, num_ranks = collective.moved_elements * itemsize, collective.num_ranks
    if num_hosts < 2:
        link = costs.host if num_hosts else costs.link(collective.span or num_ranks)
        return num_hops * link.latency_s + moved_bytes / (link.bandwidth * speedup)
    far_hops = min(num_hops, collective._replace(num_ranks=num_hosts).num_hops)
    near_s = moved_bytes * (num_ranks - num_hosts) / num_ranks / costs.host.bandwidth
    far_s = moved_bytes * num_hosts / num_ranks / costs.network.bandwidth
    waiting_s = far_hops * costs.network.latency_s + (num_hops - far_hops) * costs.host.latency_s
    return waiting_s + max(near_s, far_s) / speedup


def _registered_cost(collective: Collective, itemsize: int, costs: CostTable, num_hosts: int) -> StepCost:
    """Cost of a collective through registered memory; infinite seconds where it needs more than there is."""
    received = collective.moved_elements
    copied = sum(collective.sides) * itemsize
    if copied + STAGING_ALIGNMENT > collective.registered_bytes:
        return StepCost(1, float(received), inf)
    is_far = num_hosts > 1 if num_hosts else costs.link(collective.span or collective.num_ranks) is costs.network
    num_hops = collective.num_hops if is_far else min(collective.num_hops, 2)
    speedup = costs.collective_speedup * costs.registered_speedup
    moving_s = _ring_s(collective, itemsize, costs, num_hosts, num_hops, speedup)
    copying_s = costs.launch_s + copied / costs.copy_bandwidth
    return StepCost(1, float(received), costs.collective_launch_s + moving_s + copying_s)
