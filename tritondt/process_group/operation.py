"""What a rank asks of NCCL in one piece: calls as values, and what is said of them."""

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from tritondt._C import NcclCalls, NcclError, NcclLibrary
from tritondt.errors import TransportError
from tritondt.process_group.naming import PreMulSum

ALL = slice(None)


class TensorOffset(NamedTuple):
    """Where a call reads or writes: bytes from the beginning of a tensor, which is named by its number."""

    tensor: int
    start: int = 0


class Call(NamedTuple):
    """One call of NCCL; see `NcclCalls`. `op` may be one that is to be made first."""

    kind: str
    source: TensorOffset
    target: TensorOffset
    num_elements: int
    dtype: str = "uint8"
    op: str | PreMulSum = "sum"
    peer: int = 0


class Staging(NamedTuple):
    """Tensors alike, by number, that NCCL finds end to end in memory of their own.

    They are copied there before its calls, or from there after them. The memory's number follows those of the tensors.
    """

    tensors: tuple[int, ...]
    is_before: bool


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """Calls that travel together, on any tensors like those it was made for; equal on all ranks where its `text` is.

    `results` says which of the tensors a future of it gives; `peers` are places in the group, None for all. `native` is
    what runs, None where an op is to be made first. Raises TransportError where the library lacks what a call needs.
    """

    text: str
    calls: tuple[Call, ...]
    library: NcclLibrary
    results: slice = field(default_factory=lambda: ALL)
    stagings: tuple[Staging, ...] = ()
    peers: tuple[int, ...] | None = None
    waits_on_host: bool = False
    source: int = -1  # where a message comes from
    fingerprint: int = field(init=False)  # equal on ranks that run the same
    native: NcclCalls | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "fingerprint", fingerprint_of(self.text))
        object.__setattr__(self, "native", None if self.makes_ops else self.compiled(self.calls))

    @property
    def makes_ops(self) -> bool:
        """Whether it reduces by ops that live as long as one run of it."""
        return any(isinstance(call.op, PreMulSum) for call in self.calls)

    def compiled(self, calls: Sequence[Any]) -> NcclCalls:
        """Calls as NCCL takes them."""
        try:
            return NcclCalls(self.library, calls)
        except NcclError as error:
            raise TransportError(f"{self.text} was asked for: {error}") from error


class Request(NamedTuple):
    """An operation and the tensors that it is to run on."""

    operation: Operation
    tensors: Sequence[torch.Tensor]

    @property
    def results(self) -> Sequence[torch.Tensor]:
        """What is written."""
        return self.tensors[self.operation.results]


@functools.lru_cache(maxsize=4096)
def fingerprint_of(text: str) -> int:
    """63 bits of a text.

    >>> fingerprint_of("all_reduce (sum) of 3 float32") == fingerprint_of("all_reduce (sum) of 4 float32")
    False
    """
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def merged(requests: Sequence[Request]) -> Request:
    """All of them as one: what torch calls coalesced. Its tensors are what is written, and then all of each."""
    operations = [request.operation for request in requests]
    results = [tensor for request in requests for tensor in request.results]
    tensors, calls, stagings = list(results), list[Call](), list[Staging]()
    num_tensors = len(results) + sum(len(request.tensors) for request in requests)
    for operation, own in requests:
        memories = range(num_tensors + len(stagings), num_tensors + len(stagings) + len(operation.stagings))
        numbers = [*range(len(tensors), len(tensors) + len(own)), *memories]
        calls += [_renumbered(call, numbers) for call in operation.calls]
        stagings += [Staging(tuple(numbers[each] for each in number), when) for number, when in operation.stagings]
        tensors += own
    peers = {peer for operation in operations for peer in operation.peers or ()}
    is_of_all = any(operation.peers is None for operation in operations)
    made = Operation(
        # Sends on one side are receives on the other: their texts differ from rank to rank.
        " and ".join(found.text for found in operations if found.peers is None) or "messages",
        tuple(calls),
        operations[0].library,
        slice(len(results)),
        tuple(stagings),
        None if is_of_all else tuple(sorted(peers)),
    )
    return Request(made, tensors)


def _renumbered(call: Call, numbers: Sequence[int]) -> Call:
    """The call where its tensors have other numbers."""
    source, target = (spot._replace(tensor=numbers[spot.tensor]) for spot in (call.source, call.target))
    return call._replace(source=source, target=target)
