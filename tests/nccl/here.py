"""One rank of a communicator of NCCL, made for tests: calls by tensors, the values it brings, what they come to."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tests.nccl.devices import NcclDevice, device_of
from tritondt._C import NcclCommunicator
from tritondt.comm.nccl.streams import Stream

OPS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "product": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}


class Here(NamedTuple):
    """A communicator of all ranks, and a stream of its own."""

    device: NcclDevice
    native: NcclCommunicator
    stream: Stream
    rank: int
    size: int

    def call(self, name: str, *arguments: Any) -> Any:
        """A method whose arguments end with a stream, tensors for addresses; the host waits for it."""
        self.stream.wait_event(self.device.streams.current().record_event())
        plain = [each.data_ptr() if isinstance(each, torch.Tensor) else each for each in arguments]
        result = getattr(self.native, name)(*plain, self.stream.cuda_stream)
        self.stream.synchronize()
        return result

    def own(self, length: int = 6, dtype: str = "float32") -> torch.Tensor:
        """What this rank brings, on its device."""
        return values(self.rank, length, dtype).to(self.device.kind)

    def empty(self, length: int, dtype: str = "float32") -> torch.Tensor:
        """Room for a result: zeros, which none of the values is."""
        return torch.zeros(length, dtype=getattr(torch, dtype), device=self.device.kind)

    def all_values(self, length: int = 6, dtype: str = "float32") -> list[torch.Tensor]:
        """What the ranks bring, by rank, on the host."""
        return [values(rank, length, dtype) for rank in range(self.size)]


def values(rank: int, length: int = 6, dtype: str = "float32") -> torch.Tensor:
    """1, 2, 1, 2... times one or two, by the rank: products of a few ranks are exact in every dtype."""
    return ((torch.arange(length) % 2 + 1) * (1 + rank % 2)).to(getattr(torch, dtype))


def reduced(op: str, terms: Sequence[torch.Tensor]) -> torch.Tensor:
    """By torch, in 64 bits: few of its operators know unsigned integers and small floats."""
    dtype = terms[0].dtype
    wide = torch.float64 if dtype.is_floating_point else torch.int64
    whole = functools.reduce(OPS["sum" if op == "avg" else op], [term.to(wide) for term in terms])
    if op == "avg":
        whole = torch.div(whole, len(terms), rounding_mode=None if dtype.is_floating_point else "trunc")
    return whole.to(dtype)


def connect(rank: int, where: str, options: Mapping[str, int | str] | None = None) -> Here:
    """This rank's part in a new communicator of all; collective."""
    device, size = device_of(where), dist.get_world_size()
    # As a tensor: torch needs NumPy to broadcast an object.
    told = torch.frombuffer(bytearray(device.library.unique_id() if rank == 0 else 128), dtype=torch.uint8)
    dist.broadcast(told, 0)
    native = device.library.init([bytes(told.tolist())], size, rank, options)
    return Here(device, native, device.streams.make(), rank, size)


_joined: dict[str, Here] = {}


def join(rank: int, where: str) -> Here:
    """The same one at every call, until a case on it fails."""
    if where not in _joined:
        has_puts = device_of(where).library.has("ncclPutSignal")
        _joined[where] = connect(rank, where, {"num_rma_ctx": 1} if has_puts else None)
    return _joined[where]


def leave(where: str) -> None:
    """Ends it without the others."""
    _joined.pop(where).native.abort()
