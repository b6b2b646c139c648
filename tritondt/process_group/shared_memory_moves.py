"""Collectives of torch.distributed on the CPU that move bytes between ranks that read each other's memory.

Each function takes this rank's number, the group's size and torch's arguments, and gives what is to run; None where
Gloo runs the collective, or refuses it.
"""

from collections.abc import Sequence
from typing import Any

import torch

from tritondt.comm.packing.arena_transfer import ArenaTransfer
from tritondt.process_group.shared_memory_programs import Members, Span, byte_moves
from tritondt.process_group.shared_memory_steps import Call, Find, Lists, Step, Tensors, call_of, meet
from tritondt.process_group.staging import NewCopies, all_readable, all_writable, in_place, readable, writable

PeerSpans = tuple[tuple[int, Span], ...]


def _all_gather_base(own: int, size: int, output: torch.Tensor, given: torch.Tensor, opts: Any) -> Call | None:
    step = _gathered_into(own, size, output, given)
    return None if step is None else Call((step,), (output,))


def _all_gather_into_coalesced(own: int, size: int, outputs: Tensors, inputs: Tensors, opts: Any) -> Call | None:
    if len(outputs) != len(inputs):
        return None
    pairs = [pair for pair in zip(outputs, inputs, strict=True) if any(each.numel() for each in pair)]
    return call_of([_gathered_into(own, size, *pair) for pair in pairs], outputs)


def _gathered_into(own: int, size: int, output: torch.Tensor, given: torch.Tensor) -> Step | None:
    num_bytes = given.nbytes
    copies: NewCopies = []
    if output.numel() != given.numel() * size or output.dtype != given.dtype or num_bytes == 0:
        return None
    whole, sent = writable(output, copies), readable(given)
    if whole is None or sent is None:
        return None
    if meet(whole, sent) and sent.data_ptr() != whole.data_ptr() + own * num_bytes:
        sent = sent.clone()
    return Step((_all_gather_bytes_into, given.dtype, num_bytes), (sent,), (whole,), copies)


def _all_gather_bytes_into(members: Members, num_bytes: int) -> ArenaTransfer:
    numbers = range(len(members.places))
    receives = [(number, (0, number * num_bytes, num_bytes)) for number in numbers]
    return byte_moves(members, [(number, (0, 0, num_bytes)) for number in numbers], receives, 1)


def _all_gather(own: int, size: int, outputs: Lists, inputs: Tensors, opts: Any) -> Call | None:
    if len(outputs) != 1 or len(inputs) != 1:
        return None
    step = _gathered(own, size, inputs[0], outputs[0])
    return None if step is None else Call((step,), outputs[0])


def _all_gather_coalesced(own: int, size: int, outputs: Lists, inputs: Tensors, opts: Any) -> Call | None:
    if len(outputs) != size or any(len(each) != len(inputs) for each in outputs):
        return None
    lists = list(zip(*outputs, strict=True))
    steps = [_gathered(own, size, *pair) for pair in zip(inputs, lists, strict=True)]
    return call_of(steps, [tensor for each in outputs for tensor in each])


def _gathered(own: int, size: int, given: torch.Tensor, outputs: Tensors) -> Step | None:
    sizes = tuple(each.nbytes for each in outputs)
    copies: NewCopies = []
    if len(sizes) != size or any(each.dtype != given.dtype for each in outputs) or not any(sizes):
        return None
    sent, written = readable(given), all_writable(outputs, copies)
    if sent is None or written is None or sizes[own] != sent.nbytes:
        return None
    if _meet_others(own, sent, written):
        sent = sent.clone()
    return Step((_all_gather_bytes, given.dtype, sizes), (sent,), written, copies)


def _meet_others(own: int, sent: torch.Tensor, written: Tensors) -> bool:
    """Whether one tensor shares memory with those of a list, but for this rank's own part in place."""
    start = sent.data_ptr()
    end = start + sent.nbytes
    for number, each in enumerate(written):
        other = each.data_ptr()
        if other < end and start < other + each.nbytes and (number != own or other != start):
            return True
    return False


def _all_gather_bytes(members: Members, sizes: tuple[int, ...]) -> ArenaTransfer:
    own_bytes = sizes[members.own]
    sends = [(number, (0, 0, own_bytes)) for number in range(len(sizes)) if own_bytes]
    receives = [(number, (number, 0, count)) for number, count in enumerate(sizes) if count]
    return byte_moves(members, sends, receives, 1)


def _broadcast(own: int, size: int, tensors: Tensors, opts: Any) -> Call | None:
    root = opts.rootRank
    copies: NewCopies = []
    if len(tensors) != 1 or tensors[0].numel() == 0 or not 0 <= root < size or opts.rootTensor != 0:
        return None
    memory = in_place(tensors[0], copies)
    if memory is None:
        return None
    written = copies if own != root else ()
    key = (_broadcast_bytes, memory.dtype, memory.nbytes, root)
    return Call((Step(key, (memory,), (memory,), written),), tensors)


def _broadcast_bytes(members: Members, num_bytes: int, root: int) -> ArenaTransfer:
    whole, is_root = (0, 0, num_bytes), members.own == root
    sends = [(number, whole) for number in members.others] if is_root else []
    return byte_moves(members, sends, [] if is_root else [(root, whole)], 1)


def _gather(own: int, size: int, outputs: Lists, inputs: Tensors, opts: Any) -> Call | None:
    root = opts.rootRank
    copies: NewCopies = []
    lists = [tensor for each in outputs for tensor in each]
    if len(inputs) != 1 or not 0 <= root < size or len(lists) != (size if own == root else 0):
        return None
    given = inputs[0]
    if given.numel() == 0 or any((each.dtype, each.nbytes) != (given.dtype, given.nbytes) for each in lists):
        return None
    sent, written = readable(given), all_writable(lists, copies)
    if sent is None or written is None:
        return None
    if _meet_others(own, sent, written):
        sent = sent.clone()
    return Call((Step((_gather_bytes, sent.dtype, sent.nbytes, root), (sent,), written, copies),), lists)


def _gather_bytes(members: Members, num_bytes: int, root: int) -> ArenaTransfer:
    numbers = range(len(members.places)) if members.own == root else ()
    receives = [(number, (number, 0, num_bytes)) for number in numbers]
    return byte_moves(members, [(root, (0, 0, num_bytes))], receives, 1)


def _scatter(own: int, size: int, outputs: Tensors, inputs: Lists, opts: Any) -> Call | None:
    root = opts.rootRank
    copies: NewCopies = []
    lists = [tensor for each in inputs for tensor in each]
    if len(outputs) != 1 or not 0 <= root < size or len(lists) != (size if own == root else 0):
        return None
    output = outputs[0]
    if output.numel() == 0 or any((each.dtype, each.nbytes) != (output.dtype, output.nbytes) for each in lists):
        return None
    part, sent = writable(output, copies), all_readable(lists)
    if part is None or sent is None:
        return None
    if _meet_others(own, part, sent):
        for number, each in enumerate(sent):
            if meet(each, part) and (number != own or each.data_ptr() != part.data_ptr()):
                sent[number] = each.clone()
    return Call((Step((_scatter_bytes, part.dtype, part.nbytes, root), sent, (part,), copies),), outputs)


def _scatter_bytes(members: Members, num_bytes: int, root: int) -> ArenaTransfer:
    size = len(members.places)
    numbers = range(size) if members.own == root else ()
    sends = [(number, (number, 0, num_bytes)) for number in numbers]
    return byte_moves(members, sends, [(root, (0, 0, num_bytes))], max(size - 1, 1))


def _all_to_all(own: int, size: int, outputs: Tensors, inputs: Tensors, opts: Any) -> Call | None:
    if len(inputs) != size or len(outputs) != size or inputs[own].nbytes != outputs[own].nbytes:
        return None
    dtype = inputs[0].dtype
    copies: NewCopies = []
    if any(each.dtype != dtype for each in (*inputs, *outputs)):
        return None
    sent, written = all_readable(inputs), all_writable(outputs, copies)
    if sent is None or written is None:
        return None
    for number, each in enumerate(sent):
        if any(meet(each, other) for other in written):
            sent[number] = each.clone()
    leaving = tuple((number, (number, 0, each.nbytes)) for number, each in enumerate(sent))
    coming = tuple((number, (number, 0, each.nbytes)) for number, each in enumerate(written))
    return Call((Step(_to_all_key(dtype, size, leaving, coming), sent, written, copies),), outputs)


def _all_to_all_single(
    own: int,
    size: int,
    output: torch.Tensor,
    given: torch.Tensor,
    output_rows: Sequence[int],
    input_rows: Sequence[int],
    opts: Any,
) -> Call | None:
    if given.dtype != output.dtype or not given.dim() or not output.dim():
        return None
    key = _all_to_all_key(own, size, output, given, output_rows, input_rows)
    if key is None:
        return None
    copies: NewCopies = []
    sent, written = readable(given), writable(output, copies)
    if sent is None or written is None:
        return None
    if meet(sent, written):
        sent = sent.clone()
    return Call((Step(key, (sent,), (written,), copies),), (output,))


def _all_to_all_key(
    own: int,
    size: int,
    output: torch.Tensor,
    given: torch.Tensor,
    output_rows: Sequence[int],
    input_rows: Sequence[int],
) -> tuple[Any, ...] | None:
    """The key of a step between parts of two tensors by rows; None where they do not add up to these."""
    if not input_rows and not output_rows and given.nbytes == output.nbytes:
        is_even = given.size(0) % size == output.size(0) % size == 0
        return (_all_to_all_even_bytes, given.dtype, given.nbytes // size) if is_even else None
    leaving, coming = _row_spans(given, input_rows, size), _row_spans(output, output_rows, size)
    if leaving is None or coming is None or leaving[own][1][2] != coming[own][1][2]:
        return None
    return _to_all_key(given.dtype, 1, leaving, coming)


def _all_to_all_even_bytes(members: Members, num_bytes: int) -> ArenaTransfer:
    spans = tuple((number, (0, number * num_bytes, num_bytes)) for number in range(len(members.places)))
    return _all_to_all_bytes(members, spans, spans)


def _row_spans(tensor: torch.Tensor, rows: Sequence[int], size: int) -> PeerSpans | None:
    """The parts of a tensor by rank; equal ones where no rows are given; None where they do not add up to it."""
    num_rows = tensor.size(0)
    if rows and (len(rows) != size or sum(rows) != num_rows or min(rows) < 0):
        return None
    if not rows and num_rows % size:
        return None
    row_bytes = tensor.nbytes // num_rows if num_rows else 0
    counts = [each * row_bytes for each in (rows or [num_rows // size] * size)]
    starts = [sum(counts[:number]) for number in range(size)]
    return tuple((number, (0, *span)) for number, span in enumerate(zip(starts, counts, strict=True)))


def _to_all_key(dtype: torch.dtype, num_tensors: int, leaving: PeerSpans, coming: PeerSpans) -> tuple[Any, ...]:
    # Spans differ from rank to rank, and with them who has a program already: what its text says is all in the key.
    return _all_to_all_bytes, (dtype, num_tensors), leaving, coming


def _all_to_all_bytes(members: Members, leaving: PeerSpans, coming: PeerSpans) -> ArenaTransfer:
    # Both sides of a message know that it is empty.
    sends, receives = ([each for each in spans if each[1][2]] for spans in (leaving, coming))
    return byte_moves(members, sends, receives, max(len(leaving) - 1, 1))


def no_moves(members: Members) -> ArenaTransfer:
    """The program of a rank that has no elements in a collective."""
    return byte_moves(members, [], [], 1)


def _barrier(own: int, size: int, opts: Any) -> Call:
    return Call((Step((_barrier_signals, None), (), ()),), ())


def _barrier_signals(members: Members) -> ArenaTransfer:
    signals = [(number, (0, 0, 0)) for number in members.others]
    return byte_moves(members, signals, signals, 1)


# By the name of the method of torch's group over Gloo.
MOVES: dict[str, Find] = {
    "broadcast": _broadcast,
    "allgather": _all_gather,
    "allgather_coalesced": _all_gather_coalesced,
    "_allgather_base": _all_gather_base,
    "allgather_into_tensor_coalesced": _all_gather_into_coalesced,
    "alltoall": _all_to_all,
    "alltoall_base": _all_to_all_single,
    "gather": _gather,
    "scatter": _scatter,
    "barrier": _barrier,
}
