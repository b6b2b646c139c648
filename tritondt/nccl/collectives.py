"""Collectives and messages of NCCL on tensors, even and uneven."""

from collections.abc import Sequence
from typing import Any

import torch

from tritondt._C import NcclCallConfig, NcclCommunicator
from tritondt.errors import ArgumentError
from tritondt.errors.arguments import checked_class
from tritondt.nccl.calls import Call, dtype_of, raw_call, raw_parts, stream_handle

Tensors = Sequence[torch.Tensor]


@checked_class
class Collectives:
    """The collectives of a communicator, which all ranks call in one order, with tensors that fit each other.

    Tensors are contiguous and of one dtype; sizes are in elements, and n is the number of ranks. `stream` is a
    torch.cuda.Stream or its handle, the current one of the tensor's device by default. `config` holds options of this
    call, which `library.call_config` makes (NCCL 2.31). Each raises ValueError for tensors that do not fit, before
    anything is started, and NcclError for what NCCL refuses. Source: NCCL's documentation, Collective Communication
    Functions.
    """

    def __init__(self, native: NcclCommunicator) -> None:
        self._native = native

    def all_reduce(
        self,
        source: torch.Tensor,
        target: torch.Tensor | None = None,
        op: str | int = "sum",
        *,
        stream: Any = None,
        config: NcclCallConfig | None = None,
    ) -> None:
        """The reduction of all sources, of the target's size, to all; in place without a target. Collective."""
        self._issue([Call("all_reduce", source, source if target is None else target, op)], stream, config)

    def reduce(
        self,
        source: torch.Tensor,
        target: torch.Tensor | None,
        root: int,
        op: str | int = "sum",
        *,
        stream: Any = None,
        config: NcclCallConfig | None = None,
    ) -> None:
        """The reduction of all sources to the root's target, of their size; others may give None. Collective."""
        self._issue([Call("reduce", source, target, op, root)], stream, config)

    def broadcast(
        self,
        source: torch.Tensor | None,
        target: torch.Tensor,
        root: int,
        *,
        stream: Any = None,
        config: NcclCallConfig | None = None,
    ) -> None:
        """The root's source to the targets of all, of its size; others may give no source. Collective."""
        self._issue([Call("broadcast", source, target, peer=root)], stream, config)

    def all_gather(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        *,
        stream: Any = None,
        config: NcclCallConfig | None = None,
    ) -> None:
        """Every rank's source, end to end, to the targets of all, n times as large. Collective."""
        self._issue([Call("all_gather", source, target)], stream, config)

    def reduce_scatter(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        op: str | int = "sum",
        *,
        stream: Any = None,
        config: NcclCallConfig | None = None,
    ) -> None:
        """The reduction of all sources, an n-th to each rank's target. Collective."""
        self._issue([Call("reduce_scatter", source, target, op)], stream, config)

    def all_to_all(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        *,
        stream: Any = None,
        config: NcclCallConfig | None = None,
    ) -> None:
        """An n-th of every source to each rank's target, of its size. Collective; a group of messages before 2.28."""
        self._issue([Call("all_to_all", source, target)], stream, config)

    def gather(
        self,
        source: torch.Tensor,
        target: torch.Tensor | None,
        root: int,
        *,
        stream: Any = None,
        config: NcclCallConfig | None = None,
    ) -> None:
        """Every rank's source, end to end, to the root's target. Collective; a group of messages before 2.28."""
        self._issue([Call("gather", source, target, peer=root)], stream, config)

    def scatter(
        self,
        source: torch.Tensor | None,
        target: torch.Tensor,
        root: int,
        *,
        stream: Any = None,
        config: NcclCallConfig | None = None,
    ) -> None:
        """An n-th of the root's source to each rank's target. Collective; a group of messages before 2.28."""
        self._issue([Call("scatter", source, target, peer=root)], stream, config)

    def send(self, source: torch.Tensor, peer: int, *, stream: Any = None) -> None:
        """A tensor to a rank that calls `recv`; messages both ways between two ranks go in one `group`."""
        self._issue([Call("send", source, peer=peer)], stream, None)

    def recv(self, target: torch.Tensor, peer: int, *, stream: Any = None) -> None:
        """A tensor of a rank that calls `send` with one of the same size and dtype."""
        self._issue([Call("recv", target=target, peer=peer)], stream, None)

    def all_gather_v(self, source: torch.Tensor, targets: Tensors, *, stream: Any = None) -> None:
        """Every rank's source to the targets of all, one for each rank, of the sources' sizes. Collective.

        NCCL has no such function: a group of broadcasts carries it.
        """
        dtype = dtype_of("all_gather_v", [source, *targets])
        own = self._own_of("all_gather_v", "targets", targets)
        if own.numel() != source.numel():
            raise ArgumentError(
                f"all_gather_v was given a source of {source.numel()} elements and a target of {own.numel()} for it"
            )
        parts = raw_parts("all_gather_v", targets)
        ((address, _),) = raw_parts("all_gather_v", [source])
        self._native.all_gather_v(address, parts, dtype, stream_handle(stream, source))

    def reduce_scatter_v(
        self, sources: Tensors, target: torch.Tensor, op: str | int = "sum", *, stream: Any = None
    ) -> None:
        """The reduction of all ranks' sources, each to the rank of its place in the list. Collective.

        NCCL has no such function: a group of reductions carries it.
        """
        dtype = dtype_of("reduce_scatter_v", [target, *sources])
        own = self._own_of("reduce_scatter_v", "sources", sources)
        if own.numel() != target.numel():
            raise ArgumentError(
                f"reduce_scatter_v was given a target of {target.numel()} elements and a source of {own.numel()} for it"
            )
        parts = raw_parts("reduce_scatter_v", sources)
        ((address, _),) = raw_parts("reduce_scatter_v", [target])
        self._native.reduce_scatter_v(parts, address, dtype, op, stream_handle(stream, target))

    def all_to_all_v(self, sources: Tensors, targets: Tensors, *, stream: Any = None) -> None:
        """A tensor to every rank and one from every rank, in the order of ranks, of any sizes. Collective.

        NCCL has no such function: a group of messages carries it; those without elements are left out.
        """
        dtype = dtype_of("all_to_all_v", [*sources, *targets])
        given, taken = raw_parts("all_to_all_v", sources), raw_parts("all_to_all_v", targets)
        self._native.all_to_all_v(given, taken, dtype, stream_handle(stream, next(iter([*sources, *targets]))))

    def gather_v(self, source: torch.Tensor, targets: Tensors, root: int, *, stream: Any = None) -> None:
        """Every rank's source to the root's targets, one for each rank; elsewhere the list is empty. Collective."""
        dtype = dtype_of("gather_v", [source, *targets])
        (own,) = raw_parts("gather_v", [source])
        self._native.gather_v(own, raw_parts("gather_v", targets), dtype, root, stream_handle(stream, source))

    def scatter_v(self, sources: Tensors, target: torch.Tensor, root: int, *, stream: Any = None) -> None:
        """The root's sources to the targets of all, one for each rank; elsewhere the list is empty. Collective."""
        dtype = dtype_of("scatter_v", [target, *sources])
        (own,) = raw_parts("scatter_v", [target])
        self._native.scatter_v(raw_parts("scatter_v", sources), own, dtype, root, stream_handle(stream, target))

    def _own_of(self, operation: str, what: str, tensors: Tensors) -> torch.Tensor:
        if len(tensors) != self._native.num_ranks:
            raise ArgumentError(
                f"{operation} was given {len(tensors)} {what}; there must be {self._native.num_ranks}, one for a rank"
            )
        return tensors[self._native.rank]

    def _issue(self, calls: Sequence[Call], stream: Any, config: NcclCallConfig | None) -> None:
        raw = [raw_call(call, self._native.num_ranks) for call in calls]
        tensor = next((each for call in calls for each in (call.source, call.target) if each is not None), None)
        self._native.group(raw, stream_handle(stream, tensor), config)
