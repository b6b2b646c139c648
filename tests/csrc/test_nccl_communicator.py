"""The life of a communicator of NCCL, by a library that writes calls down: made, waited for, ended, in any order."""

import gc
import os
import re
import threading
import time

import pytest

from tests.csrc.nccl.recording import INTERNAL_ERROR, REMOTE_ERROR, STREAM, UNHANDLED_CUDA_ERROR, all_reduce
from tritondt._C import NcclError, NcclUnsupportedError

LONG = 10**9  # polls: longer than any test


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
    assert 0.05 <= time.monotonic() - start < 30
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
    assert 0.4 < time.monotonic() - start < 30
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
