"""The program of a test of the demo on two hosts: what crosses the link in a step, and what `explain` says of it.

    python -m tests.harness.demo_on_hosts PARALLEL

It is one host, HOST_NUMBER, of four ranks, which it forks; neighbouring ranks are on different hosts. Each writes a
line of JSON.
"""

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

import tritondt as T
from tests.harness.pairs_on_hosts import sent_on_wire
from tests.harness.two_hosts import ADDRESSES
from tritondt.cli.demo.experiment import DTensorStyle, Experiment, ignore
from tritondt.cli.demo.model import Model
from tritondt.comm import world
from tritondt.comm.communicator import Transfer
from tritondt.comm.transports.ordered import OrderedCommunicator
from tritondt.redistribution import compile as compiling

NUM_HOSTS, RANKS_PER_HOST = 2, 4
SIZE = NUM_HOSTS * RANKS_PER_HOST
# Heads, batch and positions that do not divide; the last step is counted, when all ranks are connected.
EXPERIMENT = Experiment(Model(heads=3, layers=2, width=96, sequence=33), steps=4, batch=9, seed=0)


class Counted:
    """Bytes and messages that come to this rank from the other host in exchanges."""

    def __init__(self) -> None:
        self.num_bytes = self.num_messages = 0
        self.compiled: list[tuple[Any, Any, Any, int]] = []  # of each pair of specs, what its exchanges bring

    def start(self) -> None:
        """Counts all exchanges of this process from now on, and those of each plan that is compiled."""
        exchange = OrderedCommunicator.exchange

        def counting(
            communicator: OrderedCommunicator,
            sources: Sequence[torch.Tensor],
            targets: Sequence[torch.Tensor],
            transfer: Transfer,
        ) -> None:
            sizes = far_messages(communicator, transfer)
            self.num_bytes += sum(sizes)
            self.num_messages += len(sizes)
            exchange(communicator, sources, targets, transfer)

        def note(source: Any, target: Any, wire_dtype: Any, plan: Any) -> None:
            found = [
                sum(far_messages(step.communicator, step.transfer))
                for step in plan.steps
                if step.communicator is not None and step.transfer is not None
            ]
            self.compiled.append((source, target, wire_dtype, sum(found)))

        OrderedCommunicator.exchange = counting  # type: ignore[assignment, method-assign]
        compiling.on_compiled.append(note)


def far_messages(communicator: Any, transfer: Transfer) -> list[int]:
    """Bytes of the messages of a transfer that come from the other host."""
    own = dist.get_rank() % NUM_HOSTS
    return [
        sum(part.numel * transfer.dtypes[part.tensor].itemsize for part in message.parts)
        for message in transfer.exchange.receives
        if communicator.ranks[message.peer] % NUM_HOSTS != own
    ]


def run_rank(parallel: str) -> dict[str, Any]:
    """Bytes, messages and losses that this rank has counted in the last step."""
    dist.init_process_group("gloo")
    everyone = world.current().communicator(tuple(range(SIZE)))
    counted = Counted()
    counted.start()
    learner = DTensorStyle(parallel=parallel).on_ranks(EXPERIMENT, ignore)
    losses = [learner.run_step(step) for step in range(EXPERIMENT.steps - 1)]

    def sent_in(step: int | None) -> int:
        everyone.barrier()
        before = sent_on_wire()
        everyone.barrier()
        if step is not None:
            counted.num_bytes = counted.num_messages = 0
            losses.append(learner.run_step(step))
        everyone.barrier()
        after = sent_on_wire()
        everyone.barrier()
        return after - before

    idle = max(sent_in(None) for _ in range(3))
    sent = sent_in(EXPERIMENT.steps - 1)
    for source, target, wire_dtype, brought in counted.compiled:
        explained = T.explain(source, target, wire_dtype=wire_dtype).far_bytes
        assert explained == brought, f"{source} to {target}: {brought} bytes come from the other host, not {explained}"
    found = {"rank": dist.get_rank(), "losses": losses, "idle": idle, "sent": sent}
    if parallel == "hsdp+tp":
        inside = learner._laid_out.mesh["shard", "tp"].mesh.flatten().tolist()  # type: ignore[attr-defined]
        assert {rank % NUM_HOSTS for rank in inside} == {dist.get_rank() % NUM_HOSTS}
    found |= {"brought": counted.num_bytes, "messages": counted.num_messages, "plans": len(counted.compiled)}
    T.close()
    dist.destroy_process_group()
    return found


def main() -> None:
    """The ranks of this host."""
    host = int(os.environ["HOST_NUMBER"])
    os.environ.update(WORLD_SIZE=str(SIZE), MASTER_ADDR=ADDRESSES[0], MASTER_PORT="29501")
    os.environ["LOCAL_WORLD_SIZE"] = str(RANKS_PER_HOST)
    children = []
    for place in range(RANKS_PER_HOST):
        child = os.fork()
        children.append(child)
        if child == 0:
            os.environ["RANK"] = str(place * NUM_HOSTS + host)
            torch.set_num_threads(1)
            try:
                os.write(1, (json.dumps(run_rank(sys.argv[1])) + "\n").encode())
            except BaseException:  # noqa: BLE001  its parent sees how it ends
                sys.excepthook(*sys.exc_info())
                os._exit(1)
            os._exit(0)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    sys.exit(max(map(abs, statuses)))


if __name__ == "__main__":
    main()
