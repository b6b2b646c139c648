"""Kinds of collectives: how each is described, made for NCCL and called on Gloo, as a table.

Every function of a kind takes the arguments of the process group's method, as torch gave them, options last. None but
the key is called for an operation that is kept, debug mode aside.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from tritondt.process_group.debug_compare import Parts
from tritondt.process_group.naming import PRE_MUL_SUM, described, number_of
from tritondt.process_group.nccl_programs import lie_end_to_end
from tritondt.process_group.operation import Operation

Tensors = Sequence[torch.Tensor]
Lists = Sequence[Tensors]


def _no_parts(_size: int, *_arguments: Any) -> Parts:
    return Parts()


class Kind(NamedTuple):
    """A kind of collective: a method of torch's group over Gloo, a text, a key and an operation of NCCL.

    Operations of NCCL of equal keys, and of tensors alike, are equal and kept; those without a key are not. `make` is
    given an OperationCache and the text before the arguments; `parts`, what debug mode compares besides the text, the
    size of the group.
    """

    gloo: str
    describe: Callable[..., str]
    key: Callable[..., Hashable | None]
    make: Callable[..., Operation]
    parts: Callable[..., Parts] = _no_parts


ALL_REDUCE = Kind(
    "allreduce",
    lambda tensors, opts: described("all_reduce", tensors, op=opts.reduceOp),
    lambda tensors, opts: key_of("all_reduce", opts.reduceOp),
    lambda cache, text, tensors, opts: cache.all_reduce(text, tensors, opts.reduceOp),
)
ALL_REDUCE_COALESCED = ALL_REDUCE._replace(gloo="allreduce_coalesced")
BROADCAST = Kind(
    "broadcast",
    lambda tensors, opts: described("broadcast", tensors, root=opts.rootRank),
    lambda tensors, opts: ("broadcast", opts.rootRank),
    lambda cache, text, tensors, opts: cache.broadcast(text, tensors, opts.rootRank),
)
REDUCE = Kind(
    "reduce",
    lambda tensors, opts: described("reduce", tensors, op=opts.reduceOp, root=opts.rootRank),
    lambda tensors, opts: key_of("reduce", opts.reduceOp, opts.rootRank),
    lambda cache, text, tensors, opts: cache.reduce(text, tensors, opts.reduceOp, opts.rootRank),
)
ALL_GATHER = Kind(
    "allgather",
    lambda outputs, inputs, opts: described("all_gather", flat(outputs) or inputs),
    lambda outputs, inputs, opts: ("all_gather", len(inputs), _shape(outputs)),
    lambda cache, text, outputs, inputs, opts: cache.all_gather(text, outputs, inputs),
)
ALL_GATHER_COALESCED = Kind(
    "allgather_coalesced",
    lambda outputs, inputs, opts: described("all_gather", flat(by_tensor(outputs)) or inputs),
    lambda outputs, inputs, opts: ("all_gather", len(inputs), _shape(by_tensor(outputs)), *map(len, outputs)),
    lambda cache, text, outputs, inputs, opts: cache.all_gather(
        text, by_tensor(outputs), inputs, list(map(len, outputs))
    ),
)
ALL_GATHER_INTO_TENSOR = Kind(
    "_allgather_base",
    lambda output, given, opts: described("all_gather_into_tensor", [given]),
    lambda output, given, opts: "all_gather_into_tensor",
    lambda cache, text, output, given, opts: cache.all_gather_into(text, [output], [given]),
)
ALL_GATHER_INTO_TENSORS = Kind(
    "allgather_into_tensor_coalesced",
    lambda outputs, inputs, opts: described("all_gather_into_tensor", inputs),
    lambda outputs, inputs, opts: ("all_gather_into_tensor", len(inputs)),
    lambda cache, text, outputs, inputs, opts: cache.all_gather_into(text, outputs, inputs),
)
REDUCE_SCATTER = Kind(
    "reduce_scatter",
    lambda outputs, inputs, opts: described("reduce_scatter", flat(inputs) or outputs, op=opts.reduceOp),
    lambda outputs, inputs, opts: key_of("reduce_scatter", opts.reduceOp, len(outputs), _shape(inputs)),
    lambda cache, text, outputs, inputs, opts: cache.reduce_scatter(text, outputs, inputs, opts.reduceOp),
)
REDUCE_SCATTER_TENSOR = Kind(
    "_reduce_scatter_base",
    lambda output, given, opts: described("reduce_scatter_tensor", [output], op=opts.reduceOp),
    lambda output, given, opts: key_of("reduce_scatter_tensor", opts.reduceOp),
    lambda cache, text, output, given, opts: cache.reduce_scatter_into(text, [output], [given], opts.reduceOp),
)
REDUCE_SCATTER_TENSORS = Kind(
    "reduce_scatter_tensor_coalesced",
    lambda outputs, inputs, opts: described("reduce_scatter_tensor", outputs, op=opts.reduceOp),
    lambda outputs, inputs, opts: key_of("reduce_scatter_tensor", opts.reduceOp, len(outputs)),
    lambda cache, text, outputs, inputs, opts: cache.reduce_scatter_into(text, outputs, inputs, opts.reduceOp),
)
ALL_TO_ALL = Kind(
    "alltoall",
    lambda outputs, inputs, opts: described("all_to_all", inputs, is_even=False),
    lambda outputs, inputs, opts: ("all_to_all", len(inputs)),
    lambda cache, text, outputs, inputs, opts: cache.all_to_all(text, outputs, inputs),
    lambda size, outputs, inputs, opts: Parts(_counts(inputs), _counts(outputs)),
)
ALL_TO_ALL_SINGLE = Kind(
    "alltoall_base",
    lambda output, given, output_rows, input_rows, opts: described("all_to_all_single", [given], is_even=False),
    lambda output, given, output_rows, input_rows, opts: (
        *("all_to_all_single", given.shape, output.shape),
        *(tuple(input_rows), tuple(output_rows)),
    ),
    lambda cache, text, output, given, output_rows, input_rows, opts: cache.all_to_all_parts(
        text, output, given, output_rows, input_rows
    ),
    lambda size, output, given, output_rows, input_rows, opts: Parts(tuple(input_rows), tuple(output_rows)),
)
GATHER = Kind(
    "gather",
    lambda outputs, inputs, opts: described("gather", inputs, root=opts.rootRank, is_even=False),
    lambda outputs, inputs, opts: ("gather", opts.rootRank, len(inputs), len(outputs)),
    lambda cache, text, outputs, inputs, opts: cache.gather(text, outputs, inputs, opts.rootRank),
    lambda size, outputs, inputs, opts: Parts(*_rooted_parts(size, opts.rootRank, inputs, outputs)),
)
SCATTER = Kind(
    "scatter",
    lambda outputs, inputs, opts: described("scatter", outputs, root=opts.rootRank, is_even=False),
    lambda outputs, inputs, opts: ("scatter", opts.rootRank, len(outputs), len(inputs)),
    lambda cache, text, outputs, inputs, opts: cache.scatter(text, outputs, inputs, opts.rootRank),
    lambda size, outputs, inputs, opts: Parts(*reversed(_rooted_parts(size, opts.rootRank, outputs, inputs))),
)


def key_of(kind: str, op: Any, *rest: Hashable) -> Hashable | None:
    """The key under which a reduction is kept; None where its factor, which is of one call, tells it from others."""
    number = number_of(op)
    return None if number == PRE_MUL_SUM else (kind, number, *rest)


def flat(lists: Iterable[Iterable[torch.Tensor]]) -> list[torch.Tensor]:
    """The tensors of all lists, list by list."""
    return [tensor for each in lists for tensor in each]


def by_tensor(outputs: Lists) -> Lists:
    """Lists with a tensor for each rank, of lists with a tensor for each input."""
    return [list(each) for each in zip(*outputs, strict=False)]


def _rooted_parts(size: int, root: int, own: Tensors, lists: Lists) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Elements between this rank and every other: of its own tensor with the root, of the root's list with all."""
    with_root = tuple(own[0].numel() if rank == root else 0 for rank in range(size))
    return with_root, _counts(lists[0]) if lists else ()


def _counts(tensors: Tensors) -> tuple[int, ...]:
    return tuple(tensor.numel() for tensor in tensors)


def _shape(lists: Lists) -> tuple[Hashable, ...]:
    """The lengths of lists, and whether tensors lie end to end: calls follow from these and the tensors' sizes."""
    return tuple((len(each), bool(each) and lie_end_to_end(each)) for each in lists)
