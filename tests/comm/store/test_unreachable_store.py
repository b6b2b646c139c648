"""Worlds that end while nobody reaches the store, over a link that is down: the next ones meet anew."""

import fcntl
import socket
import struct
from pathlib import Path

import pytest
import torch

import tritondt as T
from tests.harness.gloo_ranks import GlooRanks

SIZE = 2
_SIOCSIFFLAGS = 0x8914
_UP = 0x1


def network() -> str:
    return str(Path("/proc/self/ns/net").readlink())


def network_of(rank: int) -> str:
    return network()


def set_link(rank: int, outer: str, flags: int) -> None:
    """Sets the loopback of the ranks' own network up or down."""
    if rank == 0:
        assert network() != outer, "the loopback is that of the whole machine"
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh", b"lo", flags))


def exchange(rank: int) -> None:
    x = T.distribute_tensor(torch.arange(6.0), T.Mesh((SIZE,)), [T.Shard(0)])
    torch.testing.assert_close(x.full_tensor(), torch.arange(6.0), rtol=0, atol=0)


def abort(rank: int) -> None:
    T.abort()


@pytest.mark.parametrize(
    ("transport", "times"),
    [
        ("sockets", 1),
        pytest.param("gloo", 2, marks=pytest.mark.extended),
        pytest.param("shared-memory", 2, marks=pytest.mark.extended),
    ],
)
def test_ranks_whose_world_ended_while_the_link_was_down_connect_anew(transport: str, times: int) -> None:
    """No end could be counted in the store, in which the addresses of the world before are."""
    outer = network()
    variables = {"TRITONDT_TRANSPORT": transport, "TRITONDT_TIMEOUT": "60", "OMP_NUM_THREADS": "1"}
    with GlooRanks(SIZE, variables, own_network=True) as ranks:
        if outer in ranks.run(network_of):
            pytest.skip("ranks need a network of their own, which the system does not allow")
        ranks.run(exchange)
        for _ in range(times):
            ranks.run(set_link, outer, 0)
            ranks.run(abort)
            ranks.run(set_link, outer, _UP)
            ranks.run(exchange)
