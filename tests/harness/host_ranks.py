"""The program of a test on two hosts: exchanges on a mesh of 2 hosts x 2 ranks, and what each rank has found.

Under torchrun it is one rank; else it is the two ranks of one host, forked once torch is imported.
"""

import json
import os
import sys

import torch
import torch.distributed as dist

import tritondt as T
from tests.harness.two_hosts import ADDRESSES
from tritondt.comm import world

RANKS_PER_HOST = 2


def exchange() -> dict[str, object]:
    """Redistributes within hosts, between them, and both; says with whom this rank is connected."""
    dist.init_process_group("gloo")
    mesh = T.init_device_mesh("cpu", (2, RANKS_PER_HOST), mesh_dim_names=("host", "rank"))
    whole = torch.arange(257 * 129.0).reshape(257, 129)
    x = T.distribute_tensor(whole, mesh, [T.Shard(0), T.Shard(1)])
    for placements in ([T.Replicate(), T.Shard(1)], [T.Shard(1), T.Shard(0)], [T.Replicate(), T.Replicate()]):
        x = x.redistribute(placements=placements)
        torch.testing.assert_close(x.full_tensor(), whole, rtol=0, atol=0)
    # One exchange of every rank with all others: what stays inside a host goes through shared memory elsewhere.
    rows = T.distribute_tensor(whole, T.Mesh((2 * RANKS_PER_HOST,)), [T.Shard(0)])
    torch.testing.assert_close(rows.redistribute(placements=[T.Shard(1)]).full_tensor(), whole, rtol=0, atol=0)
    sockets = world.current().communicator(tuple(range(4)))._connections.sockets  # type: ignore[attr-defined]
    found = {
        "rank": dist.get_rank(),
        "host": int(os.environ["HOST_NUMBER"]),
        "peers": [None if one is None else one.getpeername()[0] for one in sockets],
    }
    T.close()
    dist.destroy_process_group()
    return found


def tell(found: dict[str, object]) -> None:
    """Writes one line, at once, where the other rank writes, too."""
    os.write(1, (json.dumps(found) + "\n").encode())


def main() -> None:
    """Runs as one rank, or as the ranks of a host."""
    if "RANK" not in os.environ:
        os.environ.update(WORLD_SIZE="4", MASTER_ADDR=ADDRESSES[0], MASTER_PORT="29501", LOCAL_WORLD_SIZE="2")
        first = int(os.environ["HOST_NUMBER"]) * RANKS_PER_HOST
        child = os.fork()
        os.environ["RANK"] = str(first + (child == 0))
        tell(exchange())
        if child != 0:
            _, status = os.waitpid(child, 0)
            sys.exit(os.waitstatus_to_exitcode(status))
        os._exit(0)
    tell(exchange())


if __name__ == "__main__":
    main()
