"""Ranks over the double of NCCL that take themselves for ranks of several hosts, and count what NCCL is asked to send.

    with ranks_on_hosts((3, 5)) as ranks:
        ranks.run(body)              # body(rank): sent.far_bytes is what this rank has sent to other hosts

The double carries messages inside a host and between two alike: bytes are shown, and no speeds.
"""

import os
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from tests.harness.gloo_ranks import GlooRanks
from tests.harness.nccl_on_host import use_fake_nccl
from tritondt.comm import processes
from tritondt.comm.packing.messages import MessageBuffers
from tritondt.comm.store import presence
from tritondt.comm.transports import device_arenas
from tritondt.comm.transports.nccl import NcclCommunicator


class Sent:
    """Bytes given to NCCL since it was last cleared, where an exchange goes part by part: at first."""

    def __init__(self) -> None:
        self.near_bytes = self.far_bytes = 0
        self.collectives: list[str] = []
        self.communicators: set[str] = set()

    def clear(self) -> None:
        """Begins anew."""
        self.__init__()  # type: ignore[misc]  # as new


sent = Sent()


def hosts_of(ranks_on_hosts: Sequence[int]) -> tuple[int, ...]:
    """The host of each rank, where so many are on each."""
    return tuple(host for host, count in enumerate(ranks_on_hosts) for _ in range(count))


def use_planted_hosts() -> None:
    """The preparation of a rank: RANKS_ON_HOSTS says how many ranks each host has ("3,5")."""
    hosts = hosts_of([int(count) for count in os.environ["RANKS_ON_HOSTS"].split(",")])
    machine = f"host {hosts[int(os.environ['RANK'])]}"
    for module in (processes, device_arenas):
        module.machine = lambda: machine  # type: ignore[attr-defined]  # the modules' own name for it
    # The ranks have said on which machines they are when they met.
    store: Any = dist.distributed_c10d._get_default_store()
    presence.announce(presence.of_group(store), dist.get_rank())
    dist.barrier()
    use_fake_nccl()
    start, start_collective = NcclCommunicator.start, NcclCommunicator.start_collective

    def counted(self: NcclCommunicator, record: Any, receives: MessageBuffers, sends: MessageBuffers) -> None:
        own = hosts[self._rank]
        sent.communicators.add(f"{self.ranks}")
        for peer, _, _, num_bytes in sends.slices:
            if hosts[self.ranks[peer]] == own:
                sent.near_bytes += num_bytes
            else:
                sent.far_bytes += num_bytes
        start(self, record, receives, sends)

    def noted(self: NcclCommunicator, call: Any, *operands: Any) -> None:
        sent.communicators.add(f"{self.ranks}")
        sent.collectives.append(call.kind)
        start_collective(self, call, *operands)

    NcclCommunicator.start, NcclCommunicator.start_collective = counted, noted  # type: ignore[method-assign, assignment]


def ranks_on_hosts(counts: Sequence[int], **variables: str) -> GlooRanks:
    """Processes over the double, so many on each host."""
    told = {"RANKS_ON_HOSTS": ",".join(map(str, counts)), "TRITONDT_TIMEOUT": "90", **variables}
    return GlooRanks(sum(counts), told, prepare=use_planted_hosts)
