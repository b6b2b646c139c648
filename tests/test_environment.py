"""Environment variables: each has its line in the guide, and a value that is not allowed has its own."""

import re
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
WRITERS = {"tritondt/cli/launch.py", "tritondt/cli/smoke.py", "tritondt/cli/trace/starting.py"}


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
        ("TRITONDT_TRANSPORT", "pigeons", environment.transport, "allowed are sockets, direct and gloo"),
        ("TRITONDT_TRANSPORT", "", environment.transport, "allowed are sockets, direct and gloo"),
        ("TRITONDT_DEBUG", "yes", environment.compares, "allowed are 0 and 1"),
        ("TRITONDT_LOG", "true", environment.logs, "allowed are 0 and 1"),
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
    ("variables", "expected"), [({}, None), ({"LOCAL_RANK": "2", "SLURM_LOCALID": "1"}, 2), ({"SLURM_LOCALID": "1"}, 1)]
)
def test_the_number_of_a_process_on_its_host_is_its_launchers(monkeypatch, variables, expected):
    for name in ("LOCAL_RANK", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert environment.local_rank() == expected
