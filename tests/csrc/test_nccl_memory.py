"""Memory of NCCL, windows, and the one-sided calls on them: which functions are called with what."""

import pytest

from tests.csrc.nccl.recording import STREAM, started
from tritondt._C import NcclError, NcclUnsupportedError


def test_memory_is_allocated_and_registered(recording):
    comm = recording.init()
    address = recording.nccl.allocate(4096)
    handle = comm.register_buffer(address, 4096)
    window = comm.register_window(address, 4096)
    comm.deregister_window(window)
    comm.deregister_buffer(handle)
    recording.nccl.free(address)
    assert recording.take() == [
        "ncclMemAlloc 4096",
        f"ncclCommRegister {address} 4096 c0",
        f"ncclCommWindowRegister {address} 4096 1 c0",
        f"ncclCommWindowDeregister {window} c0",
        f"ncclCommDeregister {handle} c0",
        f"ncclMemFree {address}",
    ]


def test_no_window_is_an_error(recording):
    comm = recording.init()
    recording.set_windows(False)
    with pytest.raises(NcclUnsupportedError) as raised:
        comm.register_window(4096, 8192)
    assert str(raised.value) == (
        "ncclCommWindowRegister gave no window for 8192 bytes: the GPUs of this communicator share no symmetric "
        f"memory, or NCCL_WIN_ENABLE or NCCL_CUMEM_ENABLE is 0; NCCL 2.32.3 ({recording.nccl.path})"
    )


def test_a_window_of_a_nonblocking_communicator_is_waited_for(recording):
    comm = recording.init(blocking=0)
    recording.set_polls(5)
    assert comm.register_window(4096, 8192) == 88
    recording.set_polls(10**9)
    with pytest.raises(NcclError, match=r"^ncclCommWindowRegister was not done in 0\.0500* s: all ranks of the comm"):
        comm.register_window(4096, 8192, timeout_s=0.05)


def test_addresses_of_a_window(recording):
    comm = recording.init(num_ranks=4)
    assert comm.peer_pointers(88, 64) == [1064, 2064, 0, 4064]  # rank 2 is of another host
    assert comm.multimem_pointer(88, 64) == 9064
    lines = [f"ncclGetPeerDevicePointer 88 64 {peer}" for peer in range(4)]
    assert recording.take()[-5:] == [*lines, "ncclGetLsaMultimemDevicePointer 88 64"]
    recording.set_windows(False)
    with pytest.raises(NcclUnsupportedError) as raised:
        comm.multimem_pointer(88, 64)
    assert str(raised.value) == (
        "ncclGetLsaMultimemDevicePointer gave no address: the GPUs of this communicator have no multimem (NVLink "
        f"SHARP), or NCCL_NVLS_ENABLE is 0; NCCL 2.32.3 ({recording.nccl.path})"
    )
    for ask in (comm.peer_pointers, comm.multimem_pointer):
        with pytest.raises(ValueError, match=r"^the window is null; register_window returns one$"):
            ask(0, 0)


def test_puts_and_signals(recording):
    comm = recording.init(num_ranks=3)
    comm.put([(1, 100, 7, 64), (2, 0, 0, 0)], 88, STREAM)
    comm.wait_signals([(1, 1), (2, 3)], STREAM, signal=4, context=5)
    comm.put([(1, 0, 0, 0)], 0, STREAM, signal=4, context=5)
    assert started(recording) == [
        ["ncclPutSignal 100 7 1 1 88 64 0 0 0", "ncclSignal 2 0 0 0"],
        ["ncclWaitSignal 2 3 2 4 5"],
        ["ncclSignal 1 4 5 0"],
    ]
    comm.wait_signals([], STREAM)  # from nobody, which NCCL would refuse
    with pytest.raises(ValueError, match=r"^the window is null; register_window returns one$"):
        comm.put([(1, 100, 7, 64)], 0, STREAM)
    with pytest.raises(ValueError, match=r"^rank 3 was named"):
        comm.wait_signals([(3, 1)], STREAM)
    assert recording.take() == []
