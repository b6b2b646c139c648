"""Reduction of the gradients of parameters of one dtype: packed, in one exchange, to each rank's shards.

Beside its gradients every rank sends which parameters have one. So a parameter that no rank has used keeps none, one
that some ranks have used gets the mean over all, and no rank waits for what another does not send.
"""

from math import prod
from typing import NamedTuple

import torch

from tritondt.comm.packing.wire_dtype import narrower
from tritondt.comm.work import Work
from tritondt.errors import was_told
from tritondt.fsdp.flat import FlatParameters, Specs
from tritondt.fsdp.flat_layout import FlatLayout
from tritondt.fsdp.parameter import ShardedParameter
from tritondt.kernels.boxes import CastBox, CopyBox
from tritondt.kernels.memory import allocate
from tritondt.kernels.tables import Table, cast_table, copy_table
from tritondt.redistribution.refusals import refuse_redistribution
from tritondt.redistribution.run import redistribute_local_async
from tritondt.sharding.placement import ReduceOp


class Policy(NamedTuple):
    """Dtype of the messages of gradients, None for that of the gradients, and what their sum is divided by; None for
    the number of ranks.
    """

    reduce_dtype: torch.dtype | None
    divisor: float | None


class Reduced(NamedTuple):
    """Gradients under way: the flat tensor that will hold this rank's shards, and the parameters in it.

    `refused` is why this rank takes no part.
    """

    shard: torch.Tensor
    work: Work | None
    layout: FlatLayout
    parameters: list[ShardedParameter]
    divisor: float | None
    refused: Exception | None = None


class GradientReduction:
    """Reductions of the gradients of `flat`'s parameters."""

    def __init__(self, flat: FlatParameters) -> None:
        self._flat = flat
        self._layouts: dict[tuple[bool, ...], tuple[list[ShardedParameter], FlatLayout]] = {}
        self._tables: dict[object, Table | None] = {}

    def keep(self, policy: Policy) -> None:
        """Adds the gradients of this pass to those that are kept for a later reduction."""
        for parameter in self._flat.parameters:
            gradient = parameter.take_gradient()
            if gradient is not None:
                kept = parameter.accumulated
                if policy.reduce_dtype is not None and gradient.is_floating_point():
                    gradient = gradient.to(policy.reduce_dtype)
                parameter.accumulated = gradient if kept is None else kept.add_(gradient)

    def start(self, policy: Policy) -> Reduced | None:
        """Issues the reduction of all gradients; None where no parameter needs any: a collective call."""
        parameters, layout = self._trained()
        if not parameters:
            return None
        dtype = self._dtype(policy)
        specs = Specs(self._flat.data, layout, dtype)
        op: ReduceOp = "avg" if policy.divisor is None else "sum"
        terms = specs.terms(op)
        try:
            packed = self._packed(_gradients(parameters, dtype), layout, dtype)
        except Exception as error:
            if was_told(error):
                raise
            refuse_redistribution(terms, specs.shards, error)
            # Raised where the others raise that they have heard of it: what comes before that, all ranks exchange.
            return Reduced(self._flat.shard, None, layout, parameters, policy.divisor, error)
        wire = None
        if policy.reduce_dtype is not None and policy.reduce_dtype.itemsize < dtype.itemsize and not dtype.is_complex:
            wire = narrower(dtype, policy.reduce_dtype)
        shard, work = redistribute_local_async(packed, terms, specs.shards, None, wire)
        return Reduced(shard, work, layout, parameters, policy.divisor)

    def _trained(self) -> tuple[list[ShardedParameter], FlatLayout]:
        key = tuple(parameter.sharded.requires_grad for parameter in self._flat.parameters)
        found = self._layouts.get(key)
        if found is None:
            chosen = [parameter for parameter in self._flat.parameters if parameter.sharded.requires_grad]
            members = [parameter.member for parameter in chosen]
            found = self._layouts[key] = chosen, FlatLayout(members, self._flat.num_ranks, len(chosen))
        return found

    def _dtype(self, policy: Policy) -> torch.dtype:
        """Dtype in which gradients are added up, alike on all ranks: the wider of what they have and are sent as."""
        own = self._flat.dtype_computed
        if own.is_complex or policy.reduce_dtype is None:
            return own
        return own if own.itemsize > policy.reduce_dtype.itemsize else policy.reduce_dtype

    def _packed(self, gradients: list[torch.Tensor | None], layout: FlatLayout, dtype: torch.dtype) -> torch.Tensor:
        """Flat tensor of all gradients, zeros for those that are missing, and of who has one."""
        device = self._flat.device
        packed = allocate((layout.numel,), dtype, device)
        if any(gradient is None for gradient in gradients):
            packed.zero_()
        present = [gradient for gradient in gradients if gradient is not None]
        flags = torch.tensor([gradient is not None for gradient in gradients]).to(device, dtype)
        table = self._table(gradients, layout, dtype)
        sources = [gradient.data_ptr() for gradient in present]
        if table is not None:
            table.run(sources, [packed.data_ptr()], torch.get_num_threads())
        for rank in range(layout.num_ranks):
            start, stop = layout.more(rank)
            packed[start:stop] = flags
        return packed

    def _table(self, gradients: list[torch.Tensor | None], layout: FlatLayout, dtype: torch.dtype) -> Table | None:
        """Table that packs gradients laid out as these."""
        strides = tuple(None if gradient is None else gradient.stride() for gradient in gradients)
        kinds = {gradient.dtype for gradient in gradients if gradient is not None}
        assert len(kinds) <= 1, f"gradients of {kinds} are packed together"
        source = next(iter(kinds), dtype)
        key = (layout.lengths, strides, source, dtype)
        if key not in self._tables:
            boxes = layout.scatters(strides)
            self._tables[key] = None if not boxes else _table_of(boxes, source, dtype, self._flat.device)
        return self._tables[key]


def _table_of(boxes: list[CastBox], source: torch.dtype, target: torch.dtype, device: torch.device) -> Table:
    if source is not target:
        before, after = (str(dtype).removeprefix("torch.") for dtype in (source, target))
        return cast_table(boxes, before, after, device)
    return copy_table([CopyBox(*box[:4], source.itemsize, *box[4:]) for box in boxes], device)


def _gradients(parameters: list[ShardedParameter], dtype: torch.dtype) -> list[torch.Tensor | None]:
    """This rank's gradients, of one dtype: of `dtype` where they differ."""
    found = [_gradient(parameter) for parameter in parameters]
    if len({gradient.dtype for gradient in found if gradient is not None}) > 1:
        return [None if gradient is None else gradient.to(dtype) for gradient in found]
    return found


def _gradient(parameter: ShardedParameter) -> torch.Tensor | None:
    """This rank's gradient, of this pass and of those before that were kept."""
    gradient, kept = parameter.take_gradient(), parameter.accumulated
    parameter.accumulated = None
    found = gradient if kept is None else kept
    if kept is not None and gradient is not None:
        kept.add_(gradient)
    if found is not None and (found.is_conj() or found.is_neg()):
        found = found.resolve_conj().resolve_neg()
    return found


def finish(reduced: Reduced, rank: int) -> None:
    """Waits for gradients, and adds them to those of the sharded parameters; raises why this rank has refused them."""
    if reduced.refused is not None:
        raise reduced.refused
    if reduced.work is not None:
        reduced.work.wait()
    layout, found = reduced.layout, reduced.shard
    present = found[layout.lengths[rank] - layout.num_more :].tolist()
    if reduced.divisor is not None:
        found = found / reduced.divisor
    of_parameters = reduced.parameters[0].spec.dtype
    found = found.to(of_parameters)
    for parameter, place, has_gradient in zip(reduced.parameters, layout.of_rank(rank), present, strict=True):
        if has_gradient:
            parameter.add_gradient(found[place.offset : place.offset + prod(place.shape)].view(place.shape))
