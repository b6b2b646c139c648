"""The interface of a transport, and the transfers that are handed to it.

A `Transfer` is one rank's side of one exchange with everything resolved that does not change from call to
call: peers, boxes in storage, reduction. Transports keep what they derive from it (descriptor tables, byte
counts), so a transfer should be kept for as long as it may run again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol

import torch

from tritondt.comm.work import Run, Work
from tritondt.errors import TransportError, WorldError
from tritondt.planning.collectives import Collective
from tritondt.planning.exchange import Exchange
from tritondt.planning.storage import Block
from tritondt.sharding.placement import ReduceOp

CPU = torch.device("cpu")
# What a rank is in an exchange: one of many alike, or of those that give, that take, or that do both.
Role = Literal["", "source", "target", "both"]


@dataclass(frozen=True, slots=True)
class Reduction:
    """Reduction of the terms of a received box: in coordinate order, divided once."""

    op: ReduceOp
    divisor: int


@dataclass(frozen=True, eq=False)
class Transfer:
    """One rank's side of an exchange of a list of tensors.

    `exchange` names peers by their place in the communicator; `source_blocks[i]` and `target_blocks[i]` say
    where tensor i lies, `reductions[i]` how its terms are reduced. `fingerprint` is equal on all ranks of one
    exchange and differs between exchanges; `description` is what error messages say. All tensors are on `device`.
    With `wire_dtype` messages hold that dtype, a narrower one than all tensors have, and what stays is rounded alike.
    Where there is a `collective`, that of NCCL takes the place of all messages; it has one tensor. The `role` is
    this rank's where some give and others take: ranks of other roles may ask for it from other lines.
    """

    exchange: Exchange
    source_blocks: tuple[tuple[Block, ...], ...]
    target_blocks: tuple[tuple[Block, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    reductions: tuple[Reduction | None, ...]
    fingerprint: int
    description: str
    device: torch.device = CPU
    wire_dtype: torch.dtype | None = None
    collective: Collective | None = None
    role: Role = ""
    result_bytes: int = 0  # of this rank, where this writes a part of a tensor, or is one of a list of transfers
    # What each communicator that has exchanged it made of it.
    compiled: dict[object, Any] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def needed_bytes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Bytes of memory that each source and each target has behind its first element, at least."""
        of_sides = []
        for blocks in (self.source_blocks, self.target_blocks):
            ends = [max((each.end for each in own), default=0) for own in blocks]
            of_sides.append(tuple(end * dtype.itemsize for end, dtype in zip(ends, self.dtypes, strict=True)))
        sources, targets = of_sides
        return sources, targets

    def check_tensors(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        """Raises TransportError for tensors that this was not compiled for: too few, of another dtype, or too small."""
        needed_of_sources, needed_of_targets = self.needed_bytes
        self._check_side("source", sources, needed_of_sources)
        self._check_side("target", targets, needed_of_targets)

    def _check_side(self, side: str, tensors: Sequence[torch.Tensor], needed: Sequence[int]) -> None:
        if len(tensors) != len(needed):
            raise TransportError(
                f"{self.description} was compiled for {len(needed)} {side}s and given {len(tensors)}; give it as many"
            )
        for number, tensor in enumerate(tensors):
            own = tensor.dtype
            dtype, itemsize = self.dtypes[number] if self.dtypes else own, own.itemsize
            found = tensor.untyped_storage().nbytes() - tensor.storage_offset() * itemsize
            # A part without elements may begin anywhere, past the end of its memory, too.
            if own is not dtype or 0 < needed[number] > found:
                raise TransportError(
                    f"{self.description} was compiled for a {side} of {dtype} with {needed[number] // dtype.itemsize} "
                    f"elements in memory, and given one of {own} with {max(found, 0) // itemsize}; give it tensors "
                    "like those of its layouts, and resize none before the result is there"
                )


@dataclass(slots=True)
class Traffic:
    """Bytes and messages that a communicator has moved so far, counted where they are handed to the transport."""

    sent_bytes: int = 0
    received_bytes: int = 0
    num_sent: int = 0
    num_received: int = 0

    def count(self, sent_bytes: int, received_bytes: int, num_sent: int, num_received: int) -> None:
        """Adds one exchange."""
        self.sent_bytes += sent_bytes
        self.received_bytes += received_bytes
        self.num_sent += num_sent
        self.num_received += num_received


class Communicator(Protocol):
    """Ranks that exchange boxes; made by all of `ranks` together, ended by `close` on all of them."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The world's ranks in this communicator, ascending; peers are named by their place here."""
        ...

    @property
    def traffic(self) -> Traffic:
        """Bytes and messages that the communicator has moved so far."""
        ...

    def exchange(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], transfer: Transfer) -> None:
        """Runs this rank's side of `transfer`; returns when `targets` are written and `sources` are free.

        Raises TransportError before anything is sent when a tensor cannot be carried, PeerError when another
        rank failed or did not come, MismatchError when it came for something else.
        """
        ...

    def issue(
        self, run: Run, description: str, sources: Sequence[torch.Tensor] = (), *, sources_ready: bool = True
    ) -> Work:
        """Runs `run` in a thread of the communicator, after all that was issued before, and returns at once.

        `run` may call `exchange`; `sources` are what it reads, guarded until then; what was issued before fills
        them unless `sources_ready`. Raises WorldError where another
        thread issues at the same moment, and after a failure, with its cause.
        """
        ...

    def has_issued(self, work: Work) -> bool:
        """Whether `work` was issued here, so that what is issued later runs after it."""
        ...

    @property
    def is_usable(self) -> bool:
        """Whether the communicator can exchange: it has not ended or failed."""
        ...

    def in_order(self, run: Run, description: str) -> None:
        """Runs `run`, which calls `exchange` more than once, with nothing of other threads in between."""
        ...

    def prepare(self, transfers: Sequence[Transfer]) -> None:
        """Compiles what will be exchanged, where that takes long: kernels are then compiled side by side."""
        ...

    def traffic_of(self, transfer: Transfer) -> Traffic:
        """Bytes and messages that this rank will send and receive in an exchange."""
        ...

    def drain(self) -> None:
        """Returns when all that was issued has run, well or not."""
        ...

    def refuse(self, error: BaseException) -> None:
        """Reports why this rank takes no part in the next exchange, which counts as run, to the other ranks."""
        ...

    def set_timeout(self, seconds: float) -> None:
        """Sets how long this rank waits in an exchange, in seconds, from the next exchange on."""
        ...

    def barrier(self) -> None:
        """Returns when every rank of the communicator has called it."""
        ...

    def close(self) -> None:
        """Ends the communicator; a collective call."""
        ...

    def begin_abort(self) -> None:
        """Does the part of `abort` that waits for nothing, so that several communicators can be aborted together."""
        ...

    def abort(self) -> None:
        """Ends the communicator without the other ranks."""
        ...

    def end_with_process(self, limit_s: float) -> None:
        """Ends the communicator with its process, which may wait `limit_s` seconds for what is under way."""
        ...

    def disown(self, error: WorldError) -> None:
        """Refuses all further use with `error`, in a process that was forked from the communicator's."""
        ...


_TAG_BITS = 31


def tag_of(fingerprint: int, sequence: int) -> int:
    """The tag of exchange number `sequence`: 31 bits, equal on all ranks that run the same exchanges.

    With the number in it, a message that a rank left unread when it refused an exchange is never taken for one
    of a later exchange.
    """
    # An odd step visits every tag before it repeats one.
    return (fingerprint + sequence * 0x9E3779B1) & 0x7FFFFFFF


def numbered_tag_of(fingerprint: int, sequence: int) -> int:
    """The tag with the exchange's number above it, in 64 bits: what has been left of an exchange before is known.

    >>> hex(numbered_tag_of(7, 2)), numbered_tag_of(7, 2) >> 31
    ('0x13c6ef369', 2)
    """
    return (sequence << _TAG_BITS | tag_of(fingerprint, sequence)) & 0xFFFFFFFFFFFFFFFF
