"""`trace`: a program run on ranks, its timeline and summary, how it ends, and what is refused."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from click.testing import CliRunner

from tritondt.cli.main import main
from tritondt.cli.trace import starting
from tritondt.cli.trace.on_rank import collect, run_program, trace_on_rank
from tritondt.debug.tracing.record import RankRecord

PROGRAM = """
import sys
import torch
import torch.distributed as dist
import tritondt as T

dist.init_process_group("gloo")
x = T.distribute_tensor(torch.arange(64.0).view(8, 8), T.init_device_mesh("cpu", (2,)), [T.Shard(0)])
for _ in range(3):
    y = x.redistribute(placements=[T.Shard(1)], async_op=True) + 1
    T.debug.mark_step()
print(f"sum {y.full_tensor().sum().item()} {sys.argv[1:]}")
dist.destroy_process_group()
"""


# As the command `tritondt` starts: the current folder is not on sys.path.
COMMAND = f"import sys; sys.path[0] = {str(Path(__file__).parents[2])!r}; from tritondt.__main__ import run; run()"


def run_trace(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a folder that has another tritondt, as a checkout that was not built."""
    (folder / "program.py").write_text(PROGRAM)
    (folder / "tritondt").mkdir()
    (folder / "tritondt" / "__init__.py").write_text("raise ImportError('not built')")
    return subprocess.run(
        [sys.executable, "-c", COMMAND, "trace", *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=250,
        check=False,
    )


@pytest.mark.extended
def test_a_program_on_two_ranks_has_a_timeline_and_a_summary(tmp_path):
    ended = run_trace(tmp_path, "--ranks", "2", "--out", "found.json", "--", "program.py", "--lr", "0.1")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("sum 2080.0 ['--lr', '0.1']") == 2
    document = json.loads((tmp_path / "found.json").read_text())
    events, other = document["traceEvents"], document["otherData"]
    assert {event["pid"] for event in events} == {0, 1}
    assert {"op", "exchange", "pack", "wait", "unpack"} <= {event.get("cat") for event in events}
    starts = {event["id"]: event["pid"] for event in events if event["ph"] == "s"}
    ends = {event["id"]: event["pid"] for event in events if event["ph"] == "f"}
    assert len(starts) == other["summary"]["messages"]["matched"] > 6
    assert starts.keys() == ends.keys()
    assert all(starts[number] != ends[number] for number in starts)
    assert other["summary"]["messages"]["unmatched"] == 0
    assert (other["missing_ranks"], other["failures"], other["dropped_spans"]) == ([], {}, 0)
    assert other["clocks"]["1"]["one_clock"]
    assert len(other["clocks"]["1"]["pings_error_s"]) == 2
    assert len(other["summary"]["steps"]) == 3
    assert re.search(r"step 1 of 1 \(exchange \(S0\) -> \(S1\)\) of \(8, 8\) float32", ended.stdout)
    assert "program.py:10" in ended.stdout
    assert "timeline: found.json" in ended.stdout


def test_when_a_rank_fails_its_status_is_kept_and_ranks_that_stay_are_ended(monkeypatch):
    monkeypatch.setattr(starting, "_FAILURE_GRACE_S", 0.1)
    body = "import os, sys, time; time.sleep(3600) if os.environ['RANK'] == '0' else sys.exit(7)"
    status, store = starting.run_ranks(2, [sys.executable, "-c", body])
    assert status == 7
    assert collect(store, 2, waits=False) == []


def test_a_rank_alone_leaves_its_record_in_the_store(tmp_path, monkeypatch):
    (tmp_path / "alone.py").write_text("import sys\nsys.exit(3)\n")
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr("tritondt.cli.trace.on_rank._CHUNK_BYTES", 16)
    store = dist.HashStore()
    assert trace_on_rank(store, 0, 1, [str(tmp_path / "alone.py")]) == 3
    (record,) = collect(store, 1, waits=True)
    assert (record.rank, record.failure) == (0, "exited with 3")
    assert isinstance(record, RankRecord)
    assert collect(dist.HashStore(), 1, waits=False) == []


@pytest.mark.parametrize(
    ("text", "ending"),
    [
        ("import sys\nassert sys.argv[1:] == ['-x']\n", (0, "")),
        ("raise SystemExit('no data')", (1, "no data")),
        ("raise KeyboardInterrupt", (130, "interrupted")),
        ("1 / 0", (1, "ZeroDivisionError: division by zero")),
    ],
)
def test_a_program_ends_as_python_would_have_it(tmp_path, monkeypatch, capsys, text, ending):
    (tmp_path / "program.py").write_text(text)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert run_program([str(tmp_path / "program.py"), "-x"]) == ending
    printed = capsys.readouterr().err
    assert "runpy" not in printed
    if "ZeroDivision" in ending[1]:
        assert re.search(r'program.py", line 1, in <module>[\s\S]*ZeroDivisionError: division by zero', printed)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--", "nowhere.py"], "nowhere.py is no file; allowed is SCRIPT [ARGS], or -m MODULE [ARGS]"),
        (["--", "-m"], "-m is given without a module"),
        (["--", "-m", "nowhere_at_all.train"], "there is no module nowhere_at_all.train"),
        (["--ranks", "0", "--", __file__], "0 is not in the range x>=1"),
        (["--ranks", "10000", "--", __file__], "--ranks 10000: at most"),
        (["--out", "/nowhere/trace.json", "--", __file__], "/nowhere/trace.json cannot be written: No such file"),
        (
            ["--summary", "page.html", "--", __file__],
            "page.html ends in none of .png, .svg, .pdf, which say",
        ),
        ([], "Missing argument"),
        (["--fast", "--", __file__], "No such option"),
    ],
)
def test_what_cannot_be_traced_is_refused_before_a_rank_starts(arguments, sentence):
    ended = CliRunner().invoke(main, ["trace", *arguments])
    assert ended.exit_code == 2
    assert sentence in ended.output


def test_ranks_of_a_launcher_without_a_store_of_its_own_are_refused(monkeypatch):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    ended = CliRunner().invoke(main, ["trace", "--", __file__])
    assert ended.exit_code == 2
    assert "2 ranks were started by something else than torchrun" in ended.output
    asked = CliRunner().invoke(main, ["trace", "--ranks", "3", "--", __file__])
    assert "--ranks 3 was asked for, but the launcher has started 2" in asked.output
