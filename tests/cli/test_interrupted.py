"""Ctrl-C before and while a command runs: one line, and the status that shells give."""

import importlib

import click
import pytest
from click.testing import CliRunner

from tritondt import __main__ as entry
from tritondt.cli.main import LazyGroup


@click.command()
def interrupted():
    raise KeyboardInterrupt


def test_a_command_that_is_interrupted_ends_with_one_line():
    group = LazyGroup(commands_at={"run": f"{__name__}:interrupted"})
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
