"""Folders of flight records: one that the user names, or one that this user alone can write in the temporary folder.

The temporary folder is everybody's. All files made there lie in one folder a user, of mode 0700, which is refused where
it is somebody else's or a link: a user who makes that name first must not say where our files go.
"""

import fcntl
import os
import re
import shutil
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from tritondt.errors import WorldError

# Records of worlds that have ended are kept for a week, of 20 worlds at most (130 MB for 8 ranks each), and for an hour
# whatever comes: a folder that is being made is held by nobody yet.
_MAX_ENDED, _MAX_AGE_S, _MIN_AGE_S = 20, 7 * 24 * 3600.0, 3600.0
_WORLD = re.compile(r"\d{8}T\d{6}-\d+")
_PRIVATE, _MODE_BITS = 0o700, 0o777


class FlightFolder:
    """Folder that the user has named for flight records; made where it is missing, and left there."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def path(self) -> Path:
        """Path of the folder; OSError where there can be none."""
        return self._path

    def make(self) -> None:
        """Makes the folder where it is missing; OSError where it cannot be written."""
        self.path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self.path):
            pass

    def hold(self, rank: int) -> None:
        """Makes the folder for `rank`, where the watchdog writes at any time; OSError where it cannot be written."""
        self.make()

    def release(self) -> None:
        """Lets go of the folder for the rank that holds it."""


class TemporaryFlightFolder(FlightFolder):
    """Folder of one world in this user's own folder, removed at the end where nothing was written.

    A rank holds it by a lock on a file, which ends with the process: what no rank holds may be pruned.
    """

    def __init__(self, world: str) -> None:
        """Takes the name of the world as the store has it; WorldError where that is no name but a way elsewhere."""
        if _WORLD.fullmatch(world) is None:
            raise WorldError(
                f"the store has {world[:100]!r} for the folder of this world's flight records; allowed is a name as "
                "20261122T120000-7: somebody else has written into the store of this job"
            )
        self._world = world
        self._mark: Path | None = None
        self._descriptor = -1

    @property
    def path(self) -> Path:
        """Path of the folder; OSError where there is no temporary folder."""
        return own_folder() / self._world

    def make(self) -> None:
        """Makes the folder where it is missing; OSError where the user's own one is not this user's."""
        _make_private(own_folder())
        self.path.mkdir(mode=_PRIVATE, exist_ok=True)

    def hold(self, rank: int) -> None:
        """Makes the folder, holds it for `rank`, and removes old ones."""
        mark = self.path / f".rank-{rank}"
        while self._mark is None:
            self.make()
            with suppress(FileNotFoundError):  # another rank has just left, and removed it
                self._descriptor = _locked(mark, os.O_CREAT)
                self._mark = mark
        prune(own_folder())

    def release(self) -> None:
        """Removes the folder if nothing was written and no other rank holds it."""
        if self._mark is None:
            return
        self._mark.unlink(missing_ok=True)
        os.close(self._descriptor)
        self._mark = None
        with suppress(OSError):  # not empty, or another rank of this machine was faster
            self.path.rmdir()


def own_folder() -> Path:
    """The folder for flight records of this user in the temporary folder; OSError where there is none."""
    return Path(tempfile.gettempdir()) / f"tritondt-flight-{os.geteuid()}"


def _make_private(home: Path) -> None:
    """Makes a folder that only this user can write; PermissionError where another user could decide what lies there."""
    with suppress(FileExistsError):
        home.mkdir(mode=_PRIVATE)
    found = home.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise PermissionError(f"{home} is no folder but {stat.filemode(found.st_mode)}; it must be one of this user's")
    if found.st_uid != os.geteuid():
        raise PermissionError(f"{home} is of user {found.st_uid}; it must be of user {os.geteuid()}")
    if found.st_mode & _MODE_BITS & ~_PRIVATE:
        home.chmod(_PRIVATE)


def prune(home: Path) -> None:
    """Removes the folders of worlds that no rank holds, but for the newest ones."""
    found = [(_changed(path), path) for path in home.iterdir() if _WORLD.fullmatch(path.name)]
    for place, (changed, path) in enumerate(sorted(found, reverse=True)):
        if time.time() - changed > (_MAX_AGE_S if place < _MAX_ENDED else _MIN_AGE_S) and not _is_held(path):
            shutil.rmtree(path, ignore_errors=True)  # another rank may prune the same


def _changed(path: Path) -> float:
    """When a folder's entries changed last, in seconds; 0 where it has gone meanwhile."""
    try:
        return path.stat(follow_symlinks=False).st_mtime
    except FileNotFoundError:
        return 0.0


def _is_held(path: Path) -> bool:
    """Whether a rank holds a folder; another rank may remove it and what lies in it meanwhile."""
    try:
        marks = [mark for mark in path.iterdir() if mark.name.startswith(".rank-")]
    except FileNotFoundError:
        return False
    return any(_is_locked(mark) for mark in marks)


def _is_locked(mark: Path) -> bool:
    try:
        os.close(_locked(mark, 0, fcntl.LOCK_EX))
    except BlockingIOError:
        return True
    except FileNotFoundError:
        pass
    return False


def _locked(path: Path, flags: int, lock: int = fcntl.LOCK_SH) -> int:
    """Descriptor of a file of this user's, locked; BlockingIOError where another process's lock forbids that."""
    descriptor = os.open(path, flags | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, lock | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
