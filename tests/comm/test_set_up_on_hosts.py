"""Two hosts that do not fit each other: found when ranks first meet, and told on all of them."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from tests.harness.fork_server import REPOSITORY
from tests.harness.two_hosts import run_on_two_hosts

pytestmark = pytest.mark.extended

# Rank 0 and 1 listen at an address that the other host does not know, as where an interface of containers is named.
LISTENING_ELSEWHERE = """
if test $HOST_NUMBER = 0; then
    ip link add inner type veth peer name outer && ip link set outer up
    ip addr add 10.99.0.1/24 dev inner && ip link set inner up
    export TRITONDT_SOCKET_IFNAME=inner
fi
"""
# The other host sends what is for that address to somebody who does not exist.
INTO_THE_VOID = """
if test $HOST_NUMBER = 1; then
    ip route add 10.99.0.0/24 dev wire && ip neigh add 10.99.0.1 lladdr 02:00:00:00:00:99 dev wire
fi
"""


def found_by_ranks(folder: Path, before: str, **environment: str) -> dict[int, str]:
    """Each rank's finding, by rank; both hosts have run `before` first."""
    program = ["sh", "-c", f'{before}\nexec "$@"', "sh", sys.executable, "-m", "tests.harness.set_up_on_hosts"]
    variables = {"TRITONDT_SOCKET_IFNAME": "wire", "TRITONDT_TIMEOUT": "90", "FOLDER": str(folder), **environment}
    outputs = run_on_two_hosts(folder, program, names=("one", "two"), environment=variables, timeout_s=300.0)
    lines = [json.loads(line) for text in outputs for line in text.splitlines() if line.startswith('{"rank"')]
    return {line["rank"]: line["found"] for line in lines}


def test_an_address_to_which_a_host_has_no_route(tmp_path: Path) -> None:
    told = found_by_ranks(tmp_path, LISTENING_ELSEWHERE)
    assert sorted(told) == [0, 1, 2, 3]
    for text in told.values():
        assert "could not connect to rank" in text, told
        assert "ENETUNREACH at 10.99.0.1, port" in text, told
        assert "to which no interface of this host has a route; there are lo 127.0.0.1, wire 10.77.0.2" in text, told


@pytest.mark.soak
def test_an_address_from_which_nothing_comes_back(tmp_path: Path) -> None:
    told = found_by_ranks(tmp_path, LISTENING_ELSEWHERE + INTO_THE_VOID, TRITONDT_TIMEOUT="12")
    assert sorted(told) == [0, 1, 2, 3]
    assert all("PeerError" in text for text in told.values()), told
    for text in told.values():
        called = "calls rank" in text and "from wire 10.77.0.2" in text
        listening = "listens for ranks" in text and ", of inner" in text
        assert called or listening, told
        assert "at 10.99.0.1, port" in text, told


def test_another_version_on_one_host(tmp_path: Path) -> None:
    for name in ("tritondt", "kernels", "tests"):
        shutil.copytree(REPOSITORY / name, tmp_path / "other" / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "other" / "tritondt" / "version.py").write_text('VERSION = "0.0.9"\n')
    elsewhere = f'if test $HOST_NUMBER = 1; then cd "{tmp_path}/other"; export PYTHONPATH="$PWD"; fi'
    told = found_by_ranks(tmp_path, elsewhere)
    assert sorted(told) == [0, 1, 2, 3]
    for text in told.values():
        assert "all ranks must plan alike: install one version on all hosts" in text, told
        assert "0.0.9" in text, told


def test_other_prices_on_one_host_and_ranks_in_containers_of_their_own(tmp_path: Path) -> None:
    """All take the prices of the rank that came first; ranks that share no memory talk over sockets."""
    dear = 'if test $HOST_NUMBER = 1; then export TRITONDT_COSTS=\'{"network": {"latency_s": 1.0}}\'; fi'
    assert found_by_ranks(tmp_path, dear, APART="1") == dict.fromkeys(range(4), "right")
