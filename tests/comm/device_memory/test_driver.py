"""CUDA's virtual memory over the double of libcuda: memory that processes share, and failures that leave nothing."""

import ctypes
import os
import re
from ctypes import c_uint64
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.comm.device_memory.conftest import left
from tests.doubles.fake_cuda.library import FakeCuda, build
from tests.harness.gloo_ranks import GlooRanks
from tritondt.comm.device_memory import driver as driver_module
from tritondt.comm.device_memory.descriptors import DescriptorSwap
from tritondt.comm.device_memory.driver import CudaDriver
from tritondt.errors import TransportError

PAGE = 1 << 21
OUT_OF_MEMORY = 2
ALLOCATE = [
    ("cuMemGetAllocationGranularity", 1),
    *(("cuDeviceGet", n) for n in (1, 2, 3)),
    ("cuMemCreate", 1),
    ("cuMemAddressReserve", 1),
    ("cuMemMap", 1),
    ("cuMemSetAccess", 1),
    ("cuStreamCreate", 1),
    ("cuMemsetD8Async", 1),
    ("cuStreamSynchronize", 1),
    ("cuMemExportToShareableHandle", 1),
]
MAP = [
    ("cuMemGetAllocationGranularity", 1),
    *(("cuDeviceGet", n) for n in (1, 2)),
    ("cuMemImportFromShareableHandle", 1),
    ("cuMemAddressReserve", 1),
    ("cuMemMap", 1),
    ("cuMemSetAccess", 1),
]


def share(rank: int, path: str) -> tuple[int, bool, bool, int]:
    """A rank's bytes, whether they were zeros, whether its peers' writes are there, and what is left at the end."""
    cuda, driver, size = FakeCuda(Path(path)), CudaDriver(path), dist.get_world_size()
    cuda.set_devices(size)
    told: list = [None] * size
    with DescriptorSwap() as swap:
        dist.all_gather_object(told, swap.told)
        memory, descriptor = driver.allocate(rank, PAGE + 1)
        found = swap.swap(descriptor, dict(enumerate(told)), rank, 60.0)
    peers = {place: driver.map(rank, each, memory.num_bytes) for place, each in found.items()}
    for each in (descriptor, *found.values()):
        os.close(each)
    was_clear = not any(ctypes.string_at(memory.address, memory.num_bytes))
    dist.barrier()
    for peer in peers.values():
        ctypes.memset(peer.address + rank * 1000, rank + 1, 1000)
    dist.barrier()
    written = b"".join(bytes([place + 1 if place != rank else 0]) * 1000 for place in range(size))
    is_there = ctypes.string_at(memory.address, memory.num_bytes) == written.ljust(memory.num_bytes, b"\0")
    for each_memory in (memory, *peers.values()):
        each_memory.close()
    return memory.num_bytes, was_clear, is_there, cuda.live()


def test_processes_write_into_each_others_memory(double: Path, four_shared_memory_ranks: GlooRanks) -> None:
    assert four_shared_memory_ranks.run(share, str(double)) == [(2 * PAGE, True, True, 0)] * 4


@pytest.mark.parametrize(("asked", "given"), [(1, PAGE), (PAGE, PAGE), (PAGE + 1, 2 * PAGE)])
@pytest.mark.in_core(3)
def test_sizes_are_rounded_up(driver: CudaDriver, asked: int, given: int) -> None:
    """Others may ask for either size."""
    memory, descriptor = driver.allocate(2, asked)
    assert memory.num_bytes == given
    assert memory.address % PAGE == 0
    for num_bytes in (asked, given):
        again = driver.map(1, descriptor, num_bytes)
        assert again.num_bytes == given
        ctypes.memset(again.address + given - 1, 7, 1)
        assert ctypes.string_at(memory.address, given) == bytes(given - 1) + b"\7"
        ctypes.memset(memory.address, 0, given)
        again.close()
    os.close(descriptor)
    memory.close()


def test_memory_lives_as_long_as_anybody_has_it(driver: CudaDriver) -> None:
    memory, descriptor = driver.allocate(0, PAGE)
    again = driver.map(0, descriptor, PAGE)
    os.close(descriptor)
    ctypes.memset(memory.address, 9, PAGE)
    memory.close()
    assert ctypes.string_at(again.address, PAGE) == b"\t" * PAGE
    again.close()


def test_closing_twice_is_closing_once(cuda: FakeCuda, driver: CudaDriver) -> None:
    before = cuda.live()
    memory, descriptor = driver.allocate(0, PAGE)
    os.close(descriptor)
    assert cuda.live() == before + 3
    memory.close()
    memory.close()
    assert cuda.live() == before


def test_a_refused_close_says_so_and_does_the_rest(cuda: FakeCuda, driver: CudaDriver) -> None:
    """The double did nothing: the test closes what is left."""
    before = cuda.live()
    memory, descriptor = driver.allocate(1, PAGE)
    os.close(descriptor)
    cuda.fail("cuMemAddressFree", 1, 1)
    text = (
        "cuMemAddressFree was called for 2097152 bytes of device 1 and returned 1 (invalid argument); it must return 0"
    )
    with pytest.raises(TransportError, match=f"^{re.escape(text)}$"):
        memory.close()
    assert cuda.live() == before + 1
    memory.close()
    assert cuda.call("cuMemAddressFree", c_uint64(memory.address), c_uint64(PAGE)) == 0


@pytest.mark.parametrize(("name", "n"), ALLOCATE)
@pytest.mark.in_core(len(ALLOCATE))
def test_a_failure_while_memory_is_made_gives_all_back(cuda: FakeCuda, driver: CudaDriver, name: str, n: int) -> None:
    before = left(cuda)
    cuda.fail(name, n, OUT_OF_MEMORY)
    with pytest.raises(
        TransportError, match=rf"^{name} was called for .* returned 2 \(out of memory\); it must return 0$"
    ):
        driver.allocate(0, PAGE)
    assert left(cuda) == before


@pytest.mark.parametrize(("name", "n"), MAP)
@pytest.mark.in_core(len(MAP))
def test_a_failure_while_memory_is_mapped_gives_all_back(cuda: FakeCuda, driver: CudaDriver, name: str, n: int) -> None:
    memory, descriptor = driver.allocate(0, PAGE)
    before = left(cuda)
    cuda.fail(name, n, OUT_OF_MEMORY)
    with pytest.raises(
        TransportError, match=rf"^{name} was called for .* returned 2 \(out of memory\); it must return 0$"
    ):
        driver.map(1, descriptor, PAGE)
    assert left(cuda) == before
    os.close(descriptor)
    memory.close()


def test_what_a_failure_says(cuda: FakeCuda, driver: CudaDriver) -> None:
    cuda.fail("cuMemCreate", 1, OUT_OF_MEMORY)
    with pytest.raises(TransportError) as error:
        driver.allocate(2, PAGE + 1)
    assert str(error.value) == (
        "cuMemCreate was called for 4194304 bytes of device 2 and returned 2 (out of memory); it must return 0"
    )
    cuda.fail("cuMemCreate", 1, 12345)
    with pytest.raises(TransportError, match=r"returned 12345 \(an error without a text\); it must return 0$"):
        driver.allocate(2, PAGE)
    with pytest.raises(TransportError, match=r"^0 bytes of device 2 were asked for; allowed are 1 or more$"):
        driver.allocate(2, 0)


def test_a_failure_that_cannot_be_given_back_says_both(cuda: FakeCuda, driver: CudaDriver) -> None:
    """Without the mapping's end, which the test brings about, the double frees no addresses."""
    cuda.fail("cuMemsetD8Async", 1, OUT_OF_MEMORY)
    cuda.fail("cuMemRelease", 1, 1)
    before = cuda.live()
    with pytest.raises(
        TransportError, match=r"^cuMemsetD8Async was called .*; cuMemRelease was called .* \(invalid argum"
    ):
        driver.allocate(0, PAGE)
    assert cuda.live() == before + 1
    handle = next(each for each in range(0x1000, 0x2000) if cuda.call("cuMemRelease", c_uint64(each)) == 0)
    assert cuda.call("cuMemRelease", c_uint64(handle)) == 1, "a second time"


def test_a_descriptor_of_something_else_is_refused(driver: CudaDriver) -> None:
    descriptor = os.memfd_create("something else")
    os.truncate(descriptor, PAGE)
    with pytest.raises(
        TransportError, match=r"^cuMemImportFromShareableHandle was called for 2097152 bytes of device 0 "
    ):
        driver.map(0, descriptor, PAGE)
    os.close(descriptor)


def test_the_wrong_size_is_refused(driver: CudaDriver) -> None:
    memory, descriptor = driver.allocate(0, PAGE)
    with pytest.raises(TransportError, match=r"^cuMemMap was called for 4194304 bytes of device 0 and returned 1 "):
        driver.map(0, descriptor, 2 * PAGE)
    os.close(descriptor)
    memory.close()


@pytest.mark.parametrize(
    ("constant", "value"),
    [
        ("_PINNED", 2),
        ("_FILE_DESCRIPTOR", 2),
        ("_DEVICE", 2),
        ("_READ_WRITE", 1),
        ("_MINIMUM", 2),
        ("_NON_BLOCKING", 0),
    ],
)
@pytest.mark.in_core(6)
def test_a_wrong_constant_is_found_out(
    driver: CudaDriver, monkeypatch: pytest.MonkeyPatch, constant: str, value: int
) -> None:
    """The double holds all of them against cuda.h."""
    monkeypatch.setattr(driver_module, constant, value)
    with pytest.raises(TransportError, match=r"returned 1 \(invalid argument\)"):
        driver.allocate(2, PAGE)


def clear(cuda: FakeCuda, address: c_uint64, size: c_uint64) -> int:
    """What cuMemsetD8Async returns in a stream of its own."""
    stream = ctypes.c_void_p()
    assert cuda.call("cuStreamCreate", ctypes.byref(stream), 1) == 0
    result = cuda.call("cuMemsetD8Async", address, ctypes.c_ubyte(0), size, stream)
    assert cuda.call("cuStreamSynchronize", stream) == 0
    assert cuda.call("cuStreamDestroy_v2", stream) == 0
    assert cuda.call("cuStreamDestroy_v2", stream) == 400
    return result


def test_what_is_not_there_cannot_be_given_back(cuda: FakeCuda) -> None:
    nothing, size = c_uint64(PAGE), c_uint64(PAGE)
    assert cuda.call("cuMemUnmap", nothing, size) == 1
    assert cuda.call("cuMemAddressFree", nothing, size) == 1
    assert cuda.call("cuMemRelease", c_uint64(1)) == 1
    assert clear(cuda, nothing, size) == 1


def test_memory_is_out_of_reach_until_it_is_opened(cuda: FakeCuda, driver: CudaDriver) -> None:
    """The access is not granted; zeros would be the first to be written."""
    memory, descriptor = driver.allocate(0, PAGE)
    handle, address, size = c_uint64(), c_uint64(), c_uint64(PAGE)
    assert cuda.call("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(descriptor), 1) == 0
    assert cuda.call("cuMemAddressReserve", ctypes.byref(address), size, c_uint64(0), c_uint64(0), c_uint64(0)) == 0
    assert cuda.call("cuMemMap", address, size, c_uint64(0), handle, c_uint64(0)) == 0
    assert clear(cuda, address, size) == 1
    assert cuda.call("cuMemAddressFree", address, size) == 1, "it is mapped"
    assert cuda.call("cuMemUnmap", address, size) == 0
    assert cuda.call("cuMemAddressFree", address, size) == 0
    assert cuda.call("cuMemRelease", handle) == 0
    os.close(descriptor)
    memory.close()


def test_identities_are_of_devices(cuda: FakeCuda, driver: CudaDriver) -> None:
    assert driver.identity(2) == "f0f1f2f3f4f5f6f7f8f9fafbfcfdfe02"
    assert len({driver.identity(device) for device in range(3)}) == 3
    with pytest.raises(TransportError) as error:
        driver.identity(3)
    assert str(error.value) == (
        "cuDeviceGet was called for device 3 and returned 101 (invalid device ordinal); it must return 0"
    )


def test_an_older_driver_tells_identities_too(cuda: FakeCuda, driver: CudaDriver) -> None:
    assert CudaDriver(str(build(old=True))).identity(1) == driver.identity(1)


def test_who_can_access_whom(cuda: FakeCuda, driver: CudaDriver) -> None:
    cuda.set_peer(0, 1, False)
    identities = [driver.identity(device) for device in range(3)]
    found = [[driver.can_access(device, each) for each in identities] for device in range(3)]
    assert found == [[True, False, True], [True, True, True], [True, True, True]]
    memory, descriptor = driver.allocate(1, PAGE)
    with pytest.raises(
        TransportError, match=r"^cuMemSetAccess was called for 2097152 bytes of device 0 and returned 101 "
    ):
        driver.map(0, descriptor, PAGE)
    cuda.set_peer(0, 1, True)
    driver.map(0, descriptor, PAGE).close()
    os.close(descriptor)
    memory.close()


def test_who_has_atomics_in_whose_memory(cuda: FakeCuda, driver: CudaDriver) -> None:
    cuda.set_atomics(0, 1, False)
    assert [driver.has_atomics(0, driver.identity(peer)) for peer in range(3)] == [True, False, True]
    assert all(driver.can_access(0, driver.identity(peer)) for peer in range(3))
    assert driver.has_atomics(1, driver.identity(0))
    cuda.set_atomics(0, 1, True)


def test_of_a_hidden_device_nothing_is_known(cuda: FakeCuda, driver: CudaDriver) -> None:
    hidden = driver.identity(2)
    assert driver.can_access(0, hidden)
    assert driver.has_atomics(0, hidden)
    cuda.set_devices(2)
    assert not driver.can_access(0, hidden)
    assert not driver.has_atomics(0, hidden)


@pytest.mark.parametrize("attribute", [102, 103])
def test_both_attributes_are_needed(cuda: FakeCuda, driver: CudaDriver, attribute: int) -> None:
    assert driver.can_share(1)
    cuda.set_attribute(1, attribute, 0)
    assert not driver.can_share(1)
    assert driver.can_share(0)
    cuda.set_attribute(1, attribute, 1)


def test_no_library_is_an_error() -> None:
    with pytest.raises(
        TransportError, match=r"^CUDA's driver was asked for as libnone\.so, which cannot be loaded \(.*\);"
    ):
        CudaDriver("libnone.so")
    with pytest.raises(TransportError) as error:
        CudaDriver("libc.so.6")
    assert str(error.value).startswith(
        "CUDA's driver was asked for as libc.so.6, which lacks cuGetErrorString, cuDevice"
    )
    assert str(error.value).endswith("; allowed is a libcuda.so.1 of CUDA 10.2 or newer")
