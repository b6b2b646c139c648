"""`bench COLLECTIVE`: what it refuses, each in a sentence, and what it does on Ctrl-C and under launchers."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner

from tests.cli import corrupted
from tests.harness.ports import free_port
from tritondt.cli import ranks as joined_ranks
from tritondt.cli.bench import nccl_tests
from tritondt.cli.bench.collective.case import make_case
from tritondt.cli.bench.collective.command import Choice, make_request
from tritondt.cli.bench.collective.kinds import KINDS
from tritondt.cli.bench.collective.on_rank import measure_on_rank
from tritondt.cli.bench.collective.record import Request
from tritondt.cli.bench.collective.sides import NAMES
from tritondt.cli.launch import RankFailedError, run_on_ranks
from tritondt.cli.main import main
from tritondt.cli.user_error import BenchmarkError

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("options", "status", "sentence"),
    [
        (
            ["-b", "32Q"],
            2,
            "cannot read the size '32Q'; allowed is a number of bytes of at least 1, also with a unit K",
        ),
        (["-b", "0"], 2, "cannot read the size '0'"),
        (["-b", "2M", "-e", "1M"], 1, "sizes from 2097152 to 1048576 bytes were asked for; the last (-e) is at least"),
        (["-b", "1K", "-e", "1M", "-f", "1"], 1, "a factor of 1 were asked for (-f); allowed is a number above 1"),
        (["-f", "2", "-i", "1M"], 1, "sizes by a factor of 2 (-f) and by steps of 1048576 bytes (-i): only one can be"),
        (["-b", "1", "-e", "1G", "-i", "1"], 1, "at most 10000 are measured, and -f 2 doubles instead"),
        (["-b", "1K", "-e", "1M", "-f", "nan"], 1, "a factor of nan were asked for (-f); allowed is a number above 1"),
        (["-b", "9" * 400], 2, "cannot read the size '999"),
        (["-b", "2"], 1, "there is nothing to measure: 2 left out: less than 16 bytes a rank, or than an element"),
        (["--impl", "gloo,fast"], 1, f"no implementation 'fast'; there are {', '.join(NAMES)}, and one of your own as"),
        (["--impl", "gloo,gloo"], 1, "allowed are names joined by commas, each once"),
        (["--impl", "nowhere:f"], 1, "the implementation 'nowhere:f' cannot be imported: No module named 'nowhere'"),
        (["--impl", "tests.cli.corrupted:not_callable"], 1, "is 3; allowed is a function"),
        (["-d", "float8"], 1, "there is no element type 'float8' (-d); there are int8, uint8"),
        (["-o", "mean"], 1, "there is no reduction 'mean' (-o); there are sum, prod, max, min, avg, and all"),
        (["-d", "int32", "-o", "avg"], 1, "nothing to measure: no average of int32, which has no fractions"),
        (["--ranks", "100000"], 2, "--ranks 100000: at most"),
        (["-e", "900G", "-b", "900G"], 1, "GB are free; take a smaller -e, or fewer --ranks"),
        (["--json", "/nowhere/found.json"], 2, "/nowhere/found.json cannot be written: No such file or directory"),
        (["--csv", "/nowhere/found.csv"], 2, "/nowhere/found.csv cannot be written"),
        (["--json", "--csv"], 2, "--json and --csv both go to stdout"),
        (["-a", "4"], 2, "4 is not in the range 0<=x<=3"),
        (["--skew", "0.5"], 2, "No such option"),
        (["-J", "found.csv"], 2, "--json (-J) writes JSON, and found.csv is named like CSV; write --csv found.csv"),
        (["-g", "1"], 2, "-g 1: one rank alone moves nothing; write -g 2, or more"),
        (["-g", "2", "--ranks", "3"], 2, "--ranks 3 and -g 2: only one can be"),
        (["-r", "0"], 2, "-r 0: all_reduce has no root; leave -r out"),
        (["-t", "2"], 2, "-t 2: each rank is a process of its own; write -t 1, and all ranks as -g N"),
        (["--nthreads", "2"], 2, "-t 2: each rank is a process of its own"),
        (["-m", "4"], 2, "-m 4: calls are not aggregated, since each is timed; write -m 1 and a larger -n"),
        (["-N", "0"], 2, "-N 0: sizes are run through once; write -N 1 and a larger -n, or a shell's loop"),
        (["-p", "2"], 2, "-p 2: allowed are 0 and 1; ranks are processes, which start side by side"),
        (["-z", "0"], 2, "-z 0: every call is waited for before the next; write -z 1"),
        (["-y", "1"], 2, "-y 1: calls run in torch's current stream; write -y 0"),
        (["-T", "30"], 2, "-T 30: a limit holds for each call; write TRITONDT_TIMEOUT=30 before the command"),
        (["-G", "10"], 2, "-G 10: calls are not captured in CUDA graphs; write -G 0"),
        (["-C", "1"], 2, "-C 1: times are of whole calls; write -C 0, or --breakdown for local work"),
        (["-S", "1"], 2, "-S 1: rows have no time of day; write -S 0, and --json for start and end"),
        (["-R", "1"], 2, '-R 1: buffers are not registered; write -R 0, or "registered_bytes" in'),
        (["-x", "2"], 2, "-x 2: NCCL's policy is its own setting; write -x 0, and NCCL_CTA_POLICY=2"),
        (["-D", "1"], 2, "-D 1: kernels of one's own come by name; write --impl MODULE:FUNCTION"),
        (["-V", "8"], 2, "-V 8: kernels of one's own say how many; write --impl MODULE:FUNCTION"),
        (["-M", "1"], 2, "-M 1: memory is not reported; write -M 0, or see `plan` for a redistribution's"),
        (["--device", "cuda"], 1, "--device cuda was asked for; torch "),
        (["--compute-overlap", "0"], 2, "0 is not in the range x>0"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_a_sentence(monkeypatch, options, status, sentence):
    monkeypatch.setattr(joined_ranks, "run", None)  # nothing is started
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ended = CliRunner().invoke(main, ["bench", "all_reduce", *options])
    assert ended.exit_code == status, ended.output
    assert sentence in ended.stderr
    assert ended.stdout == ""


def test_a_root_outside_the_ranks_is_refused():
    ended = CliRunner().invoke(main, ["bench", "broadcast", "--ranks", "2", "-r", "2"])
    assert ended.exit_code == 1
    assert "rank 2 is no root (-r) of 2 ranks; allowed are 0..1, and all" in ended.stderr


def test_a_root_is_a_rank_or_all():
    ended = CliRunner().invoke(main, ["bench", "broadcast", "-r", "first"])
    assert (ended.exit_code, "'first' is no root; allowed are a rank, as in 0, and all" in ended.stderr) == (2, True)
    choice = Choice(1 << 10, 1 << 11, 2, None, 5, 1, 1, "float", 1, "cpu", 1, "tritondt", root="all")
    roots = [(case.root, case.size) for case in make_request(KINDS["scatter"], 3, choice)[0].cases]
    assert roots == [(root, size) for root in range(3) for size in (1008, 2016)]


@pytest.mark.parametrize(("command", "flag"), [("all_gather", "-o"), ("redistribute", "-r"), ("redistribute", "-G")])
def test_flags_that_say_nothing_of_a_command_are_refused_by_name(command, flag):
    ended = CliRunner().invoke(main, ["bench", command, flag, "7"])
    assert ended.exit_code == 2
    assert f"Error: {flag} 7: " in ended.stderr


def test_ngpus_are_the_ranks_of_one_process_and_one_under_a_launcher(monkeypatch):
    assert (nccl_tests.ranks_asked(None, None), nccl_tests.ranks_asked(None, 4)) == (None, 4)
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert (nccl_tests.ranks_asked(None, 1), nccl_tests.ranks_asked(4, None)) == (None, 4)
    with pytest.raises(click.UsageError) as refused:
        nccl_tests.ranks_asked(None, 2)
    assert refused.value.message == (
        "-g 2: each of the 4 processes that torchrun has started is one rank; write -g 1, and start 8 processes for so "
        "many ranks"
    )


def test_an_implementation_that_is_not_there_takes_one_line():
    choice = Choice(1 << 20, None, None, None, 5, 1, 1, "float", 1, "cpu", 1, "tritondt,nccl")
    request, notes = make_request(KINDS["all_reduce"], 2, choice)
    assert request.sides == ("tritondt",)
    (note,) = notes
    assert note in (
        f"nccl is not available: torch {torch.__version__} is built without nccl",
        "nccl is not available: NCCL moves tensors on GPUs only (--device cuda)",
    )


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("16 16\n16 16\n", "needs 3 lines of 3 whole numbers of bytes; found 2 of [2] numbers"),
        ("a b c\n1 2 3\n1 2 3\n", "invalid literal for int() with base 10: 'a'"),
        ("-1 2 3\n1 2 3\n1 2 3\n", "none is below 0, and not all are 0"),
        (None, "cannot read the matrix"),
    ],
)
def test_a_matrix_that_does_not_fit_is_refused(tmp_path, text, sentence):
    path = tmp_path / "matrix.txt"
    if text is not None:
        path.write_text(text)
    ended = CliRunner().invoke(main, ["bench", "all_to_all_v", "--ranks", "3", "--matrix", str(path)])
    assert (ended.exit_code, sentence in ended.stderr) == (1, True), ended.stderr


def test_a_matrix_of_bytes_is_what_is_sent(tmp_path):
    path = tmp_path / "matrix.txt"
    path.write_text("# from, to\n0 32 40\n16, 0, 64\n\n0 0 0 99\n")
    choice = Choice(None, None, None, None, 5, 1, 1, "float", 1, "cpu", 1, "tritondt", matrix=path)
    (case,) = make_request(KINDS["all_to_all_v"], 3, choice)[0].cases
    assert case.matrix == ((0, 8, 8), (4, 0, 16), (0, 0, 0))
    with pytest.raises(BenchmarkError, match="sizes \\(-b, -e, -f, -i\\) do not go with it"):
        make_request(KINDS["all_to_all_v"], 3, replace(choice, minbytes=1 << 20))


@pytest.mark.extended
def test_ranks_that_do_not_refuse_alike_end_the_run_with_both_said():
    case = make_case("all_reduce", 2, ("float", 4), "sum", 0, 4096, 0.0)
    assert case is not None
    request = Request("all_reduce", (case,), (f"{corrupted.__name__}:of_rank_0_only",))
    with pytest.raises(RankFailedError, match=r"failed on 1 of 2 ranks in all_reduce of 4096 .*rank 0 alone refuses"):
        run_on_ranks(2, measure_on_rank, request, on_message=lambda _: None)


def test_a_collective_of_ones_own_that_raises_on_one_rank_is_shown_by_its_own_error_and_line():
    case = make_case("all_reduce", 2, ("float", 4), "sum", 0, 4096, 0.0)
    assert case is not None
    name = f"{corrupted.__name__}:broken_on_rank_1"
    with pytest.raises(RankFailedError) as failed:  # at once, while rank 0 waits in the collective
        run_on_ranks(2, measure_on_rank, Request("all_reduce", (case,), (name,)), on_message=lambda _: None)
    first, where, *frames = str(failed.value).splitlines()
    line = 1 + Path(corrupted.__file__).read_text().splitlines().index("            call.out.view(3, -1)")
    at = f"{corrupted.__file__}:{line} (run)"
    assert first == (
        f"rank 1 of 2 failed: {name} raised RuntimeError at {at}: shape '[3, -1]' is invalid for input of size 1024"
    )
    assert where == "on rank 1 of 2, in all_reduce of 4096 bytes of float"
    assert frames == [f'  File "{corrupted.__file__}", line {line}, in run', "    call.out.view(3, -1)"]


def descendants(pid):
    """Processes that a process has started, and those that they have, by number."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(path.parent.name)] = int(fields[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("number", "word"),
    [
        pytest.param(signal.SIGINT, "interrupted", marks=pytest.mark.soak),
        pytest.param(signal.SIGTERM, "terminated", marks=pytest.mark.soak),
    ],
)
def test_ctrl_c_keeps_what_was_measured_and_leaves_no_process_behind(tmp_path, number, word):
    path = tmp_path / "found.json"
    command = [sys.executable, "-m", "tritondt", "bench", "all_reduce", "--ranks", "2", "--impl", "gloo", "-n", "3"]
    process = subprocess.Popen(
        [*command, "-b", "1K", "-e", "100M", "-i", "16K", "--json", str(path)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        while not process.stdout.readline().startswith("       "):  # the first row
            assert process.poll() is None
        started = descendants(process.pid)
        assert len(started) >= 2
        os.killpg(process.pid, number)
        _, told = process.communicate(timeout=150)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130
    assert f"cases were measured: {word}" in told
    assert "Traceback" not in told
    found = json.loads(path.read_text())
    assert (found["complete"], found["errors"]) == (False, [word])
    assert len(found["results"]) >= 1
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in started) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize(
    "launcher", [pytest.param("slurm", marks=pytest.mark.extended), pytest.param("torchrun", marks=pytest.mark.soak)]
)
def test_it_runs_on_the_ranks_that_a_launcher_has_started(tmp_path, launcher):
    port = free_port()
    path = tmp_path / "found.json"
    command = [sys.executable, "-m", "tritondt", "bench", "all_gather", "--impl", "gloo", "-b", "4K", "-n", "2"]
    processes = []
    for rank in range(2):
        variables = {"SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": "2", "MASTER_PORT": str(port)}
        if launcher == "torchrun":
            variables = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": str(port)}
        environment = {**os.environ, **variables, "MASTER_ADDR": "127.0.0.1"}
        processes.append(
            subprocess.Popen([*command, "--json", str(path)], cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE)
        )
    printed = [process.communicate(timeout=250)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert b"# Collective test concluded: all_gather" in printed[0]
    assert printed[1] == b""
    assert json.loads(path.read_text())["config"]["ranks"] == 2
