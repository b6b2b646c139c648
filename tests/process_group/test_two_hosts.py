"""The backend on hosts that share no memory: results, the same bits on all ranks, bytes on the link, refusals."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.harness.two_hosts import run_on_hosts
from tests.process_group.host_ranks import CALLS, LENGTH

pytestmark = pytest.mark.extended

NAMES = ("one", "two", "three", "four")


def run(
    folder: Path, name: str, number: int, counts: Sequence[int], before: str = "true", **environment: str
) -> dict[int, Any]:
    """The ranks' findings; `counts` has the number of ranks of each host, on which `before` runs first."""
    program = ["sh", "-c", f'{before} && exec "$@"', "sh"]
    program += [sys.executable, "-m", "tests.process_group.host_ranks", name, str(number), ",".join(map(str, counts))]
    variables = {"TRITONDT_SOCKET_IFNAME": "^lo", "TRITONDT_TIMEOUT": "90", **environment}
    names = NAMES[: len(counts)]
    outputs = run_on_hosts(folder, program, names=names, environment=variables, timeout_s=400.0)
    lines = [json.loads(line) for text in outputs for line in text.splitlines() if line.startswith('{"rank"')]
    return {line["rank"]: line["found"] for line in lines}


@pytest.mark.parametrize(
    "counts", [(3, 5), (2, 2, 2, 2), (1, 2, 3), *(pytest.param(it, marks=pytest.mark.soak) for it in ((2, 2), (1, 3)))]
)
def test_random_collectives(tmp_path: Path, counts: tuple[int, ...]) -> None:
    found = run(tmp_path, "random", sum(counts), counts)
    assert found == dict.fromkeys(range(sum(counts)), "SocketCommunicator")


def test_random_collectives_by_small_packets(tmp_path: Path) -> None:
    assert len(run(tmp_path, "random", 2, (2, 2), before="ip link set wire mtu 576")) == 4


@pytest.mark.parametrize("setting", ["TRITONDT_TRANSPORT=sockets", "TRITONDT_DEBUG=1"])
def test_random_collectives_over_sockets_inside_hosts_and_compared(tmp_path: Path, setting: str) -> None:
    name, value = setting.split("=")
    assert len(run(tmp_path, "random", 1, (2, 2), **{name: value})) == 4


def test_every_call_has_the_results_of_gloo(tmp_path: Path) -> None:
    found = run(tmp_path, "as_on_gloo", 0, (2, 3), GLOO_SOCKET_IFNAME="wire")
    assert len(found) == 5
    assert all("messages_in_a_batch" in names and "reduce_scatter_coalesced" in names for names in found.values())


@pytest.mark.parametrize("counts", [(2, 2), (1, 2, 3)])
def test_all_ranks_have_the_same_bits(tmp_path: Path, counts: tuple[int, ...]) -> None:
    found = run(tmp_path, "same_bits", 0, counts)
    assert len(found) == sum(counts)
    assert len(set(found.values())) == 1


@pytest.mark.parametrize("counts", [(4, 4), (3, 5), (2, 2, 2, 2)])
def test_bytes_cross_once(tmp_path: Path, counts: tuple[int, ...]) -> None:
    found = run(tmp_path, "on_wire", 0, counts)
    size, num_hosts, whole = sum(counts), len(counts), 4 * LENGTH * sum(counts)
    for host, count in enumerate(counts):
        sent = found[sum(counts[:host])]
        near = 4 * LENGTH * count
        least = {
            "all_gather": (num_hosts - 1) * near,
            "all_gather_into_tensor": (num_hosts - 1) * near,
            "reduce_scatter": whole - near,
            "reduce_scatter_tensor": whole - near,
            "all_reduce": 2 * (num_hosts - 1) * whole // num_hosts,
            "broadcast": (num_hosts - 1) * whole if host == 0 else 0,
            "reduce": 0 if host == 0 else whole,
        }
        assert list(least) == list(CALLS)
        for name, num_bytes in least.items():
            # Headers, and what acknowledges what comes in, of which a host that sends nothing has the same.
            assert num_bytes <= sent[name] <= 1.03 * num_bytes + 0.01 * whole + 20_000 * size, (host, name, sent)


def test_what_one_rank_refuses_all_hear_and_go_on(tmp_path: Path) -> None:
    found = run(tmp_path, "refused", 0, (2, 2))
    assert len(found) == 4
    for rank, texts in found.items():
        for number, text in enumerate(texts):
            culprit = (3, 0)[number // 3]
            assert text.startswith("LocalTensorError" if rank == culprit else "RefusalError"), (rank, number, text)
            assert "7 elements" in text, (rank, number, text)


def test_what_one_rank_refuses_over_gloo_all_hear_and_go_on_after_an_abort(tmp_path: Path) -> None:
    found = run(tmp_path, "refused_over_gloo", 0, (2, 2), TRITONDT_TRANSPORT="gloo", GLOO_SOCKET_IFNAME="wire")
    assert len(found) == 4
    for rank, (first, then) in found.items():
        assert first.startswith("LocalTensorError: " if rank == 3 else "PeerError: rank 3 failed while rank"), first
        assert "was given an output of 11 elements" in first, first
        assert then.startswith("LocalTensorError: " if rank == 3 else "WorldError: "), then


def test_ranks_that_disagree_all_hear_and_go_on_in_a_new_world(tmp_path: Path) -> None:
    found = run(tmp_path, "disagree", 0, (2, 2))
    assert len(found) == 4
    for first, then in found.values():
        assert first.startswith(("MismatchError", "PeerError")), found
        assert "300001" in first, found
        assert then.startswith("WorldError"), found
