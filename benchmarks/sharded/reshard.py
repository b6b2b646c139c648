"""Resharding of a ShardedTensor here and in torch, in turns within one run.

    torchrun --standalone --nproc-per-node 4 -m benchmarks.sharded.reshard --rounds 25 --json FILE

Chunks are even: torch's reshard on Gloo takes no others. A case is a size and two chunk specs; a round reshards one
tensor there and back with each library, in turns. Times are those of the slowest rank. Values are compared first.
"""

import argparse
import json
import os
import statistics
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._shard as torch_shard
import torch.distributed._shard.sharding_spec as torch_spec

import tritondt as T
import tritondt.sharded as sharded

# Size, dims of the two specs, and whether the second has its placements in reverse order.
CASES = {
    "256x256 rows to columns": ((256, 256), 0, 1, False),
    "1024x1024 rows to columns": ((1024, 1024), 0, 1, False),
    "4096x4096 rows to columns": ((4096, 4096), 0, 1, False),
    "4096x4096 columns to rows": ((4096, 4096), 1, 0, False),
    "4096x4096 rows to other ranks": ((4096, 4096), 0, 0, True),
}


def slowest(seconds):
    found = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def measured(tensor, there, back):
    """Seconds of the slowest rank for one reshard there, and one back."""
    dist.barrier()
    started = time.perf_counter()
    tensor.reshard(there)
    tensor.reshard(back)
    return slowest(time.perf_counter() - started)


def run(case, rounds):
    size, dim, other_dim, is_reversed = CASES[case]
    ranks = [f"rank:{rank}/cpu" for rank in range(dist.get_world_size())]
    others = ranks[::-1] if is_reversed else ranks
    values = torch.arange(size[0] * size[1], dtype=torch.float32).reshape(size)
    contenders = {}
    for name, module, shard in (
        ("torch", torch_spec, torch_shard._shard_tensor),
        ("here", sharded, sharded.shard_tensor),
    ):
        specs = [module.ChunkShardingSpec(dim, list(ranks)), module.ChunkShardingSpec(other_dim, list(others))]
        contenders[name] = (shard(values, specs[0]), specs[1], specs[0])
    for there in (True, False):
        for tensor, other, first in contenders.values():
            tensor.reshard(other if there else first)
        theirs, ours = (contenders[name][0].local_tensor() for name in ("torch", "here"))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    seconds = {name: [] for name in contenders}
    for number in range(rounds):
        for name in sorted(contenders, reverse=number % 2 == 0):
            seconds[name].append(measured(*contenders[name]))
    fastest = {name: min(found) for name, found in seconds.items()}
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    return {
        "case": case,
        "fastest_ms": {name: round(1000 * found / 2, 3) for name, found in fastest.items()},
        "median_ms": {name: round(1000 * found / 2, 3) for name, found in medians.items()},
        "ratio_of_fastest": round(fastest["here"] / fastest["torch"], 3),
        "ratio_of_medians": round(medians["here"] / medians["torch"], 3),
    }


def main():
    warnings.simplefilter("ignore", FutureWarning)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    found = [run(case, options.rounds) for case in options.cases]
    if dist.get_rank() == 0:
        for row in found:
            print(f"{row['case']:32} ratio {row['ratio_of_fastest']:.2f} (medians {row['ratio_of_medians']:.2f})")
        if options.json is not None:
            report = {
                "ranks": dist.get_world_size(),
                "rounds": options.rounds,
                "torch": torch.__version__,
                "cores": os.cpu_count(),
                "load": [round(each, 1) for each in os.getloadavg()],
                "cases": found,
            }
            options.json.write_text(json.dumps(report, indent=1) + "\n")
    T.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
