"""The environment variables that tritondt reads, all of them, and nowhere else."""

import json
import logging
import math
import os
import re
import stat
from datetime import timedelta
from typing import Literal, NamedTuple

from tritondt.errors import WorldError

# Three years; what waits in other libraries counts milliseconds in 64 bits, or seconds in a timedelta.
_MAX_TIMEOUT_S = 1e8
# Ports below those that systems give to whoever asks for any.
_FIRST_PORT, _NUM_PORTS = 15_000, 10_000
# A shorter one could be found by trying.
_MIN_SECRET_BYTES, _MAX_SECRET_BYTES = 16, 4096
# Names of loggers under "tritondt", and levels that they take.
_LOGGERS = ("", "world", "moves", "exchanges")
_LOG_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_LOG_WORDS = {"1": "info,moves=debug"}
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
# Launchers that say who a process is, but not in the words of torch.distributed: the variable that tells so, and how to
# start a program that they start. The host of rank 0 is MASTER_ADDR. MPI's go first: Slurm starts MPI's own daemons.
_LAUNCHERS = {
    "OMPI_COMM_WORLD_RANK": "mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 bash -c 'RANK=$OMPI_COMM_WORLD_RANK "
    "WORLD_SIZE=$OMPI_COMM_WORLD_SIZE LOCAL_WORLD_SIZE=$OMPI_COMM_WORLD_LOCAL_SIZE exec python train.py'",
    "PMI_RANK": "mpiexec -genv MASTER_ADDR HOST -genv MASTER_PORT 29500 bash -c 'RANK=$PMI_RANK WORLD_SIZE=$PMI_SIZE "
    "LOCAL_WORLD_SIZE=$MPI_LOCALNRANKS exec python train.py'",
    "SLURM_PROCID": "srun --export=ALL,MASTER_ADDR=HOST,MASTER_PORT=29500 bash -c 'RANK=$SLURM_PROCID "
    "WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE=$((SLURM_NTASKS / SLURM_NNODES)) exec python train.py'",
}
# Their variables of a process: its number, how many there are, and how many on its host; Slurm's say the last in words.
_TASK_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", None),
)


def timeout() -> timedelta:
    """Time that a rank waits for another: TRITONDT_TIMEOUT seconds, 300 by default."""
    text = os.environ.get("TRITONDT_TIMEOUT", "300")
    seconds = _number(text)
    if not 0 < seconds <= _MAX_TIMEOUT_S:
        raise WorldError(
            f"TRITONDT_TIMEOUT={text!r} is set; allowed is a number of seconds above 0, at most {_MAX_TIMEOUT_S:.0f}"
        )
    return timedelta(seconds=seconds)


def ranks_per_host() -> int | None:
    """Number of ranks that the launcher started on each host, None where the launcher does not say (torchrun does)."""
    text = os.environ.get("LOCAL_WORLD_SIZE")
    if text is None:
        return None
    if re.fullmatch("0*[1-9][0-9]{0,8}", text) is None:
        raise WorldError(f"LOCAL_WORLD_SIZE={text!r} is set; allowed is a whole number above 0")
    return int(text)


def local_rank() -> int | None:
    """Number of this process among those of its host, as torchrun, MPI or Slurm says; None where none does."""
    for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"):
        if name in os.environ:
            return _whole(name, os.environ[name])
    return None


def master_address() -> str | None:
    """Host of the job's first rank, MASTER_ADDR, or None where the launcher does not say."""
    return os.environ.get("MASTER_ADDR")


def launcher_store_port() -> int | None:
    """Port of the store that torchrun holds for its ranks; None where rank 0 holds one, or the program makes it."""
    port = os.environ.get("MASTER_PORT", "")
    return int(port) if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and port.isdecimal() else None


def num_restarts() -> int:
    """How often torchrun has started the ranks of this machine again."""
    return _whole("TORCHELASTIC_RESTART_COUNT", os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def launch_command() -> str | None:
    """Command that starts a program as torch.distributed expects it; None but where MPI or srun has started this one.

    HOST in it stands for the host of rank 0. RANK has been set where that is so already.
    """
    if "RANK" in os.environ:
        return None
    return next((command for variable, command in _LAUNCHERS.items() if variable in os.environ), None)


class Launched(NamedTuple):
    """This process among those that a launcher has started, and where they meet."""

    launcher: Literal["torchrun", "mpi", "slurm"]
    rank: int
    num_ranks: int
    address: str
    port: int


def launched() -> Launched | None:
    """This process as torchrun describes it, or else MPI or Slurm; None for a process started alone.

    Without MASTER_ADDR the tasks of a step of Slurm meet at its first host, MPI's on the one host that they are on;
    without MASTER_PORT, at a port that follows from the job's number. WorldError for a value that is no number, for a
    RANK that is another task's, and for tasks of MPI on several hosts without MASTER_ADDR.
    """
    task = _task()
    variables = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if all(name in os.environ for name in variables):
        rank, size, address, _ = (os.environ[name] for name in variables)
        found = Launched("torchrun", _whole("RANK", rank), _whole("WORLD_SIZE", size), address, _port(0))
        _refuse_rank_of_another(found, task)
        return found
    if task is None:
        return None
    job = _whole("SLURM_JOB_ID", os.environ.get("SLURM_JOB_ID", "0"))
    launcher: Literal["mpi", "slurm"] = "slurm" if task.variable == "SLURM_PROCID" else "mpi"
    address = os.environ.get("MASTER_ADDR") or (_first_of_step() if launcher == "slurm" else _host_of(task))
    return Launched(launcher, task.rank, task.num_ranks, address, _port(_FIRST_PORT + job % _NUM_PORTS))


class _Task(NamedTuple):
    """A process that MPI or Slurm has started; `num_here` of all are on its host, None where it does not say."""

    variable: str
    rank: int
    num_ranks: int
    num_here: int | None


def _task() -> _Task | None:
    """This process among two or more that MPI or Slurm has started."""
    for rank, size, here in _TASK_VARIABLES:
        if rank in os.environ and _whole(size, os.environ.get(size, "1")) > 1:
            num_here = _whole(here, os.environ[here]) if here is not None and here in os.environ else None
            return _Task(rank, _whole(rank, os.environ[rank]), _whole(size, os.environ[size]), num_here)
    return None


def _refuse_rank_of_another(found: Launched, task: _Task | None) -> None:
    """WorldError where all tasks got one RANK, as by a variable exported beforehand; torchrun counts its own ranks."""
    if task is None or has_agent_store() or "TORCHELASTIC_RUN_ID" in os.environ:
        return
    if found.num_ranks == task.num_ranks and found.rank != task.rank:
        raise WorldError(
            f"RANK={found.rank} and WORLD_SIZE={found.num_ranks} are set, but this process is {task.rank} of "
            f"{task.num_ranks} by {task.variable}; allowed is a RANK of its own in each, as by "
            f"{_LAUNCHERS[task.variable]}"
        )


def _host_of(task: _Task) -> str:
    """Address at which tasks of MPI meet that are all on this host."""
    if task.num_here == task.num_ranks:
        return "127.0.0.1"
    raise WorldError(
        f"MASTER_ADDR is not set, and {task.num_here or 'an unknown number'} of {task.num_ranks} ranks are on this "
        f"host; allowed is the host of rank 0, as by {_LAUNCHERS[task.variable]}"
    )


def _first_of_step() -> str:
    """First host of a step of Slurm, this one where it names none."""
    nodes = re.match(r"([^\[,]*)(?:\[([^],-]*))?", os.environ.get("SLURM_STEP_NODELIST", ""))
    return "".join(part or "" for part in nodes.groups()) if nodes and nodes.group() else "127.0.0.1"


def _port(default: int) -> int:
    return _whole("MASTER_PORT", os.environ.get("MASTER_PORT", str(default)))


def has_agent_store() -> bool:
    """Whether the store at MASTER_ADDR and MASTER_PORT is there before the ranks are, and after: torchrun's."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _whole(name: str, text: str) -> int:
    if not text.isdecimal():
        raise WorldError(f"{name}={text!r} is set; allowed is a whole number")
    return int(text)


def transport() -> str | None:
    """Name of what carries messages between processes: TRITONDT_TRANSPORT, None where it is not set."""
    return os.environ.get("TRITONDT_TRANSPORT")


def arena_bytes() -> int:
    """Bytes of a rank's shared memory in a communicator: TRITONDT_ARENA_MB, 16 MB by default."""
    text = os.environ.get("TRITONDT_ARENA_MB", "16")
    if re.fullmatch("0*[1-9][0-9]{0,6}", text) is None:
        raise WorldError(f"TRITONDT_ARENA_MB={text!r} is set; allowed is a whole number from 1 to 9999999")
    return int(text) << 20


def packs_into_peers() -> bool:
    """Whether ranks on GPUs pack messages into each other's memory: TRITONDT_SLOTS=1, or by windows."""
    return slots() != "0"


def slots() -> str:
    """How ranks on GPUs reach each other's memory, TRITONDT_SLOTS: not (0), by descriptors (1), by NCCL's windows."""
    text = os.environ.get("TRITONDT_SLOTS", "0")
    if text not in ("0", "1", "windows"):
        raise WorldError(f"TRITONDT_SLOTS={text!r} is set; allowed are 0, 1 and windows")
    return text


def pool_bytes() -> int:
    """Bytes of large results that are kept for next ones when they are gone: TRITONDT_POOL_MB, 256 MB by default."""
    text = os.environ.get("TRITONDT_POOL_MB", "256")
    if re.fullmatch("[0-9]{1,7}", text) is None:
        raise WorldError(f"TRITONDT_POOL_MB={text!r} is set; allowed is a whole number from 0 to 9999999")
    return int(text) << 20


def socket_interfaces() -> list[tuple[str, str]]:
    """Variables set to interfaces for sockets between hosts, with their values; the first one counts."""
    names = ("TRITONDT_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return [(name, os.environ[name]) for name in names if os.environ.get(name)]


def secret() -> bytes | None:
    """The job's secret, TRITONDT_SECRET or the content of the file TRITONDT_SECRET_FILE; None where neither is set.

    The space around it is no part of it. WorldError for a short one, and for a file that others may read. No error
    shows any of it.
    """
    text, path = os.environ.get("TRITONDT_SECRET"), os.environ.get("TRITONDT_SECRET_FILE")
    if text is None and path is None:
        return None
    if text is not None and path is not None:
        raise WorldError("TRITONDT_SECRET and TRITONDT_SECRET_FILE are both set; allowed is one of them")
    name = "TRITONDT_SECRET" if path is None else f"TRITONDT_SECRET_FILE={path!r}"
    found = (os.fsencode(text or "") if path is None else _private_content(path, name)).strip()
    if not _MIN_SECRET_BYTES <= len(found) <= _MAX_SECRET_BYTES:
        raise WorldError(
            f"{name} is set to a secret of {len(found)} bytes; allowed are {_MIN_SECRET_BYTES} to "
            f"{_MAX_SECRET_BYTES}, such as openssl rand -hex 32 prints"
        )
    return found


def _private_content(path: str, name: str) -> bytes:
    """Content of a file that this user, or root, has and nobody else may read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise WorldError(f"{name} is set, which cannot be read: {error.strerror}") from error
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise WorldError(f"{name} is set, which is no file but {stat.filemode(found.st_mode)}")
        if found.st_mode & _OTHERS or found.st_uid not in (0, os.geteuid()):
            raise WorldError(
                f"{name} is set, a file of user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):04o}: others "
                f"may know the secret; allowed is a file of user {os.geteuid()} with mode 0600, and a new secret"
            )
        return os.read(descriptor, _MAX_SECRET_BYTES + 1)
    finally:
        os.close(descriptor)


def costs() -> str | None:
    """Prices that differ from the built-in table's: TRITONDT_COSTS as a JSON object, None where that is not set."""
    return os.environ.get("TRITONDT_COSTS") or None


def nccl_path() -> str | None:
    """Path of the NCCL library to load: TRITONDT_NCCL_SO, None where torch's own is to be used."""
    return os.environ.get("TRITONDT_NCCL_SO") or None


def nccl_options() -> dict[str, int | str]:
    """Options of NCCL's communicators, such as max_ctas: TRITONDT_NCCL_OPTIONS, a JSON object."""
    text = os.environ.get("TRITONDT_NCCL_OPTIONS", "{}")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not all(map(_is_option, found.values())):
        raise WorldError(
            f"TRITONDT_NCCL_OPTIONS={text!r} is set; allowed is a JSON object of whole numbers and texts, such as "
            '{"max_ctas": 4}'
        )
    return found


def flight_directory() -> str | None:
    """Folder of flight records: TRITONDT_FLIGHT_DIR, None where that is not set."""
    return os.environ.get("TRITONDT_FLIGHT_DIR") or None


def compares() -> bool:
    """Whether ranks compare their next exchange before they run it: TRITONDT_DEBUG=1, else what torch's DETAIL says."""
    return _switch("TRITONDT_DEBUG") if "TRITONDT_DEBUG" in os.environ else _torchs_debug_level() == "detail"


def log_levels() -> dict[str, int]:
    """Levels of `logging` by the name under "tritondt", "" for all: TRITONDT_LOG, else INFO where torch's is above OFF.

    TRITONDT_LOG is a level, or levels by name, as in "info,moves=debug", which is what 1 stands for.
    """
    text = os.environ.get("TRITONDT_LOG")
    if text is None:
        return {"": logging.INFO} if _torchs_debug_level() in ("info", "detail") else {}
    found: dict[str, int] = {}
    for item in _LOG_WORDS.get(text, text).split(",") if text != "0" else ():
        name, equals, level = item.strip().rpartition("=")
        if level.lower() not in _LOG_LEVELS or name not in _LOGGERS or bool(equals) != bool(name):
            raise WorldError(
                f"TRITONDT_LOG={text!r} is set; allowed are 0, 1, debug, info, warning, error, and levels of "
                f"{', '.join(filter(None, _LOGGERS))}, such as info,moves=debug"
            )
        found[name] = _LOG_LEVELS[level.lower()]
    return found


def _torchs_debug_level() -> str:
    return os.environ.get("TORCH_DISTRIBUTED_DEBUG", "off").lower()


def _switch(name: str) -> bool:
    text = os.environ.get(name, "0")
    if text not in ("0", "1"):
        raise WorldError(f"{name}={text!r} is set; allowed are 0 and 1")
    return text == "1"


def _is_option(value: object) -> bool:
    return isinstance(value, int | str) and not isinstance(value, bool)


def _number(text: str) -> float:
    """The number that a text says, not a number where it says none."""
    try:
        return float(text)
    except ValueError:
        return math.nan
