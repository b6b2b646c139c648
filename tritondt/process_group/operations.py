"""Collectives of torch.distributed as operations: what cannot be carried is refused here, before anything is sent."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tritondt._C import NcclLibrary
from tritondt.process_group import collective, nccl_programs
from tritondt.process_group.checks import (
    check_dense,
    check_dtypes,
    check_factor,
    check_group_rank,
    check_list,
    check_number,
    check_rooted,
    check_sizes,
    check_tensors,
    check_whole,
    split_sizes,
)
from tritondt.process_group.collective import Collective, Reduction
from tritondt.process_group.naming import op_name, reduced
from tritondt.process_group.nccl_programs import GroupRank, Numbers, lie_end_to_end
from tritondt.process_group.operation import ALL, Call, Operation, Request, Staging, TensorOffset

# Calls of NCCL in the operations that are kept, about 230 bytes each: those of a training step are far fewer.
MAX_KEPT_CALLS = 65536

Tensors = Sequence[torch.Tensor]
Signature = tuple[Hashable, ...]


class _Described(NamedTuple):
    """A collective, its numbers of sources and targets, none where it is in place, and whether they are `whole`.

    They are where a tensor for each rank lies end to end with the others.
    """

    collective: Collective
    num_sources: int
    num_targets: int
    is_whole: bool = True


class OperationCache:
    """Operations of one rank of a group, kept for tensors alike on a device.

    The tensors of an operation are this rank's own, what it gives or is given, and then the others: inputs and then
    outputs, but outputs and then inputs of what scatters; where it works in place, what it works on.
    """

    def __init__(self, group_rank: GroupRank, device: torch.device, library: NcclLibrary) -> None:
        self._group_rank, self._device, self._library = group_rank, device, library
        self._kept: dict[Signature, Operation] = {}
        self.on_clear: Callable[[], object] = self._kept.clear  # where operations are let go of
        self._num_calls = 0

    def operation(
        self,
        key: Hashable | None,
        tensors: Tensors,
        describe: Callable[..., str],
        make: Callable[..., Operation],
        arguments: tuple[Any, ...],
    ) -> Operation:
        """The operation that `make` gives, or gave before for this key and tensors alike.

        `describe` and `make` are given `arguments`, the latter after this cache and the text. Nothing is kept for a
        key of None.
        """
        signature = None if key is None else self._signature(key, tensors)
        if signature is None:
            return make(self, describe(*arguments), *arguments)
        found = self._kept.get(signature)
        if found is None:
            found = make(self, describe(*arguments), *arguments)
            self._keep(signature, found)
        return found

    def kept(self, key: Hashable | None, tensors: Tensors) -> Operation | None:
        """The operation that is kept for this key and tensors alike, if any."""
        signature = None if key is None else self._signature(key, tensors)
        return None if signature is None else self._kept.get(signature)

    def _signature(self, key: Hashable, tensors: Tensors) -> Signature | None:
        """A key that no other operation has; None where the tensors have to be looked at again each time."""
        parts, device = [key], self._device
        for tensor in tensors:
            if (
                tensor.layout is not torch.strided
                or not tensor.is_contiguous()
                or tensor.device != device
                or tensor.is_conj()
                or tensor.is_neg()
            ):
                return None
            parts += (tensor.numel(), tensor.dtype)
        return tuple(parts)

    def _keep(self, signature: Signature, operation: Operation) -> None:
        self._num_calls += len(operation.calls) + 1
        if self._num_calls > MAX_KEPT_CALLS:
            self._kept.clear()
            self.on_clear()
            self._num_calls = len(operation.calls) + 1
        self._kept[signature] = operation

    def all_reduce(self, text: str, tensors: Tensors, op: Any) -> Operation:
        """Tensors, each reduced in place."""
        check_dense(text, tensors, self._device)
        _check_factor(text, tensors, op)
        made = [self._in_place(collective.all_reduce, tensor, _reduction(tensor, op)) for tensor in tensors]
        return self._operation(text, made)

    def broadcast(self, text: str, tensors: Tensors, root: int) -> Operation:
        """Tensors of the root, to all."""
        check_dense(text, tensors, self._device)
        check_group_rank(text, root, self._group_rank.size)
        return self._operation(text, [self._in_place(collective.broadcast, tensor, root) for tensor in tensors])

    def reduce(self, text: str, tensors: Tensors, op: Any, root: int) -> Operation:
        """A tensor, reduced in place on the root."""
        check_dense(text, tensors, self._device)
        check_group_rank(text, root, self._group_rank.size)
        _check_factor(text, tensors, op)
        made = [self._in_place(collective.reduce, tensor, _reduction(tensor, op), root) for tensor in tensors]
        return self._operation(text, made)

    def all_gather(self, text: str, lists: Sequence[Tensors], given: Tensors, lengths: Sequence[int] = ()) -> Operation:
        """Every rank's tensor, to the list of each; the lists say how large the ranks' tensors are.

        `lengths` are those of lists by rank, where these were given.
        """
        for length in lengths:
            check_number(text, "outputs of one rank", length, len(given))
        check_number(text, "lists of outputs", len(lists), len(given))
        made, own = [], self._group_rank.rank
        for outputs, source in zip(lists, given, strict=True):
            self._check_list(text, "outputs", outputs, source)
            check_sizes(text, "an input", source.numel(), outputs[own].numel(), "this rank's output")
            described = collective.all_gather(*self._group_rank, [each.nbytes for each in outputs])
            made.append(_Described(described, 1, len(outputs), lie_end_to_end(outputs)))
        return self._operation(text, made, slice(len(given), len(given) + sum(map(len, lists))))

    def all_gather_into(self, text: str, outputs: Tensors, given: Tensors) -> Operation:
        """Every rank's tensor, end to end, to each; for each pair of tensors."""
        self._check_pairs(text, outputs, given)
        for output, own in zip(outputs, given, strict=True):
            check_whole(text, "an output", output, own, self._group_rank.size)
        made = [_Described(collective.all_gather_into(*self._group_rank, own.nbytes), 1, 1) for own in given]
        return self._operation(text, made, slice(len(given), None))

    def reduce_scatter(self, text: str, outputs: Tensors, lists: Sequence[Tensors], op: Any) -> Operation:
        """The reduction of the ranks' lists, each tensor to its rank."""
        check_number(text, "lists of inputs", len(lists), len(outputs))
        _check_factor(text, outputs, op)
        made, own = [], self._group_rank.rank
        for output, given in zip(outputs, lists, strict=True):
            self._check_list(text, "inputs", given, output)
            check_sizes(text, "an output", output.numel(), given[own].numel(), "this rank's input")
            pieces = [(number, 0, each.nbytes) for number, each in enumerate(given)]
            described = collective.reduce_scatter(*self._group_rank, pieces, _reduction(output, op))
            made.append(_Described(described, len(given), 1, lie_end_to_end(given)))
        return self._operation(text, made, slice(len(outputs)), targets_first=True)

    def reduce_scatter_into(self, text: str, outputs: Tensors, given: Tensors, op: Any) -> Operation:
        """The reduction of the ranks' tensors, an equal part to each; for each pair of tensors."""
        self._check_pairs(text, outputs, given)
        _check_factor(text, outputs, op)
        made = []
        for output, whole in zip(outputs, given, strict=True):
            check_whole(text, "an input", whole, output, self._group_rank.size)
            described = collective.reduce_scatter_even(*self._group_rank, output.nbytes, _reduction(output, op))
            made.append(_Described(described, 1, 1))
        return self._operation(text, made, slice(len(outputs)), targets_first=True)

    def all_to_all(self, text: str, outputs: Tensors, given: Tensors) -> Operation:
        """A tensor to every rank and one from every rank."""
        for what, tensors in (("inputs", given), ("outputs", outputs)):
            check_number(text, what, len(tensors), self._group_rank.size)
        self._check_alike(text, [*given, *outputs])
        own = self._group_rank.rank
        check_sizes(text, "an output", outputs[own].numel(), given[own].numel(), "what this rank sends itself")
        spans = [[(rank, (rank, 0, each.nbytes)) for rank, each in enumerate(tensors)] for tensors in (given, outputs)]
        described = collective.all_to_all(*self._group_rank, *spans)
        return self._operation(text, [_Described(described, len(given), len(outputs))], slice(len(given), None))

    def all_to_all_parts(
        self,
        text: str,
        output: torch.Tensor,
        given: torch.Tensor,
        output_rows: Sequence[int],
        input_rows: Sequence[int],
    ) -> Operation:
        """Parts of one tensor to every rank and from every rank, by rows of its first dim."""
        self._check_alike(text, [output, given])
        size, own = self._group_rank.size, self._group_rank.rank
        sent = split_sizes(text, "input", given, input_rows, size)
        received = split_sizes(text, "output", output, output_rows, size)
        check_sizes(text, "an output", received[own], sent[own], "what this rank sends itself")
        leaving, coming = (collective.rows_of_ranks(counts, given.itemsize) for counts in (sent, received))
        described = collective.all_to_all(*self._group_rank, leaving, coming)
        return self._operation(text, [_Described(described, 1, 1)], slice(1, None))

    def gather(self, text: str, lists: Sequence[Tensors], given: Tensors, root: int) -> Operation:
        """Every rank's tensor, to the root's list."""
        check_number(text, "inputs", len(given), 1)
        outputs = self._of_root(text, "outputs", lists, given[0], root)
        sizes = [each.nbytes for each in outputs]
        described = collective.gather(*self._group_rank, given[0].nbytes, sizes, root)
        return self._operation(text, [_Described(described, 1, len(outputs))], slice(1, None))

    def scatter(self, text: str, outputs: Tensors, lists: Sequence[Tensors], root: int) -> Operation:
        """A tensor of the root's list to every rank."""
        check_number(text, "outputs", len(outputs), 1)
        given = self._of_root(text, "inputs", lists, outputs[0], root)
        sizes = [each.nbytes for each in given]
        described = collective.scatter(*self._group_rank, outputs[0].nbytes, sizes, root)
        return self._operation(text, [_Described(described, len(given), 1)], slice(1), targets_first=True)

    def message(self, text: str, kind: str, tensors: Tensors, peer: int, number: int) -> Operation:
        """Tensors to a peer ("send") or from one ("recv"), by its `number` in the communicator that carries them."""
        check_dense(text, tensors, self._device)
        check_group_rank(text, peer, self._group_rank.size)
        is_received = kind == "recv"
        places = [(TensorOffset(place), tensor.nbytes) for place, tensor in enumerate(tensors) if tensor.numel()]
        made = tuple(Call(kind, at, at, num_bytes, peer=number) for at, num_bytes in places)
        source = peer if is_received else self._group_rank.rank
        return Operation(text, made, self._library, ALL if is_received else slice(0), peers=(peer,), source=source)

    def barrier(self, text: str) -> Request:
        """A barrier: a sum over all ranks that nobody reads."""
        token = torch.zeros(1, dtype=torch.int32, device=self._device)
        described = self._in_place(collective.all_reduce, token, _reduction(token, dist.ReduceOp.SUM))
        return Request(replace(self._operation(text, [described], slice(0)), waits_on_host=True), [token])

    def _in_place(self, describe: Callable[..., Collective], tensor: torch.Tensor, *arguments: Any) -> _Described:
        """A collective that reads and writes one tensor."""
        return _Described(describe(*self._group_rank, tensor.nbytes, *arguments), 1, 0)

    def _operation(
        self, text: str, made: Sequence[_Described], results: slice = ALL, *, targets_first: bool = False
    ) -> Operation:
        """Collectives as one operation, whose tensors are the sources of all and then the targets, or the reverse."""
        num_sources, num_targets = sum(each.num_sources for each in made), sum(each.num_targets for each in made)
        source, target = (num_targets, 0) if targets_first else (0, num_sources)
        calls, stagings = list[Call](), list[Staging]()
        for described, num_read, num_written, is_whole in made:
            sources = range(source, source + num_read)
            targets = range(target, target + num_written) if num_written else sources
            memory = None if is_whole else num_sources + num_targets + len(stagings)
            found = nccl_programs.compiled(described, Numbers(sources, targets, memory))
            calls += found.calls
            stagings += [] if found.staging is None else [found.staging]
            source, target = source + num_read, target + num_written
        return Operation(text, tuple(calls), self._library, results, tuple(stagings))

    def _of_root(self, text: str, what: str, lists: Sequence[Tensors], own: torch.Tensor, root: int) -> Tensors:
        """The list that the root was given, checked; an empty one on other ranks."""
        found = check_rooted(text, what, lists, own, self._device, (*self._group_rank, root))
        check_tensors(text, [*found, own], self._device)
        return found

    def _check_list(self, text: str, what: str, tensors: Tensors, own: torch.Tensor) -> None:
        check_list(text, what, tensors, own, self._device, self._group_rank.size)
        check_tensors(text, [*tensors, own], self._device)

    def _check_pairs(self, text: str, outputs: Tensors, given: Tensors) -> None:
        check_number(text, "outputs", len(outputs), len(given))
        check_tensors(text, [*outputs, *given], self._device)
        for pair in zip(outputs, given, strict=True):
            check_dtypes(text, pair)

    def _check_alike(self, text: str, tensors: Tensors) -> None:
        check_tensors(text, tensors, self._device)
        check_dtypes(text, tensors)


def _check_factor(text: str, tensors: Tensors, op: Any) -> None:
    """Checks the factor of a PREMUL_SUM where it is a tensor, which the operation reads as well."""
    if op_name(op) == "premul_sum" and isinstance(factor := op.__getstate__()[1], torch.Tensor):
        check_factor(text, factor, tensors)


def _reduction(tensor: torch.Tensor, op: Any) -> Reduction:
    """The reduction of a tensor's elements in NCCL's names; TransportError where NCCL does not reduce such by `op`."""
    dtype, num, known = reduced(tensor.dtype, op)
    return Reduction(dtype, known, 1, tensor.itemsize // num)
