"""Operations: calls of NCCL as values, which a rank issues in one piece, and the texts that name them."""

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
    """The place at which a call reads or writes: a tensor by its number, and bytes from its beginning."""

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
    """Tensors of one size, by number, that NCCL finds end to end in memory of their own.

    They are copied there before its calls, or from there after them. The memory's number follows those of the tensors.
    """

    tensors: tuple[int, ...]
    is_before: bool


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """Calls that run together, on any tensors like the first ones; equal on all ranks where `text` is equal.

    `results` says which of the tensors a future of it gives; `peers` are ranks of the group, None for all. `native` is
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
        """Whether calls reduce by ops that are made for one run and end with it."""
        return any(isinstance(call.op, PreMulSum) for call in self.calls)

    def compiled(self, calls: Sequence[Any]) -> NcclCalls:
        """Calls in the form that the extension takes."""
        try:
            return NcclCalls(self.library, calls)
        except NcclError as error:
            raise TransportError(f"{self.text} was asked for: {error}") from error


class Request(NamedTuple):
    """An operation and the tensors to run it on."""

    operation: Operation
    tensors: Sequence[torch.Tensor]

    @property
    def results(self) -> Sequence[torch.Tensor]:
        """The tensors that the operation writes."""
        return self.tensors[self.operation.results]


@functools.lru_cache(maxsize=4096)
def fingerprint_of(text: str) -> int:
    """63 bits of a text.

    >>> fingerprint_of("all_reduce (sum) of 3 float32") == fingerprint_of("all_reduce (sum) of 4 float32")
    False
    """
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def merged(requests: Sequence[Request]) -> Request:
    """Several requests as one, coalesced in torch's words: on all that is written, and then all tensors of each."""
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
        " and ".join(each.text for each in operations if each.peers is None) or "messages",
        tuple(calls),
        operations[0].library,
        slice(len(results)),
        tuple(stagings),
        None if is_of_all else tuple(sorted(peers)),
    )
    return Request(made, tensors)


def _renumbered(call: Call, numbers: Sequence[int]) -> Call:
    """A call whose tensors have other numbers."""
    source, target = (offset._replace(tensor=numbers[offset.tensor]) for offset in (call.source, call.target))
    return call._replace(source=source, target=target)
