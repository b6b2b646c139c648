"""Meshes that find the hosts: what they refuse, and what crosses between two namespaces when a module is trained."""

import json
import sys
from pathlib import Path

import pytest

import tritondt as T
from tests.fsdp.host_mesh_ranks import FEATURES, LAYERS
from tests.harness.two_hosts import run_on_hosts
from tritondt.fsdp.host_mesh import grid_of_hosts


def test_hosts_of_different_numbers_of_ranks_are_refused() -> None:
    expected = (
        r"init_host_mesh takes hosts of as many ranks each, found 2 on one \(0, 2\); 3 on one \(1, 3, 4\); start as "
        "many on each, or shard over one axis of all ranks, whose gathers bring each host what it lacks once"
    )
    with pytest.raises(T.MeshError, match=expected):
        grid_of_hosts((0, 1, 0, 1, 1), (-1,))


@pytest.mark.parametrize("inner_shape", [(3,), (-1, 3), (-1, -1), (0,), (2, 4), (-2, 2), ()], ids=str)
def test_sizes_that_do_not_fit_a_host_are_refused(inner_shape: tuple[int, ...]) -> None:
    with pytest.raises(
        T.MeshError, match="each host has 4 ranks; allowed are sizes above 0 whose product is 4, one of"
    ):
        grid_of_hosts((0, 0, 0, 0, 1, 1, 1, 1), inner_shape)


def test_one_host_is_one_index() -> None:
    assert grid_of_hosts((5, 5, 5, 5), (2, -1)) == ((1, 2, 2), (0, 1, 2, 3))


def test_without_a_world() -> None:
    with pytest.raises(T.MeshError, match=r"called before torch\.distributed\.init_process_group, and asks the ranks"):
        T.fsdp.init_host_mesh("cpu")


@pytest.mark.extended
def test_training_on_two_hosts_whose_ranks_alternate(tmp_path: Path) -> None:
    """Whole parameters stay inside hosts, and gradients cross alone: two thirds of what crosses where shards do too."""
    outputs = run_on_hosts(
        tmp_path,
        [sys.executable, "-m", "tests.fsdp.host_mesh_ranks"],
        names=("one", "two"),
        environment={"GLOO_SOCKET_IFNAME": "wire"},
        timeout_s=300,
    )
    lines = [line for output in outputs for line in output.splitlines() if line.startswith('{"rank"')]
    found = sorted(map(json.loads, lines), key=lambda each: each["rank"])
    assert [each["ranks"] for each in found] == [[[0, 2], [1, 3]]] * 4
    assert len({each["digest"] for each in found}) == 1
    one_of_each_host = {each["host"]: each for each in found}.values()
    assert len(one_of_each_host) == 2
    # The sums of a host's gradients cross to where they are added up, and come back; a gather brings a host the half
    # that it lacks, before forward and before backward.
    parameters = LAYERS * FEATURES * FEATURES * 4
    assert {each["explained_found"] for each in found} == {2 * parameters}
    assert {each["explained_named"] for each in found} == {3 * parameters}
    sent = sum(each["sent_found"] for each in one_of_each_host)
    assert 2 * parameters <= sent <= 1.03 * 2 * parameters + 60_000
    assert sum(each["sent_named"] for each in one_of_each_host) > sent
    # The other host lacks the whole of what rank 0 has where it holds all shards, and half of it where it holds one.
    layer = FEATURES * FEATURES * 4
    for mesh, least in enumerate((layer, layer // 2)):
        sent = sum(each["sent_from_rank_0"][mesh] for each in one_of_each_host)
        assert least <= sent <= 1.03 * least + 60_000, (mesh, sent)
