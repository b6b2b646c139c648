"""Plans of worlds of up to thousands of hosts: bytes by kind of link, predicted time, and the time and memory to plan.

python -m benchmarks.redistribution.many_hosts [--ranks N]... [--json [FILE]]

Hosts have 8 ranks, and leaf switches join 32 of them. Each case runs in a process of its own; seconds are of processor
time: of the plan with the explanation of one rank, and of the loads of all links.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from typing import Any

import click

from tritondt.cli.bench.json_result import json_option, write_json
from tritondt.cli.surroundings import surroundings
from tritondt.cli.wide_traffic import WideTraffic
from tritondt.planning.explain import explain_layouts
from tritondt.planning.planner import make_plan
from tritondt.planning.prices import built_in
from tritondt.planning.topology import FatTree, loads_by_kind
from tritondt.sharding.layout import Layout
from tritondt.sharding.placement import parse_placements

SHAPE, ITEMSIZE, RANKS_PER_HOST, HOSTS_PER_LEAF = (65536, 1024), 4, 8, 32
PAIRS = (("S0", "R"), ("P", "R"), ("P", "S0"), ("S0", "S1"))


def measured(num_ranks: int, source: str, target: str) -> dict[str, Any]:
    """One case: totals and largest loads by kind of link, predicted seconds, and what planning took."""
    hosts, costs = tuple(rank // RANKS_PER_HOST for rank in range(num_ranks)), built_in(RANKS_PER_HOST)["cpu"]
    before, after = (Layout((num_ranks,), parse_placements(text), SHAPE) for text in (source, target))
    started = time.process_time()
    plan = make_plan(before, after, ITEMSIZE, costs, hosts=hosts)
    explained = explain_layouts(before, after, ITEMSIZE, costs, hosts=hosts)
    planned = time.process_time()
    loads = WideTraffic(plan, ITEMSIZE).link_loads(FatTree(RANKS_PER_HOST, HOSTS_PER_LEAF))
    counted = time.process_time()
    by_kind = {kind: spread for kind, (spread, _) in loads_by_kind(loads).items()}
    return {
        "n": num_ranks,
        "pair": f"{source} -> {target}",
        "total": {kind: spread.total for kind, spread in by_kind.items()},
        "most": {kind: spread.most for kind, spread in by_kind.items()},
        "seconds": explained.seconds,
        "plan_s": round(planned - started, 2),
        "links_s": round(counted - planned, 2),
        "MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "steps": len(plan.steps),
    }


@click.command()
@click.option("--ranks", multiple=True, type=int, default=(64, 512, 4096, 65536), show_default=True)
@click.option("--case", hidden=True, nargs=3, default=None, type=str)
@json_option
def main(ranks: tuple[int, ...], case: tuple[str, str, str] | None, json_to: str | None) -> None:
    """Plans of worlds of up to thousands of hosts."""
    if case is not None:
        click.echo(json.dumps(measured(int(case[0]), *case[1:])))
        return
    cases = []
    for source, target in PAIRS:
        for num_ranks in ranks:
            command = [sys.executable, "-m", __spec__.name, "--case", str(num_ranks), source, target]
            found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            click.echo(found, nl=False)
            cases.append(json.loads(found))
    if json_to is not None:
        write_json({"shape": SHAPE, "cases": cases, **surroundings()}, json_to)


if __name__ == "__main__":
    main()
