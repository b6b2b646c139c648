"""Redistributions between hosts that are namespaces, against torch.distributed.tensor on Gloo, in turns on one link.

python -m benchmarks.redistribution.between_hosts [--hosts N] [--ranks-per-host N] [--rounds N] [--json [FILE]]
    [--shaping "tbf rate 1gbit burst 256kb latency 50ms"]

Bytes are those of the link's counters; times are medians over the rounds of the slowest rank in each.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import click
import torch
import torch.distributed as dist
from torch.distributed import tensor as torch_tensor
from torch.distributed.device_mesh import init_device_mesh

import tritondt as T
from tests.harness.pairs_on_hosts import Pair, sent_on_wire, whole_numbers
from tests.harness.two_hosts import ADDRESSES, run_on_hosts
from tritondt.cli.bench.json_result import json_option, write_json
from tritondt.cli.surroundings import surroundings
from tritondt.comm import world
from tritondt.interop.torch_specs import torch_placements

SHAPE = (1024, 1024)
ONE_AXIS = [("S0", "R"), ("S1", "R"), ("P", "R"), ("P", "S0"), ("P", "S1"), ("S0", "S1"), ("S1", "S0")]
TWO_AXES = [
    *[("P,P", "S0,S1"), ("P,P", "R,R"), ("S0,S1", "R,R"), ("S0,S1", "S1,S0"), ("P,R", "R,R")],
    *[("R,P", "R,R"), ("P,S1", "R,R"), ("S0,R", "R,S0"), ("R,S0", "S0,R"), ("R,S1", "S1,R")],
]
_SIDES = ("tritondt", "torch")


def measure_on_rank(pairs: list[Pair], rounds: int) -> list[dict[str, Any]]:
    """For each pair seconds of each round and bytes that this host sends in one, by side."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    everyone = world.current().communicator(tuple(range(dist.get_world_size())))
    meshes = {pair.mesh_shape: init_device_mesh("cpu", pair.mesh_shape) for pair in pairs}
    found = []
    for pair in pairs:
        source, target = pair.specs()
        local = whole_numbers(source)
        mesh, before, after = meshes[pair.mesh_shape], *map(torch_placements, (source.layout, target.layout))
        theirs = torch_tensor.DTensor.from_local(local, mesh, before, run_check=False)

        def by_torch(theirs: Any = theirs, mesh: Any = mesh, after: Any = after) -> torch.Tensor:
            result = theirs.redistribute(mesh, after).to_local()
            return result.wait() if hasattr(result, "wait") else result

        def by_tritondt(local: Any = local, source: Any = source, target: Any = target) -> torch.Tensor:
            return T.redistribute(local, source, target)

        runs: dict[str, Callable[[], torch.Tensor]] = dict(zip(_SIDES, (by_tritondt, by_torch), strict=True))
        results = [run() for run in runs.values()]
        torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
        seconds, sent = {side: list[float]() for side in runs}, {side: list[int]() for side in runs}
        for _ in range(rounds):
            for side, run in runs.items():
                everyone.barrier()
                bytes_before = sent_on_wire()
                everyone.barrier()
                started = time.perf_counter()
                run()
                seconds[side].append(time.perf_counter() - started)
                everyone.barrier()
                sent[side].append(sent_on_wire() - bytes_before)
        found.append({"seconds": seconds, "sent": {side: median(each) for side, each in sent.items()}})
    T.close()
    dist.destroy_process_group()
    return found


def run_host() -> None:
    """Runs the ranks of this host; each writes one line."""
    asked, host = json.loads(os.environ["ASKED"]), int(os.environ["HOST_NUMBER"])
    count, per_host = asked["hosts"] * asked["ranks_per_host"], asked["ranks_per_host"]
    pairs = [Pair(tuple(mesh), tuple(range(count)), *texts, SHAPE) for mesh, *texts in asked["pairs"]]
    children = []
    for place in range(per_host):
        child = os.fork()
        if child == 0:
            rank = host * per_host + place
            os.environ.update(WORLD_SIZE=str(count), RANK=str(rank), MASTER_ADDR=ADDRESSES[0], MASTER_PORT="29501")
            os.environ["LOCAL_WORLD_SIZE"] = str(per_host)
            line = {"rank": rank, "host": host, "found": measure_on_rank(pairs, asked["rounds"])}
            os.write(1, (json.dumps(line) + "\n").encode())
            os._exit(0)
        children.append(child)
    sys.exit(max(abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) for child in children))


@click.command()
@click.option("--hosts", default=2, show_default=True)
@click.option("--ranks-per-host", default=4, show_default=True)
@click.option("--rounds", default=15, show_default=True)
@click.option("--shaping", default="", help="What tc does to each end of the link, such as tbf for a rate.")
@json_option
def main(hosts: int, ranks_per_host: int, rounds: int, shaping: str, json_to: str | None) -> None:
    """Redistributions between hosts against torch on Gloo: bytes on the link, and times."""
    count = hosts * ranks_per_host
    pairs = [((count,), *texts) for texts in ONE_AXIS] + [((hosts, ranks_per_host), *texts) for texts in TWO_AXES]
    asked = {"hosts": hosts, "ranks_per_host": ranks_per_host, "rounds": rounds, "pairs": pairs}
    with tempfile.TemporaryDirectory() as folder:
        outputs = run_on_hosts(
            Path(folder),
            [sys.executable, "-m", __spec__.name, "--on-host"],
            names=["one", "two", "three", "four"][:hosts],
            environment={"ASKED": json.dumps(asked), "GLOO_SOCKET_IFNAME": "wire"},
            shaping=shaping,
            timeout_s=580,
        )
    lines = [json.loads(line) for output in outputs for line in output.splitlines() if line.startswith('{"rank"')]
    cases = []
    for number, (mesh, source, target) in enumerate(pairs):
        each = [line["found"][number] for line in lines]
        first = {line["host"]: line["found"][number] for line in lines}.values()
        pair = Pair(mesh, tuple(range(count)), source, target, SHAPE)
        case: dict[str, Any] = {"mesh": mesh, "source": source, "target": target}
        case["least_bytes"] = pair.least_bytes([ranks_per_host] * hosts)
        for side in _SIDES:
            case[f"{side}_bytes"] = sum(one["sent"][side] for one in first)
            slowest = [max(times) for times in zip(*(one["seconds"][side] for one in each), strict=True)]
            case[f"{side}_s"] = median(slowest)
        cases.append(case)
        click.echo(
            f"{source:>6} -> {target:<6} least {case['least_bytes'] / 1e6:6.2f} MB, "
            + ", ".join(
                f"{side} {case[f'{side}_bytes'] / 1e6:6.2f} MB {case[f'{side}_s'] * 1e3:7.2f} ms" for side in _SIDES
            )
        )
    crossing = [case for case in cases if case["least_bytes"]]
    ratios = {
        "bytes_to_torch": geometric_mean(case["tritondt_bytes"] / case["torch_bytes"] for case in crossing),
        "time_to_torch": geometric_mean(case["tritondt_s"] / case["torch_s"] for case in cases),
        "most_bytes_to_least": max(case["tritondt_bytes"] / case["least_bytes"] for case in crossing),
    }
    click.echo(json.dumps(ratios))
    if json_to is not None:
        write_json(
            {"asked": {**asked, "shape": SHAPE, "shaping": shaping}, "cases": cases, **ratios, **surroundings()},
            json_to,
        )


if __name__ == "__main__":
    if "--on-host" in sys.argv:
        run_host()
    else:
        main()
