"""Tensors that some ranks of a mesh send to all, over hosts: the fewest bytes between these, values, and failures."""

import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from math import prod

import pytest
import torch

import tritondt as T
from tests.harness.oracle import arithmetic
from tests.harness.oracle.cases import DTYPES
from tests.harness.oracle.random_layouts import MESH_SHAPES, random_placements, random_shape
from tests.harness.pairs_on_hosts import digest
from tritondt.comm.communicator import Transfer
from tritondt.comm.transports.ordered import OrderedCommunicator
from tritondt.comm.transports.threads import ThreadCommunicator, run_ranks
from tritondt.planning.between_hosts import MeshRanks
from tritondt.planning.planner import least_between_hosts
from tritondt.redistribution.agreement import agreed_local
from tritondt.redistribution.send import distribute_from
from tritondt.sharding.coordinates import coordinate_at

WORLD_SIZE = 8


def count_messages(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, int]]:
    """Bytes that each rank receives from each other one in sends, counted from the exchanges that run."""
    found, lock = Counter[tuple[int, int]](), threading.Lock()

    def exchange(
        self: ThreadCommunicator, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], transfer: Transfer
    ) -> None:
        OrderedCommunicator.exchange(self, sources, targets, transfer)
        if transfer.description.startswith("sending "):
            own = T.Mesh((WORLD_SIZE,)).identity.rank
            with lock:
                for message in transfer.exchange.receives:
                    found[self.ranks[message.peer], own] += message.numel * transfer.dtypes[0].itemsize

    monkeypatch.setattr(ThreadCommunicator, "exchange", exchange)
    return found


def between(messages: Counter[tuple[int, int]], hosts: Sequence[int]) -> int:
    return sum(count for (sender, receiver), count in messages.items() if hosts[sender] != hosts[receiver])


def on_hosts(
    monkeypatch: pytest.MonkeyPatch, body: Callable[[int], object], hosts: Sequence[int]
) -> tuple[list[object], int]:
    """Results of all ranks, the same as of ranks of one host, and bytes between the hosts."""
    with monkeypatch.context() as patched:
        messages = count_messages(patched)
        found = run_ranks(WORLD_SIZE, body, hosts=hosts)
    assert found == run_ranks(WORLD_SIZE, body)
    return found, between(messages, hosts)


class RandomSend:
    """A layout of a tensor on some of the world's ranks, in any order, and the hosts of all of them."""

    def __init__(self, seed: int) -> None:
        chosen = random.Random(seed)
        self.mesh_shape = chosen.choice(MESH_SHAPES[chosen.choice((2, 3, 4, 5, 6, 7, 8, 8))])
        self.ranks = tuple(chosen.sample(range(WORLD_SIZE), prod(self.mesh_shape)))
        self.shape = random_shape(chosen)
        self.dtype: torch.dtype = getattr(torch, chosen.choice(DTYPES))
        self.placements, self.order = random_placements(chosen, self.mesh_shape, self.shape, self.dtype)
        if chosen.random() < 0.5:  # else few tensors cross more often than once
            self.placements = (T.Replicate(), *self.placements[1:])
        self.source = chosen.randrange(min(self.mesh_shape))
        self.hosts = tuple(chosen.randrange(3) for _ in range(WORLD_SIZE))
        self.layout = T.Layout(self.mesh_shape, self.placements, self.shape, self.order)

    def spec(self) -> T.DTensorSpec:
        mesh = T.Mesh(self.mesh_shape, ranks=self.ranks)
        return T.DTensorSpec(mesh, self.placements, T.TensorMeta.contiguous(self.shape, self.dtype), self.order)

    def values_of(self, rank: int, shape: Sequence[int]) -> torch.Tensor:
        """Other values on every rank."""
        return arithmetic.whole_tensor(shape, self.dtype, torch.Generator().manual_seed(rank))

    def least_from_one(self) -> int:
        """The fewest bytes between hosts that a whole tensor of one rank takes."""
        position = self.layout.position((self.source,) * len(self.mesh_shape))
        ranks = MeshRanks((self.ranks[position],), self.ranks)
        whole = T.Layout((1,), (T.Replicate(),), self.shape)
        least = least_between_hosts(whole, self.layout, tuple(self.hosts[rank] for rank in ranks.either), ranks)
        assert least is not None, "few items"
        return least * self.dtype.itemsize

    def least_from_first_replica(self) -> int:
        """The elements of all terms that ranks of a host want and none of its ranks at index 0 of replicas holds."""
        wanted: dict[int, set[object]] = {}
        held: dict[int, set[object]] = {}
        for position, rank in enumerate(self.ranks):
            coordinate = coordinate_at(position, self.mesh_shape)
            term = tuple(coordinate[axis] for axis in self.layout.axes_where(T.Partial))
            mask = arithmetic.held_mask(self.mesh_shape, self.placements, self.shape, coordinate, self.order)
            elements = {(term, place) for place in mask.flatten().nonzero().flatten().tolist()}
            wanted.setdefault(self.hosts[rank], set()).update(elements)
            if not any(coordinate[axis] for axis in self.layout.axes_where(T.Replicate)):
                held.setdefault(self.hosts[rank], set()).update(elements)
        return sum(len(wanted[host] - held.get(host, set())) for host in wanted) * self.dtype.itemsize


SEEDS = [
    *range(8),
    *(pytest.param(seed, marks=pytest.mark.extended) for seed in range(8, 30)),
    *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(30, 400)),
]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_tensor_of_one_rank(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    given = RandomSend(seed)

    def body(rank: int) -> str:
        spec, whole = given.spec(), given.values_of(rank, given.shape)
        made = T.distribute_tensor(
            whole,
            spec.mesh,
            spec.placements,
            src_data_rank=given.source,
            order=None if spec.order is None else given.order,
        )
        return digest(made.to_local())

    _, crossing = on_hosts(monkeypatch, body, given.hosts)
    assert crossing == given.least_from_one(), f"{crossing} bytes of {given.layout} from {given.source}"


@pytest.mark.parametrize("seed", SEEDS)
def test_random_replicas_that_are_made_alike(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    given = RandomSend(seed)

    def body(rank: int) -> str:
        spec = given.spec()
        local = given.values_of(rank, spec.local_shape if spec.coordinate is not None else (0,))
        return digest(agreed_local(local, spec))

    _, crossing = on_hosts(monkeypatch, body, given.hosts)
    assert crossing == given.least_from_first_replica(), f"{crossing} bytes of {given.layout}"


FULL = torch.arange(60.0).reshape(12, 5)
HOSTS = (0, 0, 0, 0, 0, 1, 1, 1)  # 5 ranks and 3


@pytest.mark.parametrize("text", ["R, R", "R, S0", "S1, R", "P, R", "P(max), R"])
def test_what_the_other_host_wants_crosses_once(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Whole tensors and parts that ranks share; the sender's own values are there, and no view of them."""

    def body(rank: int) -> list[object]:
        whole = FULL + 100 * rank
        made = T.distribute_tensor(whole, T.Mesh((2, 4)), T.parse_placements(text), src_data_rank=1)
        whole.fill_(-1)
        assert torch.equal(made.full_tensor(), FULL + 500)  # the rank at (1, 1)
        return made.to_local().tolist()

    _, crossing = on_hosts(monkeypatch, body, HOSTS)
    # Rank 5 is of the smaller host: to the five of the larger one goes what they want together.
    assert crossing == FULL.nbytes


def freed(shape: tuple[int, ...]) -> torch.Tensor:
    local = torch.ones(shape)
    local.untyped_storage().resize_(0)
    return local


@pytest.mark.parametrize("at_fault", [0, 2])
def test_a_rank_that_cannot_send_is_told_of_and_the_ranks_go_on(at_fault: int) -> None:
    """Ranks that have a message of it in neither exchange, too."""

    def body(rank: int) -> str:
        mesh, meta = T.Mesh((2, 4)), T.TensorMeta.contiguous((12, 5))
        rows = T.Layout((4,), (T.Shard(0),), (12, 5))
        target = T.DTensorSpec(mesh, T.parse_placements("R, S0"), meta)
        text = ""
        for is_wrong in (True, True, False):
            local = freed((3, 5)) if is_wrong and rank == at_fault else torch.full((3, 5), float(rank))
            try:
                found = distribute_from(local, rows, (0, 1, 2, 3), target)
            except (T.PeerError, T.LocalTensorError) as error:
                text = f"{type(error).__name__} {error}"
            else:
                assert found.unique().tolist() == [rank % 4]
            made = T.distribute_tensor(FULL + rank, mesh, [T.Replicate(), T.Replicate()])
            assert torch.equal(made.to_local(), FULL)
        return text

    for hosts in (HOSTS, (0, 1, 0, 1, 0, 1, 0, 1), (0, 0, 0, 0, 1, 1, 1, 1), (0,) * 8):
        texts = run_ranks(WORLD_SIZE, body, hosts=hosts)
        told = f"with memory on rank {at_fault}; found one of (3, 5)"
        assert [rank for rank, text in enumerate(texts) if text.startswith("LocalTensorError")] == [at_fault], texts
        assert told in texts[at_fault]
        assert told in texts[4 + at_fault]


def test_arguments_that_one_rank_alone_has_are_refused_on_all_and_the_ranks_go_on() -> None:
    def body(rank: int) -> None:
        mesh = T.Mesh((WORLD_SIZE,))
        with pytest.raises(T.MismatchError, match=r"but with \(11, 5\) float32 as \(R\) on rank 6"):
            T.distribute_tensor(FULL[1:] if rank == 6 else FULL, mesh)
        with pytest.raises((T.PeerError, T.TritondtError), match="on rank 3; found one of"):
            T.distribute_tensor(freed((12, 5)) if rank == 3 else FULL, mesh, src_data_rank=3)
        found = T.distribute_tensor(FULL + rank, mesh, src_data_rank=3).to_local()
        assert torch.equal(found, FULL + 3)

    run_ranks(WORLD_SIZE, body, hosts=HOSTS)


def test_other_sources_on_other_ranks_are_an_error() -> None:
    """Of one host or of two, and where the one plan has two exchanges and the other one."""
    told: dict[int, str] = {}

    def body(rank: int, sources: Sequence[int]) -> None:
        target = T.DTensorSpec(T.Mesh((5,), ranks=(0, 1, 2, 3, 4)), [T.Replicate()], T.TensorMeta.contiguous((12, 5)))
        whole = T.Layout((1,), (T.Replicate(),), (12, 5))
        try:
            distribute_from(FULL, whole, (sources[rank],), target)
            T.distribute_tensor(FULL, target.mesh).full_tensor()
        except T.PeerError as error:
            told[rank] = str(error)
            raise

    for hosts, sources in (
        ((0, 0, 0, 1, 1), (0, 1, 0, 1, 1)),
        ((0, 0, 1, 1, 1), (0, 2, 2, 0, 2)),
        ((0, 0, 0, 0, 1), (0, 4, 0, 4, 4)),
    ):
        told.clear()
        with pytest.raises(T.MismatchError, match="ranks disagree at exchange 1: "):
            run_ranks(5, partial(body, sources=sources), hosts=hosts)
        assert len(told) == 5, told
        assert all("ranks disagree at exchange 1: " in text for text in told.values()), told
