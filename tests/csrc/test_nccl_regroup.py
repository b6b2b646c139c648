"""Communicators made from others: split, shrunk, grown, revoked; and the versions of NCCL that brought each."""

import gc

import pytest

from tests.csrc.nccl.recording import REMOTE_ERROR, STREAM, all_reduce
from tritondt._C import NcclError, NcclUnsupportedError

LONG = 10**9  # polls: longer than any test


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
        (22203, "ncclGetPeerDevicePointer", "2.29.2", lambda comm: comm.peer_pointers(88, 0)),
        (22203, "ncclGetLsaMultimemDevicePointer", "2.29.2", lambda comm: comm.multimem_pointer(88, 0)),
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
