"""Memory of large results that are gone is handed out again, and no other."""

import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import tritondt as T
from tritondt import environment
from tritondt.comm.transports.threads import run_ranks
from tritondt.errors import WorldError
from tritondt.kernels import memory
from tritondt.kernels.memory_pool import MemoryPool

_LENGTH = 1000


def _followed(pool: MemoryPool, num_bytes: int = _LENGTH) -> torch.Tensor:
    made = torch.zeros(num_bytes, dtype=torch.uint8)
    pool.follow(made.untyped_storage())
    return made


def test_memory_of_a_tensor_that_is_gone_is_handed_out_once():
    pool = MemoryPool(10 * _LENGTH)
    made = _followed(pool)
    address = made.data_ptr()
    assert pool.take(_LENGTH) is None
    del made
    assert pool.idle_bytes == _LENGTH
    assert pool.take(_LENGTH - 1) is None
    taken = pool.take(_LENGTH)
    assert taken.data_ptr() == address
    assert pool.take(_LENGTH) is None, "it is in use again"
    assert pool.idle_bytes == 0


@pytest.mark.parametrize(
    "holder",
    [
        lambda made: made[3:],
        lambda made: made.detach(),
        lambda made: made.untyped_storage(),
        lambda made: made.numpy(),
        lambda made: memoryview(made.numpy()),
        lambda made: torch.utils.dlpack.to_dlpack(made),
        lambda made: torch.frombuffer(made.numpy(), dtype=torch.uint8),
        lambda made: (made.float().requires_grad_() * made).grad_fn,
    ],
    ids=["view", "detached", "storage", "numpy", "memoryview", "dlpack", "frombuffer", "saved for backward"],
)
def test_memory_that_anything_holds_stays_as_it_is(holder):
    pool = MemoryPool(10 * _LENGTH)
    made = _followed(pool)
    held = holder(made)
    del made
    assert pool.take(_LENGTH) is None
    assert pool.empty() == 0
    del held
    assert pool.take(_LENGTH) is not None


@pytest.mark.parametrize(
    "change", [lambda made: made.share_memory_(), lambda made: made.resize_(2 * _LENGTH)], ids=["shared", "resized"]
)
def test_a_storage_with_other_memory_is_dropped(change):
    pool = MemoryPool(10 * _LENGTH)
    made = _followed(pool)
    change(made)
    storage = weakref.ref(made.untyped_storage())
    del made
    assert pool.take(_LENGTH) is None
    assert pool.take(2 * _LENGTH) is None
    _followed(pool)
    assert storage() is None


def test_the_bound_holds_for_what_is_in_use_and_idle_and_the_idle_goes_first():
    pool = MemoryPool(3 * _LENGTH)
    oldest, second, third = (_followed(pool) for _ in range(3))
    del second
    fourth = _followed(pool)
    assert pool.idle_bytes == 0, "the idle one made room"
    fifth = _followed(pool)
    del oldest
    assert pool.idle_bytes == 0, "the oldest in use made room, and was freed as all memory is"
    del third, fourth, fifth
    assert pool.idle_bytes == 3 * _LENGTH
    assert pool.empty() == 3 * _LENGTH
    assert pool.take(_LENGTH) is None


def test_an_idle_block_goes_first_only_where_it_is_among_the_oldest():
    pool = MemoryPool(10 * _LENGTH)
    held = [_followed(pool) for _ in range(10)]
    del held[9]
    held.append(_followed(pool))
    assert pool.idle_bytes == _LENGTH, "the oldest made room, as the idle one is not among the oldest eight"
    del held[0]
    assert pool.idle_bytes == _LENGTH, "and is freed as all memory is"


def test_a_storage_of_another_length_with_other_memory_is_dropped_in_time():
    pool = MemoryPool(160 * _LENGTH)
    made = _followed(pool)
    made.resize_(3 * _LENGTH)
    storage = weakref.ref(made.untyped_storage())
    del made
    kept = [_followed(pool, 2 * _LENGTH) for _ in range(6)]
    assert storage() is None
    assert len(kept) == 6


def test_memory_is_followed_as_that_of_the_latest_storage():
    """As where the C library hands out what a followed storage has freed in resize_(0)."""
    pool, memory_of_both = MemoryPool(3 * _LENGTH), bytearray(_LENGTH)
    for _ in range(2):
        pool.follow(torch.frombuffer(memory_of_both, dtype=torch.uint8).untyped_storage())
    assert pool.idle_bytes == _LENGTH
    assert pool.take(_LENGTH) is not None
    assert pool.empty() == _LENGTH
    assert pool.take(_LENGTH) is None


def test_what_is_longer_than_the_bound_is_not_followed():
    pool = MemoryPool(_LENGTH - 1)
    made = _followed(pool)
    del made
    assert pool.idle_bytes == 0


def test_notes_at_a_storage_end_with_its_tensors():
    pool = MemoryPool(_LENGTH)
    made = _followed(pool)
    vars(made.untyped_storage())["note"] = "of a tensor"
    del made
    assert not hasattr(pool.take(_LENGTH), "note")


def test_a_forked_child_is_not_held_up_by_a_thread_of_its_parent():
    with memory.pool._changing:
        child = os.fork()
        if child == 0:
            memory.pool.empty()
            os._exit(7)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7


@pytest.fixture
def small_pool(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory, "pool", MemoryPool(1 << 20))
    monkeypatch.setattr(memory, "_POOLED_BYTES", 4096)
    monkeypatch.setattr(memory._Room, "has_some", True)
    monkeypatch.setattr(memory, "_HUGE_BYTES", 4096)  # and the kernel is asked for its memory each time


@pytest.mark.usefixtures("small_pool")
def test_results_are_written_where_earlier_ones_were_and_never_into_one_that_is_there(monkeypatch: pytest.MonkeyPatch):
    pool, is_found = memory.pool, list[bool]()

    def counted(num_bytes: int) -> Any:
        storage = MemoryPool.take(pool, num_bytes)
        is_found.append(storage is not None)
        return storage

    def body(_rank: int) -> None:
        mesh = T.Mesh((2,))
        whole = torch.arange(4096.0).reshape(64, 64)
        x: Any = T.distribute_tensor(whole, mesh, [T.Shard(0)])
        first = x.redistribute(mesh, [T.Replicate()]).to_local()
        second = (x + 1).redistribute(mesh, [T.Replicate()]).to_local()
        torch.testing.assert_close(first, whole, rtol=0, atol=0)
        row = first[5]
        del first
        third = (x + 2).redistribute(mesh, [T.Replicate()]).to_local()
        torch.testing.assert_close(row, whole[5], rtol=0, atol=0)
        del row
        fourth = (x + 3).redistribute(mesh, [T.Replicate()]).to_local()
        for found, added in ((second, 1), (third, 2), (fourth, 3)):
            torch.testing.assert_close(found, whole + added, rtol=0, atol=0)

    monkeypatch.setattr(pool, "take", counted)
    run_ranks(2, body)
    assert any(is_found)


@pytest.mark.usefixtures("small_pool")
def test_a_result_under_inference_mode_may_be_written_to():
    for _ in range(2):
        with torch.inference_mode():
            made = memory.allocate((64, 64), torch.float32)
            made.fill_(1)
            assert made.is_inference()
        del made
    made = memory.allocate((64, 64), torch.float32)
    made.fill_(2)
    made.requires_grad_()
    assert not made.is_inference()


@pytest.mark.usefixtures("small_pool")
def test_where_the_machine_has_little_memory_nothing_is_kept(monkeypatch: pytest.MonkeyPatch):
    made = memory.allocate((64, 64), torch.float32)
    del made
    monkeypatch.setattr(memory, "available_share", lambda: 0.01)
    other = memory.allocate((64, 65), torch.float32)
    assert memory.pool.idle_bytes == 0
    del other
    assert memory.pool.idle_bytes == 0


def test_the_kernel_is_asked_for_its_memory_once_for_so_much_of_it(small_pool, monkeypatch: pytest.MonkeyPatch):
    asked = list[float]()

    def share() -> float:
        asked.append(0.5)
        return asked[-1]

    monkeypatch.setattr(memory, "available_share", share)
    monkeypatch.setattr(memory, "_HUGE_BYTES", 10 * 4096)
    monkeypatch.setattr(memory._Room, "unseen_bytes", 0)
    held = [memory.allocate((64, 16), torch.float32) for _ in range(25)]
    assert len(asked) == 2
    assert len(held) == 25


def test_the_share_of_memory_is_read_off_the_kernel(tmp_path: Path):
    path = tmp_path / "meminfo"
    path.write_text(
        "MemTotal:       24684084 kB\nMemFree:  100 kB\nMemAvailable:   6171021 kB\nHugePages_Total:       0\n"
    )
    assert memory.available_share(path) == 0.25
    assert memory.available_share(tmp_path / "missing") == 1.0
    assert 0 < memory.available_share() <= 1


@pytest.mark.parametrize("text", ["-1", "nan", "", "1.5", "12345678"])
def test_a_bound_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, text: str):
    monkeypatch.setenv("TRITONDT_POOL_MB", text)
    with pytest.raises(WorldError) as raised:
        environment.pool_bytes()
    assert str(raised.value) == f"TRITONDT_POOL_MB={text!r} is set; allowed is a whole number from 0 to 9999999"


def test_the_bound_is_256_mb_unless_it_is_set(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TRITONDT_POOL_MB", raising=False)
    assert environment.pool_bytes() == 256 << 20
    monkeypatch.setenv("TRITONDT_POOL_MB", "0")
    assert environment.pool_bytes() == 0
