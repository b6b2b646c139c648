"""The program of tests of redistributions on several hosts: what each pair moves between them, and what ranks get.

It is one host, HOST_NUMBER, whose ranks it forks: RANKS_ON_HOSTS says how many each host has ("3,5"), and PAIRS has the
pairs as JSON, the fields of `Pair`. They run one by one, and as one list. A rank writes one line.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import tritondt as T
from tests.harness.two_hosts import ADDRESSES
from tritondt.comm import world
from tritondt.dtensor.many import redistribute_to
from tritondt.planning.between_hosts import MeshRanks
from tritondt.planning.planner import least_between_hosts
from tritondt.redistribution.send import distribute_from
from tritondt.sharding.placement import parse_placements


class Pair(NamedTuple):
    """A redistribution of a tensor on a mesh of some ranks, or from there to another mesh, where that is given.

    With `is_sent` it is a send of the ranks of the first mesh, all of which are in the other one, to the ranks there.
    """

    mesh_shape: tuple[int, ...]
    ranks: tuple[int, ...]
    source: str
    target: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    target_mesh_shape: tuple[int, ...] = ()
    target_ranks: tuple[int, ...] = ()
    is_sent: bool = False

    @classmethod
    def of_json(cls, fields: Sequence[Any]) -> "Pair":
        """The pair whose fields JSON has as lists."""
        given: list[Any] = [tuple(field) if isinstance(field, list) else field for field in fields]
        return cls(*given)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return int(getattr(torch, self.dtype).itemsize)

    def least_bytes(self, ranks_on_hosts: Sequence[int]) -> int:
        """The fewest bytes that can cross between hosts."""
        host_of = [host for host, count in enumerate(ranks_on_hosts) for _ in range(count)]
        source = T.Layout(self.mesh_shape, parse_placements(self.source), self.shape)
        target = T.Layout(self.target_mesh_shape or self.mesh_shape, parse_placements(self.target), self.shape)
        ranks = MeshRanks(self.ranks, self.target_ranks) if self.target_ranks else None
        members = self.ranks if ranks is None else ranks.either
        found = least_between_hosts(source, target, tuple(host_of[rank] for rank in members), ranks)
        assert found is not None, f"{self} has few items"
        return found * self.itemsize

    def specs(self) -> tuple[T.DTensorSpec, T.DTensorSpec]:
        """Source and target."""
        mesh = T.Mesh(self.mesh_shape, ranks=self.ranks)
        target_mesh = T.Mesh(self.target_mesh_shape, ranks=self.target_ranks) if self.target_ranks else mesh
        meta = T.TensorMeta.contiguous(self.shape, getattr(torch, self.dtype))
        source = T.DTensorSpec(mesh, parse_placements(self.source), meta)
        return source, T.DTensorSpec(target_mesh, parse_placements(self.target), meta)


def whole_numbers(spec: T.DTensorSpec) -> torch.Tensor:
    """This rank's part of a tensor: whole numbers, so that sums are the same in any order; equal on replicas."""
    coordinate = spec.mesh.coordinate
    if coordinate is None:
        return torch.empty(0, dtype=spec.dtype)
    replicated = spec.layout.axes_where(T.Replicate)
    own = [index for axis, index in enumerate(coordinate) if axis not in replicated]
    generator = torch.Generator().manual_seed(sum(index * 17**place for place, index in enumerate(own)))
    return torch.randint(-3, 4, spec.local_shape, generator=generator).to(spec.dtype)


def digest(tensor: torch.Tensor) -> str:
    """Hash of a tensor's bytes."""
    return hashlib.blake2b(tensor.flatten().view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()


def redistributed(pair: Pair) -> str:
    """Digest of this rank's part of the target; "" outside of its mesh."""
    source, target = pair.specs()
    if pair.is_sent:
        senders = tuple(pair.target_ranks.index(rank) for rank in pair.ranks)
        found = distribute_from(whole_numbers(source), source.layout, senders, target)
    else:
        found = T.redistribute(whole_numbers(source), source, target)
    return "" if target.coordinate is None else digest(found)


def redistributed_list(pairs: Sequence[Pair]) -> list[str]:
    """Digests as of `redistributed`, of all pairs in one call."""
    specs = [pair.specs() for pair in pairs]
    given = [T.DTensor(whole_numbers(source), source) for source, _ in specs]
    found = redistribute_to(given, [target for _, target in specs], bucket_bytes=None, async_op=False)
    return [
        "" if target.coordinate is None else digest(x.to_local()) for x, (_, target) in zip(found, specs, strict=True)
    ]


def sent_on_wire() -> int:
    """Bytes that this host has sent over the link, less those that TCP has sent there again.

    Where a loaded machine acknowledges late, TCP sends again what has arrived: 256 KB of 8 MB were seen.
    """
    return _on_wire()[1] - _sent_again(_tcp_counter("RetransSegs"))


@lru_cache(maxsize=1)
def _sent_again(num_segments: int) -> int:
    """Bytes that the connections to other hosts have sent again; `num_segments` of them since the host began."""
    if not num_segments:
        return 0
    listed = subprocess.run(["ss", "-tinOH"], capture_output=True, text=True, check=True).stdout
    connections = [line.split() for line in listed.splitlines()]
    there = [fields for fields in connections if fields[3].rpartition(":")[0] != fields[4].rpartition(":")[0]]
    marked = [field for fields in there for field in fields if field.startswith("bytes_retrans:")]
    return sum(int(field.partition(":")[2]) for field in marked)


def _tcp_counter(name: str) -> int:
    names, values = (line for line in Path("/proc/net/snmp").read_text().splitlines() if line.startswith("Tcp:"))
    return int(values.split()[names.split().index(name)])


def moved_on_wire() -> int:
    """Bytes that this host has received and sent over the link."""
    return sum(_on_wire())


def _on_wire() -> tuple[int, int]:
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "wire":
            return int(counters.split()[0]), int(counters.split()[8])
    return 0, 0


def run_pairs(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Runs all pairs twice, then as a list; bytes on the wire of the second time and of the list, and digests."""
    dist.init_process_group("gloo")
    everyone = world.current().communicator(tuple(range(dist.get_world_size())))
    counted, digests, explained = list[int](), list[str](), list[str]()

    def measured(run: Callable[[], object] | None) -> int:
        everyone.barrier()
        before = sent_on_wire()
        everyone.barrier()
        if run is not None:
            run()
        everyone.barrier()
        after = sent_on_wire()
        everyone.barrier()
        return after - before

    measured(None)
    idle = max(measured(None) for _ in range(3))
    for pair in pairs:
        redistributed(pair)
        source, target = pair.specs()
        takes_part = source.coordinate is not None or target.coordinate is not None
        explained.append(T.explain(source, target).to_json() if takes_part else "")
        counted.append(measured(lambda pair=pair: digests.append(redistributed(pair))))  # type: ignore[misc]
    listed = list[list[str]]()
    redistributed_list(pairs)
    sent_by_list = measured(lambda: listed.append(redistributed_list(pairs)))
    assert listed == [digests], "a list of redistributions gives something else"
    found = {"rank": dist.get_rank(), "host": int(os.environ["HOST_NUMBER"]), "idle": idle, "sent": counted}
    found["sent_by_list"] = sent_by_list
    T.close()
    dist.destroy_process_group()
    return {**found, "digests": digests, "explained": explained}


def run_host() -> None:
    """Runs the ranks of this host."""
    ranks_on_hosts = [int(count) for count in os.environ["RANKS_ON_HOSTS"].split(",")]
    host, count = int(os.environ["HOST_NUMBER"]), sum(ranks_on_hosts)
    os.environ.update(WORLD_SIZE=str(count), MASTER_ADDR=ADDRESSES[0], MASTER_PORT="29501")
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks_on_hosts[host])
    pairs = [Pair.of_json(fields) for fields in json.loads(os.environ["PAIRS"])]
    first, children = sum(ranks_on_hosts[:host]), []
    for place in range(ranks_on_hosts[host]):
        child = os.fork()
        if child == 0:
            os.environ.update(RANK=str(first + place), LOCAL_RANK=str(place))
            torch.set_num_threads(1)
            os.write(1, (json.dumps(run_pairs(pairs)) + "\n").encode())
            os._exit(0)
        children.append(child)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    sys.exit(max(map(abs, statuses)))


if __name__ == "__main__":
    run_host()
