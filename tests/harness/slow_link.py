"""A link between two network namespaces that delays packets and loses some: a program that carries them.

    python -m tests.harness.slow_link PID FOLDER --delay 0.005 --lose-every 100 --rate 100e6

Each namespace, that of this process and that of process PID, gets a device `wire` (TUN); where the system has none, the
exit status is NO_LINK. A packet arrives `delay` seconds after the packets before it have been sent at `rate` bits per
second, and every so many of a direction do not. FOLDER/carried holds the packets taken and the packets lost so far.
"""

import argparse
import collections
import ctypes
import errno
import fcntl
import os
import select
import struct
import sys
import time
from collections.abc import Sequence
from pathlib import Path

NO_LINK = 77
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI, _CLONE_NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000
# A packet of the largest length, and so many that wait on the way: what comes beyond is lost, as in a router.
_MAX_BYTES, _MAX_WAITING = 65536, 1000


class Direction:
    """Packets on their way from one device to the other."""

    def __init__(self, source: int, target: int, asked: argparse.Namespace) -> None:
        self.source, self._target, self._asked = source, target, asked
        self._waiting: collections.deque[tuple[float, bytes]] = collections.deque()
        self._sent_at, self.num_taken, self.num_lost = 0.0, 0, 0

    def take(self) -> None:
        """Takes one packet, and loses it where its turn has come."""
        packet = os.read(self.source, _MAX_BYTES)
        self.num_taken += 1
        if self.num_taken % self._asked.lose_every == 0 or len(self._waiting) >= _MAX_WAITING:
            self.num_lost += 1
            return
        self._sent_at = max(self._sent_at, time.monotonic()) + 8 * len(packet) / self._asked.rate
        self._waiting.append((self._sent_at + self._asked.delay, packet))

    def deliver(self) -> float | None:
        """Delivers what is due; seconds until the next is, None where nothing is on its way."""
        while self._waiting:
            left = self._waiting[0][0] - time.monotonic()
            if left > 0:
                return left
            try:
                os.write(self._target, self._waiting.popleft()[1])
            except OSError as error:
                if error.errno != errno.EIO:  # the other device is not up yet
                    raise
        return None


def _device() -> int:
    """A new device `wire` of the namespace that this process is in."""
    made = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(made, _TUNSETIFF, struct.pack("16sH", b"wire", _IFF_TUN | _IFF_NO_PI))
    return made


def _enter(process: int) -> None:
    """Enters the network of a process; os.setns came with Python 3.12."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(f"/proc/{process}/ns/net").open() as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"process {process} has a network that cannot be entered")


def _record(folder: Path, directions: Sequence[Direction]) -> None:
    """Writes the counts; at one go, since this process is killed at any time when its hosts end."""
    draft = folder / "carried-draft"
    draft.write_text(f"{sum(each.num_taken for each in directions)} {sum(each.num_lost for each in directions)}")
    draft.replace(folder / "carried")


def main() -> int:
    """Carries packets for good; the exit status where there is no device."""
    parser = argparse.ArgumentParser(prog="python -m tests.harness.slow_link", description=__doc__)
    parser.add_argument("process", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--delay", type=float, required=True, help="seconds")
    parser.add_argument("--lose-every", type=int, required=True, help="one packet in so many is lost")
    parser.add_argument("--rate", type=float, required=True, help="bits per second")
    asked = parser.parse_args()
    try:
        own = _device()
        _enter(asked.process)
        other = _device()
    except OSError as error:
        sys.stderr.write(f"no TUN device: {error}\n")
        return NO_LINK
    directions = (Direction(own, other, asked), Direction(other, own, asked))
    _record(asked.folder, directions)
    while True:
        due = [left for direction in directions if (left := direction.deliver()) is not None]
        readable, _, _ = select.select([own, other], [], [], min(due, default=None))
        for direction in directions:
            if direction.source in readable:
                direction.take()
                _record(asked.folder, directions)


if __name__ == "__main__":
    sys.exit(main())
