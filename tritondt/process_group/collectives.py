"""torch.distributed's process group over NCCL and Gloo.

torch calls most methods from Python, and some from C++, which finds those by name (PyProcessGroup.hpp). What torch 2.13
has renamed is here by both names.
"""

from collections.abc import Callable, Hashable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from tritondt.errors import TransportError
from tritondt.process_group.debug_compare import Parts
from tritondt.process_group.group import Group
from tritondt.process_group.naming import PRE_MUL_SUM, described, number_of
from tritondt.process_group.nccl_calls import lie_end_to_end

Tensors = Sequence[torch.Tensor]
Lists = Sequence[Tensors]

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


class TritondtProcessGroup(Group):
    """One rank's part in a group; `dist.init_process_group("tritondt")` and `dist.new_group` make one.

    Raises TransportError for what cannot be carried, LocalTensorError for tensors of wrong sizes, PeerError where
    others failed or did not come, MismatchError where they came for something else, WorldError once it has ended.
    """

    def allreduce(self, tensors: Tensors, opts: Any = ALL_REDUCE) -> Any:
        """Tensors, each reduced in place on all ranks."""
        op = opts.reduceOp
        return self._router.run(
            key_of("all_reduce", op),
            tensors,
            opts,
            lambda: described("all_reduce", tensors, op=op),
            lambda gloo: gloo.allreduce(tensors, opts),
            lambda on, text: on.all_reduce(text, tensors, op),
        )

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = ALL_REDUCE_COALESCED) -> Any:
        """The same, as one operation."""
        op = opts.reduceOp
        return self._router.run(
            key_of("all_reduce", op),
            tensors,
            opts,
            lambda: described("all_reduce", tensors, op=op),
            lambda gloo: gloo.allreduce_coalesced(tensors, opts),
            lambda on, text: on.all_reduce(text, tensors, op),
        )

    def broadcast(self, tensors: Tensors, opts: Any = BROADCAST) -> Any:
        """Tensors of the root, to all."""
        root = opts.rootRank
        return self._router.run(
            ("broadcast", root),
            tensors,
            opts,
            lambda: described("broadcast", tensors, root=root),
            lambda gloo: gloo.broadcast(tensors, opts),
            lambda on, text: on.broadcast(text, tensors, root),
        )

    def reduce(self, tensors: Tensors, opts: Any = REDUCE) -> Any:
        """A tensor, reduced in place on the root."""
        op, root = opts.reduceOp, opts.rootRank
        return self._router.run(
            key_of("reduce", op, root),
            tensors,
            opts,
            lambda: described("reduce", tensors, op=op, root=root),
            lambda gloo: gloo.reduce(tensors, opts),
            lambda on, text: on.reduce(text, tensors, op, root),
        )

    def allgather(self, outputs: Lists, inputs: Tensors, opts: Any = ALL_GATHER) -> Any:
        """Every rank's tensor, to the list of each; sizes may differ from rank to rank."""
        return self._all_gather(outputs, inputs, opts, lambda gloo: gloo.allgather(outputs, inputs, opts))

    def allgather_coalesced(self, outputs: Lists, inputs: Tensors, opts: Any = ALL_GATHER) -> Any:
        """The same for several tensors; `outputs` has a list for each rank here."""
        lists = [list(each) for each in zip(*outputs, strict=False)]
        return self._all_gather(
            lists, inputs, opts, lambda gloo: gloo.allgather_coalesced(outputs, inputs, opts), list(map(len, outputs))
        )

    def _all_gather(
        self, lists: Lists, inputs: Tensors, opts: Any, over_gloo: Callable[[Any], Any], lengths: Sequence[int] = ()
    ) -> Any:
        outputs = _flat(lists)
        return self._router.run(
            ("all_gather", len(inputs), _shape(lists), *lengths),
            [*inputs, *outputs],
            opts,
            lambda: described("all_gather", outputs or inputs),
            over_gloo,
            lambda on, text: on.all_gather(text, lists, inputs, lengths),
        )

    def _allgather_base(self, output: torch.Tensor, given: torch.Tensor, opts: Any = ALL_GATHER) -> Any:
        return self._router.run(
            "all_gather_into_tensor",
            (given, output),
            opts,
            lambda: described("all_gather_into_tensor", [given]),
            lambda gloo: gloo._allgather_base(output, given, opts),
            lambda on, text: on.all_gather_into(text, [output], [given]),
        )

    def allgather_into_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = ALL_GATHER) -> Any:
        """Every rank's tensors, end to end, to all."""
        return self._router.run(
            ("all_gather_into_tensor", len(inputs)),
            [*inputs, *outputs],
            opts,
            lambda: described("all_gather_into_tensor", inputs),
            lambda gloo: gloo.allgather_into_tensor_coalesced(outputs, inputs, opts),
            lambda on, text: on.all_gather_into(text, outputs, inputs),
        )

    def reduce_scatter(self, outputs: Tensors, inputs: Lists, opts: Any = REDUCE_SCATTER) -> Any:
        """The reduction of the ranks' lists, each tensor to its rank; sizes may differ from rank to rank."""
        op, given = opts.reduceOp, _flat(inputs)
        return self._router.run(
            key_of("reduce_scatter", op, len(outputs), _shape(inputs)),
            [*outputs, *given],
            opts,
            lambda: described("reduce_scatter", given or outputs, op=op),
            lambda gloo: gloo.reduce_scatter(outputs, inputs, opts),
            lambda on, text: on.reduce_scatter(text, outputs, inputs, op),
        )

    def _reduce_scatter_base(self, output: torch.Tensor, given: torch.Tensor, opts: Any = REDUCE_SCATTER) -> Any:
        op = opts.reduceOp
        return self._router.run(
            key_of("reduce_scatter_tensor", op),
            (output, given),
            opts,
            lambda: described("reduce_scatter_tensor", [output], op=op),
            lambda gloo: gloo._reduce_scatter_base(output, given, opts),
            lambda on, text: on.reduce_scatter_into(text, [output], [given], op),
        )

    def reduce_scatter_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = REDUCE_SCATTER) -> Any:
        """The reduction of the ranks' tensors, an equal part of each to every rank."""
        op = opts.reduceOp
        return self._router.run(
            key_of("reduce_scatter_tensor", op, len(outputs)),
            [*outputs, *inputs],
            opts,
            lambda: described("reduce_scatter_tensor", outputs, op=op),
            lambda gloo: gloo.reduce_scatter_tensor_coalesced(outputs, inputs, opts),
            lambda on, text: on.reduce_scatter_into(text, outputs, inputs, op),
        )

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = ALL_TO_ALL) -> Any:
        """A tensor to every rank and one from every rank."""
        return self._router.run(
            ("all_to_all", len(inputs)),
            [*inputs, *outputs],
            opts,
            lambda: described("all_to_all", inputs, is_even=False),
            lambda gloo: gloo.alltoall(outputs, inputs, opts),
            lambda on, text: on.all_to_all(text, outputs, inputs),
            lambda: Parts(_counts(inputs), _counts(outputs)),
        )

    def alltoall_base(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        output_rows: Sequence[int],
        input_rows: Sequence[int],
        opts: Any = ALL_TO_ALL,
    ) -> Any:
        """The same with parts of one tensor, by rows; without sizes, equal parts."""
        return self._router.run(
            ("all_to_all_single", given.shape, output.shape, tuple(input_rows), tuple(output_rows)),
            (given, output),
            opts,
            lambda: described("all_to_all_single", [given], is_even=False),
            lambda gloo: gloo.alltoall_base(output, given, output_rows, input_rows, opts),
            lambda on, text: on.all_to_all_parts(text, output, given, output_rows, input_rows),
            lambda: Parts(tuple(input_rows), tuple(output_rows)),
        )

    def gather(self, outputs: Lists, inputs: Tensors, opts: Any = GATHER) -> Any:
        """Every rank's tensor, to the root's list."""
        root = opts.rootRank
        return self._router.run(
            ("gather", root, len(inputs), len(outputs)),
            [*inputs, *_flat(outputs)],
            opts,
            lambda: described("gather", inputs, root=root, is_even=False),
            lambda gloo: gloo.gather(outputs, inputs, opts),
            lambda on, text: on.gather(text, outputs, inputs, root),
            lambda: self._rooted_parts(root, inputs, outputs)[0],
        )

    def scatter(self, outputs: Tensors, inputs: Lists, opts: Any = SCATTER) -> Any:
        """A tensor of the root's list to every rank."""
        root = opts.rootRank
        return self._router.run(
            ("scatter", root, len(outputs), len(inputs)),
            [*outputs, *_flat(inputs)],
            opts,
            lambda: described("scatter", outputs, root=root, is_even=False),
            lambda gloo: gloo.scatter(outputs, inputs, opts),
            lambda on, text: on.scatter(text, outputs, inputs, root),
            lambda: self._rooted_parts(root, outputs, inputs)[1],
        )

    def _rooted_parts(self, root: int, own: Tensors, lists: Lists) -> tuple[Parts, Parts]:
        """What goes to the root from all, and the other way around."""
        with_root = tuple(own[0].numel() if place == root else 0 for place in range(self._router.place.size))
        of_root = _counts(lists[0]) if lists else ()
        return Parts(with_root, of_root), Parts(of_root, with_root)

    def send(self, tensors: Tensors, target: int, tag: int = 0) -> Any:
        """Tensors to a rank of the group; on NCCL tags say nothing, and messages arrive in the order they were sent."""
        return self._router.message("send", tensors, target, lambda gloo: gloo.send(tensors, target, tag))

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> Any:
        """Tensors of a rank of the group."""
        return self._router.message("recv", tensors, source, lambda gloo: gloo.recv(tensors, source, tag))

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Any:
        """A tensor of whoever sends first; TransportError on a GPU, where NCCL receives of ranks that are named."""
        text = "a receive from any rank"
        if self._router.side(lambda: text, tensors[0].device) is not None:
            raise TransportError(f"{text} was asked for; NCCL receives from a rank that is named")
        return self._router.over_gloo.recv_anysource(tensors, tag)

    def barrier(self, opts: Any = BARRIER) -> Any:
        """A Work that is over when all ranks have come; on a GPU, with all that was put into its stream before."""
        return self._router.barrier(opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier of the host that names the ranks that have not come."""
        self._router.gloo.monitored_barrier(timeout or self._router.timeout, wait_all_ranks)

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalescing(device).start_coalescing()

    def _end_coalescing(self, device: torch.device) -> Any:
        return self._coalescing(device).end_coalescing()

    def _coalescing(self, device: torch.device) -> Any:
        found = self._router.side(lambda: "coalescing", device)
        if found is None:
            raise TransportError(f"coalescing was asked for on {device}; Gloo runs operations one by one")
        return found

    # As torch 2.13 calls them.
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base


def key_of(kind: str, op: Any, *rest: Hashable) -> Hashable | None:
    """What tells a reduction from others on tensors alike; None where its factor does, which is of one call."""
    number = number_of(op)
    return None if number == PRE_MUL_SUM else (kind, number, *rest)


def _flat(lists: Lists) -> list[torch.Tensor]:
    return [tensor for each in lists for tensor in each]


def _shape(lists: Lists) -> tuple[Hashable, ...]:
    """Of lists of tensors, what their calls follow from besides the tensors' sizes."""
    return tuple((len(each), bool(each) and lie_end_to_end(each)) for each in lists)


def _counts(tensors: Tensors) -> tuple[int, ...]:
    return tuple(tensor.numel() for tensor in tensors)
