"""Collectives of the backend against Gloo's between two hosts, which are network namespaces joined by a veth link.

    python -m benchmarks.collectives.two_hosts --ranks-per-host 2 --seconds 60 --json results.json

Both groups are of the same processes; calls take turns, and each rank's time is from the barrier before it to its own
return, of which the slowest rank's counts. A ratio is of medians, ours over Gloo's. Bytes are those that the first host
sends and receives over the link in a call, headers and the barriers around it included.
"""

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tritondt as T
from tests.harness.pairs_on_hosts import moved_on_wire
from tests.harness.two_hosts import ADDRESSES, run_on_two_hosts

SIZES = (4 << 10, 256 << 10, 4 << 20)  # bytes of a rank's tensor
Run = Callable[[Any], Any]


def calls(num_bytes: int, rank: int, size: int) -> dict[str, Run]:
    """Collectives of tensors of so many bytes, float32."""
    one = torch.full((num_bytes // 4,), float(rank))
    part = torch.empty(one.numel() // size)
    whole, lists = torch.empty(one.numel()), list(torch.empty(one.numel()).chunk(size))
    chunks = list(one.chunk(size))
    return {
        "all_reduce": lambda group: dist.all_reduce(one.clone(), group=group),
        "all_gather": lambda group: dist.all_gather(lists, part, group=group),
        "all_gather_into_tensor": lambda group: dist.all_gather_into_tensor(whole, part, group=group),
        "reduce_scatter_tensor": lambda group: dist.reduce_scatter_tensor(part, one, group=group),
        "broadcast": lambda group: dist.broadcast(one.clone(), 0, group=group),
        "reduce": lambda group: dist.reduce(one.clone(), 0, group=group),
        "all_to_all_single": lambda group: dist.all_to_all_single(whole, one, group=group),
        "gather": lambda group: dist.gather(part, lists if rank == 0 else None, 0, group=group),
        "scatter": lambda group: dist.scatter(part, chunks if rank == 0 else None, 0, group=group),
    }


def measure(seconds: float) -> list[dict[str, Any]]:
    """Medians of every case, in microseconds, on the first rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    over_gloo, found = dist.new_group(backend="gloo"), []
    cases = [(num_bytes, name, run) for num_bytes in SIZES for name, run in calls(num_bytes, rank, size).items()]
    for num_bytes, name, run in cases:
        times: dict[str, list[float]] = {"tritondt": [], "gloo": []}
        moved: dict[str, list[int]] = {"tritondt": [], "gloo": []}
        groups = {"tritondt": dist.group.WORLD, "gloo": over_gloo}
        end, going = time.monotonic() + seconds / len(cases), torch.ones(1)
        while len(times["gloo"]) < 4 or float(going) == 1.0:
            for kind, group in groups.items():
                dist.barrier(over_gloo)
                before = moved_on_wire()
                dist.barrier(over_gloo)
                began = time.monotonic()
                run(group)
                taken = torch.tensor(time.monotonic() - began, dtype=torch.float64)
                dist.barrier(over_gloo)
                moved[kind].append(moved_on_wire() - before)
                dist.all_reduce(taken, dist.ReduceOp.MAX, over_gloo)
                times[kind].append(float(taken) * 1e6)
            going.fill_(float(time.monotonic() < end))
            dist.broadcast(going, 0, group=over_gloo)
        medians = {kind: statistics.median(of_kind[1:]) for kind, of_kind in times.items()}
        on_wire = {kind: statistics.median(of_kind[1:]) for kind, of_kind in moved.items()}
        ratios = {"ratio": _ratio(medians), "ratio_of_bytes": _ratio(on_wire)}
        rounds = len(times["gloo"])
        found.append(
            {"collective": name, "bytes": num_bytes, "rounds": rounds, **ratios, **medians, "on_wire": on_wire}
        )
    return found


def _ratio(found: dict[str, float]) -> float:
    return found["tritondt"] / found["gloo"]


def _geomean(ratios: list[float]) -> float:
    return math.exp(statistics.mean(map(math.log, ratios)))


def run_host(seconds: float, count: int) -> None:
    """All ranks of this host."""
    first = int(os.environ["HOST_NUMBER"]) * count
    os.environ.update(
        WORLD_SIZE=str(2 * count), MASTER_ADDR=ADDRESSES[0], MASTER_PORT="29501", LOCAL_WORLD_SIZE=str(count)
    )
    children = []
    for place in range(count):
        child = os.fork()
        children.append(child)
        if child == 0:
            os.environ["RANK"] = str(first + place)
            torch.set_num_threads(1)
            dist.init_process_group("tritondt")
            found = measure(seconds)
            if first + place == 0:
                os.write(1, (json.dumps(found) + "\n").encode())
            T.close()
            dist.destroy_process_group()
            os._exit(0)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks-per-host", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if "HOST_NUMBER" in os.environ:
        run_host(arguments.seconds, arguments.ranks_per_host)
    options = ["--ranks-per-host", str(arguments.ranks_per_host), "--seconds", str(arguments.seconds)]
    with tempfile.TemporaryDirectory() as folder:
        outputs = run_on_two_hosts(
            Path(folder),
            [sys.executable, "-W", "ignore", "-m", "benchmarks.collectives.two_hosts", *options],
            names=("one", "two"),
            environment={"GLOO_SOCKET_IFNAME": "wire", "TRITONDT_SOCKET_IFNAME": "^lo"},
            timeout_s=10 * arguments.seconds + 200,
        )
    found = json.loads(next(line for line in outputs[0].splitlines() if line.startswith("[{")))
    for each in found:
        took = f"{each['tritondt']:9.0f} us, Gloo {each['gloo']:9.0f} us, {each['ratio']:.2f}"
        on_wire = each["on_wire"]
        moved = (
            f"{on_wire['tritondt']:9.0f} bytes on the link, Gloo {on_wire['gloo']:9.0f}, {each['ratio_of_bytes']:.2f}"
        )
        sys.stdout.write(f"{each['collective']:24} {each['bytes']:>8} bytes: {took}; {moved}\n")
    geomean = _geomean([each["ratio"] for each in found])
    large = [each["ratio_of_bytes"] for each in found if each["bytes"] == SIZES[-1]]
    sys.stdout.write(f"geomean of {len(found)} ratios: {geomean:.3f}, load {os.getloadavg()[0]:.0f}; ")
    sys.stdout.write(f"of bytes of {SIZES[-1]}: {_geomean(large):.3f}\n")
    if arguments.json is not None:
        load, version = os.getloadavg()[0], torch.__version__
        machine = {"cores": os.cpu_count(), "load": load, "torch": version}
        result = {
            "machine": machine,
            "ranks_per_host": arguments.ranks_per_host,
            "geomean": geomean,
            "geomean_of_bytes": _geomean(large),
            "cases": found,
        }
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
