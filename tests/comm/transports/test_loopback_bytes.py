"""Bytes counted by the operating system: what crosses the loopback interface, against the least that there can be."""

import time
from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import tritondt as T
from tests.harness.gloo_ranks import GlooRanks
from tests.harness.oracle.traffic import lacking_elements

pytestmark = pytest.mark.usefixtures("alone")

CALLS = 20
QUIET_S = 0.3
ATTEMPTS = 8  # where the ranks cannot have a network of their own, others on it can only add

CASES = [
    ((4,), (1024, 1024), "S0", "S1"),
    ((4,), (1023, 1025), "S0", "S1"),
    ((4,), (1023, 1025), "S1", "R"),
    ((2, 2), (1024, 512), "S0, S0", "S1, S1"),
    ((2, 2), (1023, 1025), "R, S0", "S0, S0"),
    ((2, 2), (1023, 1025), "S0, S1", "S1, R"),
]


def loopback_bytes() -> int:
    """Bytes that the loopback interface has received so far."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[0])
    raise AssertionError("/proc/net/dev has no line for lo")


def carried_bytes(rank: int, mesh_shape: tuple[int, ...], shape: tuple[int, ...], source: str, target: str) -> int:
    """What the loopback interface carried during 20 calls between quiet gaps."""
    mesh, meta = T.Mesh(mesh_shape), T.TensorMeta.contiguous(shape)
    before, after = (T.DTensorSpec(mesh, T.parse_placements(text), meta) for text in (source, target))
    local = torch.full(before.local_shape, float(rank))
    T.redistribute(local, before, after)
    dist.barrier()
    time.sleep(QUIET_S)
    start = loopback_bytes()
    time.sleep(QUIET_S)
    for _ in range(CALLS):
        T.redistribute(local, before, after)
    time.sleep(QUIET_S)
    carried = loopback_bytes() - start
    dist.barrier()
    return carried


@pytest.mark.parametrize(("mesh_shape", "shape", "source", "target"), CASES)
def test_the_loopback_interface_carries_little_more_than_the_minimum(
    four_ranks: GlooRanks, mesh_shape: tuple[int, ...], shape: tuple[int, ...], source: str, target: str
) -> None:
    placements = T.parse_placements(source), T.parse_placements(target)
    least = CALLS * 4 * sum(lacking_elements(mesh_shape, shape, *placements).values())
    assert prod(shape) * 4 >= 1 << 20
    ratios = []
    for _ in range(ATTEMPTS):
        ratios.append(four_ranks.run(carried_bytes, mesh_shape, shape, source, target)[0] / least)
        assert ratios[-1] >= 1.0, f"the interface counted less than was received: {ratios}"
        if ratios[-1] <= 1.03:
            return
    raise AssertionError(f"bytes on the loopback interface over the minimum, by attempt: {ratios}")
