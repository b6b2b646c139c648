"""Real refusals of the system for the length of a block: limits of resources, and system calls that a filter denies.

    with limited("no memory file"):
        ...

Limits are those of the process, as other threads have them too; a filter is the calling thread's alone and never goes
away, so `in_thread` runs the block's function in a thread that ends.
"""

import ctypes
import errno
import os
import platform
import resource
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

_PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 4, 22, 38
_FILTER_MODE, _ALLOW, _REFUSE = 2, 0x7FFF0000, 0x00050000
# Instructions of the filter: load a word of the call, skip so many where it is not equal, return.
_LOAD, _JUMP_EQUAL, _RETURN = 0x20, 0x15, 0x06
_MAP_SHARED_NORESERVE, _MADV_DONTFORK, _F_ADD_SEALS = 0x4001, 10, 1033
_NUMBERS = {
    "x86_64": {"mmap": 9, "madvise": 28, "fcntl": 72, "ftruncate": 77, "openat": 257, "memfd_create": 319},
    "aarch64": {"fcntl": 25, "ftruncate": 46, "openat": 56, "mmap": 222, "madvise": 233, "memfd_create": 279},
}
_NOBODY = 65534


class Denied(NamedTuple):
    """A system call that fails with `error`, where argument `position` has that value, or always without one."""

    call: str
    error: int
    position: int = 0
    value: int | None = None


DENIED = {
    "memory files are forbidden": Denied("memfd_create", errno.EPERM),
    "memory files are unknown": Denied("memfd_create", errno.ENOSYS),
    "no length can be set": Denied("ftruncate", errno.ENOSPC),
    "seals are refused": Denied("fcntl", errno.EPERM, 1, _F_ADD_SEALS),
    "mappings are refused": Denied("mmap", errno.ENOMEM, 3, _MAP_SHARED_NORESERVE),
    "MADV_DONTFORK is refused": Denied("madvise", errno.EINVAL, 2, _MADV_DONTFORK),
    "files of others are refused": Denied("openat", errno.EACCES, 2, os.O_RDWR | os.O_CLOEXEC),
}
_libc = ctypes.CDLL(None, use_errno=True)


def in_thread(run: Callable[[], Any]) -> Any:
    """The result of `run` in a thread of its own, which takes its filter with it; raises what it raises."""
    results: list[Any] = []
    errors: list[BaseException] = []

    def kept() -> None:
        try:
            results.append(run())
        except BaseException as error:  # noqa: BLE001  raised below
            errors.append(error)

    thread = threading.Thread(target=kept)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


@contextmanager
def limited(kind: str | None, num_spare: int = 0) -> Iterator[None]:
    """Holds this process, or the calling thread, to a limit of that name, above it by `num_spare`; to none, without."""
    if kind is None:
        yield
    elif kind in DENIED:
        _deny(DENIED[kind])
        yield
    elif kind == "not dumpable":
        _prctl(_PR_SET_DUMPABLE, 0)
        yield
        _prctl(_PR_SET_DUMPABLE, 1)
    else:
        which, most = _LIMITS[kind]
        before = resource.getrlimit(which)
        resource.setrlimit(which, (most(num_spare), before[1]))
        try:
            yield
        finally:
            resource.setrlimit(which, before)


def become_ordinary() -> None:
    """Makes this process one of a user without privileges, where it is root's."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
        _prctl(_PR_SET_DUMPABLE, 1)  # as it is for a process that was this user's from the beginning


def _descriptors(num_spare: int) -> int:
    """The limit below which so many numbers are free."""
    found = [os.dup(0) for _ in range(num_spare + 1)]
    for descriptor in found:
        os.close(descriptor)
    return max(found)


def _address_space(num_spare: int) -> int:
    """Room for a thread's stack, and for no arena."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize() + (12 << 20) + num_spare


_LIMITS: dict[str, tuple[int, Callable[[int], int]]] = {
    "short files": (resource.RLIMIT_FSIZE, lambda num_spare: (1 << 20) + num_spare),
    "little address space": (resource.RLIMIT_AS, _address_space),
    "no descriptors": (resource.RLIMIT_NOFILE, _descriptors),
    "no threads": (resource.RLIMIT_NPROC, lambda num_spare: num_spare),
}


def _deny(denied: Denied) -> None:
    """Lets a system call of this thread fail, for as long as the thread lives."""
    number = _NUMBERS[platform.machine()][denied.call]
    refusal = (_RETURN, 0, 0, _REFUSE | denied.error)
    checks = [(_LOAD, 0, 0, 0), (_JUMP_EQUAL, 0, 1 if denied.value is None else 3, number)]
    if denied.value is not None:
        checks += [(_LOAD, 0, 0, 16 + 8 * denied.position), (_JUMP_EQUAL, 0, 1, denied.value)]
    code = b"".join(struct.pack("HBBI", *each) for each in (*checks, refusal, (_RETURN, 0, 0, _ALLOW)))
    instructions = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(instructions))
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_SECCOMP, _FILTER_MODE, ctypes.create_string_buffer(program, len(program)))


def _prctl(option: int, first: Any, second: Any = 0) -> None:
    if _libc.prctl(option, first, second, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}): {os.strerror(ctypes.get_errno())}")
