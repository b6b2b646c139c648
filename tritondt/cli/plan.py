"""`plan`: explanation of a redistribution, without starting any process."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tritondt._importing import without_collections
from tritondt.cli.outputs import ProgressLine
from tritondt.cli.plan_picture import LINK_HEADER, link_rows, spread_rows, write_html, write_png
from tritondt.comm.transports.table import chosen, named, transports
from tritondt.errors import LayoutError
from tritondt.planning.alignment import DENSE, NCCL_ALIGNMENT
from tritondt.planning.between_hosts import Hosts
from tritondt.planning.cost import CostTable
from tritondt.planning.explain import Explanation, explain_layouts
from tritondt.planning.plan import Plan
from tritondt.planning.planner import make_plan
from tritondt.planning.prices import built_in
from tritondt.planning.spread import Spread
from tritondt.planning.topology import Link, Topology, link_loads, loads_by_kind, parse_topology
from tritondt.planning.traffic import MOST_MESSAGES, RankTraffic, rank_totals, rank_traffic
from tritondt.sharding.layout import Layout
from tritondt.sharding.placement import parse_placements

if TYPE_CHECKING:
    from tritondt.cli.wide_traffic import WideTraffic


@without_collections()
def plan(
    mesh: tuple[int, ...],
    shape: tuple[int, ...],
    source: str,
    target: str,
    source_order: tuple[int, ...] | None,
    target_order: tuple[int, ...] | None,
    dtype: str,
    coordinate: tuple[int, ...] | None,
    device: str,
    transport: str | None,
    against: str | None,
    all_ranks: bool,
    topology: str | None,
    html: str | None,
    png: str | None,
    as_json: bool,
) -> None:
    """Prints what a redistribution takes, and writes the pages that were asked for."""
    before = Layout(mesh, parse_placements(source), shape, source_order)
    after = Layout(mesh, parse_placements(target), shape, target_order)
    if coordinate is not None and not _is_on(mesh, coordinate):
        ends = ", ".join(f"0..{size - 1}" for size in mesh)
        raise click.BadParameter(
            f"{coordinate} is not on a mesh of shape {mesh}; allowed are ({ends})",
            param_hint="--coordinate",
        )
    if html is not None and html == png:
        raise click.UsageError(f"--html and --png both go to {html}")
    network = None if topology is None else parse_topology(topology)
    itemsize, costs = _item_bytes(dtype), _costs(device, transport, network)
    hosts = _hosts(network, before.num_ranks)
    alignment = NCCL_ALIGNMENT if device == "cuda" else DENSE
    sides = before, after
    found = explain_layouts(*sides, itemsize, costs, coordinate, alignment=alignment, dtype=dtype, hosts=hosts)
    fields, lines, of_torch = json.loads(found.to_json()), [str(found)], None
    if against is not None:
        fields["torch"], of_torch = _moved_by_torch(before, after, dtype, found, device)
        lines.append(of_torch)
    lists = any(found is not None for found in (html, png, network))
    if all_ranks or lists:
        steps = make_plan(before, after, itemsize, costs, dtype, hosts)
        with ProgressLine() as progress:
            progress.tell(f"counting what {before.num_ranks:,} ranks send")
            spreads = rank_totals(steps, itemsize).spreads
        fields["ranks"] = {name: asdict(spread) for name, spread in spreads.items()}
        head = ("a rank's", "least", "mean", "most", "of rank", "all ranks")
        lines += _aligned([head, *spread_rows(spreads)])
        if lists:
            with ProgressLine() as progress:
                progress.tell(f"counting {spreads['messages'].total:,} messages of {before.num_ranks:,} ranks")
                traffic = _traffic(steps, itemsize, spreads["messages"].total)
                loads = _loads(traffic, network)
                if network is not None:
                    fields["links"] = {
                        kind: {**asdict(spread), "busiest": link} for kind, (spread, link) in loads.items()
                    }
                    lines += _aligned([LINK_HEADER, *link_rows(loads)])
                if html is not None:
                    write_html(Path(html), found, traffic, loads, of_torch)
                if png is not None:
                    write_png(Path(png), f"{found.source} -> {found.target} of {found.shape}", traffic)
    click.echo(json.dumps(fields) if as_json else "\n".join(lines))


def _item_bytes(dtype: str) -> int:
    """Bytes of an element of torch's dtype of this name, without torch, which takes a second to import.

    >>> _item_bytes("bfloat16"), _item_bytes("complex128"), _item_bytes("bool")
    (2, 16, 1)
    """
    bits = dtype.lstrip("abcdefghijklmnopqrstuvwxyz")
    return int(bits) // 8 if bits else 1


def _costs(device: str, transport: str | None, network: Topology | None) -> CostTable:
    """Default prices on a type of device, of ranks whose messages a transport carries, on the hosts of a network."""
    ranks_per_host = CostTable().ranks_per_host if network is None else network.ranks_per_host
    found = chosen(device) if transport is None else named(transport, "--transport")
    if device not in found.device_types:
        fitting = " and ".join(each.name for each in transports() if device in each.device_types)
        raise click.UsageError(
            f"--transport {found.name} carries tensors on {' and '.join(found.device_types)}, not on {device}; allowed "
            f"for --device {device} are {fitting}"
        )
    return found.price(built_in(ranks_per_host)[device])


def _hosts(network: Topology | None, num_ranks: int) -> Hosts:
    """Hosts of a topology, by rank, for plans that know them; () where there is one."""
    if network is None or num_ranks <= network.ranks_per_host:
        return ()
    return tuple(rank // network.ranks_per_host for rank in range(num_ranks))


def _moved_by_torch(
    before: Layout, after: Layout, dtype: str, ours: Explanation, device: str
) -> tuple[dict[str, Any], str]:
    """The bytes that torch would move to the explained rank, as fields of JSON and as a line."""
    torch = importlib.import_module("torch")
    version = str(torch.__version__)
    try:
        torch_moves = importlib.import_module("tritondt.cli.torch_moves").torch_moves
        collectives = torch_moves(before, after, getattr(torch, dtype), ours.coordinate, device)
    except LayoutError as refusal:
        return {"version": version, "refusal": str(refusal)}, f"torch {version}: {refusal}"
    received = sum(each.received_bytes for each in collectives)
    fields = {"version": version, "received_bytes": received, "collectives": [asdict(each) for each in collectives]}
    ratio = f", {received / ours.received_bytes:.2f} of ours" if ours.received_bytes else ""
    these = "".join(f"; {each}" for each in collectives)
    return fields, f"torch {version} would receive {received:,} bytes{ratio}{these}"


def _traffic(steps: Plan, itemsize: int, num_messages: int) -> RankTraffic | WideTraffic:
    """Traffic message by message, or by fans where messages are too many."""
    if num_messages <= MOST_MESSAGES:
        return rank_traffic(steps, itemsize)
    found: WideTraffic = importlib.import_module("tritondt.cli.wide_traffic").WideTraffic(steps, itemsize)
    return found


def _loads(traffic: RankTraffic | WideTraffic, network: Topology | None) -> dict[str, tuple[Spread, Link]]:
    """Bytes over the links of a network, by their kind; none without a network."""
    if network is None:
        return {}
    return loads_by_kind(
        link_loads(traffic, network) if isinstance(traffic, RankTraffic) else traffic.link_loads(network)
    )


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Lines of a table whose columns are as wide as their cells: names to the left, figures to the right.

    >>> _aligned([("bytes", "least"), ("sent", "1,024,000")])
    ['bytes      least', 'sent   1,024,000']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    forms = [f"{{:{'>' if place else '<'}{width}}}" for place, width in enumerate(widths)]
    return ["  ".join(forms).format(*row) for row in rows]


def _is_on(mesh: tuple[int, ...], coordinate: tuple[int, ...]) -> bool:
    if len(coordinate) != len(mesh):
        return False
    return all(0 <= index < size for index, size in zip(coordinate, mesh, strict=True))
