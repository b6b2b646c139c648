"""Calls of NCCL: which functions are called with what, by a library that writes them down and moves nothing."""

import re

import pytest

from tests.csrc.nccl.recording import INVALID_ARGUMENT, REMOTE_ERROR, STREAM, started
from tritondt._C import MessageSlices, NcclCalls, NcclError, NcclUnsupportedError

# NCCL's numbers, as the recorder writes them.
UINT8, INT32, FLOAT16, FLOAT32, BFLOAT16 = 1, 2, 6, 7, 9
SUM, PRODUCT, MAX, AVG = 0, 1, 2, 4


def test_collectives_call_their_function(recording):
    comm = recording.init()
    comm.all_gather(16, 32, 3, "float32", STREAM)
    comm.reduce_scatter(16, 32, 3, "bfloat16", "avg", STREAM)
    comm.all_reduce(16, 32, 3, "int32", "max", STREAM)
    comm.broadcast(16, 32, 3, "uint8", 1, STREAM)
    comm.reduce(16, 32, 3, "float16", "product", 1, STREAM)
    comm.all_to_all(16, 32, 3, "float32", STREAM)
    comm.gather(16, 32, 3, "float32", 1, STREAM)
    comm.scatter(16, 32, 3, "float32", 1, STREAM)
    comm.send(16, 3, "float32", 1, STREAM)
    comm.recv(32, 3, "float32", 1, STREAM)
    assert recording.take() == [
        f"ncclAllGather 16 32 3 {FLOAT32} {STREAM} c0",
        f"ncclReduceScatter 16 32 3 {BFLOAT16} {AVG} {STREAM} c0",
        f"ncclAllReduce 16 32 3 {INT32} {MAX} {STREAM} c0",
        f"ncclBroadcast 16 32 3 {UINT8} 1 {STREAM} c0",
        f"ncclReduce 16 32 3 {FLOAT16} {PRODUCT} 1 {STREAM} c0",
        f"ncclAlltoAll 16 32 3 {FLOAT32} {STREAM} c0",
        f"ncclGather 16 32 3 {FLOAT32} 1 {STREAM} c0",
        f"ncclScatter 16 32 3 {FLOAT32} 1 {STREAM} c0",
        f"ncclSend 16 3 {FLOAT32} 1 {STREAM} c0",
        f"ncclRecv 32 3 {FLOAT32} 1 {STREAM} c0",
    ]


def test_before_2_28_they_are_groups_of_messages(libraries):
    recording = libraries(22703)
    comm = recording.init(num_ranks=2, rank=1)
    send, recv = "ncclSend {} 3 7 {}".format, "ncclRecv {} 3 7 {}".format

    def started_by(method, *arguments):
        method(100, 200, 3, "float32", *arguments, STREAM)
        return started(recording)

    assert started_by(comm.all_to_all) == [[send(100, 0), recv(200, 0), send(112, 1), recv(212, 1)]]
    assert started_by(comm.gather, 0) == [[send(100, 0)]]
    assert started_by(comm.gather, 1) == [[send(100, 1), recv(200, 0), recv(212, 1)]]
    assert started_by(comm.scatter, 0) == [[recv(200, 0)]]
    assert started_by(comm.scatter, 1) == [[send(100, 0), send(112, 1), recv(200, 1)]]


def test_parts_that_differ_are_one_group(recording):
    comm = recording.init(num_ranks=3, rank=1)
    parts = [(100, 2), (200, 0), (300, 1)]
    comm.all_gather_v(16, [(100, 2), (200, 4), (300, 0)], "float32", STREAM)
    # Others than the root give a pointer that NCCL may look at.
    assert started(recording) == [["ncclBroadcast 100 100 2 7 0", "ncclBroadcast 16 200 4 7 1"]]
    comm.reduce_scatter_v([(100, 2), (200, 4), (300, 0)], 16, "float32", "sum", STREAM)
    assert started(recording) == [["ncclReduce 100 0 2 7 0 0", "ncclReduce 200 16 4 7 0 1"]]
    comm.all_to_all_v(parts, [(400, 0), (500, 0), (600, 5)], "float32", STREAM)
    assert started(recording) == [["ncclSend 100 2 7 0", "ncclSend 300 1 7 2", "ncclRecv 600 5 7 2"]]
    comm.gather_v((16, 4), [], "float32", 0, STREAM)
    assert started(recording) == [["ncclSend 16 4 7 0"]]
    comm.gather_v((16, 4), [(100, 2), (200, 4), (300, 1)], "float32", 1, STREAM)
    assert started(recording) == [
        ["ncclSend 16 4 7 1", "ncclRecv 100 2 7 0", "ncclRecv 200 4 7 1", "ncclRecv 300 1 7 2"]
    ]
    comm.scatter_v(parts, (16, 0), "float32", 1, STREAM)
    assert started(recording) == [["ncclSend 100 2 7 0", "ncclSend 300 1 7 2"]]
    comm.scatter_v([], (16, 4), "float32", 2, STREAM)
    assert started(recording) == [["ncclRecv 16 4 7 2"]]


def test_parts_are_one_for_each_rank(recording):
    comm = recording.init(num_ranks=3)
    with pytest.raises(ValueError, match=r"^2 targets were given; there must be 3$"):
        comm.all_gather_v(16, [(100, 2), (200, 4)], "float32", STREAM)
    with pytest.raises(ValueError, match=r"^1 sources were given; there must be 0$"):
        comm.scatter_v([(100, 2)], (16, 4), "float32", 2, STREAM)
    assert recording.take() == []


def test_an_exchange_is_one_group_of_bytes(recording):
    comm = recording.init(num_ranks=3)
    comm.exchange([(1, 100, 7), (2, 200, 0)], [(2, 300, 9), (1, 400, 5)], STREAM)
    assert started(recording) == [["ncclSend 100 7 1 1", "ncclRecv 300 9 1 2", "ncclRecv 400 5 1 1"]]
    comm.exchange([], [(2, 300, 9)], STREAM)
    assert started(recording) == [["ncclRecv 300 9 1 2"]]
    comm.exchange([], [], STREAM)
    assert recording.take() == []


def test_slices_are_messages_once_it_is_known_where_tensors_lie(recording):
    comm = recording.init(num_ranks=3)
    sends = MessageSlices([(1, 1, 4, 7), (2, None, 8, 9), (1, 0, 0, 0)])
    receives = MessageSlices([(2, None, 0, 5), (1, 0, 3, 6)])
    comm.exchange_slices(sends, [100, 200], 300, receives, [400], 500, STREAM)
    assert started(recording) == [
        ["ncclSend 204 7 1 1", "ncclSend 308 9 1 2", "ncclRecv 500 5 1 2", "ncclRecv 403 6 1 1"]
    ]
    with pytest.raises(IndexError, match=r"^a slice is of tensor 1, but the number of addresses is 1$"):
        comm.exchange_slices(sends, [100], 300, receives, [400], 500, STREAM)
    assert recording.take() == []


def test_calls_as_values_are_one_group(recording):
    comm = recording.init()
    comm.group(
        [
            ("all_reduce", 16, 16, 3, "float32", "sum", 0),
            ("broadcast", 32, 32, 5, "uint8", "sum", 1),
            ("send", 64, 0, 2, "int32", "sum", 1),
        ],
        STREAM,
    )
    assert started(recording) == [
        ["ncclAllReduce 16 16 3 7 0", "ncclBroadcast 32 32 5 1 1", "ncclSend 64 2 2 1"],
    ]


def test_calls_of_tensors_run_wherever_these_lie(recording):
    comm = recording.init()
    calls = NcclCalls(
        recording.nccl,
        [
            ("all_reduce", (0, 0), (0, 0), 3, "float32", "sum", 0),
            ("broadcast", (1, 4), (0, 8), 5, "uint8", "sum", 1),
        ],
    )
    comm.run(calls, [16, 32], STREAM)
    comm.run(calls, [64, 96], STREAM)
    assert started(recording) == [
        ["ncclAllReduce 16 16 3 7 0", "ncclBroadcast 36 24 5 1 1"],
        ["ncclAllReduce 64 64 3 7 0", "ncclBroadcast 100 72 5 1 1"],
    ]
    with pytest.raises(IndexError, match=r"^a call is of tensor 1, but the number of addresses is 1$"):
        comm.run(calls, [16], STREAM)
    comm.run(NcclCalls(recording.nccl, []), [], STREAM)
    assert recording.take() == []


def test_calls_that_a_library_lacks_are_refused_when_they_are_made(libraries):
    with pytest.raises(NcclUnsupportedError, match="float8_e5m2"):
        NcclCalls(libraries(22203).nccl, [("all_reduce", (0, 0), (0, 0), 3, "float8_e5m2", "sum", 0)])


REFUSED = {
    "rank 2 was named; this communicator has ranks 0 to 1": ("send", 16, 0, 3, "float32", "sum", 2),
    "rank -1 was named; this communicator has ranks 0 to 1": ("recv", 0, 16, 3, "float32", "sum", -1),
    "a count of -1 was given; it must be 0 or more": ("send", 16, 0, -1, "float32", "sum", 1),
    "the source is null; this rank reads it": ("all_reduce", 0, 16, 3, "float32", "sum", 0),
    "the target is null; this rank writes it": ("broadcast", 0, 0, 3, "float32", "sum", 1),
    "the dtype 'complex64' was asked for; NCCL has int8, uint8, int32, uint32, int64, uint64, float16, float32, "
    "float64, bfloat16, float8_e4m3fn, float8_e5m2": ("send", 16, 0, 3, "complex64", "sum", 1),
    "the op 'bxor' was asked for; NCCL has sum, product, max, min, avg": (
        "all_reduce",
        16,
        16,
        3,
        "float32",
        "bxor",
        0,
    ),
    "the op 3 was asked for; numbers are those that pre_mul_sum returned": (
        "all_reduce",
        16,
        16,
        3,
        "float32",
        3,
        0,
    ),
    "the operation 'barrier' was asked for; NCCL has all_gather, reduce_scatter, all_reduce, broadcast, reduce, "
    "all_to_all, gather, scatter, send, recv": ("barrier", 16, 16, 3, "float32", "sum", 0),
}


@pytest.mark.parametrize("sentence", list(REFUSED))
def test_what_no_rank_can_do_is_refused_before_anything_starts(recording, sentence):
    comm = recording.init()
    good = ("all_reduce", 16, 16, 3, "float32", "sum", 0)
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        comm.group([good, REFUSED[sentence]], STREAM)
    assert recording.take() == []
    comm.group([good], STREAM)
    assert len(recording.take()) == 1


def test_null_where_this_rank_does_not_look_is_no_error(recording):
    comm = recording.init(rank=0)
    comm.broadcast(0, 16, 3, "float32", 1, STREAM)
    comm.reduce(16, 0, 3, "float32", "sum", 1, STREAM)
    comm.all_reduce(0, 0, 0, "float32", "sum", STREAM)
    assert len(recording.take()) == 3


def test_dtypes_of_8_bits_came_with_2_24(libraries):
    comm = libraries(22203).init()
    with pytest.raises(
        NcclUnsupportedError, match=r"^the dtype float8_e5m2 was asked for; NCCL has it from 2\.24\.3 on"
    ):
        comm.all_reduce(16, 16, 3, "float8_e5m2", "sum", STREAM)


def test_a_failed_call_says_which_and_what_nccl_says(recording):
    comm = recording.init()
    recording.fail("ncclAllReduce", REMOTE_ERROR)
    with pytest.raises(NcclError) as raised:
        comm.all_reduce(16, 16, 3, "float32", "sum", STREAM)
    assert str(raised.value) == (
        "ncclAllReduce: ncclRemoteError, a remote process left; NCCL's last error: what NCCL said last; "
        f"NCCL 2.32.3 ({recording.nccl.path})"
    )
    assert raised.value.function == "ncclAllReduce"
    assert raised.value.result == "ncclRemoteError"


def test_a_call_that_fails_within_a_group_ends_the_group(recording):
    comm = recording.init()
    recording.fail("ncclRecv", INVALID_ARGUMENT)
    with pytest.raises(NcclError, match=r"^ncclRecv: ncclInvalidArgument"):
        comm.exchange([(1, 100, 7)], [(1, 200, 7)], STREAM)
    assert [line.split()[0] for line in recording.take()] == ["ncclGroupStart", "ncclSend", "ncclRecv", "ncclGroupEnd"]


def test_options_of_one_call(recording):
    comm = recording.init()
    config = recording.nccl.call_config({"max_ctas": 4, "alg_selection": "ring", "user_profiler_tag": 2**40})
    comm.all_reduce(16, 16, 3, "float32", "sum", STREAM, config)
    comm.all_to_all(16, 32, 3, "float32", STREAM, config=config)
    shown = f"{{size 72 maxCTAs 4 algSelection ring force 1 tag {2**40}}}"
    assert recording.take() == [
        f"ncclAllReduceConfig 16 16 3 7 0 {STREAM} {shown} c0",
        f"ncclAlltoAllConfig 16 32 3 7 {STREAM} {shown} c0",
    ]
    with pytest.raises(ValueError, match=r"^a configuration was given for a send or recv; NCCL takes one for its coll"):
        comm.group([("send", 16, 0, 3, "float32", "sum", 1)], STREAM, config)


@pytest.mark.extended
def test_options_of_one_call_came_with_2_31(libraries):
    newest = libraries()
    newer = newest.nccl.call_config({"launch_completion_event": 64})
    recording = libraries(23102)
    with pytest.raises(
        NcclUnsupportedError, match=r"^the option launch_completion_event of a call .* from 2\.32\.3 on"
    ):
        recording.nccl.call_config({"launch_completion_event": 64})
    comm = libraries(23007).init()
    with pytest.raises(NcclUnsupportedError, match=r"^ncclAllReduceConfig was asked for; NCCL has it from 2\.31\.2 on"):
        comm.all_reduce(16, 16, 3, "float32", "sum", STREAM, newer)


def test_a_sum_of_terms_times_a_factor(recording):
    comm = recording.init()
    op = comm.pre_mul_sum(0.5, "float32")
    comm.all_reduce(16, 16, 3, "float32", op, STREAM)
    comm.destroy_op(op)
    comm.pre_mul_sum(3, "int8")
    comm.pre_mul_sum(-1.5, "float16")
    comm.pre_mul_sum(2, "bfloat16")
    comm.pre_mul_sum(0.1, "float64")
    comm.pre_mul_sum_on_device(640, "float32")
    assert recording.take() == [
        f"ncclRedOpCreatePreMulSum {0x3F000000} 7 1 c0",
        f"ncclAllReduce 16 16 3 7 17 {STREAM} c0",
        "ncclRedOpDestroy 17 c0",
        "ncclRedOpCreatePreMulSum 3 0 1 c0",
        f"ncclRedOpCreatePreMulSum {0xBE00} 6 1 c0",
        f"ncclRedOpCreatePreMulSum {0x4000} 9 1 c0",
        f"ncclRedOpCreatePreMulSum {0x3FB999999999999A} 8 1 c0",
        "ncclRedOpCreatePreMulSum 640 7 0 c0",
    ]


@pytest.mark.parametrize(
    ("factor", "dtype", "sentence"),
    [
        (0.5, "int32", "the factor 0.500000 was given for a dtype of integers; it must be an int"),
        (-1, "uint64", "the factor -1 is out of the range of its dtype"),
        (200, "int8", "the factor 200 is out of the range of its dtype"),
        (1, "float8_e5m2", "a factor for 8-bit floating point was given; NCCL takes none"),
    ],
)
def test_a_factor_is_a_number_of_its_dtype(recording, factor, dtype, sentence):
    comm = recording.init()
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        comm.pre_mul_sum(factor, dtype)


def test_a_simulation_gives_microseconds(recording):
    comm = recording.init()
    recording.take()
    messages = [(kind, 16, 16, 3, "float32", "sum", 1) for kind in ("send", "all_to_all", "gather", "scatter")]
    assert comm.simulate(messages) is None
    assert not {line.split()[0] for line in recording.take()} & {"ncclGroupStart", "ncclCommSplit"}
    assert comm.simulate([*messages, ("all_reduce", 16, 16, 3, "float32", "sum", 0)]) == 12.5
    lines = recording.take()
    assert [line.split()[0] for line in lines][-5:] == [
        "ncclCommSplit",
        "ncclGroupStart",
        "ncclAllReduce",
        "ncclGroupSimulateEnd",
        "ncclCommAbort",
    ]


def test_a_simulation_on_a_nonblocking_communicator_would_be_none(recording):
    comm = recording.init(blocking=0)
    with pytest.raises(NcclUnsupportedError, match=r"^a simulation was asked of a nonblocking communicator"):
        comm.simulate([("all_reduce", 16, 16, 3, "float32", "sum", 0)])
    assert recording.take() == []
