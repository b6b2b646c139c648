"""Transfers through arenas whose messages take many rounds: exact results, chunks that hold, terms that wait."""

import mmap
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import NamedTuple

import pytest
import torch

from tritondt._C import Arena, ArenaGroup, SocketGroup
from tritondt.comm.communicator import Reduction, Transfer
from tritondt.comm.packing.arena_transfer import ArenaTransfer, arena_transfer
from tritondt.planning.exchange import Exchange, Message, Part
from tritondt.planning.storage import Block
from tritondt.sharding import intervals as regions
from tritondt.sharding.intervals import Region

SIDE, NUM_RANKS = 20, 3
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


class Tensor(NamedTuple):
    """Parts that ranks 1 and 2 send: regions of their own to both others, or terms of one region to rank 0."""

    dtype: torch.dtype
    sent: tuple[Region, Region]
    is_reduced: bool
    has_own: bool


def random_tensor(rng: random.Random, dtype: torch.dtype) -> Tensor:
    """A tensor of up to 3 dims behind a first one, of which the ranks' regions hold different indices."""
    first = sorted(rng.sample(range(SIDE), 4))
    rest = [random_intervals(rng) for _ in range(rng.randrange(3))]
    sent = tuple((regions.merge([(first[at], first[at + 1])]), *rest) for at in (0, 2))
    is_reduced = rng.random() < 0.5
    return Tensor(dtype, (sent[0], sent[0] if is_reduced else sent[1]), is_reduced, rng.random() < 0.5)


def random_intervals(rng: random.Random) -> regions.Intervals:
    bounds = sorted(rng.sample(range(SIDE), 2 * rng.randint(1, 3)))
    return regions.merge(zip(bounds[::2], bounds[1::2], strict=True))


def transfer_of(tensors: Sequence[Tensor], rank: int) -> Transfer:
    def parts(sender: int, receiver: int) -> tuple[Part, ...]:
        return tuple(
            Part(each.sent[sender - 1], sender - 1 + each.has_own if each.is_reduced else 0, number)
            for number, each in enumerate(tensors)
            if sender and (receiver == 0 if each.is_reduced else (sender + number) % 3 != 1)
        )

    own = [Part(each.sent[0], 0, number) for number, each in enumerate(tensors) if each.is_reduced and each.has_own]
    others = [other for other in range(NUM_RANKS) if other != rank]
    sends = [Message(other, parts(rank, other)) for other in others]
    receives = [Message(other, parts(other, rank)) for other in others]
    arrived = {part.tensor for found in receives for part in found.parts}
    stored = tuple(whole_block(each) for each in tensors)
    return Transfer(
        Exchange(
            tuple(found for found in sends if found.parts),
            tuple(found for found in receives if found.parts),
            tuple(part for part in own if rank == 0 and part.tensor in arrived),
            tuple(
                each.has_own + sum(part.tensor == number for found in receives for part in found.parts)
                for number, each in enumerate(tensors)
            ),
        ),
        stored,
        stored,
        tuple(each.dtype for each in tensors),
        tuple(Reduction("sum", 1) if each.is_reduced else None for each in tensors),
        1,
        "an exchange",
    )


def whole_block(tensor: Tensor) -> tuple[Block, ...]:
    """All of a tensor, whose dims lie in memory the other way round."""
    num_dims = len(tensor.sent[0])
    strides = tuple(SIDE**dim for dim in range(num_dims))
    return (Block((((0, SIDE),),) * num_dims, (SIDE,) * num_dims, 0, strides),)


def run(group: ArenaGroup, plan: ArenaTransfer, sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    staging = torch.empty(plan.staged_bytes + 64, dtype=torch.uint8)
    before, after = ([tensor.data_ptr() for tensor in tensors] for tensors in (sources, targets))
    outcome, _ = group.run(plan.native, before, after, 1, 1, 1, staging.data_ptr())
    while outcome == "pending":
        outcome, _ = group.finish()
    assert outcome == "done"


def expected(tensors: Sequence[Tensor], sources: list[list[torch.Tensor]], rank: int) -> list[torch.Tensor]:
    found = [torch.zeros_like(source) for source in sources[rank]]
    transfer = transfer_of(tensors, rank)
    terms: dict[int, list[tuple[int, Part]]] = {}
    for message in transfer.exchange.receives:
        for part in message.parts:
            terms.setdefault(part.tensor, []).append((message.peer, part))
    for part in transfer.exchange.keeps:
        terms[part.tensor].insert(0, (rank, part))
    for number, each in terms.items():
        for sender, part in each:
            mask = torch.zeros(found[number].shape, dtype=torch.bool)
            at = [torch.tensor([index for bounds in dim for index in range(*bounds)]) for dim in part.region]
            mask[torch.meshgrid(*at, indexing="ij")] = True
            found[number][mask] += sources[sender][number][mask]
    return found


def random_values(rng: random.Random, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Integers whose sums are exact, in memory that `whole_block` describes."""
    values = torch.tensor(rng.choices(range(60), k=prod(shape)))
    return values.to(dtype).view(shape).permute(tuple(reversed(range(len(shape)))))


def staged_bytes(seed: int) -> int:
    """Bytes that waited on rank 0 in an exchange that is run, and whose results and rounds are checked."""
    rng = random.Random(seed)
    tensors = [random_tensor(rng, dtype) for dtype in DTYPES]
    chunk_bytes = rng.choice([16, 48, 256, 4096])
    arenas = [Arena(4 * 4096 + 2 * 4096 * NUM_RANKS) for _ in range(NUM_RANKS)]
    sockets = [-1] * NUM_RANKS
    groups = [ArenaGroup(rank, arenas, SocketGroup(sockets), sockets, 0) for rank in range(NUM_RANKS)]
    for group in groups:
        group.set_timeout(60)
    shapes = [(SIDE,) * len(each.sent[0]) for each in tensors]
    sources = [
        [random_values(rng, each.dtype, shape) for each, shape in zip(tensors, shapes, strict=True)]
        for _ in range(NUM_RANKS)
    ]
    targets = [[torch.zeros_like(source) for source in of_rank] for of_rank in sources]
    transfers = [transfer_of(tensors, rank) for rank in range(NUM_RANKS)]
    plans = [arena_transfer(transfer, NUM_RANKS, chunk_bytes, 2) for transfer in transfers]
    with ThreadPoolExecutor(NUM_RANKS) as threads:
        list(threads.map(run, groups, plans, sources, targets))
    for rank, found in enumerate(targets):
        for part, wanted in zip(found, expected(tensors, sources, rank), strict=True):
            torch.testing.assert_close(part, wanted, rtol=0, atol=0)
        messages = [*transfers[rank].exchange.sends, *transfers[rank].exchange.receives]
        sizes = [sum(part.numel * DTYPES[part.tensor].itemsize for part in message.parts) for message in messages]
        fewest = max((-(-size // chunk_bytes) for size in sizes), default=0)
        assert fewest <= plans[rank].native.num_rounds <= 4 * fewest + len(DTYPES)
    return plans[0].staged_bytes


@pytest.mark.parametrize("first_seed", [0, pytest.param(100, marks=pytest.mark.extended)])
def test_messages_of_regions_and_terms_arrive_in_rounds(first_seed: int) -> None:
    """Ranks 1 and 2 send different tensors before a term, which waits in one of them for the other's."""
    staged = [staged_bytes(seed) for seed in range(first_seed, first_seed + 40)]
    assert any(staged)
    assert not all(staged)


def test_what_several_ranks_receive_is_packed_once() -> None:
    """Three messages of 64 bytes fit a slot of 128 with what is equal in them, and would not side by side."""
    region = (((0, 8),),)
    block = (Block(region, (8,), 0, (1,)),)
    parts = [Part(region, 0, 0), Part(region, 0, 0), Part((((4, 8),),), 0, 0)]
    sends = tuple(Message(peer, (part,)) for peer, part in zip((1, 2, 3), parts, strict=True))
    transfer = Transfer(Exchange(sends, (), ()), (block,), (block,), (torch.float64,), (None,), 1, "an exchange")
    plan = arena_transfer(transfer, 4, 64, 2)
    arenas = [Arena(3 * 4096) for _ in range(4)]
    group = ArenaGroup(0, arenas, SocketGroup([-1] * 4), [-1] * 4, 0)
    source = torch.arange(8.0, dtype=torch.float64)
    assert group.run(plan.native, [source.data_ptr()], [source.data_ptr()], 1, 1, 1, 0)[0] == "done"
    packed = memory_of(arenas[0])
    first = bytes(source.numpy())
    assert packed.count(first) == 1
    assert first + first[32:] in packed


def memory_of(arena: Arena) -> bytes:
    with mmap.mmap(arena.descriptor, arena.num_bytes) as found:
        return found[:]
