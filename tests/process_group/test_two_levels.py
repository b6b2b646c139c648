"""Collectives in stages between hosts, run by hand on plain tensors: results, and bytes that cross."""

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial, reduce

import pytest
import torch

from tritondt.process_group import collective as collectives
from tritondt.process_group import two_levels
from tritondt.process_group.collective import Collective, Reduction, Span, TermExchange
from tritondt.process_group.two_levels import Hosts, Stage, Stages, stages

SUM = Reduction("int32", "sum", 1, 4)
# Hosts of the ranks: equal ones, in turns, uneven ones, three, and hosts of one rank beside larger ones.
LAYOUTS = (
    (0, 0, 0, 1, 1, 1, 1, 1),
    (0, 1, 1, 2, 0, 2),
    (0, 0, 1, 1),
    (0, 1, 0, 1),
    (0, 0, 1, 1, 2, 2),
    (0, 1, 1, 2, 2, 2),
    (0, 0, 0, 0, 1),
    (2, 0, 1, 0, 2, 1, 0, 2),
)
NUM_ELEMENTS = 3_011


@pytest.fixture(autouse=True)
def few_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few bytes are stages enough, and no tensor here is for several threads, which wait for each other's cores."""
    monkeypatch.setattr(two_levels, "SHORT_BYTES", 4_000)


class Run:
    """All ranks' tensors, in the one list that stages name, and the bytes between hosts so far, by receiving host."""

    def __init__(self, of_rank: Sequence[int], found: Sequence[Stages], tensors: Sequence[list[torch.Tensor]]) -> None:
        self.of_rank = of_rank
        self.tensors = [
            [*own, torch.full((each.scratch_bytes // 4,), -1, dtype=torch.int32)]
            for own, each in zip(tensors, found, strict=True)
        ]
        self.received, self.sent = defaultdict[int, int](int), defaultdict[int, int](int)
        left = [list(each.stages) for each in found]
        while any(left):
            inside = [rank for rank, each in enumerate(left) if each and each[0].is_near]
            ready = inside or list(range(len(left)))
            if inside:
                host = of_rank[inside[0]]
                ready = [rank for rank, at in enumerate(of_rank) if at == host]
            assert all(left[rank] for rank in ready), "the same number of stages on all ranks that take part"
            assert all(left[rank][0].is_near == bool(inside) for rank in ready)
            self._run(ready, [left[rank].pop(0) for rank in ready])

    def bytes_at(self, rank: int, span: Span) -> torch.Tensor:
        tensor, start, num_bytes = span
        return self.tensors[rank][tensor].view(torch.uint8)[start : start + num_bytes]

    def _run(self, ranks: Sequence[int], at: Sequence[Stage]) -> None:
        """Runs one exchange: all messages leave before any arrives, one at most for a pair of ranks."""
        messages: dict[tuple[int, int], torch.Tensor] = {}
        for rank, (what, _) in zip(ranks, at, strict=True):
            for peer, span in what.sends:
                to = ranks[peer]
                if span[2] or isinstance(what, Collective):
                    assert (rank, to) not in messages
                    messages[rank, to] = self.bytes_at(rank, span).clone()
                if self.of_rank[rank] != self.of_rank[to]:
                    self.sent[self.of_rank[rank]] += span[2]
                    self.received[self.of_rank[to]] += span[2]
        for rank, (what, is_near) in zip(ranks, at, strict=True):
            if isinstance(what, TermExchange):
                self._reduce(rank, what, messages)
            elif what.reduction is not None:
                assert is_near
                terms = [messages.pop((peer, rank)).view(torch.int32) for peer in ranks]
                self.bytes_at(rank, what.result).view(torch.int32).copy_(added(terms))
            else:
                for peer, span in what.receives:
                    self.bytes_at(rank, span).copy_(messages.pop((ranks[peer], rank)))
        assert not messages, "every message is expected"

    def _reduce(self, rank: int, what: TermExchange, messages: dict[tuple[int, int], torch.Tensor]) -> None:
        if not what.source[2]:
            assert not what.arrivals
            return
        rows = torch.full((what.num_terms, what.source[2]), 77, dtype=torch.uint8)
        rows[what.own] = self.bytes_at(rank, what.source)
        filled = torch.zeros_like(rows)
        for peer, term, start, num_bytes in what.arrivals:
            rows[term, start : start + num_bytes] = messages.pop((peer, rank))
            filled[term, start : start + num_bytes] += 1
        filled[what.own] += 1
        assert bool((filled == 1).all()), "every byte of every term arrives once"
        self.bytes_at(rank, what.target).view(torch.int32).copy_(added(list(rows.view(torch.int32))))


def run(
    of_rank: Sequence[int], make: Callable[[int], Collective], tensors: Sequence[tuple[list[torch.Tensor], ...]]
) -> Run:
    """Runs a collective whose sources and targets are given by rank."""
    found = []
    for rank, (sources, targets) in enumerate(tensors):
        own = stages(make(rank), Hosts(of_rank, rank), len(sources), len(targets))
        assert own is not None
        found.append(own)
    return Run(of_rank, found, [[*sources, *targets] for sources, targets in tensors])


def added(terms: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of terms, by one thread."""
    return reduce(torch.add, terms)


def numbers(seed: int, count: int) -> torch.Tensor:
    return torch.randint(-99, 99, (count,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


def rest_of(whole: int, of_rank: Sequence[int], lengths: Sequence[int], host: int) -> int:
    """Bytes of the parts of ranks on other hosts."""
    return whole - sum(length for length, at in zip(lengths, of_rank, strict=True) if at == host)


@pytest.mark.in_core(16)
@pytest.mark.parametrize("is_list", [False, True])
@pytest.mark.parametrize("of_rank", LAYOUTS)
def test_all_gather(of_rank: tuple[int, ...], is_list: bool) -> None:
    size, generator = len(of_rank), random.Random(1)
    counts = [generator.choice((0, 2_000, 2_345)) if is_list else 901 for _ in of_rank]
    terms = [numbers(rank, count) for rank, count in enumerate(counts)]
    lengths = [4 * count for count in counts]
    whole = torch.cat(terms)
    empty = [[torch.zeros_like(each) for each in terms] if is_list else [torch.zeros_like(whole)] for _ in of_rank]

    def make(rank: int) -> Collective:
        if is_list:
            return collectives.all_gather(rank, size, lengths)
        return collectives.all_gather_into(rank, size, lengths[0])

    done = run(of_rank, make, [([terms[rank]], empty[rank]) for rank in range(size)])
    for targets in empty:
        assert torch.equal(torch.cat(targets), whole)
    for host in set(of_rank):
        assert done.received[host] == rest_of(whole.nbytes, of_rank, lengths, host)


def broadcast_from(size: int, root: int, rank: int) -> Collective:
    return collectives.broadcast(rank, size, 4 * NUM_ELEMENTS, root)


def reduce_to(size: int, root: int, rank: int) -> Collective:
    return collectives.reduce(rank, size, 4 * NUM_ELEMENTS, SUM, root)


@pytest.mark.in_core(8)
@pytest.mark.parametrize("of_rank", LAYOUTS)
def test_broadcast(of_rank: tuple[int, ...]) -> None:
    size = len(of_rank)
    for root in range(size):
        tensors = [numbers(rank, NUM_ELEMENTS) for rank in range(size)]
        expected = tensors[root].clone()
        done = run(
            of_rank,
            partial(broadcast_from, size, root),
            [([each], [each]) for each in tensors],
        )
        assert all(torch.equal(each, expected) for each in tensors)
        for host in set(of_rank):
            assert done.received[host] == (0 if host == of_rank[root] else expected.nbytes)


@pytest.mark.in_core(8)
@pytest.mark.parametrize("of_rank", LAYOUTS)
def test_all_reduce(of_rank: tuple[int, ...]) -> None:
    size, num_hosts = len(of_rank), len(set(of_rank))
    terms = [numbers(rank, NUM_ELEMENTS) for rank in range(size)]
    expected = added(terms)
    done = run(
        of_rank,
        lambda rank: collectives.all_reduce(rank, size, 4 * NUM_ELEMENTS, SUM),
        [([each], [each]) for each in terms],
    )
    assert all(torch.equal(each, expected) for each in terms)
    for host in set(of_rank):
        assert done.sent[host] <= 2 * (num_hosts - 1) / num_hosts * expected.nbytes + 4 * num_hosts


@pytest.mark.in_core(8)
@pytest.mark.parametrize("of_rank", LAYOUTS)
def test_reduce(of_rank: tuple[int, ...]) -> None:
    size = len(of_rank)
    for root in range(size):
        terms = [numbers(rank, NUM_ELEMENTS) for rank in range(size)]
        before, expected = [each.clone() for each in terms], added(terms)
        done = run(
            of_rank,
            partial(reduce_to, size, root),
            [([each], [each if rank == root else torch.empty(0)]) for rank, each in enumerate(terms)],
        )
        assert torch.equal(terms[root], expected)
        assert all(
            torch.equal(each, old) for rank, (each, old) in enumerate(zip(terms, before, strict=True)) if rank != root
        )
        for host in set(of_rank):
            assert done.sent[host] == (0 if host == of_rank[root] else expected.nbytes)


@pytest.mark.in_core(16)
@pytest.mark.parametrize("is_list", [False, True])
@pytest.mark.parametrize("of_rank", LAYOUTS)
def test_reduce_scatter(of_rank: tuple[int, ...], is_list: bool) -> None:
    size, generator = len(of_rank), random.Random(2)
    counts = [generator.choice((0, 2_000, 2_345)) if is_list else 901 for _ in of_rank]
    terms = [numbers(rank, sum(counts)) for rank in range(size)]
    expected = added(terms).split(counts)
    results = [torch.zeros(count, dtype=torch.int32) for count in counts]

    def make(rank: int) -> Collective:
        if not is_list:
            return collectives.reduce_scatter_even(rank, size, 4 * counts[0], SUM)
        return collectives.reduce_scatter(
            rank, size, [(place, 0, 4 * count) for place, count in enumerate(counts)], SUM
        )

    sources = [list(term.split(counts)) if is_list else [term] for term in terms]
    sources = [[each.clone() for each in own] for own in sources]
    done = run(of_rank, make, [(sources[rank], [results[rank]]) for rank in range(size)])
    for found, one in zip(results, expected, strict=True):
        assert torch.equal(found, one)
    for host in set(of_rank):
        assert done.sent[host] == rest_of(4 * sum(counts), of_rank, [4 * count for count in counts], host)


def each_to_each(size: int, lengths: Sequence[Sequence[int]], rank: int) -> Collective:
    """Uneven parts of one tensor, by rank."""
    sent, received = lengths[rank], [each[rank] for each in lengths]
    leaving, coming = (
        [(peer, (0, 4 * sum(counts[:peer]), 4 * counts[peer])) for peer in range(size)] for counts in (sent, received)
    )
    return collectives.all_to_all(rank, size, leaving, coming)


@pytest.mark.in_core(8)
@pytest.mark.parametrize("of_rank", LAYOUTS)
def test_all_to_all(of_rank: tuple[int, ...]) -> None:
    size, generator = len(of_rank), random.Random(3)
    lengths = [[generator.choice((0, 1, 700)) for _ in of_rank] for _ in of_rank]
    terms = [numbers(rank, sum(own)) for rank, own in enumerate(lengths)]
    results = [torch.zeros(sum(own[rank] for own in lengths), dtype=torch.int32) for rank in range(size)]
    done = run(
        of_rank, partial(each_to_each, size, lengths), [([terms[rank]], [results[rank]]) for rank in range(size)]
    )
    parts = [term.split(own) for term, own in zip(terms, lengths, strict=True)]
    for rank, found in enumerate(results):
        assert torch.equal(found, torch.cat([own[rank] for own in parts]))
    for host in set(of_rank):
        crossing = [(to, own) for to in range(size) for own in range(size) if of_rank[to] == host != of_rank[own]]
        assert done.received[host] == 4 * sum(lengths[own][to] for to, own in crossing)


@pytest.mark.in_core(8)
@pytest.mark.parametrize("of_rank", LAYOUTS)
def test_gather_and_scatter(of_rank: tuple[int, ...]) -> None:
    size = len(of_rank)
    for root in range(size):
        lengths = [4 * (rank % 3) * 300 for rank in range(size)]
        whole = [numbers(rank, length // 4) for rank, length in enumerate(lengths)]
        lists: list[list[torch.Tensor]] = [[] for _ in range(size)]
        lists[root] = [torch.zeros_like(each) for each in whole]

        def gathered(rank: int, root: int = root, lengths: list[int] = lengths) -> Collective:
            return collectives.gather(rank, size, lengths[rank], lengths if rank == root else (), root)

        def scattered(rank: int, root: int = root, lengths: list[int] = lengths) -> Collective:
            return collectives.scatter(rank, size, lengths[rank], lengths if rank == root else (), root)

        run(of_rank, gathered, [([whole[rank]], lists[rank]) for rank in range(size)])
        assert all(torch.equal(*pair) for pair in zip(lists[root], whole, strict=True))
        back = [torch.zeros_like(each) for each in whole]
        run(of_rank, scattered, [(lists[rank], [back[rank]]) for rank in range(size)])
        assert all(torch.equal(*pair) for pair in zip(back, whole, strict=True))


@pytest.mark.in_core(8)
@pytest.mark.parametrize("of_rank", LAYOUTS)
def test_few_bytes_for_all_and_a_barrier(of_rank: tuple[int, ...]) -> None:
    size = len(of_rank)
    terms = [numbers(rank, 3) for rank in range(size)]
    results = [torch.zeros(3 * size, dtype=torch.int32) for _ in range(size)]
    run(
        of_rank,
        lambda rank: collectives.all_gather_into(rank, size, 12),
        [([terms[rank]], [results[rank]]) for rank in range(size)],
    )
    assert all(torch.equal(found, torch.cat(terms)) for found in results)
    run(of_rank, lambda rank: collectives.barrier(rank, size), [([], []) for _ in range(size)])


def test_one_exchange_where_stages_save_nothing() -> None:
    def found(of_rank: tuple[int, ...], num_bytes: int) -> Stages | None:
        return stages(collectives.all_reduce(0, len(of_rank), num_bytes, SUM), Hosts(of_rank, 0), 1, 1)

    assert found((0, 0, 1, 1), 1 << 20) is not None
    assert found((0, 0, 0, 0), 1 << 20) is None
    assert found((0, 1, 2, 3), 1 << 20) is None
    assert found((0, 0, 1, 1), 1200) is None


@pytest.mark.parametrize("counts", [(2, 64, 64), (2, 120), (2, 100), (1, 3, 130)], ids=str)
def test_all_ranks_find_alike_whether_lists_are_too_long_for_stages(counts: tuple[int, ...]) -> None:
    of_rank = [host for host, count in enumerate(counts) for _ in range(count)]
    size, ranks = len(of_rank), [sum(counts[:host]) for host in range(len(counts))]
    calls: list[tuple[Callable[[int], Collective], int, int]] = [
        (lambda rank: collectives.all_gather(rank, size, [4_000] * size), 1, size),
        (lambda rank: collectives.reduce_scatter(rank, size, [(to, 0, 4_000) for to in range(size)], SUM), size, 1),
    ]
    for make, num_sources, num_targets in calls:
        found = [stages(make(rank), Hosts(of_rank, rank), num_sources, num_targets) for rank in ranks]
        assert len({each is None for each in found}) == 1
        assert (found[0] is None) == (counts in ((2, 64, 64), (2, 120)))
        assert all(each is None or len(each.stages) <= two_levels.MOST_STAGES for each in found)
