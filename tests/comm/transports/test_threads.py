"""Ranks as threads: one at a time, the same every time, and told why where nobody can go on."""

import threading

import pytest
import torch

import tritondt as T
from tritondt import identity
from tritondt.comm import world
from tritondt.comm.communicator import tag_of
from tritondt.comm.transports.threads import run_ranks


def move(size: int, rows: int) -> torch.Tensor:
    mesh, meta = T.Mesh((size,)), T.TensorMeta.contiguous((rows,))
    source, target = (T.DTensorSpec(mesh, T.parse_placements(text), meta) for text in ("S0", "R"))
    return T.redistribute(torch.zeros(source.local_shape), source, target)


def test_results_come_in_rank_order() -> None:
    assert run_ranks(5, lambda rank: rank * rank) == [0, 1, 4, 9, 16]


def test_each_rank_is_a_thread_with_an_identity_of_its_own() -> None:
    found = run_ranks(3, lambda rank: (threading.get_ident(), identity.current()))
    assert len({thread for thread, _ in found}) == 3
    assert [(who.rank, who.size) for _, who in found] == [(0, 3), (1, 3), (2, 3)]
    assert len({who.generation for _, who in found}) == 1
    with pytest.raises(T.WorldError):
        identity.current()


def test_backward_passes_run_in_the_ranks_own_thread() -> None:
    """Where tensors are on a GPU, too: autograd's threads for devices are off, and on again behind the ranks."""
    assert run_ranks(2, lambda _: torch._C._is_multithreading_enabled()) == [False, False]
    assert torch._C._is_multithreading_enabled()


def test_ranks_take_turns() -> None:
    """A rank runs until it waits for a message: with one that never waits, the others come after it."""
    running, most = [0], [0]

    def body(rank: int) -> None:
        running[0] += 1
        most[0] = max(most[0], running[0])
        for _ in range(1000):
            assert running[0] == 1
        running[0] -= 1

    run_ranks(4, body)
    assert most == [1]


def test_a_run_is_the_same_every_time() -> None:
    def once() -> list[int]:
        order: list[int] = []

        def body(rank: int) -> None:
            for rows in (5, 3):
                move(4, rows)
                order.append(rank)

        run_ranks(4, body)
        return order

    assert once() == once()


def test_a_barrier_waits_for_all() -> None:
    reached: list[int] = []

    def body(rank: int) -> int:
        communicator = world.current().communicator((0, 1, 2))
        reached.append(rank)
        communicator.barrier()
        return len(reached)

    assert run_ranks(3, body) == [3, 3, 3]


def test_a_barrier_that_one_rank_skips() -> None:
    def body(rank: int) -> None:
        if rank != 1:
            world.current().communicator((0, 1, 2)).barrier()

    with pytest.raises(
        T.PeerError, match=r"rank 2 waits at a barrier that not all ranks reach|rank 0 waits at a barrier"
    ):
        run_ranks(3, body)


@pytest.mark.parametrize(("end", "how"), [("close", "closed"), ("abort", "aborted")])
def test_a_communicator_that_has_ended_is_refused(end: str, how: str) -> None:
    def body(rank: int) -> None:
        move(2, 4)
        getattr(world.current().communicator((0, 1)), end)()
        with pytest.raises(T.WorldError, match=rf"step 1 of 1 .* that ended \(the communicator was {how}\); make a"):
            move(2, 6)

    run_ranks(2, body)


def test_the_first_error_of_its_own_is_raised() -> None:
    def body(rank: int) -> None:
        if rank == 1:
            raise LookupError("mine")
        move(3, 3)

    with pytest.raises(LookupError, match="mine"):
        run_ranks(3, body)


def test_traffic_counts_bytes_and_messages() -> None:
    def body(rank: int) -> tuple[int, int, int, int]:
        move(4, 10)
        found = world.current().communicator(range(4)).traffic
        return found.sent_bytes, found.received_bytes, found.num_sent, found.num_received

    # 10 rows are cut 3, 3, 3, 1: whoever holds 3 sends them to 3 others and receives 7.
    assert run_ranks(4, body) == [(36, 28, 3, 3)] * 3 + [(12, 36, 3, 3)]


def test_empty_pieces_send_no_message() -> None:
    def body(rank: int) -> tuple[int, int]:
        move(4, 2)
        found = world.current().communicator(range(4)).traffic
        return found.num_sent, found.num_received

    assert run_ranks(4, body) == [(3, 1), (3, 1), (0, 2), (0, 2)]


def test_tags_of_one_exchange_and_of_others_differ() -> None:
    fingerprints = [12345678901234567, 98765432109876543, 1]
    tags = [tag_of(fingerprint, sequence) for sequence in range(1000) for fingerprint in fingerprints]
    assert len(set(tags)) == 3000
    assert all(0 <= tag < 1 << 31 for tag in tags)
