"""Messages through arenas: exact results, long ones in rounds, and ranks that cannot share memory."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import tritondt as T
from tests.comm.transports.test_gloo_cases import check_on
from tests.comm.transports.test_reductions import in_order, random_terms, reduced_by
from tests.harness.descriptors import open_targets
from tests.harness.gloo_ranks import GlooRanks
from tritondt.comm import world
from tritondt.comm.answers import Answers
from tritondt.comm.packing.arena_transfer import ArenaTransfer
from tritondt.comm.transports import arenas, shared_memory
from tritondt.planning import slots
from tritondt.planning.explain import explain_layouts
from tritondt.planning.prices import built_in, in_shared_memory
from tritondt.planning.slots import slot_bytes
from tritondt.sharded import Shard, ShardMetadata, init_from_local_shards
from tritondt.sharding.layout import Layout

ALL = (0, 1, 2, 3)


@pytest.mark.parametrize("first_seed", [500_000, 500_060, pytest.param(500_120, marks=pytest.mark.extended)])
def test_random_cases(four_shared_memory_ranks: GlooRanks, first_seed: int) -> None:
    check_on(four_shared_memory_ranks, first_seed)


@pytest.fixture(scope="module")
def ranks_in_many_rounds() -> Iterator[GlooRanks]:
    with GlooRanks(4, {"TRITONDT_TRANSPORT": "shared-memory"}, prepare=shorten_chunks) as ranks:
        yield ranks


def shorten_chunks() -> None:
    """Lets messages of more than 48 bytes take several rounds, in arenas of a board and two pages."""
    slots.CHUNK_BYTES = 48
    arenas.environment.arena_bytes = lambda: 3 * 4096  # type: ignore[attr-defined]


@pytest.mark.parametrize("first_seed", [500_180, pytest.param(500_240, marks=pytest.mark.extended)])
def test_random_cases_in_many_rounds(ranks_in_many_rounds: GlooRanks, first_seed: int) -> None:
    check_on(ranks_in_many_rounds, first_seed)


@pytest.mark.parametrize("op", ["sum", "avg"])
def test_terms_that_come_in_different_rounds_wait_for_each_other(ranks_in_many_rounds: GlooRanks, op: str) -> None:
    """Ranks 0 and 1 alone have rows of the first tensor, which come before their terms of the second."""
    terms = random_terms(torch.bfloat16, 4)
    expected = in_order(terms, op)
    for rows, reduced, staged in ranks_in_many_rounds.run(gather_and_reduce, terms, op):
        torch.testing.assert_close(rows, torch.arange(62, dtype=torch.bfloat16).view(2, 31), rtol=0, atol=0)
        torch.testing.assert_close(reduced, expected, rtol=0, atol=0)
        assert staged > 0


def gather_and_reduce(rank: int, terms: list[torch.Tensor], op: str) -> tuple[torch.Tensor, torch.Tensor, int]:
    mesh = T.Mesh((4,))
    rows = T.distribute_tensor(torch.arange(62, dtype=torch.bfloat16).view(2, 31), mesh, [T.Shard(0)])
    term = T.DTensor.from_local(terms[rank].clone(), mesh, [T.Partial("sum" if op == "sum" else "avg")])
    with compiled() as plans:
        found = [each.to_local() for each in T.redistribute_many([(rows, [T.Replicate()]), (term, [T.Replicate()])])]
    return found[0], found[1], max(plan.staged_bytes for plan in plans)


@contextmanager
def compiled() -> Iterator[list[ArenaTransfer]]:
    """What is compiled for arenas within the context."""
    made, plans = vars(shared_memory)["arena_transfer"], list[ArenaTransfer]()

    def kept(*arguments: Any) -> ArenaTransfer:
        plans.append(made(*arguments))
        return plans[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_memory, "arena_transfer", kept)
        yield plans


def test_what_stays_is_read_before_anything_lands_on_it(ranks_in_many_rounds: GlooRanks) -> None:
    """Rank 0 gathers into memory of which the first quarter holds its own part, the last rows of the whole."""
    gathered, *_ = ranks_in_many_rounds.run(gather_over_the_own_part)
    torch.testing.assert_close(gathered, torch.arange(160.0).view(32, 5), rtol=0, atol=0)


def gather_over_the_own_part(rank: int) -> torch.Tensor:
    whole, own = torch.zeros(32, 5), torch.arange(160.0).view(4, 8, 5)[(rank - 1) % 4]
    local = whole[:8] if rank == 0 else torch.empty(8, 5)
    local.copy_(own)
    metadata = ShardMetadata([8 * ((rank - 1) % 4), 0], [8, 5], f"rank:{rank}/cpu")
    made = init_from_local_shards([Shard(local, metadata)], 32, 5)
    made.gather(0, whole if rank == 0 else None)
    return whole


def moved(rank: int, shape: tuple[int, int], source: str, target: str) -> tuple[torch.Tensor, str]:
    """This rank's result, and how many rounds its messages took."""
    mesh, meta = T.Mesh((4,)), T.TensorMeta.contiguous(shape)
    before, after = (T.DTensorSpec(mesh, T.parse_placements(text), meta) for text in (source, target))
    whole = torch.arange(shape[0] * shape[1], dtype=torch.float32).view(shape)
    assert before.coordinate is not None
    local = whole[tuple(slice(*bounds) for bounds in before.layout.boxes(before.coordinate)[0])].contiguous()
    communicator: Any = world.current().communicator(ALL)
    with compiled() as plans:
        found = T.redistribute(local, before, after)
    (plan,) = plans
    return found, f"{type(communicator).__name__}: {plan.native.num_rounds} rounds"


def test_long_messages_go_through_arenas_in_rounds(four_shared_memory_ranks: GlooRanks) -> None:
    assert four_shared_memory_ranks.run(in_new_world, 16, (400, 700)) == ["SharedMemoryCommunicator: 1 rounds"] * 4
    # 201 rows of 376 columns are a message of 302 kB, of which a slot of 0.5 MB holds 170 kB for each of three peers.
    assert four_shared_memory_ranks.run(in_new_world, 1, (801, 1501)) == ["SharedMemoryCommunicator: 2 rounds"] * 4


def in_new_world(rank: int, arena_mb: int, shape: tuple[int, int]) -> str:
    T.close()
    with set_to("TRITONDT_ARENA_MB", str(arena_mb)):
        found, ways = moved(rank, shape, "S0", "S1")
    columns = torch.arange(shape[0] * shape[1], dtype=torch.float32).view(shape).chunk(4, 1)
    torch.testing.assert_close(found, columns[rank], rtol=0, atol=0)
    T.close()
    return ways


@contextmanager
def set_to(name: str, value: str | None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(name, raising=False) if value is None else patch.setenv(name, value)
        yield


@pytest.mark.parametrize("num_ranks", [2, 4, 61, 100])
def test_planning_knows_how_long_slots_are(num_ranks: int) -> None:
    group: Any = vars(shared_memory)["ArenaGroup"]
    for arena_bytes in (4096, 3 * 4096, 1 << 20, 1 << 27, 123 << 20):
        assert slot_bytes(arena_bytes, num_ranks) == group.slot_bytes(arena_bytes, num_ranks)


def test_what_is_foretold_of_slots_is_so(four_shared_memory_ranks: GlooRanks) -> None:
    """With slots of 0.5 MB, in one round and in several."""
    for shape in [(400, 700), (801, 1501)]:
        for foretold, found in four_shared_memory_ranks.run(foretell, shape):
            assert foretold == found
            assert foretold[0] > 0


def foretell(rank: int, shape: tuple[int, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Bytes in slots, packed and staged: as explained, and as compiled."""
    T.close()
    with set_to("TRITONDT_ARENA_MB", "1"), compiled() as plans:
        moved(rank, shape, "S0", "S1")
        before, after = (Layout((4,), T.parse_placements(text), shape) for text in ("S0", "S1"))
        # Tables are agreed in a program's first world, whose arenas were longer.
        step = explain_layouts(before, after, 4, in_shared_memory(built_in(4)["cpu"], 1 << 20), (rank,)).steps[0]
    (plan,) = plans
    T.close()
    return (step.slot_bytes, step.packed_bytes, step.staged_bytes), (plan.sent_bytes, 0, plan.staged_bytes)


def test_all_holders_have_the_same_bits_again_and_again(four_shared_memory_ranks: GlooRanks) -> None:
    terms = random_terms(torch.bfloat16, 4)
    expected = in_order(terms, "avg")
    for local in four_shared_memory_ranks.run(reduce_often, terms):
        torch.testing.assert_close(local, expected, rtol=0, atol=0)


def test_small_sums_take_one_exchange_and_have_the_same_bits_on_all_ranks(four_shared_memory_ranks: GlooRanks) -> None:
    terms = random_terms(torch.float32, 4)
    expected = in_order(terms, "sum")
    for local, num_exchanges, explained in four_shared_memory_ranks.run(reduce_counted, terms):
        torch.testing.assert_close(local, expected, rtol=0, atol=0)
        assert num_exchanges == 1
        assert "every term goes to everybody in one step" in explained, explained


def reduce_counted(rank: int, terms: list[torch.Tensor]) -> tuple[torch.Tensor, int, str]:
    T.close()
    communicator: Any = world.current().communicator(ALL)
    before = communicator.sequence
    found = reduced_by(rank, (4,), "P", "R", terms[rank])
    num_exchanges = communicator.sequence - before
    meta = T.TensorMeta.contiguous(found.shape)
    specs = [T.DTensorSpec(T.Mesh((4,)), T.parse_placements(text), meta) for text in ("P", "R")]
    return found, num_exchanges, str(T.explain(*specs))


def reduce_often(rank: int, terms: list[torch.Tensor]) -> torch.Tensor:
    found = [reduced_by(rank, (4,), "P(avg)", "R", terms[rank]) for _ in range(20)]
    assert all(torch.equal(each, found[0]) for each in found)
    return found[0]


def test_many_exchanges_whose_ranks_dawdle(four_shared_memory_ranks: GlooRanks) -> None:
    """Of one sender and of all; a slot is packed again only when everybody has read it."""
    for text in four_shared_memory_ranks.run(exchange_often, 300):
        assert text == ""


def exchange_often(rank: int, count: int) -> str:
    mesh, meta = T.Mesh((4,)), T.TensorMeta.contiguous((4, 6))
    spec = {text: T.DTensorSpec(mesh, T.parse_placements(text), meta) for text in ("S0", "S1", "R")}
    generator = torch.Generator().manual_seed(rank)
    for number in range(count):
        whole = torch.arange(24, dtype=torch.float32).view(4, 6) + number
        if torch.rand((), generator=generator) < 0.05:
            torch.randn(200_000, generator=generator).sort()
        target = "R" if number % 3 else "S1"
        found = T.redistribute(whole[rank : rank + 1].clone(), spec["S0"], spec[target])
        expected = whole if target == "R" else whole.tensor_split([2, 4, 6], 1)[rank]
        if not torch.equal(found, expected):
            return f"exchange {number} to {target} gave {found} instead of {expected}"
    return ""


def test_ranks_that_disagree_find_out(four_shared_memory_ranks: GlooRanks) -> None:
    for kind, text in four_shared_memory_ranks.run(disagree):
        assert kind in ("MismatchError", "PeerError"), text
        assert "ranks disagree at exchange 1: rank" in text, text


def disagree(rank: int) -> tuple[str, str]:
    T.close()
    mesh, meta = T.Mesh((4,)), T.TensorMeta.contiguous((8, 8))
    before, *after = (T.DTensorSpec(mesh, T.parse_placements(text), meta) for text in ("S0", "S1", "R"))
    try:
        with pytest.raises(T.PeerError) as caught:
            T.redistribute(torch.ones(before.local_shape), before, after[rank == 2])
        return type(caught.value).__name__, str(caught.value)
    finally:
        T.abort()


@pytest.mark.parametrize("what", ["another transport", "another length"])
def test_where_one_rank_cannot_share_memory_all_use_sockets(four_shared_memory_ranks: GlooRanks, what: str) -> None:
    """Refusals of the system are in test_real_limits."""
    assert four_shared_memory_ranks.run(connect_but_for, what) == [("SocketCommunicator", [])] * 4


def connect_but_for(rank: int, what: str) -> tuple[str, list[str]]:
    """Connects anew, where rank 1 asks for something else; the communicator's class, and what was warned of."""
    T.close()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if rank == 1:
            plant(patch, what)
        communicator = world.current().communicator(ALL)
        communicator.barrier()
    T.close()
    return type(communicator).__name__, [str(each.message) for each in said if "share memory" in str(each.message)]


def test_ranks_of_several_hosts_need_not_hear_each_other(four_shared_memory_ranks: GlooRanks) -> None:
    """Where the launcher says that a host has fewer ranks, nobody asks; where the user names the transport, all do."""
    assert four_shared_memory_ranks.run(connect_with_store_watched, "2", None) == [("SocketCommunicator", 0)] * 4
    assert four_shared_memory_ranks.run(connect_with_store_watched, "4", None) == [("SharedMemoryCommunicator", 2)] * 4
    assert (
        four_shared_memory_ranks.run(connect_with_store_watched, "2", "shared-memory")
        == [("SharedMemoryCommunicator", 2)] * 4
    )


def connect_with_store_watched(rank: int, per_host: str, transport: str | None) -> tuple[str, int]:
    """The communicator's class, and how often the others' answers about arenas were read."""
    T.close()
    of_others, asked = Answers.of_others, []

    def counted(told: Answers, what: str, among: Any = None) -> dict[int, Any]:
        asked.append(what)
        return of_others(told, what, among)

    with pytest.MonkeyPatch.context() as patch, set_to("TRITONDT_TRANSPORT", transport):
        patch.setattr(Answers, "of_others", counted)
        patch.setenv("LOCAL_WORLD_SIZE", per_host)
        communicator = world.current().communicator(ALL)
        communicator.barrier()
        T.close()
    return type(communicator).__name__, sum(what in ("arena", "arena-taken") for what in asked)


def plant(patch: pytest.MonkeyPatch, what: str) -> None:
    name, value = {"another transport": ("TRANSPORT", "sockets"), "another length": ("ARENA_MB", "64")}[what]
    patch.setenv(f"TRITONDT_{name}", value)


def test_nothing_is_left_and_a_forked_child_maps_nothing(four_shared_memory_ranks: GlooRanks) -> None:
    for own, childs, left, descriptors in four_shared_memory_ranks.run(connect_fork_and_close):
        assert (own, childs, left, descriptors) == (4, 0, 0, 0)


def connect_fork_and_close(rank: int) -> tuple[int, int, int, int]:
    T.close()
    moved(rank, (8, 8), "S0", "S1")
    own = num_mapped(os.getpid())
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, bytes([num_mapped(os.getpid())]))
        os._exit(0)
    childs = os.read(reading, 1)[0]
    os.waitpid(child, 0)
    os.close(reading)
    os.close(writing)
    T.close()
    descriptors = sum("memfd:tritondt" in target for target in open_targets())
    return own, childs, num_mapped(os.getpid()), descriptors


def num_mapped(process: int) -> int:
    return Path(f"/proc/{process}/maps").read_text().count("memfd:tritondt")
