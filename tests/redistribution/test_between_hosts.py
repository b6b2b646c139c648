"""Redistributions on hosts that are namespaces: bytes on the link between them, against the fewest; and the results."""

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import tritondt as T
from tests.harness.oracle.random_layouts import random_pair
from tests.harness.pairs_on_hosts import Pair, digest, redistributed, whole_numbers
from tests.harness.two_hosts import run_on_hosts
from tritondt.comm import world
from tritondt.comm.transports.threads import run_ranks
from tritondt.dtensor.many import redistribute_to

ROWS, COLUMNS = 512, 520
IN_ORDER = tuple(range(8))
# Neighbours of the mesh are on different hosts.
ACROSS = (0, 4, 1, 5, 2, 6, 3, 7)
ONE_AXIS = [("S0", "R"), ("S1", "R"), ("P", "R"), ("P", "S0"), ("P", "S1"), ("S0", "S1"), ("S1", "S0")]
TWO_AXES = [
    ("P,P", "S0,S1"),
    ("P,P", "R,R"),
    ("P,P", "S0,S0"),
    ("P,P", "R,S1"),
    ("S0,S1", "R,R"),
    ("S0,S1", "S1,S0"),
    ("S0,S0", "R,S0"),
    ("S0,S0", "S0,R"),
    ("P,R", "R,R"),
    ("R,P", "R,R"),
    ("P,S0", "S0,P"),
    ("P,S1", "R,R"),
    ("S0,P", "R,R"),
    ("S0,R", "R,S0"),
    ("R,S0", "S0,R"),
    ("R,S1", "S0,S1"),
    ("R,S1", "S1,R"),
    ("P(max),S0", "R,R"),
    ("P(avg),S0", "S1,R"),
]
# Of headers, acknowledgements and tags.
OVERHEAD = 1.03


def check_pairs(folder: Path, ranks_on_hosts: Sequence[int], pairs: Sequence[Pair]) -> None:
    """Bytes between hosts are the fewest, as explained, and results are those of ranks that share a host."""
    lines = [
        line
        for output in run_on_hosts(
            folder,
            [sys.executable, "-m", "tests.harness.pairs_on_hosts"],
            names=["one", "two", "three", "four"][: len(ranks_on_hosts)],
            environment={
                "PAIRS": json.dumps(pairs),
                "RANKS_ON_HOSTS": ",".join(map(str, ranks_on_hosts)),
                "GLOO_SOCKET_IFNAME": "wire",
            },
            timeout_s=500,
        )
        for line in output.splitlines()
        if line.startswith('{"rank"')
    ]
    found = sorted(map(json.loads, lines), key=lambda each: each["rank"])
    assert len(found) == sum(ranks_on_hosts), lines
    one_of_each_host = {each["host"]: each for each in found}.values()
    control = sum(each["idle"] for each in one_of_each_host) + 20_000
    for number, pair in enumerate(pairs):
        least, sent = pair.least_bytes(ranks_on_hosts), sum(each["sent"][number] for each in one_of_each_host)
        explained = [json.loads(each["explained"][number]) for each in found if each["explained"][number]]
        assert all(sum(row[2] for row in each["between_hosts"]) == least for each in explained), pair
        assert sum(each["far_bytes"] for each in explained) == least, pair
        assert least <= sent <= OVERHEAD * least + control, f"{pair} took {sent:,} bytes of {least:,}"
    least, sent = (
        sum(pair.least_bytes(ranks_on_hosts) for pair in pairs),
        sum(each["sent_by_list"] for each in one_of_each_host),
    )
    assert least <= sent <= OVERHEAD * least + control, f"a list took {sent:,} bytes of {least:,}"
    expected = run_ranks(len(found), lambda rank: [redistributed(pair) for pair in pairs])
    for each in found:
        for pair, got, wanted in zip(pairs, each["digests"], expected[each["rank"]], strict=True):
            assert got == wanted, f"rank {each['rank']} in {pair}"


def pairs_of(mesh_shape: tuple[int, ...], ranks: tuple[int, ...], placements: Sequence[tuple[str, str]]) -> list[Pair]:
    return [Pair(mesh_shape, ranks, *each, (ROWS, COLUMNS)) for each in placements]


def test_two_hosts(tmp_path: Path) -> None:
    pairs = pairs_of((8,), IN_ORDER, [("S0", "R"), ("P", "R")])
    pairs += pairs_of((2, 4), ACROSS, [("P,P", "S0,S1")])
    pairs += [between_meshes((2, 2), (1, 0, 4, 2), "S0,P", (3,), (6, 3, 5), "R")]
    check_pairs(tmp_path, (4, 4), [*pairs, between_meshes((1,), (0,), "R", (8,), IN_ORDER, "R")._replace(is_sent=True)])


def between_meshes(
    mesh_shape: tuple[int, ...],
    ranks: tuple[int, ...],
    source: str,
    target_mesh_shape: tuple[int, ...],
    target_ranks: tuple[int, ...],
    target: str,
) -> Pair:
    return Pair(mesh_shape, ranks, source, target, (ROWS, COLUMNS), "float32", target_mesh_shape, target_ranks)


@pytest.mark.parametrize(
    "ranks_on_hosts",
    [
        pytest.param((3, 5), marks=pytest.mark.extended),
        *(pytest.param(each, marks=pytest.mark.soak) for each in ((4, 4), (2, 2, 2, 2))),
    ],
    ids=str,
)
def test_meshes_across_hosts(tmp_path: Path, ranks_on_hosts: tuple[int, ...]) -> None:
    """Meshes on different hosts, meshes that share ranks, one rank to all others and back, and sends."""
    first, last = IN_ORDER[:4], IN_ORDER[4:]
    sides = [
        *[
            ((4,), first, "S0", (4,), last, "R"),
            ((4,), first, "P", (4,), last, "R"),
            ((4,), last, "P", (4,), first, "S1"),
        ],
        *[
            ((4,), first, "R", (4,), last, "R"),
            ((4,), first, "S1", (2, 2), last, "S0,R"),
            ((4,), last, "R", (4,), first, "P"),
        ],
        *[
            ((2, 2), (0, 5, 1, 4), "S0,P", (3,), (4, 7, 2), "R"),
            ((3,), (7, 0, 4), "P(max)", (2, 3), (0, 1, 2, 5, 6, 7), "R,R"),
        ],
        *[((8,), ACROSS, "S0", (8,), IN_ORDER, "S0"), ((2, 4), IN_ORDER, "P,S0", (4, 2), ACROSS, "R,S1")],
        *[
            ((1,), (0,), "R", (8,), IN_ORDER, "R"),
            ((8,), IN_ORDER, "P", (1,), (5,), "R"),
            ((1,), (6,), "R", (8,), IN_ORDER, "S0"),
        ],
    ]
    pairs = [between_meshes(*each) for each in sides]
    sends = [
        between_meshes((1,), (6,), "R", (2, 4), ACROSS, "R,S1"),
        between_meshes((4,), (0, 4, 1, 5), "S0", (2, 4), ACROSS, "R,S0"),
        between_meshes((1,), (3,), "R", (7,), IN_ORDER[1:], "P"),
    ]
    check_pairs(tmp_path, ranks_on_hosts, [*pairs, *(pair._replace(is_sent=True) for pair in sends)])


@pytest.mark.extended
@pytest.mark.parametrize(
    "ranks_on_hosts", [pytest.param((4, 4), marks=pytest.mark.soak), (3, 5), (2, 2, 2, 2)], ids=str
)
def test_all_pairs(tmp_path: Path, ranks_on_hosts: tuple[int, ...]) -> None:
    pairs = [*pairs_of((8,), IN_ORDER, ONE_AXIS), *pairs_of((2, 4), IN_ORDER, TWO_AXES)]
    pairs += pairs_of((2, 4), ACROSS, TWO_AXES)
    pairs += pairs_of((7,), IN_ORDER[1:], ONE_AXIS)  # does not fill the hosts
    pairs += pairs_of((2, 2, 2), ACROSS, [("P,S0,R", "S1,R,S0"), ("S0,S1,P", "R,R,R")])
    assert len(pairs) == 54
    check_pairs(tmp_path, ranks_on_hosts, pairs)


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(6, 150))])
def test_random_pairs_on_hosts(seed: int) -> None:
    """One by one, as a list, and asynchronously: the same bits as among ranks of one host."""
    chosen = random.Random(seed)
    layouts = [random_pair(chosen, torch.float32) for _ in range(6)]
    mesh_shape, size = layouts[0][0].mesh_shape, layouts[0][0].num_ranks
    layouts = [pair for pair in layouts if pair[0].mesh_shape == mesh_shape]
    hosts = [chosen.randrange(3) for _ in range(size)]

    def body(rank: int) -> list[str]:
        mesh, given, targets = T.Mesh(mesh_shape), list[T.DTensor](), list[T.DTensorSpec]()
        for source, target in layouts:
            meta = T.TensorMeta.contiguous(source.shape)
            spec, wanted = (T.DTensorSpec(mesh, it.placements, meta, it.order) for it in (source, target))
            given.append(T.DTensor(whole_numbers(spec), spec))
            targets.append(wanted)
        listed = redistribute_to(given, targets, bucket_bytes=chosen_bytes, async_op=True)
        single = [T.redistribute(x.to_local(), x._spec, target) for x, target in zip(given, targets, strict=True)]
        return [digest(x.to_local()) for x in listed] + [digest(local) for local in single]

    chosen_bytes = chosen.choice((1, 300, 1 << 20))
    assert run_ranks(size, body, hosts=hosts) == run_ranks(size, body)


@pytest.mark.parametrize("hosts", [(0, 0, 1, 1), (0, 1, 1, 2, 2, 2)], ids=str)
def test_means_of_float16_do_not_overflow_on_the_way(hosts: tuple[int, ...]) -> None:
    """The sum of a host is over 65504, and its mean has no more digits than float16; messages alone are of it, too."""

    def body(rank: int) -> list[torch.Tensor]:
        mesh, found = T.Mesh((len(hosts),)), list[torch.Tensor]()
        for dtype, wire_dtype in ((torch.float16, None), (torch.float32, torch.float16)):
            meta = T.TensorMeta.contiguous((12, 5), dtype)
            terms = torch.full((12, 5), 59_904.0 - 64 * rank, dtype=dtype)
            source = T.DTensorSpec(mesh, (T.Partial("avg"),), meta)
            for placement in (T.Replicate(), T.Shard(0)):
                target = T.DTensorSpec(mesh, (placement,), meta)
                found.append(T.redistribute(terms, source, target, wire_dtype=wire_dtype))
        return found

    between, inside = run_ranks(len(hosts), body, hosts=hosts), run_ranks(len(hosts), body)
    for ours, ours_inside in zip(between, inside, strict=True):
        for found, expected in zip(ours, ours_inside, strict=True):
            assert bool(expected.isfinite().all())
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


def summed(kind: str) -> None:
    """A sum of all ranks between hosts: terms inside each, then shares between them, and shares inside each."""
    mesh = T.Mesh((4,))
    terms = T.DTensor.from_local(torch.ones(256, 520), mesh, [T.Partial()])
    if kind == "list":
        rows = T.DTensor.from_local(torch.ones(16, 520), mesh, [T.Shard(0)])
        found, _ = T.redistribute_many([(terms, [T.Replicate()]), (rows, [T.Replicate()])])
    else:
        found = terms.redistribute(placements=[T.Replicate()], async_op=kind == "asynchronous")
    assert bool((found.to_local() == 4).all())


@pytest.mark.parametrize("kind", ["synchronous", "asynchronous", "list"])
def test_where_a_rank_has_ended_no_rank_of_another_host_is_told_that_the_world_goes_on(kind: str) -> None:
    """A host whose own exchanges have failed for good has not merely refused the exchange between hosts."""

    def body(rank: int, ended: int) -> list[str]:
        summed(kind)
        if rank == ended:
            return []
        errors = []
        for error in (T.PeerError, T.WorldError):  # nobody waits for the second
            with pytest.raises(error) as raised:
                summed(kind)
            errors.append(type(raised.value).__name__)
        of_all = world.current().communicator((0, 1, 2, 3))
        near = world.current().communicator((0, 1) if rank < 2 else (2, 3), inside=(0, 1, 2, 3))
        assert not of_all.is_usable
        assert not near.is_usable
        return errors

    for ended in range(4):
        told = run_ranks(4, lambda rank, ended=ended: body(rank, ended), hosts=(0, 0, 1, 1))  # type: ignore[misc]
        for rank, errors in enumerate(told):
            assert errors == ([] if rank == ended else ["PeerError", "WorldError"]), (ended, rank)
