"""torch.distributed's process group over NCCL, and on the CPU over shared memory and sockets.

torch calls most methods from Python, and some from C++, which finds those by name (PyProcessGroup.hpp). A method that
torch 2.13 has renamed is here by both names.
"""

import inspect
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, ParamSpec

import torch
from torch._C import _distributed_c10d as c10d

from tritondt._C import collective_method
from tritondt.errors import TransportError
from tritondt.process_group import kinds
from tritondt.process_group.group import Group
from tritondt.process_group.kinds import Kind, Lists, Tensors, by_tensor, flat
from tritondt.process_group.mailbox import ANY

_P = ParamSpec("_P")
# What a call without options means.
ALL_REDUCE = c10d.AllreduceOptions()
ALL_REDUCE_COALESCED = c10d.AllreduceCoalescedOptions()
BROADCAST = c10d.BroadcastOptions()
REDUCE = c10d.ReduceOptions()
ALL_GATHER = c10d.AllgatherOptions()
REDUCE_SCATTER = c10d.ReduceScatterOptions()
ALL_TO_ALL = c10d.AllToAllOptions()
GATHER = c10d.GatherOptions()
SCATTER = c10d.ScatterOptions()
BARRIER = c10d.BarrierOptions()


def _by_one_call(kind: Kind, *order: int) -> Callable[[Callable[_P, Any]], Callable[_P, Any]]:
    """A method that is one call of the extension for what was asked for before over NCCL.

    `order` are the places of the arguments with tensors, those of this rank's own first, and then of numbers.
    """

    def decorate(method: Callable[_P, Any]) -> Callable[_P, Any]:
        options: Any = inspect.signature(method).parameters["opts"].default
        has_op, has_root = hasattr(options, "reduceOp"), hasattr(options, "rootRank")
        return collective_method(method, kind.key, order, len(order) + 1, has_op, has_root)

    return decorate


class TritondtProcessGroup(Group):
    """One rank's part in a group; `dist.init_process_group("tritondt")` and `dist.new_group` make one.

    Raises TransportError for what cannot be carried, LocalTensorError for tensors of wrong sizes, PeerError where
    others failed or did not come, MismatchError where they came for something else, WorldError once it has ended.
    """

    @_by_one_call(kinds.ALL_REDUCE, 0)
    def allreduce(self, tensors: Tensors, opts: Any = ALL_REDUCE) -> Any:
        """Tensors, each reduced in place on all ranks."""
        return self._router.run(kinds.ALL_REDUCE, tensors, (tensors, opts))

    @_by_one_call(kinds.ALL_REDUCE_COALESCED, 0)
    def allreduce_coalesced(self, tensors: Tensors, opts: Any = ALL_REDUCE_COALESCED) -> Any:
        """Tensors, each reduced in place on all ranks, as one operation."""
        return self._router.run(kinds.ALL_REDUCE_COALESCED, tensors, (tensors, opts))

    @_by_one_call(kinds.BROADCAST, 0)
    def broadcast(self, tensors: Tensors, opts: Any = BROADCAST) -> Any:
        """Tensors of the root, to all."""
        return self._router.run(kinds.BROADCAST, tensors, (tensors, opts))

    @_by_one_call(kinds.REDUCE, 0)
    def reduce(self, tensors: Tensors, opts: Any = REDUCE) -> Any:
        """A tensor, reduced in place on the root."""
        return self._router.run(kinds.REDUCE, tensors, (tensors, opts))

    @_by_one_call(kinds.ALL_GATHER, 1, 0)
    def allgather(self, outputs: Lists, inputs: Tensors, opts: Any = ALL_GATHER) -> Any:
        """Every rank's tensor, to the list of each; sizes may differ from rank to rank."""
        return self._router.run(kinds.ALL_GATHER, [*inputs, *flat(outputs)], (outputs, inputs, opts))

    def allgather_coalesced(self, outputs: Lists, inputs: Tensors, opts: Any = ALL_GATHER) -> Any:
        """Every rank's tensors, to the lists of each; `outputs` has a list for each rank."""
        lists = by_tensor(outputs)
        return self._router.run(kinds.ALL_GATHER_COALESCED, [*inputs, *flat(lists)], (outputs, inputs, opts))

    @_by_one_call(kinds.ALL_GATHER_INTO_TENSOR, 1, 0)
    def _allgather_base(self, output: torch.Tensor, given: torch.Tensor, opts: Any = ALL_GATHER) -> Any:
        tensors = (given, output)
        return self._router.run(kinds.ALL_GATHER_INTO_TENSOR, tensors, (output, given, opts))

    @_by_one_call(kinds.ALL_GATHER_INTO_TENSORS, 1, 0)
    def allgather_into_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = ALL_GATHER) -> Any:
        """Every rank's tensors, end to end, to all."""
        return self._router.run(kinds.ALL_GATHER_INTO_TENSORS, [*inputs, *outputs], (outputs, inputs, opts))

    @_by_one_call(kinds.REDUCE_SCATTER, 0, 1)
    def reduce_scatter(self, outputs: Tensors, inputs: Lists, opts: Any = REDUCE_SCATTER) -> Any:
        """The reduction of the ranks' lists, each tensor to its rank; sizes may differ from rank to rank."""
        return self._router.run(kinds.REDUCE_SCATTER, [*outputs, *flat(inputs)], (outputs, inputs, opts))

    @_by_one_call(kinds.REDUCE_SCATTER_TENSOR, 0, 1)
    def _reduce_scatter_base(self, output: torch.Tensor, given: torch.Tensor, opts: Any = REDUCE_SCATTER) -> Any:
        return self._router.run(kinds.REDUCE_SCATTER_TENSOR, (output, given), (output, given, opts))

    @_by_one_call(kinds.REDUCE_SCATTER_TENSORS, 0, 1)
    def reduce_scatter_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = REDUCE_SCATTER) -> Any:
        """The reduction of the ranks' tensors, an equal part of each to every rank."""
        return self._router.run(kinds.REDUCE_SCATTER_TENSORS, [*outputs, *inputs], (outputs, inputs, opts))

    @_by_one_call(kinds.ALL_TO_ALL, 1, 0)
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = ALL_TO_ALL) -> Any:
        """A tensor to every rank and one from every rank."""
        return self._router.run(kinds.ALL_TO_ALL, [*inputs, *outputs], (outputs, inputs, opts))

    @_by_one_call(kinds.ALL_TO_ALL_SINGLE, 1, 0, 2, 3)
    def alltoall_base(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        output_rows: Sequence[int],
        input_rows: Sequence[int],
        opts: Any = ALL_TO_ALL,
    ) -> Any:
        """Parts of one tensor to every rank and from every rank, by rows; without sizes, equal parts."""
        arguments = (output, given, output_rows, input_rows, opts)
        return self._router.run(kinds.ALL_TO_ALL_SINGLE, (given, output), arguments)

    @_by_one_call(kinds.GATHER, 1, 0)
    def gather(self, outputs: Lists, inputs: Tensors, opts: Any = GATHER) -> Any:
        """Every rank's tensor, to the root's list."""
        return self._router.run(kinds.GATHER, [*inputs, *flat(outputs)], (outputs, inputs, opts))

    @_by_one_call(kinds.SCATTER, 0, 1)
    def scatter(self, outputs: Tensors, inputs: Lists, opts: Any = SCATTER) -> Any:
        """A tensor of the root's list to every rank."""
        return self._router.run(kinds.SCATTER, [*outputs, *flat(inputs)], (outputs, inputs, opts))

    def send(self, tensors: Tensors, target: int, tag: int = 0) -> Any:
        """Tensors to a rank of the group; on NCCL tags say nothing, and messages arrive in the order they were sent."""
        return self._router.message("send", tensors, target, tag)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> Any:
        """Tensors of a rank of the group."""
        return self._router.message("recv", tensors, source, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Any:
        """A tensor of whoever sends first; TransportError on a GPU, where NCCL receives of ranks that are named."""
        return self._router.message("recv", tensors, ANY, tag)

    def barrier(self, opts: Any = BARRIER) -> Any:
        """A Work that is over when all ranks have come; on a GPU, with all that was put into its stream before."""
        return self._router.barrier(opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier of the host; PeerError names the first rank that has not come, or all of them."""
        self._router.monitored_barrier(timeout, names_all=wait_all_ranks)

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalescing(device).start_coalescing()

    def _end_coalescing(self, device: torch.device) -> Any:
        return self._coalescing(device).end_coalescing()

    def _coalescing(self, device: torch.device) -> Any:
        found = self._router.nccl_group(device, str, "coalescing")
        if found is None:
            raise TransportError(f"coalescing was asked for on {device}; there operations run one by one")
        return found

    # As torch 2.13 calls them.
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base
