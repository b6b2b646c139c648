"""The program of a test of HSDP on two hosts of 2 ranks: bytes on the link in a step, by the mesh that was found.

It is one host, HOST_NUMBER, whose ranks it forks; neighbouring ranks are on different hosts. A rank writes one line.
"""

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

import tritondt as T
from tests.harness.pairs_on_hosts import digest, sent_on_wire
from tests.harness.two_hosts import ADDRESSES
from tritondt.comm import world
from tritondt.fsdp import fully_shard, init_host_mesh

FEATURES, LAYERS, NUM_HOSTS, RANKS_PER_HOST = 512, 2, 2, 2


def trained(mesh: Any) -> tuple[torch.Tensor, int]:
    """Whole parameters after two steps, and the bytes that this host has sent in the second one."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(*(torch.nn.Linear(FEATURES, FEATURES, bias=False) for _ in range(LAYERS)))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randint(-2, 3, parameter.shape))
    for layer in module:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    everyone = world.current().communicator(tuple(range(dist.get_world_size())))
    own = torch.Generator().manual_seed(dist.get_rank())
    sent = 0
    for _ in range(2):
        batch = torch.randint(-2, 3, (4, FEATURES), generator=own).float()
        everyone.barrier()
        before = sent_on_wire()
        everyone.barrier()
        module(batch).sum().backward()
        everyone.barrier()
        sent = sent_on_wire() - before
        everyone.barrier()
        with torch.no_grad():
            for parameter in module.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=2.0**-10)
            module.zero_grad()
    parameters: list[Any] = list(module.parameters())
    whole = [parameter.full_tensor().flatten() for parameter in parameters]
    return torch.cat(whole), sent


def explained(mesh: Any) -> int:
    """Bytes between hosts of a step: of gathers before forward and backward, and of gradients, as explain has them."""
    meta = T.TensorMeta.contiguous((FEATURES, FEATURES))
    shards = T.DTensorSpec(mesh, [T.Replicate(), T.Shard(0)], meta)
    whole, terms = (shards.with_placements([placement] * 2) for placement in (T.Replicate(), T.Partial("avg")))
    gather, reduce = (
        sum(each[2] for each in T.explain(*pair).between_hosts) for pair in ((shards, whole), (terms, shards))
    )
    return LAYERS * (2 * gather + reduce)


def set_from_rank_0(mesh: Any) -> int:
    """Bytes that this host sends while rank 0 sets the parameters of a sharded module on all ranks."""
    module: Any = torch.nn.Linear(FEATURES, FEATURES, bias=False)
    fully_shard(module, mesh=mesh)
    whole = torch.arange(float(FEATURES * FEATURES)).view(FEATURES, FEATURES)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    everyone = world.current().communicator(tuple(range(dist.get_world_size())))
    sent = 0
    for factor in (1.0, 2.0):  # ranks are connected before the second time
        everyone.barrier()
        before = sent_on_wire()
        everyone.barrier()
        given: dict[str, Any] = {"weight": whole * factor} if dist.get_rank() == 0 else {}
        set_model_state_dict(module, given, options=options)
        everyone.barrier()
        sent = sent_on_wire() - before
        everyone.barrier()
        torch.testing.assert_close(module.weight.full_tensor(), whole * factor, rtol=0, atol=0)
    return sent


def run() -> dict[str, Any]:
    """This rank's bytes and parameters, on the mesh that was found and on one of neighbours."""
    dist.init_process_group("tritondt")
    torch.set_num_threads(1)
    mesh = init_host_mesh("cpu")
    parameters, sent = trained(mesh)
    named = T.init_device_mesh("cpu", (NUM_HOSTS, RANKS_PER_HOST), mesh_dim_names=("replicate", "shard"))
    others, sent_named = trained(named)
    torch.testing.assert_close(others, parameters, rtol=0, atol=0)
    found = {"rank": dist.get_rank(), "host": int(os.environ["HOST_NUMBER"]), "ranks": mesh.mesh.tolist()}
    found |= {"sent_found": sent, "sent_named": sent_named, "digest": digest(parameters)}
    found |= {"sent_from_rank_0": [set_from_rank_0(each) for each in (mesh, named["replicate", "shard"])]}
    found |= {"explained_found": explained(mesh), "explained_named": explained(named)}
    T.close()
    dist.destroy_process_group()
    return found


def main() -> None:
    """All ranks of this host."""
    host = int(os.environ["HOST_NUMBER"])
    os.environ.update(WORLD_SIZE=str(NUM_HOSTS * RANKS_PER_HOST), MASTER_ADDR=ADDRESSES[0], MASTER_PORT="29501")
    os.environ["LOCAL_WORLD_SIZE"] = str(RANKS_PER_HOST)
    children = []
    for place in range(RANKS_PER_HOST):
        child = os.fork()
        if child == 0:
            os.environ["RANK"] = str(place * NUM_HOSTS + host)
            os.write(1, (json.dumps(run()) + "\n").encode())
            os._exit(0)
        children.append(child)
    sys.exit(max(abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) for child in children))


if __name__ == "__main__":
    main()
