"""Ctrl-C before and while a command runs: one line, and the status that shells give."""

import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from tritondt import __main__ as entry
from tritondt.cli.main import Commands


@click.command()
def interrupted():
    raise KeyboardInterrupt


def test_a_command_that_is_interrupted_ends_with_one_line():
    group = Commands(commands={"run": interrupted})
    ended = CliRunner().invoke(group, ["run"])
    assert (ended.exit_code, ended.stderr, ended.stdout) == (130, "Error: interrupted\n", "")


def test_an_import_that_is_interrupted_ends_with_one_line(monkeypatch, capsys):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib, "import_module", interrupt)
    with pytest.raises(SystemExit) as ended:
        entry.run()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "Error: interrupted\n"


def test_ctrl_c_while_ranks_are_being_started_prints_one_line():
    """A terminal sends it to all processes: the server that forks ranks imports torch for seconds, and says nothing."""
    # What a shell without job control starts in the background ignores Ctrl-C, and so does all that it starts.
    listening = "import signal, runpy; signal.signal(signal.SIGINT, signal.default_int_handler); runpy.run_module"
    command = [sys.executable, "-c", f"{listening}('tritondt', run_name='__main__')", "bench", "all_reduce"]
    with subprocess.Popen(
        [*command, "--ranks", "2", "-b", "4K"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as program:
        try:
            deadline = time.monotonic() + 100
            while not any("forkserver" in text for text in commands_of_session(program.pid)):
                assert program.poll() is None, program.communicate()
                assert time.monotonic() < deadline, commands_of_session(program.pid)
                time.sleep(0.1)  # each question reads /proc whole
            time.sleep(0.2)  # the server runs: it imports
            os.killpg(program.pid, signal.SIGINT)
            _, said = program.communicate(timeout=100)
        finally:
            program.kill()
    assert (program.returncode, said) == (130, "Error: partial, 0 of 1 cases were measured: interrupted\n")
    deadline = time.monotonic() + 30
    while commands_of_session(program.pid):
        assert time.monotonic() < deadline, commands_of_session(program.pid)
        time.sleep(0.02)


def commands_of_session(session: int) -> list[str]:
    """Command lines of the processes in a session, those that have ended not among them."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(process.name)) == session:
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except (ProcessLookupError, FileNotFoundError):
            continue  # it has ended since
    return [text for text in found if text]
