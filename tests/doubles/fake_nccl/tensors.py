"""Collectives of the test double on tensors, and what they must come to by torch."""

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tests.doubles.fake_nccl import abi
from tests.doubles.fake_nccl.abi import AVG, MAX, MIN, PROD, SUM, Config, UniqueId
from tests.doubles.fake_nccl.library import FakeNccl, load

DTYPES = {
    torch.int8: abi.INT8,
    torch.uint8: abi.UINT8,
    torch.int32: abi.INT32,
    torch.uint32: abi.UINT32,
    torch.int64: abi.INT64,
    torch.uint64: abi.UINT64,
    torch.float16: abi.FLOAT16,
    torch.float32: abi.FLOAT32,
    torch.float64: abi.FLOAT64,
    torch.bfloat16: abi.BFLOAT16,
    torch.float8_e4m3fn: abi.FLOAT8E4M3,
    torch.float8_e5m2: abi.FLOAT8E5M2,
}
OPS: dict[int, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    SUM: torch.add,
    PROD: torch.mul,
    MAX: torch.maximum,
    MIN: torch.minimum,
    AVG: torch.add,
}


class RankOfTensors:
    """One rank: a communicator, a stream, and calls by tensors that go to that stream."""

    def __init__(self, library: FakeNccl, communicator: int, rank: int, size: int) -> None:
        self.library, self.communicator, self.rank, self.size = library, communicator, rank, size
        self.stream = library.new_stream()

    def __call__(self, name: str, source: torch.Tensor, target: torch.Tensor, count: int, *rest: int) -> None:
        """A collective; `rest` is the op and the root, where it has them."""
        pointers = source.data_ptr() or None, target.data_ptr() or None
        self.library(name, *pointers, count, DTYPES[source.dtype], *rest, self.communicator, self.stream.handle)

    def send(self, source: torch.Tensor, peer: int) -> None:
        self._message("ncclSend", source, peer)

    def receive(self, target: torch.Tensor, peer: int) -> None:
        self._message("ncclRecv", target, peer)

    def _message(self, name: str, tensor: torch.Tensor, peer: int) -> None:
        pointer = tensor.data_ptr() or None
        self.library(name, pointer, tensor.numel(), DTYPES[tensor.dtype], peer, self.communicator, self.stream.handle)

    @contextmanager
    def group(self) -> Iterator[None]:
        self.library("ncclGroupStart")
        yield
        self.library("ncclGroupEnd")

    def close(self) -> None:
        self.library("ncclCommDestroy", self.communicator)
        self.stream.destroy()


@contextmanager
def joined(path: Path, unique_id: bytes, rank: int, size: int) -> Iterator[RankOfTensors]:
    """A rank of a new communicator, which is destroyed at the end."""
    library = load(path)
    made = RankOfTensors(library, library.init(size, unique_id, rank), rank, size)
    yield made
    made.close()


@contextmanager
def ranks_of_process(library: FakeNccl, size: int, config: Config | None = None) -> Iterator[list[RankOfTensors]]:
    """All ranks of a communicator in one process, driven by one thread; aborted at the end, where they are not gone."""
    unique_id = library.unique_id()
    handles = [ctypes.c_void_p() for _ in range(size)]
    pointer = None if config is None else ctypes.byref(config)
    library("ncclGroupStart")
    for rank, handle in enumerate(handles):
        given = UniqueId.from_buffer_copy(unique_id)
        library("ncclCommInitRankConfig", ctypes.byref(handle), size, given, rank, pointer)
    ended = library.result("ncclGroupEnd")
    assert ended == ("ncclSuccess" if config is None or config.blocking != 0 else "ncclInProgress")
    ranks = [RankOfTensors(library, handle.value or 0, rank, size) for rank, handle in enumerate(handles)]
    try:
        yield ranks
    finally:
        for made in ranks:
            library.result("ncclCommAbort", made.communicator)
            made.stream.destroy()


def values(seed: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers from a seed: of few bits, so that float8 holds them."""
    generator = torch.Generator().manual_seed(seed)
    low = 0 if dtype in (torch.uint8, torch.uint32, torch.uint64) else -4
    return torch.randint(low, 5, (count,), generator=generator).to(dtype)


def reduced(op: int, terms: list[torch.Tensor]) -> torch.Tensor:
    """The reduction in order of rank, in float32 for what is smaller."""
    dtype = terms[0].dtype
    wide = {torch.float64: torch.float64}.get(dtype, torch.float32 if dtype.is_floating_point else torch.int64)
    result = functools.reduce(OPS[op], [term.to(wide) for term in terms])
    if op == AVG:
        rounding = None if dtype.is_floating_point else "trunc"
        result = torch.div(result, len(terms), rounding_mode=rounding)
    return result.to(dtype)


def assert_same(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Bits for bits."""
    torch.testing.assert_close(
        found.view(torch.uint8), expected.view(torch.uint8), rtol=0, atol=0, msg=lambda text: f"{what}: {text}"
    )
