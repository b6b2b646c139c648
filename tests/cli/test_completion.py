"""Completion of commands and flags by a shell, which asks the program itself."""

import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from tritondt.cli.main import main

_COMMAND = "import tritondt.__main__ as command; command.run(prog_name='tritondt')"


def asked(instruction: str, **environment: str) -> str:
    """What the command `tritondt` answers to a shell's instruction."""
    answered = subprocess.run(
        [sys.executable, "-c", _COMMAND],
        env=os.environ | environment | {"_TRITONDT_COMPLETE": instruction},
        capture_output=True,
        text=True,
        check=True,
    )
    return answered.stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [("tritondt bench all_g", {"all_gather", "all_gather_v"}), ("tritondt bench all_reduce --minb", {"--minbytes"})],
)
def test_a_shell_completes_commands_and_flags(words, expected):
    found = asked("bash_complete", COMP_WORDS=words, COMP_CWORD=str(len(words.split()) - 1))
    assert {line.partition(",")[2] for line in found.splitlines()} == expected


def test_the_help_names_the_line_that_switches_completion_on():
    found = CliRunner().invoke(main, ["--help"])
    assert 'eval "$(_TRITONDT_COMPLETE=bash_source tritondt)"' in found.output
    assert "complete -o nosort -F _tritondt_completion tritondt" in asked("bash_source")


def test_help_of_every_command_imports_neither_torch_nor_matplotlib():
    """Both take a second or two, which a shell that completes a flag waits for."""
    program = """
import sys
import click
from tritondt.cli.main import main

def told(command, name):
    with click.Context(command, info_name=name) as context:
        command.get_help(context)
    for each in getattr(command, "commands", {}).items():
        told(each[1], f"{name} {each[0]}")

told(main, "tritondt")
print(sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "matplotlib", "numpy", "rich"}))
"""
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert told.stdout.splitlines() == ["[]"]
