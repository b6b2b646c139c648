"""Environment variables: each has its line in the guide, and a value that is not allowed has its own."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import tritondt as T
from tritondt import environment, identity
from tritondt.comm.process_world import default_costs

REPOSITORY = Path(__file__).parents[1]
SOURCES = ("tritondt/**/*.py", "kernels/**/*.py", "csrc/**/*.cpp", "csrc/**/*.h")
NAME = re.compile(r"\bTRITONDT_[A-Z0-9_]+")
READS = re.compile(r"os\.(environ|getenv)|\bgetenv\(")
# They start processes, whose environment they make; smoke is run in such, once for each transport.
_OF_BENCH = "tritondt/cli/bench/over_sockets.py"
WRITERS = {"tritondt/cli/launch.py", "tritondt/cli/smoke.py", "tritondt/cli/trace/starting.py", _OF_BENCH}


def sources() -> dict[str, str]:
    """Texts of the package's files, by path."""
    paths = (path for pattern in SOURCES for path in REPOSITORY.glob(pattern))
    return {str(path.relative_to(REPOSITORY)): path.read_text() for path in paths}


def table() -> dict[str, str]:
    """Lines of the guide's table, by variable."""
    chapter = (REPOSITORY / "docs" / "guide.md").read_text().partition("\n## Environment variables\n")[2]
    lines = [line for line in chapter.partition("\n## ")[0].splitlines() if line.startswith("| `")]
    return {name: line for line in lines for name in re.findall(r"`([A-Z0-9_]+)`", line.split("|")[1])}


def test_the_guide_has_every_variable_that_the_sources_name() -> None:
    named = {name for text in sources().values() for name in NAME.findall(text)}
    assert "TRITONDT_TIMEOUT" in named
    assert {name for name in table() if name.startswith("TRITONDT_")} == named


def test_the_guide_has_every_variable_that_is_read() -> None:
    read = set(re.findall(r'"([A-Z][A-Z_]{3,})"', (REPOSITORY / "tritondt" / "environment.py").read_text()))
    assert {"TRITONDT_COSTS", "MASTER_ADDR", "GLOO_SOCKET_IFNAME", "SLURM_PROCID"} <= read
    assert set(table()) == read


def test_variables_are_read_in_one_file() -> None:
    readers = {path for path, text in sources().items() if READS.search(text)}
    assert readers - WRITERS == {"tritondt/environment.py"}


TIMES = "allowed is a number of seconds above 0, at most 100000000"
LOGS = "allowed are 0, 1, debug, info, warning, error, and levels of world, moves, exchanges, such as info,moves=debug"
OPTIONS = 'allowed is a JSON object of whole numbers and texts, such as {"max_ctas": 4}'


@pytest.mark.in_ci(40)
@pytest.mark.parametrize(
    ("variable", "value", "read", "allowed"),
    [
        *(("TRITONDT_TIMEOUT", value, environment.timeout, TIMES)
          for value in ("soon", "0", "-3", "", "nan", "inf", "1e300", "1e9", "5 s")),
        *(("LOCAL_WORLD_SIZE", value, environment.ranks_per_host, "allowed is a whole number above 0")
          for value in ("", "0", "-1", "2.5", "nan", "1e3", "9" * 5000, "²")),
        *(("TRITONDT_NCCL_OPTIONS", value, environment.nccl_options, OPTIONS)
          for value in ("", "4", "{", "[]", '{"a": 1.5}', '{"a": true}', '{"a": null}', '{"a": NaN}')),
        ("TRITONDT_DEBUG", "yes", environment.compares, "allowed are 0 and 1"),
        *(("TRITONDT_LOG", value, environment.log_levels, LOGS)
          for value in ("true", "", "move=debug", "moves", "info,", "=info", "moves=loud")),
        *(("TRITONDT_SLOTS", value, environment.slots, "allowed are 0, 1 and windows")
          for value in ("2", "", "window")),
    ],
)  # fmt: skip
def test_a_value_that_is_not_allowed(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, read: object, allowed: str
) -> None:
    monkeypatch.setenv(variable, value)
    assert callable(read)
    with pytest.raises(T.WorldError) as told:
        read()
    assert str(told.value) == f"{variable}={value!r} is set; {allowed}"


def test_the_secret_of_a_job_is_in_a_variable_or_in_a_file_of_its_user(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "secret"
    file.write_text("  0123456789abcdef in a file\n")
    file.chmod(0o400)
    for name in ("TRITONDT_SECRET", "TRITONDT_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)
    assert environment.secret() is None
    monkeypatch.setenv("TRITONDT_SECRET_FILE", str(file))
    assert environment.secret() == b"0123456789abcdef in a file"
    monkeypatch.setenv("TRITONDT_SECRET", "0123456789abcdef")
    with pytest.raises(T.WorldError, match=r"^TRITONDT_SECRET and TRITONDT_SECRET_FILE are both set; allowed is one"):
        environment.secret()
    monkeypatch.delenv("TRITONDT_SECRET_FILE")
    assert environment.secret() == b"0123456789abcdef"


@pytest.mark.parametrize("value", ["", "0123456789abcde", "x" * 4097])
def test_no_part_of_a_secret_that_is_refused_is_shown(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("TRITONDT_SECRET", value)
    with pytest.raises(T.WorldError) as told:
        environment.secret()
    assert str(told.value) == (
        f"TRITONDT_SECRET is set to a secret of {len(value)} bytes; allowed are 16 to 4096, such as openssl rand -hex "
        "32 prints"
    )


@pytest.mark.in_core(7)
@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("mode 0644", "mode 0644: others may know the secret; allowed is a file of user"),
        ("mode 0620", "mode 0620: others may know the secret; allowed is a file of user"),
        ("of another user", "a file of user 65534 with mode 0600: others may know"),
        ("missing", "which cannot be read: No such file or directory"),
        ("a folder", "which is no file but drwx"),
        ("a FIFO", "which is no file but prw-"),
        ("short", "is set to a secret of 5 bytes; allowed are 16 to 4096"),
    ],
)
def test_a_file_that_others_may_know_holds_no_secret(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str, why: str
) -> None:
    file = tmp_path / "secret"
    if what == "a folder":
        file.mkdir()
    elif what == "a FIFO":
        os.mkfifo(file)
    elif what != "missing":
        file.write_text("short" if what == "short" else "a secret that others know")
        file.chmod(int(what[5:], 8) if what.startswith("mode") else 0o600)
    if what == "of another user":
        if os.geteuid() != 0:
            pytest.skip("root alone gives files away")
        os.chown(file, 65534, 65534)
    monkeypatch.delenv("TRITONDT_SECRET", raising=False)
    monkeypatch.setenv("TRITONDT_SECRET_FILE", str(file))
    with pytest.raises(T.WorldError) as told:
        environment.secret()
    assert str(told.value).startswith(f"TRITONDT_SECRET_FILE={str(file)!r} is set")
    assert why in str(told.value)
    assert "others know" not in str(told.value)


def test_prices_that_are_none_name_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITONDT_COSTS", '{"host": {"bandwidth": NaN}}')
    with pytest.raises(T.WorldError, match=r"^TRITONDT_COSTS='.*NaN.*' is set, but nan is given for 'bandwidth'; all"):
        default_costs(4)


@pytest.mark.parametrize(
    ("variable", "command"),
    [("SLURM_PROCID", "srun "), ("OMPI_COMM_WORLD_RANK", "mpirun "), ("PMI_RANK", "mpiexec ")],
)
def test_a_program_that_another_launcher_has_started_is_told_how(
    monkeypatch: pytest.MonkeyPatch, variable: str, command: str
) -> None:
    for name in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(T.WorldError, match=r"not initialised; start the program with torchrun and call torch\.dist"):
        identity.current()
    monkeypatch.setenv(variable, "0")
    with pytest.raises(T.WorldError, match=rf"start the program with torchrun, or with {command}.* and call torch\."):
        identity.current()
    told = environment.launch_command()
    assert told is not None
    assert told in " ".join((REPOSITORY / "docs" / "guide.md").read_text().split())
    monkeypatch.setenv("RANK", "0")
    assert environment.launch_command() is None


@pytest.mark.parametrize("value", ["300", "0.5", "1e8"])
def test_a_timeout(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("TRITONDT_TIMEOUT", value)
    assert environment.timeout().total_seconds() == float(value)


@pytest.mark.parametrize(
    ("variables", "expected"), [({}, None), ({"LOCAL_RANK": "2", "SLURM_LOCALID": "1"}, 2), ({"SLURM_LOCALID": "1"}, 1),
     ({"OMPI_COMM_WORLD_LOCAL_RANK": "3", "SLURM_LOCALID": "0"}, 3), ({"MPI_LOCALRANKID": "1"}, 1)],
)  # fmt: skip
def test_the_number_of_a_process_on_its_host_is_its_launchers(monkeypatch, variables, expected):
    for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert environment.local_rank() == expected


OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "4"}
STEP = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "node[07-08]", "SLURM_JOB_ID": "3"}
TORCH = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "first", "MASTER_PORT": "29500"}


@pytest.fixture
def launched_with(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], environment.Launched | None]:
    """What is found of a process that has these variables alone."""
    for name in [name for name in os.environ if re.match("RANK|WORLD_|MASTER_|SLURM|OMPI|PMI|MPI_|TORCHEL", name)]:
        monkeypatch.delenv(name)

    def found(variables: dict[str, str]) -> environment.Launched | None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return environment.launched()

    return found


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, None),
        (OPEN_MPI, ("mpi", 1, 4, "127.0.0.1", 15000)),
        (MPICH, ("mpi", 1, 4, "127.0.0.1", 15000)),
        (STEP, ("slurm", 1, 4, "node07", 15003)),
        (STEP | {"SLURM_STEP_NODELIST": ""}, ("slurm", 1, 4, "127.0.0.1", 15003)),
        # Open MPI starts a daemon on each host by srun, whose variables its ranks inherit.
        (STEP | OPEN_MPI | {"SLURM_PROCID": "0"}, ("mpi", 1, 4, "127.0.0.1", 15003)),
        (MPICH | {"MPI_LOCALNRANKS": "2", "MASTER_ADDR": "a", "MASTER_PORT": "9"}, ("mpi", 1, 4, "a", 9)),
        (STEP | TORCH | {"RANK": "1"}, ("torchrun", 1, 4, "first", 29500)),
        # torchrun as each task of a step: tasks with two ranks each, or agents' ranks in an order of their own.
        (STEP | TORCH | {"WORLD_SIZE": "8"}, ("torchrun", 0, 8, "first", 29500)),
        (STEP | TORCH | {"TORCHELASTIC_RUN_ID": "none"}, ("torchrun", 0, 4, "first", 29500)),
    ],
)  # fmt: skip
def test_who_a_process_is_by_its_launcher(launched_with, variables, expected):
    assert launched_with(variables) == expected


@pytest.mark.parametrize(
    ("variables", "variable", "command"),
    [(STEP, "SLURM_PROCID", "srun "), (OPEN_MPI, "OMPI_COMM_WORLD_RANK", "mpirun "), (MPICH, "PMI_RANK", "mpiexec ")],
)
def test_one_rank_for_all_tasks_is_refused(launched_with, variables, variable, command):
    told = (
        f"RANK=0 and WORLD_SIZE=4 are set, but this process is 1 of 4 by {variable}; allowed is a RANK of its own in "
        f"each, as by {command}"
    )
    with pytest.raises(T.WorldError, match=f"^{re.escape(told)}"):
        launched_with(variables | TORCH)


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, ("2", "mpirun")),
        ({"PMI_RANK": "1", "PMI_SIZE": "4"}, ("an unknown number", "mpiexec")),
    ],
)  # fmt: skip
def test_ranks_of_mpi_on_several_hosts_are_told_where_to_meet(launched_with, variables, told):
    text = "^MASTER_ADDR is not set, and {} of 4 ranks are on this host; allowed is the host of rank 0, as by {} "
    with pytest.raises(T.WorldError, match=text.format(*told)):
        launched_with(variables)
