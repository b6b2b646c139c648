"""Collectives of torch.distributed as operations: what cannot be carried is refused here, before anything is sent."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from tritondt.backend import calls
from tritondt.backend.calls import Place, Tensors
from tritondt.backend.checks import (
    check_dense,
    check_dtypes,
    check_factor,
    check_number,
    check_place,
    check_sizes,
    check_tensors,
    split_sizes,
)
from tritondt.backend.elements import op_name
from tritondt.backend.operation import Operation


class Requests:
    """Those of one rank of a group, for tensors of a device."""

    def __init__(self, place: Place, device: torch.device) -> None:
        self._place, self._device = place, device

    def all_reduce(self, text: str, tensors: Tensors, op: Any) -> Operation:
        """Tensors, each reduced in place."""
        check_dense(text, tensors, self._device)
        return Operation(text, calls.all_reduce(tensors, op), [*tensors, *_factor(text, tensors, op)], tensors)

    def broadcast(self, text: str, tensors: Tensors, root: int) -> Operation:
        """Tensors of the root, to all."""
        check_dense(text, tensors, self._device)
        check_place(text, root, self._place.size)
        return Operation(text, calls.broadcast(tensors, root), tensors, tensors)

    def reduce(self, text: str, tensors: Tensors, op: Any, root: int) -> Operation:
        """A tensor, reduced in place on the root."""
        check_dense(text, tensors, self._device)
        check_place(text, root, self._place.size)
        made = [call for tensor in tensors for call in calls.reduce(tensor, op, root)]
        return Operation(text, made, [*tensors, *_factor(text, tensors, op)], tensors)

    def all_gather(self, text: str, lists: Sequence[Tensors], given: Tensors) -> Operation:
        """Every rank's tensor, to the list of each; the lists say how large the ranks' tensors are."""
        check_number(text, "lists of outputs", len(lists), len(given))
        made = []
        for outputs, own in zip(lists, given, strict=True):
            self._check_list(text, "outputs", outputs, own)
            check_sizes(text, "an input", own.numel(), outputs[self._place.rank].numel(), "this rank's output")
            made += calls.all_gather(self._place, outputs, own)
        results = [output for outputs in lists for output in outputs]
        return Operation(text, made, [*results, *given], results)

    def all_gather_into(self, text: str, outputs: Tensors, given: Tensors) -> Operation:
        """Every rank's tensor, end to end, to each; for each pair of tensors."""
        self._check_pairs(text, outputs, given)
        for output, own in zip(outputs, given, strict=True):
            check_sizes(text, "an output", output.numel(), own.numel() * self._place.size, self._times(own))
        return Operation(text, calls.all_gather_into(outputs, given), [*outputs, *given], outputs)

    def reduce_scatter(self, text: str, outputs: Tensors, lists: Sequence[Tensors], op: Any) -> Operation:
        """The reduction of the ranks' lists, each tensor to its rank."""
        check_number(text, "lists of inputs", len(lists), len(outputs))
        made = []
        for output, given in zip(outputs, lists, strict=True):
            self._check_list(text, "inputs", given, output)
            check_sizes(text, "an output", output.numel(), given[self._place.rank].numel(), "this rank's input")
            made += calls.reduce_scatter(self._place, output, given, op)
        held = [*outputs, *(tensor for given in lists for tensor in given), *_factor(text, outputs, op)]
        return Operation(text, made, held, outputs)

    def reduce_scatter_into(self, text: str, outputs: Tensors, given: Tensors, op: Any) -> Operation:
        """The reduction of the ranks' tensors, an equal part to each; for each pair of tensors."""
        self._check_pairs(text, outputs, given)
        for output, whole in zip(outputs, given, strict=True):
            check_sizes(text, "an input", whole.numel(), output.numel() * self._place.size, self._times(output))
        made = calls.reduce_scatter_into(outputs, given, op)
        return Operation(text, made, [*outputs, *given, *_factor(text, outputs, op)], outputs)

    def all_to_all(self, text: str, outputs: Tensors, given: Tensors) -> Operation:
        """A tensor to every rank and one from every rank."""
        for what, tensors in (("inputs", given), ("outputs", outputs)):
            check_number(text, what, len(tensors), self._place.size)
        self._check_alike(text, [*given, *outputs])
        own = self._place.rank
        check_sizes(text, "an output", outputs[own].numel(), given[own].numel(), "what this rank sends itself")
        return Operation(text, calls.all_to_all(outputs, given), [*outputs, *given], outputs)

    def all_to_all_parts(
        self,
        text: str,
        output: torch.Tensor,
        given: torch.Tensor,
        output_rows: Sequence[int],
        input_rows: Sequence[int],
    ) -> Operation:
        """The same with parts of one tensor, by rows of its first dim."""
        self._check_alike(text, [output, given])
        size, own = self._place.size, self._place.rank
        sent = split_sizes(text, "input", given, input_rows, size)
        received = split_sizes(text, "output", output, output_rows, size)
        check_sizes(text, "an output", received[own], sent[own], "what this rank sends itself")
        return Operation(text, calls.all_to_all_parts(output, given, received, sent), [output, given], [output])

    def gather(self, text: str, lists: Sequence[Tensors], given: Tensors, root: int) -> Operation:
        """Every rank's tensor, to the root's list."""
        check_place(text, root, self._place.size)
        check_number(text, "inputs", len(given), 1)
        outputs = self._of_root(text, "outputs", lists, given[0], root)
        return Operation(text, calls.gather(given[0], outputs, root), [*given, *outputs], outputs)

    def scatter(self, text: str, outputs: Tensors, lists: Sequence[Tensors], root: int) -> Operation:
        """A tensor of the root's list to every rank."""
        check_place(text, root, self._place.size)
        check_number(text, "outputs", len(outputs), 1)
        given = self._of_root(text, "inputs", lists, outputs[0], root)
        return Operation(text, calls.scatter(outputs[0], given, root), [*given, *outputs], outputs)

    def message(self, text: str, kind: str, tensors: Tensors, peer: int) -> Operation:
        """Tensors to a peer ("send") or from one ("recv")."""
        check_dense(text, tensors, self._device)
        check_place(text, peer, self._place.size)
        source = peer if kind == "recv" else self._place.rank
        made = calls.message(kind, tensors, peer)
        return Operation(text, made, tensors, tensors if kind == "recv" else [], (peer,), source=source)

    def barrier(self, text: str) -> Operation:
        """Nothing but the coming of all: a sum that nobody reads."""
        token = torch.zeros(1, dtype=torch.int32, device=self._device)
        return Operation(text, calls.all_reduce([token], dist.ReduceOp.SUM), [token], [], waits_on_host=True)

    def _of_root(self, text: str, what: str, lists: Sequence[Tensors], own: torch.Tensor, root: int) -> Tensors:
        """The root's list; none elsewhere."""
        if self._place.rank != root:
            check_number(text, f"lists of {what} on a rank that is not the root", len(lists), 0)
            check_tensors(text, [own], self._device)
            return []
        check_number(text, f"lists of {what} on the root", len(lists), 1)
        self._check_list(text, what, lists[0], own)
        check_sizes(text, "a tensor", own.numel(), lists[0][root].numel(), f"the root's own among the {what}")
        return lists[0]

    def _check_list(self, text: str, what: str, tensors: Tensors, own: torch.Tensor) -> None:
        check_number(text, what, len(tensors), self._place.size)
        self._check_alike(text, [*tensors, own])

    def _check_pairs(self, text: str, outputs: Tensors, given: Tensors) -> None:
        check_number(text, "outputs", len(outputs), len(given))
        check_tensors(text, [*outputs, *given], self._device)
        for pair in zip(outputs, given, strict=True):
            check_dtypes(text, pair)

    def _check_alike(self, text: str, tensors: Tensors) -> None:
        check_tensors(text, tensors, self._device)
        check_dtypes(text, tensors)

    def _times(self, part: torch.Tensor) -> str:
        return f"{part.numel()} on each of {self._place.size} ranks"


def _factor(text: str, tensors: Tensors, op: Any) -> list[torch.Tensor]:
    """The factor of a PREMUL_SUM where it is a tensor, which the operation reads as well."""
    if op_name(op) != "premul_sum":
        return []
    factor = op.__getstate__()[1]
    if not isinstance(factor, torch.Tensor):
        return []
    check_factor(text, factor, tensors)
    return [factor]
