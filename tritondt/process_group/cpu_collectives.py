"""Collectives of torch.distributed on the CPU: torch's arguments, checked, as steps that every transport can run.

Each function of `FIND` takes what was asked, this rank's number, the group's size and torch's arguments. It raises
LocalTensorError, TransportError or WorldError before anything is sent: the same on every transport. How a tensor lies
in memory is a rank's own affair: one with gaps is read from a copy, or written from one after the collective.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch

from tritondt.process_group import checks, collective
from tritondt.process_group.collective import Collective, Reduction
from tritondt.process_group.naming import PRE_MUL_SUM, number_of, op_name, refusal_of_op, text_of
from tritondt.process_group.staging import (
    Copies,
    NewCopies,
    all_readable,
    all_writable,
    as_bytes,
    copy_back,
    in_place,
    readable,
    writable,
)

Tensors = Sequence[torch.Tensor]
Lists = Sequence[Tensors]
CPU = torch.device("cpu")

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_BITWISE = ("band", "bor", "bxor")
_OF_INTEGERS = {op: op for op in ("sum", "product", "min", "max", *_BITWISE)}
_OF_FLOATS = {"sum": "sum", "avg": "sum", **{op: op for op in ("product", "min", "max")}, "premul_sum": "sum"}
_OF_COMPLEX = {"sum": "sum", "avg": "sum", "premul_sum": "sum"}
_OF_BOOL = {"sum": "bor", "product": "band", "min": "band", "max": "bor", **{op: op for op in _BITWISE}}
# The extension's name of a dtype's elements, their bytes, and its names of torch's reductions.
_REDUCED: dict[torch.dtype, tuple[str, int, dict[str, str]]] = {
    **{dtype: (text_of(dtype), dtype.itemsize, _OF_INTEGERS) for dtype in _INTEGERS},
    **{dtype: (text_of(dtype), dtype.itemsize, _OF_FLOATS) for dtype in _FLOATS},
    torch.complex64: ("float32", 4, _OF_COMPLEX),
    torch.complex128: ("float64", 8, _OF_COMPLEX),
    torch.bool: ("bool", 1, _OF_BOOL),
}
_found: dict[Hashable, Reduction] = {}


class Asked:
    """The text of a collective, made where it is needed."""

    __slots__ = ("_arguments", "_describe")

    def __init__(self, describe: Callable[..., str], arguments: tuple[Any, ...]) -> None:
        self._describe, self._arguments = describe, arguments

    def __str__(self) -> str:
        return self._describe(*self._arguments)


class Step(NamedTuple):
    """One collective and its tensors.

    `key` is what its description is made by: a function, a part that only tells texts apart, and the function's
    arguments behind this rank's number and the group's size. `copies` are pairs of a tensor and what is copied to it
    afterwards.
    """

    key: tuple[Any, ...]
    sources: Tensors
    targets: Tensors
    copies: Copies = ()

    def collective(self, own: int, size: int) -> Collective:
        """The description, equal for equal keys."""
        make, _, *arguments = self.key
        made: Collective = make(own, size, *arguments)
        return made


class Call(NamedTuple):
    """The steps of one call, in order, none where no rank has an element, and the tensors that they write."""

    steps: Sequence[Step]
    results: Tensors


Find = Callable[..., Call]


def reduction_of(dtype: torch.dtype, op: Any, size: int) -> Reduction:
    """The reduction of elements of a dtype by torch's `op` on `size` ranks; TransportError where there is none.

    >>> import torch.distributed as dist
    >>> reduction_of(torch.bfloat16, dist.ReduceOp.AVG, 4)
    Reduction(dtype='bfloat16', op='sum', divisor=4, itemsize=2)
    """
    key = (dtype, number_of(op), size)
    found = _found.get(key)
    if found is None:
        name, itemsize, allowed = _REDUCED.get(dtype, ("", 0, {}))
        asked = op_name(op)
        if asked not in allowed:
            raise refusal_of_op(dtype, asked, allowed, _REDUCED, "the CPU")
        found = _found[key] = Reduction(name, allowed[asked], size if asked == "avg" else 1, itemsize)
    return found


def _all_reduce(asked: Asked, own: int, size: int, tensors: Tensors, opts: Any) -> Call:
    checks.check_carried(asked, tensors, CPU)
    steps = [_reduced(asked, collective.all_reduce, tensor, opts.reduceOp, size) for tensor in tensors]
    return Call([step for step in steps if step.sources[0].numel()], tensors)


def _reduce(asked: Asked, own: int, size: int, tensors: Tensors, opts: Any) -> Call:
    root = opts.rootRank
    checks.check_carried(asked, tensors, CPU)
    checks.check_group_rank(asked, root, size)
    checks.check_number(asked, "tensors", len(tensors), 1)
    step = _reduced(asked, collective.reduce, tensors[0], opts.reduceOp, size, root)
    if own != root:  # its term stays as it is
        term = step.sources[0]
        step = step._replace(targets=(term if collective.is_short(term.nbytes, size) else torch.empty_like(term),))
        step = step._replace(copies=())
    return Call([step] if step.sources[0].numel() else [], tensors)


def _reduced(
    asked: Asked, make: Callable[..., Collective], tensor: torch.Tensor, op: Any, size: int, *root: int
) -> Step:
    """The step that reduces a tensor in place."""
    copies: NewCopies = []
    reduction, memory = reduction_of(tensor.dtype, op, size), in_place(tensor, copies)
    term = memory if number_of(op) != PRE_MUL_SUM else _times(asked, memory, op)
    return Step((make, (memory.dtype, *_factor(op)), memory.nbytes, reduction, *root), (term,), (memory,), copies)


def _factor(op: Any) -> tuple[str, ...]:
    """The fact that an op's terms were multiplied, which the reduction does not tell."""
    return ("premul_sum",) if number_of(op) == PRE_MUL_SUM else ()


def _times(asked: Asked, tensor: torch.Tensor, op: Any) -> torch.Tensor:
    """A term of a PREMUL_SUM."""
    factor: float | torch.Tensor = op.__getstate__()[1]
    if isinstance(factor, torch.Tensor):
        checks.check_factor(str(asked), factor, [tensor])
        factor = factor.reshape(())
    with torch.no_grad():
        return tensor * factor


def _reduce_scatter_base(
    asked: Asked, own: int, size: int, output: torch.Tensor, given: torch.Tensor, opts: Any
) -> Call:
    return Call(_scattered(asked, own, size, output, given, opts.reduceOp), (output,))


def _reduce_scatter_coalesced(asked: Asked, own: int, size: int, outputs: Tensors, inputs: Tensors, opts: Any) -> Call:
    checks.check_number(asked, "outputs", len(outputs), len(inputs))
    pairs = zip(outputs, inputs, strict=True)
    return Call([step for pair in pairs for step in _scattered(asked, own, size, *pair, opts.reduceOp)], outputs)


def _scattered(asked: Asked, own: int, size: int, output: torch.Tensor, given: torch.Tensor, op: Any) -> list[Step]:
    checks.check_carried(asked, (output, given), CPU)
    checks.check_dtypes(asked, (output, given))
    checks.check_whole(asked, "an input", given, output, size)
    num_bytes, reduction, whole = output.nbytes, reduction_of(output.dtype, op, size), readable(given)
    if num_bytes == 0:
        return []
    if number_of(op) == PRE_MUL_SUM:
        whole = _times(asked, whole, op)
    key = (collective.reduce_scatter_even, (output.dtype, *_factor(op)), num_bytes, reduction)
    return [_reduced_piece(key, (0, own * num_bytes), [whole], output)]


def _reduce_scatter(asked: Asked, own: int, size: int, outputs: Tensors, inputs: Lists, opts: Any) -> Call:
    checks.check_number(asked, "lists of inputs", len(inputs), len(outputs))
    steps = []
    for output, given in zip(outputs, inputs, strict=True):
        checks.check_list(asked, "inputs", given, output, CPU, size)
        checks.check_sizes(asked, "an output", output.numel(), given[own].numel(), "this rank's input")
        found, reduction = all_readable(given), reduction_of(output.dtype, opts.reduceOp, size)
        if number_of(opts.reduceOp) == PRE_MUL_SUM:
            found = [_times(asked, each, opts.reduceOp) for each in found]
        pieces = tuple((number, 0, each.nbytes) for number, each in enumerate(found))
        if any(piece[2] for piece in pieces):
            key = (collective.reduce_scatter, (output.dtype, *_factor(opts.reduceOp)), pieces, reduction)
            steps.append(_reduced_piece(key, (own, 0), found, output))
    return Call(steps, outputs)


def _reduced_piece(
    key: tuple[Any, ...], piece: tuple[int, int], sources: list[torch.Tensor], output: torch.Tensor
) -> Step:
    """The step that reduces this rank's piece, which begins in a source at a byte, to `output`, maybe the piece."""
    copies: NewCopies = []
    part = writable(output, copies)
    tensor, start = piece
    is_piece = part.data_ptr() == sources[tensor].data_ptr() + start
    for number, each in enumerate(sources):
        if (not is_piece or number != tensor) and meet(each, part):  # which later rounds would read
            copies.append((part, torch.empty_like(part)))
            part = copies[-1][1]
            break
    return Step(key, sources, (part,), copies)


def _all_gather_base(asked: Asked, own: int, size: int, output: torch.Tensor, given: torch.Tensor, opts: Any) -> Call:
    return Call(_gathered_into(asked, own, size, output, given), (output,))


def _all_gather_into_coalesced(asked: Asked, own: int, size: int, outputs: Tensors, inputs: Tensors, opts: Any) -> Call:
    checks.check_number(asked, "outputs", len(outputs), len(inputs))
    pairs = zip(outputs, inputs, strict=True)
    return Call([step for pair in pairs for step in _gathered_into(asked, own, size, *pair)], outputs)


def _gathered_into(asked: Asked, own: int, size: int, output: torch.Tensor, given: torch.Tensor) -> list[Step]:
    checks.check_carried(asked, (output, given), CPU)
    checks.check_dtypes(asked, (output, given))
    checks.check_whole(asked, "an output", output, given, size)
    num_bytes = given.nbytes
    if num_bytes == 0:
        return []
    copies: NewCopies = []
    whole, sent = writable(output, copies), readable(given)
    if meet(whole, sent) and sent.data_ptr() != whole.data_ptr() + own * num_bytes:
        sent = sent.clone()
    return [Step((collective.all_gather_into, given.dtype, num_bytes), (sent,), (whole,), copies)]


def _all_gather(asked: Asked, own: int, size: int, outputs: Lists, inputs: Tensors, opts: Any) -> Call:
    checks.check_number(asked, "lists of outputs", len(outputs), len(inputs))
    steps = [step for pair in zip(inputs, outputs, strict=True) for step in _gathered(asked, own, size, *pair)]
    return Call(steps, [tensor for each in outputs for tensor in each])


def _all_gather_coalesced(asked: Asked, own: int, size: int, outputs: Lists, inputs: Tensors, opts: Any) -> Call:
    for each in outputs:
        checks.check_number(asked, "outputs of one rank", len(each), len(inputs))
    lists = [list(each) for each in zip(*outputs, strict=True)] if outputs else [[]] * len(inputs)
    steps = [step for pair in zip(inputs, lists, strict=True) for step in _gathered(asked, own, size, *pair)]
    return Call(steps, [tensor for each in outputs for tensor in each])


def _gathered(asked: Asked, own: int, size: int, given: torch.Tensor, outputs: Tensors) -> list[Step]:
    checks.check_list(asked, "outputs", outputs, given, CPU, size)
    checks.check_sizes(asked, "an input", given.numel(), outputs[own].numel(), "this rank's output")
    sizes = tuple(each.nbytes for each in outputs)
    if not any(sizes):
        return []
    copies: NewCopies = []
    sent, written = readable(given), all_writable(outputs, copies)
    if _meet_others(own, sent, written):
        sent = sent.clone()
    return [Step((collective.all_gather, given.dtype, sizes), (sent,), written, copies)]


def _meet_others(own: int, sent: torch.Tensor, written: Tensors) -> bool:
    """Whether one tensor shares memory with those of a list, but for this rank's own part in place."""
    start = sent.data_ptr()
    end = start + sent.nbytes
    for number, each in enumerate(written):
        other = each.data_ptr()
        if other < end and start < other + each.nbytes and (number != own or other != start):
            return True
    return False


def _broadcast(asked: Asked, own: int, size: int, tensors: Tensors, opts: Any) -> Call:
    root = opts.rootRank
    checks.check_carried(asked, tensors, CPU)
    checks.check_group_rank(asked, root, size)
    steps = []
    for tensor in tensors:
        copies: NewCopies = []
        memory = in_place(tensor, copies)
        if memory.nbytes:
            key = (collective.broadcast, memory.dtype, memory.nbytes, root)
            steps.append(Step(key, (memory,), (memory,), copies if own != root else ()))
    return Call(steps, tensors)


def _gather(asked: Asked, own: int, size: int, outputs: Lists, inputs: Tensors, opts: Any) -> Call:
    root = opts.rootRank
    checks.check_number(asked, "inputs", len(inputs), 1)
    lists = checks.check_rooted(asked, "outputs", outputs, inputs[0], CPU, (own, size, root))
    copies: NewCopies = []
    sent, written = readable(inputs[0]), all_writable(lists, copies)
    if _meet_others(own, sent, written):
        sent = sent.clone()
    key = (collective.gather, sent.dtype, sent.nbytes, tuple(each.nbytes for each in written), root)
    return Call((Step(key, (sent,), written, copies),), lists)


def _scatter(asked: Asked, own: int, size: int, outputs: Tensors, inputs: Lists, opts: Any) -> Call:
    root = opts.rootRank
    checks.check_number(asked, "outputs", len(outputs), 1)
    lists = checks.check_rooted(asked, "inputs", inputs, outputs[0], CPU, (own, size, root))
    copies: NewCopies = []
    part, sent = writable(outputs[0], copies), all_readable(lists)
    if _meet_others(own, part, sent):
        for number, each in enumerate(sent):
            if meet(each, part) and (number != own or each.data_ptr() != part.data_ptr()):
                sent[number] = each.clone()
    key = (collective.scatter, part.dtype, part.nbytes, tuple(each.nbytes for each in sent), root)
    return Call((Step(key, sent, (part,), copies),), outputs)


def _all_to_all(asked: Asked, own: int, size: int, outputs: Tensors, inputs: Tensors, opts: Any) -> Call:
    checks.check_number(asked, "inputs", len(inputs), size)
    checks.check_number(asked, "outputs", len(outputs), size)
    checks.check_carried(asked, (*inputs, *outputs), CPU)
    checks.check_dtypes(asked, (*inputs, *outputs))
    checks.check_sizes(asked, "an output", outputs[own].numel(), inputs[own].numel(), "what this rank sends itself")
    copies: NewCopies = []
    sent, written = all_readable(inputs), all_writable(outputs, copies)
    for number, each in enumerate(sent):
        if any(meet(each, other) for other in written):
            sent[number] = each.clone()
    leaving = tuple((number, (number, 0, each.nbytes)) for number, each in enumerate(sent))
    coming = tuple((number, (number, 0, each.nbytes)) for number, each in enumerate(written))
    key = (collective.all_to_all, (inputs[0].dtype, size), leaving, coming)
    return Call((Step(key, sent, written, copies),), outputs)


def _all_to_all_single(
    asked: Asked,
    own: int,
    size: int,
    output: torch.Tensor,
    given: torch.Tensor,
    output_rows: Sequence[int],
    input_rows: Sequence[int],
    opts: Any,
) -> Call:
    checks.check_carried(asked, (output, given), CPU)
    checks.check_dtypes(asked, (output, given))
    key = _all_to_all_key(asked, own, size, output, given, output_rows, input_rows)
    copies: NewCopies = []
    sent, written = readable(given), writable(output, copies)
    if meet(sent, written):
        sent = sent.clone()
    return Call((Step(key, (sent,), (written,), copies),), (output,))


def _all_to_all_key(
    asked: Asked,
    own: int,
    size: int,
    output: torch.Tensor,
    given: torch.Tensor,
    output_rows: Sequence[int],
    input_rows: Sequence[int],
) -> tuple[Any, ...]:
    """The key of a step between parts of two tensors by rows."""
    is_even = not input_rows and not output_rows and given.nbytes == output.nbytes and given.dim() and output.dim()
    if is_even and given.size(0) % size == output.size(0) % size == 0:
        return collective.all_to_all_even, given.dtype, given.nbytes // size
    sent = checks.split_sizes(asked, "input", given, input_rows, size)
    received = checks.split_sizes(asked, "output", output, output_rows, size)
    checks.check_sizes(asked, "an output", received[own], sent[own], "what this rank sends itself")
    leaving, coming = (collective.rows_of_ranks(counts, given.itemsize) for counts in (sent, received))
    # Spans differ from rank to rank, and with them who has a program already: what its text says is all in the key.
    return collective.all_to_all, (given.dtype, 1), leaving, coming


def _barrier(asked: Asked, own: int, size: int, opts: Any) -> Call:
    return Call((Step((collective.barrier, None), (), ()),), ())


def meet(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors without gaps share memory.

    >>> whole = torch.zeros(4)
    >>> meet(whole[:3], whole[2:]), meet(whole[:2], whole[2:])
    (True, False)
    """
    first, second = one.data_ptr(), other.data_ptr()
    return first < second + other.nbytes and second < first + one.nbytes


# By the name of the method of torch's group.
FIND: dict[str, Find] = {
    "allreduce": _all_reduce,
    "allreduce_coalesced": _all_reduce,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "allgather": _all_gather,
    "allgather_coalesced": _all_gather_coalesced,
    "_allgather_base": _all_gather_base,
    "allgather_into_tensor_coalesced": _all_gather_into_coalesced,
    "reduce_scatter": _reduce_scatter,
    "_reduce_scatter_base": _reduce_scatter_base,
    "reduce_scatter_tensor_coalesced": _reduce_scatter_coalesced,
    "alltoall": _all_to_all,
    "alltoall_base": _all_to_all_single,
    "gather": _gather,
    "scatter": _scatter,
    "barrier": _barrier,
}


def write_copies(call: Call) -> None:
    """Copies what is not written in place, after all exchanges."""
    for step in call.steps:
        copy_back(step.copies)


def run_alone(call: Call, own: int, size: int) -> None:
    """Runs a collective of one rank, or of steps that are none: what it sends itself is there."""
    for step in call.steps:
        described = step.collective(own, size)
        for (source, start, num_bytes), (target, first, _) in described.keeps:
            sent = as_bytes(step.sources[source])[start : start + num_bytes]
            as_bytes(step.targets[target])[first : first + num_bytes].copy_(sent)
    write_copies(call)
