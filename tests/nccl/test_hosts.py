"""Redistributions over the double of NCCL between hosts: stages, bytes by kind of link, values, and explanations."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

import tritondt as T
from tests.comm.transports.test_gloo_cases import check_on
from tests.harness.gloo_ranks import GlooRanks
from tests.harness.nccl_on_hosts import hosts_of, ranks_on_hosts, sent
from tests.harness.oracle.across_cases import AcrossCase, check_all_across, inputs_of, random_across_case, run_across
from tests.harness.pairs_on_hosts import Pair, redistributed, redistributed_list, whole_numbers
from tests.nccl.devices import device_of
from tritondt.cli.main import main
from tritondt.comm.transports.threads import run_ranks
from tritondt.planning.prices import CUDA

SHAPE = (13, 9)
IN_ORDER = tuple(range(8))
ACROSS = (0, 4, 1, 5, 2, 6, 3, 7)


class Moved(NamedTuple):
    """A rank's result and sent bytes, and the bytes that explain had said."""

    digest: str
    near_bytes: int
    far_bytes: int
    collectives: tuple[str, ...]
    num_communicators: int
    explained: dict[str, Any] | None


def move(rank: int, pairs: Sequence[Pair]) -> list[Moved]:
    """Every pair twice: part by part, and as one call of the extension; then all of them as a list."""
    found = []
    for pair in pairs:
        source, target = pair.specs()
        takes_part = source.coordinate is not None or target.coordinate is not None
        told = json.loads(T.explain(source, target).to_json()) if takes_part else None
        sent.clear()
        got = redistributed(pair)
        communicators = len(sent.communicators)
        found.append(Moved(got, sent.near_bytes, sent.far_bytes, tuple(sent.collectives), communicators, told))
        assert redistributed(pair) == got, f"{pair} the second time"
    assert redistributed_list([pair for pair in pairs if not pair.is_sent]) == [
        each.digest for each, pair in zip(found, pairs, strict=True) if not pair.is_sent
    ]
    return found


def check(
    ranks: GlooRanks, pairs: Sequence[Pair], counts: Sequence[int], *, has_slots: bool = False, compares: bool = False
) -> None:
    """Bytes between hosts are the fewest, as explained, on one communicator; results are those of one host.

    Where ranks compare what they run, notes go over NCCL too, and bytes are not counted.
    """
    outcomes = ranks.run(move, pairs)
    expected = run_ranks(len(outcomes), lambda rank: [redistributed(pair) for pair in pairs])
    for pair, wanted, *found in zip(pairs, zip(*expected, strict=True), *outcomes, strict=True):
        assert [each.digest for each in found] == [*wanted], pair
        if compares:
            continue
        least = pair.least_bytes(counts)
        assert sum(each.far_bytes for each in found) == least, pair
        told = [each.explained for each in found if each.explained is not None]
        assert max(each.num_communicators for each in found) <= 1, pair
        if not pair.is_sent:  # explain tells of a redistribution
            assert sum(each["far_bytes"] for each in told) == least, pair
            assert all(sum(row[2] for row in each["between_hosts"]) == least for each in told), pair
            near = sum(each["received_bytes"] - each["far_bytes"] for each in told)
            assert sum(each.near_bytes for each in found) == (0 if has_slots else near), pair


def pair(mesh: tuple[int, ...], ranks: tuple[int, ...], source: str, target: str, dtype: str = "float32") -> Pair:
    return Pair(mesh, ranks, source, target, SHAPE, dtype)


PAIRS = [
    pair((8,), IN_ORDER, "S0", "R"),
    pair((8,), IN_ORDER, "P(max)", "R"),
    pair((2, 4), ACROSS, "P,P", "S0,S1"),
    Pair((2, 2), (1, 0, 4, 2), "S0,P", "R", SHAPE, "float32", (3,), (6, 3, 5)),
    Pair((1,), (0,), "R", "R", SHAPE, "float32", (8,), IN_ORDER, is_sent=True),
]
MORE_PAIRS = [
    *[pair((8,), IN_ORDER, *each) for each in (("S1", "R"), ("P", "R"), ("P(min)", "S1"), ("S0", "S1"))],
    pair((8,), IN_ORDER, "S0(sizes=0/5/0/1/0/7/0/0)", "R"),
    pair((8,), IN_ORDER, "S0(block=2)", "R"),
    pair((8,), IN_ORDER, "S0(block=2)", "S1(block=1)"),
    pair((8,), IN_ORDER, "P", "R", "bfloat16"),
    pair((8,), IN_ORDER, "P(product)", "S0", "int32"),
    pair((7,), IN_ORDER[1:], "S0", "R"),
    *[pair((2, 4), ranks, "P(avg),S0", "S1,R") for ranks in (IN_ORDER, ACROSS)],
    *[pair((2, 4), ranks, "S0,R", "R,S0") for ranks in (IN_ORDER, ACROSS)],
    pair((2, 2, 2), ACROSS, "P,S0,R", "S1,R,S0"),
    Pair((4,), IN_ORDER[:4], "S0", "R", SHAPE, "float32", (4,), IN_ORDER[4:]),
    Pair((4,), IN_ORDER[4:], "P", "S1", SHAPE, "float32", (4,), IN_ORDER[:4]),
    Pair((4,), (0, 4, 1, 5), "S0", "R,S0", SHAPE, "float32", (2, 4), ACROSS, is_sent=True),
]


@pytest.fixture(scope="module")
def uneven() -> Iterator[GlooRanks]:
    with ranks_on_hosts((3, 5)) as started:
        yield started


def test_hosts_of_3_and_5_ranks(uneven: GlooRanks) -> None:
    check(uneven, PAIRS, (3, 5))


@pytest.mark.extended
def test_more_pairs(uneven: GlooRanks) -> None:
    check(uneven, MORE_PAIRS, (3, 5))


@pytest.mark.extended
@pytest.mark.parametrize(
    ("counts", "variables"),
    [
        ((2, 2), {"TRITONDT_SLOTS": "1"}),
        pytest.param((4, 4), {"TRITONDT_DEBUG": "1"}, marks=pytest.mark.soak),
        pytest.param((2, 2, 2, 2), {}, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_other_hosts(counts: tuple[int, ...], variables: dict[str, str]) -> None:
    """Through slots inside hosts, compared in debug mode, and on four hosts."""
    size = sum(counts)
    chosen = [*PAIRS, *MORE_PAIRS] if size == 8 else [pair((4,), IN_ORDER[:4], *each) for each in ONE_AXIS]
    with ranks_on_hosts(counts, **variables) as ranks:
        check(ranks, chosen, counts, has_slots="TRITONDT_SLOTS" in variables, compares="TRITONDT_DEBUG" in variables)


ONE_AXIS = (("S0", "R"), ("S1", "R"), ("P(max)", "R"), ("P", "S0"), ("S0", "S1"))


@pytest.mark.extended
def test_random_redistributions(uneven: GlooRanks) -> None:
    """At once and asynchronously, of any strides and dtypes, forth and, where there is a gradient, back."""
    check_on(uneven, 410_000)


def run_between_meshes(rank: int, cases: list[AcrossCase]) -> list[Any]:
    return [run_across(case, inputs_of(case), rank) for case in cases]


@pytest.mark.extended
def test_random_redistributions_between_meshes(uneven: GlooRanks) -> None:
    cases = [random_across_case(seed, 8) for seed in range(20)]
    check_all_across(cases, uneven.run(run_between_meshes, cases), hosts_of((3, 5)))


def record_and_replay(rank: int, is_async: bool) -> None:
    for source, target in (each.specs() for each in PAIRS[:3]):
        local = whole_numbers(source)
        x, found = T.DTensor(local, source), torch.empty(target.local_shape)

        def run(x: T.DTensor = x, target: T.DTensorSpec = target, found: torch.Tensor = found) -> None:
            found.copy_(x.redistribute(placements=target.placements, async_op=is_async).to_local())

        with torch.no_grad():
            replay = device_of("host").recorded(run)
            for factor in (2, -3):
                local.mul_(factor)
                found.fill_(99)
                replay()
                assert torch.equal(found, T.redistribute(local, source, target)), (source, target)


@pytest.mark.extended
@pytest.mark.parametrize("is_async", [False, True], ids=["at once", "async"])
def test_stages_are_recorded_once_and_replayed(uneven: GlooRanks, is_async: bool) -> None:
    uneven.run(record_and_replay, is_async)


def refuse(rank: int) -> tuple[str, str]:
    """One rank's tensor is not its part: the stages of the others name it."""
    mesh, meta = T.Mesh((3,)), T.TensorMeta.contiguous(SHAPE)
    source, target = (T.DTensorSpec(mesh, T.parse_placements(text), meta) for text in ("P(max)", "R"))
    local = torch.zeros(1) if rank == 2 else whole_numbers(source)
    with pytest.raises((T.PeerError, T.LocalTensorError)) as raised:
        T.redistribute(local, source, target)
    dist.barrier()  # all have heard, by messages of Gloo
    T.abort()
    return type(raised.value).__name__, str(raised.value)


@pytest.mark.extended
def test_a_refusal_is_heard_in_stages_on_all_hosts() -> None:
    """It ends the communicator of all, as over NCCL on one host: messages that were put into streams have no tags."""
    with ranks_on_hosts((1, 2)) as ranks:
        found = ranks.run(refuse)
    assert [kind for kind, _ in found] == ["PeerError", "PeerError", "LocalTensorError"]
    assert all("rank 2" in text and "of 3 (" in text for _, text in found[:2]), found


# Of float32 (n, n): even and uneven cuts, large and small, with NCCL's collective or without.
PRICED = [
    ("S0", "R", 1024, ["all_gather"]),
    ("P", "R", 1024, ["all_reduce"]),
    ("S0", "R", 1001, ["exchange", "exchange"]),
    ("S0", "R", 5, ["exchange"]),
    ("P(max)", "R", 1001, ["reduce", "reduce", "exchange"]),
    ("P(max)", "R", 5, ["reduce"]),
    ("S0", "S1", 1001, ["exchange"]),
]


def explain_and_move(rank: int) -> list[tuple[dict[str, Any], int, list[str]]]:
    found = []
    for source, target, side, _ in PRICED:
        specs = Pair((8,), IN_ORDER, source, target, (side, side)).specs()
        told = json.loads(T.explain(*specs).to_json())
        sent.clear()
        T.redistribute(whole_numbers(specs[0]), *specs)
        found.append((told, sent.far_bytes, [*sent.collectives]))
    return found


@pytest.mark.extended
def test_prices_choose_stages_and_plan_says_what_runs() -> None:
    with ranks_on_hosts((4, 4), TRITONDT_COSTS=json.dumps({"cpu": asdict(CUDA)})) as ranks:
        outcomes = ranks.run(explain_and_move)
    for (source, target, side, kinds), *found in zip(PRICED, *outcomes, strict=True):
        told = found[0][0]
        assert [step["kind"] for step in told["steps"]] == kinds, told["reason"]
        collectives = [kind for kind in kinds if kind.startswith("all_")]
        assert all(each[2] == collectives for each in found)
        if not collectives:
            assert sum(each[1] for each in found) == sum(row[2] for row in told["between_hosts"])
            assert sum(each[0]["far_bytes"] for each in found) == sum(each[1] for each in found)
        asked = ["--mesh", "8", "--shape", f"{side},{side}", "--from", source, "--to", target, "--device", "cuda"]
        ended = CliRunner().invoke(main, ["plan", *asked, "--topology", "rail-optimised:4", "--json"])
        assert ended.exit_code == 0, ended.output
        planned = json.loads(ended.output)
        for name in ("far_bytes", "between_hosts", "reason", "sent_bytes", "received_bytes", "messages"):
            assert planned[name] == told[name], name
        assert [step["kind"] for step in planned["steps"]] == kinds
        assert planned["seconds"] == pytest.approx(told["seconds"])
