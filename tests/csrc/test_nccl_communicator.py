"""The life of a communicator of NCCL, by a library that writes calls down: made, waited for, ended, in any order."""

import gc
import os
import re
import threading
import time

import pytest

from tests.csrc.nccl.recording import INTERNAL_ERROR, REMOTE_ERROR, UNHANDLED_CUDA_ERROR
from tritondt._C import NcclError, NcclUnsupportedError

STREAM = 9
LONG = 10**9  # polls: longer than any test


def all_reduce(comm):
    comm.all_reduce(16, 16, 3, "float32", "sum", STREAM)


def test_a_communicator_is_made_with_options(recording):
    nccl = recording.nccl
    options = {"max_ctas": 4, "net_name": "Socket", "comm_name": "ours", "cta_policy": 2, "nvls_host_mode": 0}
    comm = nccl.init([nccl.unique_id()], 4, 2, options)
    assert recording.take() == [
        "ncclGetUniqueId",
        "ncclCommInitRankConfig 4 id7 2 "
        "{size 120 version 23203 maxCTAs 4 netName Socket CTAPolicy 2 commName ours nvlsHostMode 0}",
    ]
    assert (comm.rank, comm.num_ranks, comm.device, comm.is_blocking) == (2, 4, 5, True)


def test_options_are_laid_out_as_the_loaded_version_has_them(libraries):
    made = []
    for version, size in [(21801, 48), (22203, 48), (22703, 72), (23007, 96), (23102, 112)]:
        recording = libraries(version)
        made.append(recording.nccl.init([recording.nccl.unique_id()], 1, 0))
        assert recording.take()[1] == f"ncclCommInitRankConfig 1 id7 0 {{size {size} version {version}}}"


def test_options_that_are_none_are_refused(libraries):
    nccl = libraries(22203).nccl
    unique_id = nccl.unique_id()
    with pytest.raises(NcclUnsupportedError) as raised:
        nccl.init([unique_id], 1, 0, {"traffic_class": 1})
    assert str(raised.value) == (
        "the option traffic_class of a communicator was asked for; NCCL has it from 2.26.2 on, and NCCL 2.22.3 "
        f"({nccl.path}) is in use. TRITONDT_NCCL_SO can name another library"
    )
    for options, sentence in [
        (
            {"max_cta": 1},
            "the option max_cta of a communicator was asked for; NCCL has blocking, cga_cluster_size, min_c",
        ),
        ({"max_ctas": "4"}, "the option max_ctas is '4'; it must be an integer of 32 bits"),
        ({"max_ctas": 2**31}, "the option max_ctas is 2147483648; it must be an integer of 32 bits"),
        ({"net_name": 4}, "the option net_name is 4; it must be a text without a zero byte"),
        ({"net_name": "a\0b"}, "the option net_name is a text with a zero byte; it must be a text without a zero byte"),
    ]:
        with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
            nccl.init([unique_id], 1, 0, options)


def test_what_is_no_rank_and_no_id_is_refused(recording):
    nccl = recording.nccl
    with pytest.raises(ValueError, match=r"^rank 2 of 2 was asked for; ranks are counted from 0$"):
        nccl.init([nccl.unique_id()], 2, 2)
    with pytest.raises(ValueError, match=r"^a unique id of 3 bytes was given; it must have 128$"):
        nccl.init([b"abc"], 2, 0)
    with pytest.raises(ValueError, match=r"^no unique id was given; there must be one or more$"):
        nccl.init([], 2, 0)


def test_many_ids_make_a_large_communicator_faster(libraries):
    recording = libraries()
    nccl = recording.nccl
    comm = nccl.init([nccl.unique_id(), nccl.unique_id()], 8, 3)
    assert comm.rank == 3
    assert recording.take()[-1] == "ncclCommInitRankScalable 8 3 2 id7"
    nccl = libraries(22203).nccl
    with pytest.raises(NcclUnsupportedError, match=r"^ncclCommInitRankScalable was asked for; .* from 2\.23\.4 on"):
        nccl.init([nccl.unique_id(), nccl.unique_id()], 8, 3)


def test_what_fails_late_is_aborted(recording):
    nccl = recording.nccl
    recording.fail("ncclCommInitRankConfig", UNHANDLED_CUDA_ERROR)
    with pytest.raises(NcclError, match=r"^ncclCommInitRankConfig: ncclUnhandledCudaError, something went wrong; "):
        nccl.init([nccl.unique_id()], 2, 0)
    assert "ncclCommAbort" not in " ".join(recording.take())
    recording.fail("ncclCommInitRankConfig", INTERNAL_ERROR)
    with pytest.raises(NcclError, match=r"^ncclCommInitRankConfig: ncclInternalError, "):
        nccl.init([nccl.unique_id()], 2, 0)
    assert recording.take()[-1] == "ncclCommAbort c0"


def test_a_nonblocking_communicator_is_waited_for(recording):
    recording.set_polls(3)
    comm = recording.nccl.init([recording.nccl.unique_id()], 2, 0, {"blocking": 0})
    assert not comm.is_blocking
    assert [comm.poll() for _ in range(5)] == [False, False, False, True, True]
    recording.set_polls(LONG)
    all_reduce(comm)
    start = time.monotonic()
    assert not comm.wait(0.05)
    assert 0.05 <= time.monotonic() - start < 5
    with pytest.raises(
        NcclError, match=r"^this nonblocking communicator is still at work on what was asked of it befor"
    ):
        all_reduce(comm)
    with pytest.raises(NcclError, match=r"^this nonblocking communicator is still at work"):
        comm.destroy()


def test_what_goes_wrong_in_the_background_is_raised_by_poll(recording):
    comm = recording.init(blocking=0)
    assert comm.poll()
    recording.set_state(0, REMOTE_ERROR)
    with pytest.raises(NcclError, match=r"^ncclCommGetAsyncError: ncclRemoteError, a remote process left; ") as raised:
        comm.wait(10)
    assert raised.value.result == "ncclRemoteError"


def test_a_communicator_ends_once(recording):
    comm = recording.init()
    comm.finalize()
    assert comm.wait(10)
    comm.destroy()
    assert recording.take() == ["ncclCommFinalize c0", "ncclCommDestroy c0"]
    comm.abort()
    with pytest.raises(NcclError, match=r"^this communicator was destroyed; nothing more can be done with it$"):
        all_reduce(comm)
    del comm
    gc.collect()
    assert recording.take() == []


@pytest.mark.parametrize(
    "use",
    [
        lambda comm: comm.poll(),
        lambda comm: comm.finalize(),
        lambda comm: comm.destroy(),
        lambda comm: comm.revoke(),
        lambda comm: comm.split(0, 0),
        lambda comm: comm.rank,
        all_reduce,
    ],
)
def test_an_aborted_communicator_refuses_everything(recording, use):
    comm = recording.init()
    comm.abort()
    comm.abort()
    with pytest.raises(NcclError, match=r"^this communicator was aborted; nothing more can be done with it$"):
        use(comm)
    assert recording.take() == ["ncclCommAbort c0"]


def test_what_was_never_closed_is_aborted(recording):
    comm = recording.init()
    del comm
    assert recording.take() == ["ncclCommAbort c0"]


def test_an_abort_ends_the_wait_of_another_thread(recording):
    comm = recording.init(blocking=0)
    recording.set_polls(LONG)
    all_reduce(comm)
    raised = []

    def wait():
        with pytest.raises(NcclError, match=r"^this communicator was aborted") as error:
            comm.wait(60)
        raised.append(error.value)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)
    comm.abort()
    thread.join(10)
    assert raised


def test_an_abort_ends_a_call_that_is_stuck(recording):
    """A blocking call without the GIL: others poll, and abort after half a second of patience."""
    comm = recording.init()
    recording.get_stuck_in("ncclAllReduce")
    raised = []

    def run():
        with pytest.raises(NcclError, match=r"^ncclAllReduce: ncclInternalError") as error:
            all_reduce(comm)
        raised.append(error.value)

    thread = threading.Thread(target=run)
    thread.start()
    while not recording.take():
        time.sleep(0.001)
    assert not comm.poll()
    start = time.monotonic()
    comm.abort()
    assert 0.4 < time.monotonic() - start < 10
    thread.join(10)
    assert raised
    assert recording.take() == ["ncclCommAbort c0"]


def test_a_forked_process_leaves_the_communicator_alone(recording):
    comm = recording.init()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            all_reduce(comm)
        except NcclError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        told = pipe.read()
    os.waitpid(child, 0)
    assert told == f"this communicator belongs to process {os.getpid()}; a forked process makes its own"
    all_reduce(comm)
    assert len(recording.take()) == 1


def test_a_split_makes_a_communicator_of_some_ranks(recording):
    comm = recording.init()
    part = comm.split(1, 5)
    assert part.poll()
    assert comm.split(None, 5) is None
    comm.split(0, 0, {"max_ctas": 2})
    assert recording.take() == [
        "ncclCommSplit 1 5 default c0",
        "ncclCommSplit -1 5 default c0",
        "ncclCommSplit 0 0 {size 120 version 23203 maxCTAs 2} c0",
        "ncclCommAbort c2",
    ]
    with pytest.raises(
        ValueError, match=r"^the color -1 was given; it must be 0 or more, or None for no communicator$"
    ):
        comm.split(-1, 0)


def test_a_child_is_there_once_its_parent_is_done(recording):
    """NCCL gives a nonblocking child's handle when the parent is ready, and not before."""
    comm = recording.init(blocking=0)
    recording.set_polls(2)
    child = comm.split(0, 0)
    assert not child.is_blocking
    assert not child.poll()
    with pytest.raises(NcclError, match=r"^this nonblocking communicator is still at work"):
        all_reduce(child)
    assert child.wait(10)
    assert (child.rank, child.num_ranks) == (0, 1)
    assert comm.poll()
    del comm
    gc.collect()
    all_reduce(child)
    # The child has let go of its parent.
    assert recording.take() == [
        "ncclCommSplit 0 0 default c0",
        "ncclCommAbort c0",
        f"ncclAllReduce 16 16 3 7 0 {STREAM} c1",
    ]


def test_a_child_that_its_parent_never_gave(recording):
    comm = recording.init(blocking=0)
    recording.set_polls(LONG)
    child = comm.split(0, 0)
    comm.abort()
    with pytest.raises(NcclError, match=r"^this communicator was aborted"):
        child.wait(10)
    child.abort()
    assert recording.take() == ["ncclCommSplit 0 0 default c0", "ncclCommAbort c0"]


def test_shrink_leaves_ranks_out(recording):
    comm = recording.init(num_ranks=4)
    smaller = comm.shrink([3, 1])
    assert smaller.num_ranks == 2
    comm.shrink([2], {"max_ctas": 2}, abort=True)
    assert recording.take()[:2] == [
        "ncclCommShrink 3 2 0 default c0",
        "ncclCommShrink 2 1 1 {size 120 version 23203 maxCTAs 2} c0",
    ]


def test_shrink_goes_on_from_a_communicator_that_failed(recording):
    comm = recording.init(num_ranks=4, blocking=0)
    recording.set_state(0, REMOTE_ERROR)
    with pytest.raises(NcclError, match=r"^ncclCommGetAsyncError: ncclRemoteError"):
        comm.poll()
    smaller = comm.shrink([3], abort=True)
    assert not smaller.poll()  # and no error, which is the parent's


def test_grow_adds_ranks(recording):
    comm = recording.init(num_ranks=2, rank=1)
    unique_id = comm.grow_id()
    larger = comm.grow(3, unique_id)
    joined = recording.nccl.join(unique_id, 3, 2)
    comm.grow(3)
    assert [(one.rank, one.num_ranks) for one in (larger, joined)] == [(1, 3), (2, 3)]
    assert recording.take()[:4] == [
        "ncclCommGetUniqueId c0",
        "ncclCommGrow 3 id8 -1 default c0",
        "ncclCommGrow 3 id8 2 default null",
        "ncclCommGrow 3 id0 -1 default c0",
    ]


def test_revoke_ends_what_is_under_way(recording):
    comm = recording.init()
    comm.revoke()
    assert recording.take() == ["ncclCommRevoke 0 c0"]


@pytest.mark.parametrize(
    ("version", "function", "since", "use"),
    [
        (21801, "ncclCommRegister", "2.19.1", lambda comm: comm.register_buffer(4096, 64)),
        (21801, "ncclGroupSimulateEnd", "2.22.3", lambda comm: comm.simulate([])),
        (22203, "ncclCommShrink", "2.27.3", lambda comm: comm.shrink([1])),
        (22203, "ncclCommWindowRegister", "2.27.3", lambda comm: comm.register_window(4096, 64)),
        (22203, "ncclCommRevoke", "2.28.7", lambda comm: comm.revoke()),
        (22203, "ncclCommGrow", "2.29.2", lambda comm: comm.grow(3)),
        (22203, "ncclCommGetUniqueId", "2.29.2", lambda comm: comm.grow_id()),
        (22203, "ncclPutSignal", "2.29.2", lambda comm: comm.put([(1, 16, 4, 0)], 88, STREAM)),
        (22203, "ncclWaitSignal", "2.29.2", lambda comm: comm.wait_signals([(1, 1)], STREAM)),
    ],
)
def test_what_came_later_says_with_which_version(libraries, version, function, since, use):
    recording = libraries(version)
    comm = recording.init()
    with pytest.raises(NcclUnsupportedError) as raised:
        use(comm)
    assert str(raised.value) == (
        f"{function} was asked for; NCCL has it from {since} on, and NCCL {recording.nccl.version} "
        f"({recording.nccl.path}) is in use. TRITONDT_NCCL_SO can name another library"
    )
    assert raised.value.function == function
    assert raised.value.result is None
    assert recording.take() == []
    all_reduce(comm)


def test_one_thread_at_a_time_calls(recording):
    """Groups of two threads on one communicator do not mix."""
    comm = recording.init()

    def exchange(address):
        for _ in range(200):
            comm.exchange([(1, address, 7)], [(1, address, 7)], STREAM)

    threads = [threading.Thread(target=exchange, args=(address,)) for address in (100, 200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    lines = recording.take()
    assert len(lines) == 2 * 200 * 4
    for start in range(0, len(lines), 4):
        group = lines[start : start + 4]
        assert group[0] == "ncclGroupStart"
        assert group[3] == "ncclGroupEnd"
        assert group[1].split()[1] == group[2].split()[1]
