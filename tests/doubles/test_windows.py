"""Memory that other ranks reach: windows, puts and signals."""

import ctypes
import threading
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.doubles.fake_nccl.abi import INT32, INT64, Awaited
from tests.doubles.fake_nccl.library import FakeNccl, FakeNcclError, load
from tests.doubles.fake_nccl.tensors import RankOfTensors, joined, ranks_of_process
from tests.harness.gloo_ranks import GlooRanks

SIZE, PAGE = 4, 4096


def tensor_at(address: int, count: int) -> torch.Tensor:
    """A view of memory of ncclMemAlloc as int32."""
    memory = (ctypes.c_int32 * count).from_address(address)
    return torch.frombuffer(memory, dtype=torch.int32)


def window_of(here: RankOfTensors, address: int, num_bytes: int) -> int:
    return here.library.pointer("ncclCommWindowRegister", here.communicator, address, num_bytes, 1, at=3)


def wait_for(here: RankOfTensors, awaited: dict[int, int]) -> None:
    descriptions = (Awaited * len(awaited))(*(Awaited(count, peer, 0, 0) for peer, count in awaited.items()))
    here.library("ncclWaitSignal", len(awaited), descriptions, here.communicator, here.stream.handle)


def put_to_all(rank: int, path: Path, unique_id: bytes) -> None:
    """Every rank writes its number into its place in everybody's window, round after round."""
    if rank >= SIZE:
        return
    with joined(path, unique_id, rank, SIZE) as here:
        library, place, stream = here.library, here.communicator, here.stream.handle
        address = library.pointer("ncclMemAlloc", PAGE, at=0)
        mine, source = tensor_at(address, SIZE + 1).split([SIZE, 1])  # what is put lies in a window, too
        window = window_of(here, address, 4 * (SIZE + 1))
        assert library.pointer("ncclWinGetUserPtr", place, window, at=2) == address
        others = [peer for peer in range(SIZE) if peer != rank]
        for number in range(20):
            here.stream.launch(partial(source.fill_, 100 * number + rank))
            for peer in range(SIZE):
                library("ncclPutSignal", source.data_ptr(), 1, INT32, peer, window, 4 * rank, 0, 0, 0, place, stream)
            wait_for(here, dict.fromkeys(range(SIZE), 1))
            found = torch.zeros(SIZE, dtype=torch.int32)
            here.stream.launch(partial(found.copy_, mine))
            for peer in others:  # that they may write again
                library("ncclSignal", peer, 0, 0, 0, place, stream)
            wait_for(here, dict.fromkeys(others, 1))
            here.stream.synchronize()
            assert found.tolist() == [100 * number + other for other in range(SIZE)]
        right = library.pointer("ncclGetLsaDevicePointer", window, 4, (rank + 1) % SIZE, at=3)
        assert tensor_at(right, 1).item() == 1901
        with pytest.raises(FakeNcclError, match=rf"8 bytes from byte 16 of rank {others[0]} are not in the window"):
            library("ncclPutSignal", address, 1, INT64, others[0], window, 16, 0, 0, 0, place, stream)
        outside = torch.zeros(1, dtype=torch.int32)
        with pytest.raises(FakeNcclError, match="the source is not in a symmetric window"):
            library("ncclPutSignal", outside.data_ptr(), 1, INT32, others[0], window, 0, 0, 0, 0, place, stream)
        with pytest.raises(FakeNcclError, match="signal, context and flags must be 0"):
            library("ncclSignal", others[0], 1, 0, 0, place, stream)
        library("ncclCommWindowDeregister", place, window)
        with pytest.raises(FakeNcclError, match="there is no such window"):
            library("ncclCommWindowDeregister", place, window)
        library("ncclMemFree", address)


def test_puts_and_signals(ranks: GlooRanks, double: Path) -> None:
    ranks.run(put_to_all, double, load(double).unique_id())


def register(ranks: list[RankOfTensors], addresses: list[int]) -> list[tuple[str, int]]:
    """What every rank is told: ranks of one process register from threads of their own."""
    told: list[tuple[str, int]] = [("", 0)] * len(ranks)

    def tell(rank: RankOfTensors, address: int) -> None:
        try:
            told[rank.rank] = "", window_of(rank, address, PAGE)
        except FakeNcclError as error:
            told[rank.rank] = str(error), 0

    threads = [threading.Thread(target=tell, args=each) for each in zip(ranks, addresses, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return told


def test_memory_that_cannot_be_a_window_is_refused_on_all_ranks(nccl: FakeNccl) -> None:
    addresses = [nccl.pointer("ncclMemAlloc", 2 * PAGE, at=0) for _ in range(2)]
    elsewhere = torch.zeros(3 * PAGE, dtype=torch.uint8).data_ptr() // PAGE * PAGE + PAGE
    with ranks_of_process(nccl, 2) as ranks:
        for bad, text in ((elsewhere, "must lie in memory of ncclMemAlloc"), (addresses[1] + 64, "multiple of 4096")):
            told = register(ranks, [addresses[0], bad])
            assert all(text in each for each, _ in told), told
        assert all(window != 0 for _, window in register(ranks, [address + PAGE for address in addresses]))
    for address in addresses:
        nccl("ncclMemFree", address)
    with pytest.raises(FakeNcclError, match="it is not of ncclMemAlloc"):
        nccl("ncclMemFree", addresses[0])


def test_no_window_and_success_where_there_is_no_symmetric_memory(nccl: FakeNccl) -> None:
    nccl.set(FAKE_NCCL_SYMMETRIC=0)
    address = nccl.pointer("ncclMemAlloc", PAGE, at=0)
    with ranks_of_process(nccl, 2) as ranks:
        assert register(ranks, [address, address]) == [("", 0), ("", 0)]
    nccl("ncclMemFree", address)
