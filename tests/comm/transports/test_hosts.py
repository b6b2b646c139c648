"""Ranks on two hosts, 2 x 2, whose own names mean 127.0.1.1 there, whose names are equal, or whose link is slow."""

import json
import sys
from pathlib import Path

import pytest

from tests.harness.two_hosts import ADDRESSES, run_on_two_hosts

pytestmark = pytest.mark.extended

RANKS = [sys.executable, "-m", "tests.harness.host_ranks"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
RENDEZVOUS = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "one:29500", "--rdzv-id", "hosts"]


def assert_connected(outputs: tuple[str, str]) -> None:
    """Ranks of one host are connected over its loopback interface, others over the link."""
    found = [json.loads(line) for text in outputs for line in text.splitlines() if line.startswith('{"rank"')]
    by_rank = {one["rank"]: one for one in found}
    assert sorted(by_rank) == [0, 1, 2, 3], outputs
    for rank, one in by_rank.items():
        hosts = [by_rank[other]["host"] for other in range(4)]
        near = [None if other == rank else "127.0.0.1" for other in range(4)]
        expected = [near[other] if hosts[other] == one["host"] else ADDRESSES[hosts[other]] for other in range(4)]
        assert one["peers"] == expected, outputs


def test_hosts_whose_own_names_mean_their_loopback_interface(tmp_path: Path) -> None:
    """Through torchrun's rendezvous, which gives MASTER_ADDR the name of the first rank's host."""
    assert_connected(
        run_on_two_hosts(
            tmp_path,
            [*TORCHRUN, *RENDEZVOUS, "-m", "tests.harness.host_ranks"],
            names=("one", "two"),
            environment={"GLOO_SOCKET_IFNAME": "wire"},
        )
    )


@pytest.mark.parametrize(
    ("shaping", "slowly"),
    [
        pytest.param("tbf rate 100mbit burst 64kb latency 50ms", "", id="queue of the kernel", marks=pytest.mark.soak),
        pytest.param("", "--delay 0.005 --lose-every 100 --rate 100e6", id="delay and loss"),
    ],
)
def test_hosts_of_equal_names(tmp_path: Path, shaping: str, slowly: str) -> None:
    """On a link of 100 Mbit/s, and on one with 10 ms there and back that loses a packet in a hundred, too."""
    environment = {"GLOO_SOCKET_IFNAME": "wire", "TRITONDT_SOCKET_IFNAME": "^lo"}
    names = ("node", "node")
    assert_connected(
        run_on_two_hosts(tmp_path, RANKS, names=names, environment=environment, shaping=shaping, slowly=slowly)
    )
    if slowly:
        num_carried, num_lost = map(int, (tmp_path / "carried").read_text().split())
        assert num_carried > 100
        assert num_lost >= num_carried // 200
