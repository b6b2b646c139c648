"""What descriptors of this process lead to, while other threads open and close some."""

from pathlib import Path

_FOLDER = Path("/proc/self/fd")


def open_targets() -> list[str]:
    """Names, as the kernel writes them, of what is open: without those that were closed while they were listed.

    One of these is the descriptor by which the folder is read.
    """
    return [target for path in tuple(_FOLDER.iterdir()) if (target := _target(path)) is not None]


def _target(descriptor: Path) -> str | None:
    try:
        return str(descriptor.readlink())
    except FileNotFoundError:
        return None
