"""CUDA's virtual memory management, by which processes map one piece of a GPU's memory: the driver by ctypes.

The library has one name everywhere, libcuda.so.1. A test double of libcuda takes its place where there is no GPU.
Source: CUDA's driver API, "Virtual Memory Management".
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_ubyte, c_uint64, c_void_p
from typing import Any

from tritondt.errors import TransportError

_PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_FILE_DESCRIPTOR = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_MINIMUM = 0  # CU_MEM_ALLOC_GRANULARITY_MINIMUM
# CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED and _HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
_NEEDED_ATTRIBUTES = (102, 103)
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED


class _Location(ctypes.Structure):
    """CUmemLocation: a device by its number."""

    _fields_ = [("type", c_int), ("id", c_int)]


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = [
        ("type", c_int),
        ("handle_types", c_int),
        ("location", _Location),
        ("windows_attributes", c_void_p),
        ("flags", c_ubyte * 8),
    ]


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", _Location), ("flags", c_int)]


_Uuid = c_ubyte * 16
# CUmemGenericAllocationHandle and CUdeviceptr are numbers of 64 bits, CUdevice is an int.
_PARAMETERS: dict[str, tuple[Any, ...]] = {
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDeviceCanAccessPeer": (POINTER(c_int), c_int, c_int),
    "cuDeviceGetP2PAttribute": (POINTER(c_int), c_int, c_int, c_int),
    "cuMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(_Properties), c_int),
    "cuMemCreate": (POINTER(c_uint64), c_size_t, POINTER(_Properties), c_uint64),
    "cuMemRelease": (c_uint64,),
    "cuMemAddressReserve": (POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemAddressFree": (c_uint64, c_size_t),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemUnmap": (c_uint64, c_size_t),
    "cuMemSetAccess": (c_uint64, c_size_t, POINTER(_Access), c_size_t),
    "cuStreamCreate": (POINTER(c_void_p), c_int),
    "cuMemsetD8Async": (c_uint64, c_ubyte, c_size_t, c_void_p),
    "cuStreamSynchronize": (c_void_p,),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuMemExportToShareableHandle": (c_void_p, c_uint64, c_int, c_uint64),
    "cuMemImportFromShareableHandle": (POINTER(c_uint64), c_void_p, c_int),
}
# The first that there is: only the second version, of CUDA 11.4, tells parts of a GPU (MIG) apart.
_UUID_NAMES = ("cuDeviceGetUuid_v2", "cuDeviceGetUuid")


class MappedMemory:
    """Bytes of a GPU's memory that are mapped into this process, from `address` on, until they are closed.

    An address is the device's: kernels and copies take it, the host does not read it.

    An example that needs a GPU:

    >>> memory, descriptor = CudaDriver().allocate(0, 1 << 20)  # doctest: +SKIP
    >>> memory.num_bytes  # doctest: +SKIP
    2097152
    """

    def __init__(self, driver: "CudaDriver", device: int, num_bytes: int) -> None:
        self.address = 0
        self.num_bytes = num_bytes
        self._driver, self._subject = driver, f"{num_bytes} bytes of device {device}"
        self._steps_back: list[tuple[Any, ...]] = []

    def close(self) -> None:
        """The end of the mapping, its addresses and this process's hold on the memory; a second call does nothing.

        Not collective: the memory itself goes when the last process has closed it, and the last descriptor. Nothing on
        the device may use it any more. Raises TransportError where the driver refuses a step; the others are done.
        """
        refusals = self._step_back()
        if refusals:
            raise TransportError("; ".join(refusals))

    def _do(self, name: str, *arguments: Any) -> None:
        """Calls a function of the driver for this memory; TransportError where it fails."""
        self._driver._call(name, self._subject, *arguments)

    def _must_undo(self, name: str, *arguments: Any) -> None:
        """Has `close` call a function of the driver, before those that it was told of earlier."""
        self._steps_back.append((name, *arguments))

    def _step_back(self) -> list[str]:
        """Gives everything back, the latest first; returns what the driver refused."""
        refusals = []
        while self._steps_back:
            try:
                self._do(*self._steps_back.pop())
            except TransportError as error:
                refusals.append(str(error))
        return refusals


class CudaDriver:
    """CUDA's driver, as far as processes of one host need it to share memory of GPUs.

    `path` names the library. Devices are CUDA's ordinals in this process. The driver is initialised by somebody else,
    and the calling thread's current context is of the device that it asks about: torch has seen to both once it has
    made a tensor there (torch.cuda.set_device for another thread). Raises TransportError where there is no such
    library, or where it lacks a function.

    An example that needs a GPU:

    >>> driver = CudaDriver()  # doctest: +SKIP
    >>> driver.can_share(torch.cuda.current_device())  # doctest: +SKIP
    True
    """

    def __init__(self, path: str = "libcuda.so.1") -> None:
        try:
            self._library = ctypes.CDLL(path)
        except OSError as error:
            raise TransportError(
                f"CUDA's driver was asked for as {path}, which cannot be loaded ({error}); allowed is a libcuda.so.1, "
                "which a machine with a GPU has"
            ) from error
        missing = [name for name in _PARAMETERS if not hasattr(self._library, name)]
        uuid_names = [name for name in _UUID_NAMES if hasattr(self._library, name)]
        if missing or not uuid_names:
            raise TransportError(
                f"CUDA's driver was asked for as {path}, which lacks {', '.join(missing or _UUID_NAMES)}; allowed is a "
                "libcuda.so.1 of CUDA 10.2 or newer"
            )
        self._uuid_name = uuid_names[0]
        for name, types in {**_PARAMETERS, self._uuid_name: (POINTER(_Uuid), c_int)}.items():
            getattr(self._library, name).argtypes = types
            getattr(self._library, name).restype = c_int

    def can_share(self, device: int) -> bool:
        """Whether memory of the device can be mapped at chosen addresses, and passed on as a file descriptor."""
        return all(
            self._number("cuDeviceGetAttribute", f"device {device}", attribute, self._handle(device))
            for attribute in _NEEDED_ATTRIBUTES
        )

    def identity(self, device: int) -> str:
        """The GPU's UUID in 32 hexadecimal digits: one for all processes, whatever number they have for the GPU."""
        found = _Uuid()
        self._call(self._uuid_name, f"device {device}", ctypes.byref(found), self._handle(device))
        return bytes(found).hex()

    def can_access(self, device: int, identity: str) -> bool:
        """Whether `device` may read and write memory of the GPU with a UUID, as `identity` gives it.

        False for a GPU that is hidden from this process by CUDA_VISIBLE_DEVICES: CUDA does not say what is between the
        two.
        """
        other = self._visible(identity)
        if other is None:
            return False
        subject, pair = f"devices {device} and {other}", (self._handle(device), self._handle(other))
        return other == device or bool(self._number("cuDeviceCanAccessPeer", subject, *pair))

    def has_atomics(self, device: int, identity: str) -> bool:
        """Whether atomic operations of `device` are native in memory of that GPU: NVLink carries them, PCIe may not."""
        other = self._visible(identity)
        if other is None:
            return False
        subject, pair = f"devices {device} and {other}", (self._handle(device), self._handle(other))
        return other == device or bool(self._number("cuDeviceGetP2PAttribute", subject, _NATIVE_ATOMICS, *pair))

    def _visible(self, identity: str) -> int | None:
        """The number that this process has for a GPU; None where it is hidden."""
        for device in range(self._number("cuDeviceGetCount", "all devices")):
            if self.identity(device) == identity:
                return device
        return None

    def allocate(self, device: int, num_bytes: int) -> tuple[MappedMemory, int]:
        """New memory of the device, all zeros, mapped here, and a file descriptor by which others map it.

        Not collective. `num_bytes` is rounded up to the device's granularity,
        2 MiB. The caller closes both: the descriptor once the others have mapped it. Raises TransportError, with
        everything given back, where the driver refuses.

        An example that needs a GPU:

        >>> memory, descriptor = CudaDriver().allocate(0, 1 << 20)  # doctest: +SKIP
        """
        handle, descriptor = c_uint64(), c_int()
        with self._mapping(device, num_bytes) as memory:
            memory._do("cuMemCreate", ctypes.byref(handle), memory.num_bytes, self._properties(device), 0)
            self._place(memory, handle.value, device)
            self._clear(memory)
            memory._do("cuMemExportToShareableHandle", ctypes.byref(descriptor), handle, _FILE_DESCRIPTOR, 0)
        return memory, descriptor.value

    def _clear(self, memory: MappedMemory) -> None:
        """Sets memory to 0, and waits for that: others must not see what was there before, nor lose what they write.

        In a stream of its own: in others something may wait for a rank that waits for this one.
        """
        stream = c_void_p()
        memory._do("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
        try:
            memory._do("cuMemsetD8Async", memory.address, 0, memory.num_bytes, stream)
            memory._do("cuStreamSynchronize", stream)
        finally:
            memory._do("cuStreamDestroy_v2", stream)

    def map(self, device: int, descriptor: int, num_bytes: int) -> MappedMemory:
        """The memory behind a descriptor of `allocate`'s, of any process, mapped here for `device`.

        Not collective. `num_bytes` is what `allocate` was asked for, or has given. The descriptor stays the caller's,
        and may be closed. Raises TransportError, with everything given back, where the driver refuses.

        An example that needs a GPU:

        >>> memory = CudaDriver().map(0, descriptor, 1 << 20)  # doctest: +SKIP
        """
        handle = c_uint64()
        with self._mapping(device, num_bytes) as memory:
            # The descriptor itself is in the place of a pointer.
            memory._do("cuMemImportFromShareableHandle", ctypes.byref(handle), descriptor, _FILE_DESCRIPTOR)
            self._place(memory, handle.value, device)
        return memory

    @contextmanager
    def _mapping(self, device: int, num_bytes: int) -> Iterator[MappedMemory]:
        """Memory that is not there yet, of a size that the device takes; given back where it is not completed."""
        if num_bytes <= 0:
            raise TransportError(f"{num_bytes} bytes of device {device} were asked for; allowed are 1 or more")
        granularity, properties = c_size_t(), self._properties(device)
        subject = f"{num_bytes} bytes of device {device}"
        self._call("cuMemGetAllocationGranularity", subject, ctypes.byref(granularity), properties, _MINIMUM)
        memory = MappedMemory(self, device, -(-num_bytes // granularity.value) * granularity.value)
        try:
            yield memory
        except BaseException as error:
            refusals = memory._step_back()
            if refusals and isinstance(error, TransportError):
                raise TransportError("; ".join([str(error), *refusals])) from error
            raise

    def _place(self, memory: MappedMemory, handle: int, device: int) -> None:
        """Maps what a handle stands for at new addresses, and lets the device read and write there."""
        address = c_uint64()
        memory._must_undo("cuMemRelease", handle)
        memory._do("cuMemAddressReserve", ctypes.byref(address), memory.num_bytes, 0, 0, 0)
        memory.address = address.value
        memory._must_undo("cuMemAddressFree", memory.address, memory.num_bytes)
        memory._do("cuMemMap", memory.address, memory.num_bytes, 0, handle, 0)
        memory._must_undo("cuMemUnmap", memory.address, memory.num_bytes)
        access = _Access(_Location(_DEVICE, self._handle(device)), _READ_WRITE)
        memory._do("cuMemSetAccess", memory.address, memory.num_bytes, ctypes.byref(access), 1)

    def _properties(self, device: int) -> Any:
        """A pointer to the properties of memory of the device that can be shared."""
        return ctypes.byref(_Properties(_PINNED, _FILE_DESCRIPTOR, _Location(_DEVICE, self._handle(device))))

    def _handle(self, device: int) -> int:
        """CUDA's handle of a device."""
        return self._number("cuDeviceGet", f"device {device}", device)

    def _number(self, name: str, subject: str, *arguments: Any) -> int:
        """The int that a function of the driver writes through its first parameter."""
        found = c_int()
        self._call(name, subject, ctypes.byref(found), *arguments)
        return found.value

    def _call(self, name: str, subject: str, *arguments: Any) -> None:
        """Calls a function of the driver; TransportError where it fails, with CUDA's words for it."""
        status = getattr(self._library, name)(*arguments)
        if status == 0:
            return
        text = c_char_p()  # stays null where the driver has no words
        self._library.cuGetErrorString(status, ctypes.byref(text))
        words = "an error without a text" if text.value is None else text.value.decode()
        raise TransportError(f"{name} was called for {subject} and returned {status} ({words}); it must return 0")
