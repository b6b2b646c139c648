"""Asynchronous redistribution on rank threads: results, the order of waits, guards, and what is refused."""

import copy
import gc
import pickle
import random
import threading
import weakref
from typing import Any

import pytest
import torch

import tritondt as T
from tests.ops.sharded import distribute
from tests.redistribution.moves import FULL, equal, to
from tritondt.comm import read_guard, world
from tritondt.comm.transports.threads import run_ranks
from tritondt.debug import CommDebugMode

LAYOUTS = ["S0", "S1", "R", "P"]


@pytest.mark.parametrize("after", ["S0", "S1", "R", "P"])
@pytest.mark.parametrize("before", LAYOUTS)
def test_every_pair_gives_what_the_synchronous_call_gives(before, after):
    def body(rank):
        x = distribute(FULL, T.Mesh((3,)), before)
        moved = to(x, after, async_op=True)
        assert moved.shape == FULL.shape
        expected = to(x, after)
        assert moved.placements == expected.placements
        torch.testing.assert_close(moved.to_local(), expected.to_local(), rtol=0, atol=0)
        assert moved.work is None
        assert type(moved) is T.DTensor

    run_ranks(3, body)


@pytest.mark.parametrize("text", ["R,S1", "S1,S0", "P,R", "S0,P"])
def test_plans_of_several_steps(text):
    def body(rank):
        x = distribute(FULL, T.Mesh((2, 2)), "P,S0")
        moved = to(x, text, async_op=True)
        equal(moved, FULL)

    run_ranks(4, body)


def test_a_result_is_under_way_until_it_is_used():
    def body(rank):
        x = distribute(FULL, T.Mesh((2,)), "S0")
        moved: Any = to(x, "S1", async_op=True)
        work: Any = moved.work
        assert isinstance(moved, T.DTensor)
        assert not work.is_completed()  # rank threads take turns, and nobody has waited
        assert work.exception() is None
        assert repr(work) == "Work((S0) -> (S1) of (7, 11), under way)"
        total = moved + 1
        assert moved.work is None
        equal(total, FULL + 1)
        assert moved.wait() is moved

    run_ranks(2, body)


USES = {
    "an operator": lambda x: x + 0,
    "a list operator": lambda x: torch._foreach_add([x, x], 0)[1],
    "to_local": lambda x: T.DTensor.from_local(x.to_local(), x.device_mesh, x.placements, shape=x.shape),
    "an operator with a keyword": lambda x: torch.add(x, x, alpha=0),
    "redistribute": lambda x: to(x, "R"),
    "redistribute again": lambda x: to(to(x, "S0", async_op=True), "R", async_op=True),
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "clone": lambda x: x.clone(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "parameter": lambda x: torch.nn.Parameter(x),
    "flatten": lambda x: T.DTensor.__tensor_unflatten__(
        {"_local_tensor": x._local_tensor}, x.__tensor_flatten__()[1], x.shape, x.stride()
    ),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_every_use_waits(use):
    def body(rank):
        moved = to(distribute(FULL, T.Mesh((2,)), "S0"), "S1", async_op=True)
        equal(use(moved), FULL)

    run_ranks(2, body)


def test_the_text_waits():
    def body(rank):
        moved = to(distribute(FULL, T.Mesh((2,)), "S0"), "R", async_op=True)
        assert "75., 76." in repr(moved)

    run_ranks(2, body)


def test_waits_in_any_order_on_any_rank():
    """Two-step plans deadlock where the order of waits decides what runs."""
    targets = ["S0,S1", "R,R", "S1,S0", "S0,R", "R,S0", "S1,R"]

    def body(rank):
        choice = random.Random(rank)
        x = distribute(FULL, T.Mesh((2, 2)), "P,S0")
        for _ in range(10):
            moved = [to(x, text, async_op=True) for text in targets]
            # A synchronous one comes after those that were issued before.
            moved.append(to(x, "R,S1", async_op=choice.random() < 0.5))
            for tensor in choice.sample(moved, len(moved)):
                tensor.wait()
            for tensor in moved:
                equal(tensor, FULL)

    run_ranks(4, body)


def test_gradients_come_back_under_way():
    def body(rank):
        x: Any = distribute(FULL, T.Mesh((2,)), "S0").requires_grad_()
        weights = distribute(torch.rand(7, 11, generator=torch.Generator().manual_seed(0)), T.Mesh((2,)), "S1")
        (to(x, "S1", async_op=True) * weights).sum().backward()
        assert x.grad.work is not None
        assert x.grad.placements == x.placements
        equal(x.grad, weights.full_tensor())

    run_ranks(2, body)


def test_in_place_operators_wait_until_the_memory_has_been_read():
    writes = {
        "the tensor": lambda x, view: x.add_(1),
        "a view": lambda x, view: view.mul_(0),
        "a list": lambda x, view: torch._foreach_add_([x], 1),
        "out": lambda x, view: torch.add(x.clone(), x.clone(), out=x),
    }

    def body(rank):
        for write in writes.values():
            x = distribute(FULL, T.Mesh((2,)), "S0")
            view = x.view(7, 11)
            moved = to(x, "R", async_op=True)
            assert read_guard.readers
            write(x, view)
            assert moved.work.is_completed()
            torch.testing.assert_close(moved.to_local(), FULL, rtol=0, atol=0)

    run_ranks(2, body)
    assert not read_guard.readers


def test_writing_to_the_local_tensor_meanwhile_is_found():
    def body(rank):
        x = distribute(FULL, T.Mesh((2,)), "S0")
        moved = to(x, "R", async_op=True)
        x.to_local().zero_()
        with pytest.raises(
            T.WorldError, match=r"a local tensor of shape \(\d, 11\) was written to while \(S0\) -> \(R\)"
        ):
            moved.wait()
        with pytest.raises(T.WorldError, match="may be torn; wait for the result before writing"):
            _ = moved + 1

    run_ranks(2, body)


def test_what_nobody_waits_for_runs_and_is_freed():
    def body(rank):
        x = distribute(FULL, T.Mesh((2,)), "S0")
        moved = to(x, "R", async_op=True)
        local = weakref.ref(x.to_local())
        kept = weakref.ref(moved.work)
        del x, moved
        equal(distribute(FULL, T.Mesh((2,)), "S1"), FULL)  # what is issued later runs after it
        gc.collect()
        assert local() is None
        assert kept() is None

    run_ranks(2, body)


def test_waiting_twice_gives_the_same():
    def body(rank):
        moved = to(distribute(FULL, T.Mesh((2,)), "S0"), "R", async_op=True)
        work = moved.work
        work.wait()
        work.wait()
        assert work.is_completed()
        equal(moved, FULL)
        assert repr(work).endswith("done)")

    run_ranks(2, body)


def test_a_failure_is_raised_by_every_use_and_by_what_follows():
    def body(rank):
        x = distribute(FULL, T.Mesh((2,)), "S0")
        if rank == 1:
            raise ValueError("the loss is not a number")
        moved = to(x, "R", async_op=True)
        for _ in range(2):
            with pytest.raises(T.PeerError, match=r"rank 1 failed while rank 0 waited .* the loss is not a number"):
                moved.wait()
        assert isinstance(moved.work.exception(), T.PeerError)
        assert repr(moved.work).endswith("failed)")
        with pytest.raises(T.WorldError, match=r"communicator that failed before \(rank 1 failed .* not a number"):
            to(x, "S1", async_op=True)

    with pytest.raises(ValueError, match="not a number"):
        run_ranks(2, body)


def test_the_failure_of_what_nobody_waits_for_is_not_lost():
    def body(rank):
        x = distribute(FULL, T.Mesh((2,)), "S0")
        to(x, "R" if rank else "S1", async_op=True)

    with pytest.raises(T.PeerError, match=r"ranks disagree at exchange 1"):
        run_ranks(2, body)


def test_another_rank_cannot_wait():
    works = {}

    def body(rank):
        moved = to(distribute(FULL, T.Mesh((2,)), "S0"), "R", async_op=True)
        works[rank] = moved.work
        world.current().communicator((0, 1)).barrier()
        return moved

    def of_other(rank):
        moved = to(distribute(FULL, T.Mesh((2,)), "S0"), "R", async_op=True)
        works[rank] = moved.work
        if rank == 1:
            with pytest.raises(
                T.WorldError, match=r"issued by rank 0 of world \d+ and is waited for by rank 1 of world"
            ):
                works[0].wait()
        equal(moved, FULL)

    run_ranks(2, body)
    run_ranks(2, of_other)


def test_two_threads_cannot_issue_at_once():
    def body(rank):
        x = distribute(FULL, T.Mesh((2,)), "S0")
        communicator = world.current().communicator((0, 1))
        errors = []

        def issue():
            try:
                communicator.issue(lambda: None, "a test")
            except T.WorldError as error:
                errors.append(str(error))

        other = threading.Thread(target=issue, name="loader")

        def meanwhile():
            other.start()
            other.join()

        communicator.in_order(meanwhile, "two steps")
        assert len(errors) == 1
        assert "a test was asked for by thread 'loader' while another thread issues" in errors[0]
        equal(x, FULL)

    run_ranks(2, body)


def test_abort_ends_what_is_under_way_and_a_new_world_goes_on():
    def body(rank):
        x = distribute(FULL, T.Mesh((2,)), "S0")
        if rank == 0:
            moved = to(x, "R", async_op=True)
            T.abort()
            with pytest.raises(T.WorldError, match="aborted"):
                moved.wait()
        else:
            T.abort()
        equal(to(x, "S1", async_op=True), FULL)

    run_ranks(2, body)


def test_debug_mode_counts_what_was_issued_where_it_was_issued():
    def body(rank):
        x = distribute(FULL, T.Mesh((2,)), "S0")
        with CommDebugMode() as at_once:
            to(x, "S1")
        with CommDebugMode() as issued:
            to(x, "S1", async_op=True).wait()
        assert issued.get_sent_bytes() == at_once.get_sent_bytes() > 0
        assert issued.get_comm_counts() == at_once.get_comm_counts()

    run_ranks(2, body)


def test_an_empty_part_is_read_by_nobody():
    """All empty storages are at address 0: guarded there, a write on one rank would wait for the others' reads."""

    def body(rank):
        x = distribute(FULL[:1], T.Mesh((2,)), "S0")
        moved = to(x, "R", async_op=True)
        assert len(read_guard.readers) <= 1
        x.add_(1)
        assert moved.work.is_completed() == (rank == 0)
        torch.testing.assert_close(moved.to_local(), FULL[:1], rtol=0, atol=0)

    run_ranks(2, body)


def test_a_write_waits_for_another_ranks_read_of_the_same_memory():
    shared = FULL.clone()

    def body(rank):
        mesh = T.Mesh((2,))
        x = T.DTensor.from_local(shared, mesh)
        terms = T.DTensor.from_local(shared, mesh, [T.Partial()])
        moved = to(terms, "S0", async_op=True)
        if rank == 1:
            x.add_(1)
        equal(moved, 2 * FULL)

    run_ranks(2, body)
