"""What a rank asks of NCCL in one piece: calls as values, and what is said of them."""

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tritondt.backend.elements import PreMulSum


class Call(NamedTuple):
    """One call of NCCL; see `NcclCommunicator.group`. `op` may be one that is to be made first."""

    kind: str
    source: int
    target: int
    num_elements: int
    dtype: str = "uint8"
    op: str | PreMulSum = "sum"
    peer: int = 0


@dataclass(slots=True, eq=False)
class Operation:
    """Calls that travel together, equal on all ranks where their `text` is.

    `tensors` are all that it reads and writes, `results` what a future of it gives; `peers` are places in the group,
    None for all.
    """

    text: str
    calls: Sequence[Call]
    tensors: Sequence[torch.Tensor]
    results: Sequence[torch.Tensor]
    peers: tuple[int, ...] | None = None
    waits_on_host: bool = False
    source: int = -1  # where a message comes from

    @property
    def fingerprint(self) -> int:
        """Equal on ranks that run the same."""
        return fingerprint_of(self.text)


@functools.lru_cache(maxsize=4096)
def fingerprint_of(text: str) -> int:
    """63 bits of a text.

    >>> fingerprint_of("all_reduce (sum) of 3 float32") == fingerprint_of("all_reduce (sum) of 4 float32")
    False
    """
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def merged(operations: Sequence[Operation]) -> Operation:
    """All of them as one: what torch calls coalesced."""
    peers = {peer for operation in operations for peer in operation.peers or ()}
    is_of_all = any(operation.peers is None for operation in operations)
    return Operation(
        # Sends on one side are receives on the other: their texts differ from rank to rank.
        " and ".join(found.text for found in operations if found.peers is None) or "messages",
        [call for operation in operations for call in operation.calls],
        [tensor for operation in operations for tensor in operation.tensors],
        [tensor for operation in operations for tensor in operation.results],
        None if is_of_all else tuple(sorted(peers)),
    )
