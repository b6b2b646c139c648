"""The backend on two hosts, which share no memory: exact results, the same bits on all ranks, and who is lost."""

import json
import signal
import sys
from pathlib import Path

import pytest

from tests.harness.two_hosts import run_on_two_hosts

pytestmark = pytest.mark.extended

COUNTS = (2, 3)


def run(folder: Path, name: str, number: int, count: int, **environment: str) -> dict[int, str]:
    program = [sys.executable, "-m", "tests.process_group.host_ranks", name, str(number), str(count)]
    variables = {"TRITONDT_SOCKET_IFNAME": "^lo", "TRITONDT_TIMEOUT": "90", **environment}
    outputs = run_on_two_hosts(folder, program, names=("one", "two"), environment=variables, timeout_s=400.0)
    lines = [json.loads(line) for text in outputs for line in text.splitlines() if line.startswith('{"rank"')]
    return {line["rank"]: line["found"] for line in lines}


@pytest.mark.parametrize("count", COUNTS)
def test_random_collectives(tmp_path: Path, count: int) -> None:
    assert run(tmp_path, "random", 0, count) == dict.fromkeys(range(2 * count), "SocketCommunicator")


def test_all_ranks_have_the_same_bits(tmp_path: Path) -> None:
    found = run(tmp_path, "same_bits", 0, 2)
    assert len(found) == 4
    assert len(set(found.values())) == 1


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP, 0], ids=["killed", "stopped", "late"])
def test_who_is_lost_is_named_on_all_others(tmp_path: Path, how: int) -> None:
    found = run(tmp_path, "lose", how, 2)
    assert sorted(found) == [0, 1, 2]
    for text in found.values():
        assert "rank 3" in text, found
