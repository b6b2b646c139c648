"""Every operation of our communicator of NCCL by name: each takes a rank's place and says what came of it.

A case returns pairs of what was found and what it must be.
"""

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist

from tests.nccl.here import OPS, Here, reduced, values
from tritondt._C import NcclUnsupportedError

Pairs = list[tuple[torch.Tensor, torch.Tensor]]
Case = Callable[[Here], Pairs]

CASES: dict[str, Case] = {}
DTYPES = (
    *("int8", "uint8", "int32", "uint32", "int64", "uint64"),
    *("float16", "bfloat16", "float32", "float64"),
)
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")


def case(run: Case) -> Case:
    CASES[run.__name__] = run
    return run


@case
def all_gather(here):
    target = here.empty(6 * here.size)
    here.call("all_gather", here.own(), target, 6, "float32")
    return [(target, torch.cat(here.all_values()))]


@case
def reduce_scatter(here):
    target = here.empty(3)
    here.call("reduce_scatter", here.own(3 * here.size), target, 3, "float32", "sum")
    return [(target, reduced("sum", here.all_values(3 * here.size))[3 * here.rank :][:3])]


@case
def all_reduce_of_every_dtype_by_every_op(here):
    found = []
    for dtype in DTYPES:
        for op in (*OPS, "avg"):
            target = here.empty(5, dtype)
            here.call("all_reduce", here.own(5, dtype), target, 5, dtype, op)
            found.append((target, reduced(op, here.all_values(5, dtype))))
    return found


@case
def all_reduce_of_float8(here):
    found = []
    for dtype in FLOAT8:
        tensor = here.own(5, dtype)
        here.call("all_reduce", tensor, tensor, 5, dtype, "sum")
        found.append((tensor, reduced("sum", here.all_values(5, dtype))))
    return found


@case
def all_reduce_in_place_of_a_million(here):
    tensor = here.own(1_000_003)
    here.call("all_reduce", tensor, tensor, 1_000_003, "float32", "sum")
    return [(tensor, reduced("sum", here.all_values(1_000_003)))]


@case
def broadcast_from_every_rank(here):
    found = []
    for root in range(here.size):
        target = here.empty(6)
        here.call("broadcast", here.own(), target, 6, "float32", root)
        found.append((target, values(root)))
    return found


@case
def reduce_to_every_rank(here):
    found = []
    for root in range(here.size):
        target = here.empty(6)
        here.call("reduce", here.own(), target, 6, "float32", "sum", root)
        if root == here.rank:
            found.append((target, reduced("sum", here.all_values())))
    return found


@case
def all_to_all(here):
    target = here.empty(2 * here.size)
    here.call("all_to_all", here.own(2 * here.size), target, 2, "float32")
    return [(target, torch.cat([whole[2 * here.rank :][:2] for whole in here.all_values(2 * here.size)]))]


@case
def gather_and_scatter_with_every_root(here):
    found = []
    for root in range(here.size):
        whole, part = here.empty(6 * here.size), here.empty(3)
        here.call("gather", here.own(), whole, 6, "float32", root)
        if root == here.rank:
            found.append((whole, torch.cat(here.all_values())))
        here.call("scatter", here.own(3 * here.size), part, 3, "float32", root)
        found.append((part, values(root, 3 * here.size)[3 * here.rank :][:3]))
    return found


def _parts(tensor: torch.Tensor, lengths: Sequence[int]) -> list[tuple[int, int]]:
    """(address, count) of parts that lie end to end."""
    return [(part.data_ptr(), part.numel()) for part in tensor.split(list(lengths))]


@case
def gathers_and_scatters_of_uneven_parts(here):
    lengths = [2 * rank + 1 for rank in range(here.size)]
    own, total, root = lengths[here.rank], sum(lengths), here.size - 1
    is_root = here.rank == root
    given, source, everywhere, at_root, part = here.own(own), here.own(total), *map(here.empty, (total, total, own))
    here.call("all_gather_v", given, _parts(everywhere, lengths), "float32")
    given_part, part_given = (given.data_ptr(), own), (part.data_ptr(), own)
    here.call("gather_v", given_part, _parts(at_root, lengths) if is_root else [], "float32", root)
    here.call("scatter_v", _parts(source, lengths) if is_root else [], part_given, "float32", root)
    whole = torch.cat([values(rank, length) for rank, length in enumerate(lengths)])
    found = [(everywhere, whole), (part, values(root, total).split(lengths)[here.rank])]
    return [*found, (at_root, whole)] if is_root else found


@case
def reduce_scatter_of_uneven_parts(here):
    lengths = [2 * rank + 1 for rank in range(here.size)]
    source, target = here.own(sum(lengths)), here.empty(lengths[here.rank])
    here.call("reduce_scatter_v", _parts(source, lengths), target, "float32", "max")
    return [(target, reduced("max", here.all_values(sum(lengths))).split(lengths)[here.rank])]


@case
def all_to_all_of_uneven_parts(here):
    """As many from one to another as back, none between some."""
    lengths = [[(rank + peer) % 3 for peer in range(here.size)] for rank in range(here.size)]
    own = lengths[here.rank]
    given, arrived = here.own(sum(own)), here.empty(sum(own))
    here.call("all_to_all_v", _parts(given, own), _parts(arrived, own), "float32")
    sent = [values(peer, sum(theirs)).split(theirs)[here.rank] for peer, theirs in enumerate(lengths)]
    return [(arrived, torch.cat(sent))]


@case
def messages_around_a_ring_in_a_group(here):
    source, target = here.own(), here.empty(6)
    after, before = (here.rank + 1) % here.size, (here.rank - 1) % here.size
    calls = [
        ("send", source.data_ptr(), source.data_ptr(), 6, "float32", "sum", after),
        ("recv", target.data_ptr(), target.data_ptr(), 6, "float32", "sum", before),
    ]
    here.call("group", calls)
    return [(target, values(before))]


@case
def messages_one_by_one(here):
    """From each to the next but the last to the first, which would wait for itself."""
    target = here.empty(6)
    if here.rank > 0:
        here.call("recv", target, 6, "float32", here.rank - 1)
    if here.rank < here.size - 1:
        here.call("send", here.own(), 6, "float32", here.rank + 1)
    return [(target, values(here.rank - 1))] if here.rank > 0 else []


@case
def several_operations_as_one_group(here):
    dtypes, source, gathered = ("float32", "int64"), here.own(), here.empty(6 * here.size)
    tensors = [here.own(6, dtype) for dtype in dtypes]
    calls = [
        ("all_reduce", tensor.data_ptr(), tensor.data_ptr(), 6, dtype, "sum", 0)
        for tensor, dtype in zip(tensors, dtypes, strict=True)
    ]
    here.call("group", [*calls, ("all_gather", source.data_ptr(), gathered.data_ptr(), 6, "float32", "sum", 0)])
    expected = [reduced("sum", here.all_values(6, dtype)) for dtype in dtypes]
    return [*zip(tensors, expected, strict=True), (gathered, torch.cat(here.all_values()))]


@case
def letters_of_bytes(here):
    peers = [peer for peer in range(here.size) if peer != here.rank]
    source, rows = here.own(100, "int64"), here.empty(100 * here.size, "int64").view(here.size, 100)
    sends = [(peer, source.data_ptr(), source.nbytes) for peer in peers]
    here.call("exchange", sends, [(peer, rows[peer].data_ptr(), source.nbytes) for peer in peers])
    return [(rows[peer], values(peer, 100, "int64")) for peer in peers]


@case
def a_letter_to_oneself(here):
    """By NCCL's kernel for messages, also where there is one rank."""
    source, target = here.own(1 << 20), here.empty(1 << 20)
    letters = [[(here.rank, tensor.data_ptr(), tensor.nbytes)] for tensor in (source, target)]
    here.call("exchange", *letters)
    return [(target, values(here.rank, 1 << 20))]


@case
def sums_of_terms_times_a_factor(here):
    found, factor = [], torch.tensor([0.5], device=here.device.kind)
    here.device.streams.current().synchronize()
    make = (
        lambda: here.native.pre_mul_sum(0.5, "float32"),
        lambda: here.native.pre_mul_sum_on_device(factor.data_ptr(), "float32"),
    )
    for make_op in make:
        op, target = make_op(), here.empty(6)
        here.call("all_reduce", here.own(), target, 6, "float32", op)
        here.native.destroy_op(op)
        found.append((target, reduced("sum", here.all_values()) / 2))
    return found


@case
def empty_operations(here):
    tensor = here.own()
    here.call("all_reduce", tensor, tensor, 0, "float32", "sum")
    here.call("group", [])
    here.call("exchange", [], [])
    return [(tensor, values(here.rank))]


@case
def simulations_move_nothing_and_say_microseconds(here):
    tensor = here.own(1 << 20)
    address = tensor.data_ptr()
    if not here.device.library.has("ncclGroupSimulateEnd"):
        with pytest.raises(NcclUnsupportedError, match=r"ncclGroupSimulateEnd was asked for; NCCL has it from 2\.22"):
            here.native.simulate([])
        return []
    messages = [(kind, address, address, 1, "float32", "sum", here.rank) for kind in ("send", "recv")]
    assert here.native.simulate(messages) is None
    told = here.native.simulate([*messages, ("all_reduce", address, address, 1 << 20, "float32", "sum", 0)])
    if here.size > 1:  # one rank's are copied, or left, without an estimate
        assert told is not None
        assert 0 < told < 1e6
    # NCCL keeps the messages of a simulated group: those of the next one on its communicator are one behind.
    target = here.empty(1 << 20)
    here.call("exchange", *([(here.rank, each.data_ptr(), each.nbytes)] for each in (tensor, target)))
    return [(tensor, values(here.rank, 1 << 20)), (target, values(here.rank, 1 << 20))]


@case
def options_of_a_call(here):
    if not here.device.library.has("ncclAllReduceConfig"):
        with pytest.raises(NcclUnsupportedError, match=r"2\.31"):
            here.device.library.call_config({"max_ctas": 1})
        return []
    tensor, config = here.own(), here.device.library.call_config({"max_ctas": 1})
    calls = [("all_reduce", tensor.data_ptr(), tensor.data_ptr(), 6, "float32", "sum", 0)]
    here.stream.wait_event(here.device.streams.current().record_event())
    here.native.group(calls, here.stream.cuda_stream, config)
    here.stream.synchronize()
    return [(tensor, reduced("sum", here.all_values()))]


@case
def a_split_by_pairs(here):
    made, tensor = here.native.split(here.rank // 2, here.rank), here.own()
    assert made is not None
    members = [rank for rank in range(here.size) if rank // 2 == here.rank // 2]
    here._replace(native=made).call("all_reduce", tensor, tensor, 6, "float32", "sum")
    assert (made.rank, made.num_ranks) == (members.index(here.rank), len(members))
    assert here.native.split(None, 0) is None
    made.destroy()
    return [(tensor, reduced("sum", [values(rank) for rank in members]))]


@case
def registered_buffers(here):
    memory = here.device.memory(1 << 21)
    tensor, length = memory.view(torch.float32), (1 << 21) // 4
    tensor.copy_(values(here.rank, length))
    handle = here.native.register_buffer(memory.data_ptr(), memory.nbytes)
    here.call("all_reduce", tensor, tensor, length, "float32", "sum")
    here.native.deregister_buffer(handle)
    return [(tensor, reduced("sum", here.all_values(length)))]


def window_or_refusal(here: Here, memory: torch.Tensor) -> int | None:
    """A symmetric window; None where NCCL or the machine has none, which must have been said."""
    has = here.device.library.has("ncclCommWindowRegister")
    try:
        return here.native.register_window(memory.data_ptr(), memory.nbytes)
    except NcclUnsupportedError as error:
        assert ("share no symmetric memory" if has else "NCCL has it from 2.27.3") in str(error)  # noqa: PT017
        return None


@case
def collectives_in_a_window(here):
    memory = here.device.memory(1 << 21)
    tensor, length = memory.view(torch.float32), (1 << 21) // 4
    tensor.copy_(values(here.rank, length))
    window = window_or_refusal(here, memory)
    here.call("all_reduce", tensor, tensor, length, "float32", "sum")
    if window is not None:
        here.native.deregister_window(window)
    return [(tensor, reduced("sum", here.all_values(length)))]


@case
def puts_and_signals(here):
    """Every rank puts its part into the others' windows; a signal says that it is there.

    What is put lies in a window, too: NCCL refuses it elsewhere (2.30.7).
    """
    memory = here.device.memory(1 << 21)
    source = memory[1 << 20 :].view(torch.float32)[:2].copy_(here.own(2))
    peers = [peer for peer in range(here.size) if peer != here.rank]
    window = window_or_refusal(here, memory)
    if window is None:
        return []
    if not here.device.library.has("ncclPutSignal"):
        with pytest.raises(NcclUnsupportedError, match=r"2\.29"):
            here.call("put", [(here.rank, source.data_ptr(), 8, 0)], window)
    else:
        here.device.synchronize()
        dist.barrier()  # all windows are zeroed
        here.call("put", [(peer, source.data_ptr(), 8, 8 * here.rank) for peer in peers], window)
        here.call("wait_signals", [(peer, 1) for peer in peers])
    rows = memory.view(torch.float32)[: 2 * here.size].clone().view(here.size, 2)
    here.native.deregister_window(window)
    return [(rows[peer], values(peer, 2)) for peer in peers] if here.device.library.has("ncclPutSignal") else []
