"""`--json [FILE]` of the benchmarks: nowhere, on stdout, or to a file."""

import json

import click
from click.testing import CliRunner

from tritondt.cli.bench.json_result import is_printed, json_option, write_json

FOUND = {"ratio": 0.5, "ranks": (2, 3)}


@click.command()
@json_option
def command(json_to):
    click.echo(f"printed: {is_printed(json_to)}")
    write_json(FOUND, json_to)


def test_without_the_option_nothing_is_written():
    assert CliRunner().invoke(command, []).stdout == "printed: False\n"


def test_the_object_is_the_last_line_printed():
    for arguments in (["--json"], ["--json", "-"]):
        first, last = CliRunner().invoke(command, arguments).stdout.splitlines()
        assert first == "printed: True"
        assert json.loads(last) == {"ratio": 0.5, "ranks": [2, 3]}


def test_the_object_is_one_line_of_a_file(tmp_path):
    path = tmp_path / "found.json"
    assert CliRunner().invoke(command, ["--json", str(path)]).stdout == "printed: False\n"
    assert path.read_text() == '{"ratio": 0.5, "ranks": [2, 3]}\n'


def test_a_folder_is_refused(tmp_path):
    found = CliRunner().invoke(command, ["--json", str(tmp_path)])
    assert found.exit_code == 2
    assert f"File '{tmp_path}' is a directory" in found.output


def test_a_file_that_cannot_be_written_is_refused_before_the_command_runs(tmp_path):
    found = CliRunner().invoke(command, ["--json", str(tmp_path / "nowhere" / "found.json")])
    assert (found.exit_code, found.stdout) == (2, "")
    assert "found.json cannot be written: No such file or directory" in found.stderr


def test_a_file_that_is_there_stays_as_it_is_until_it_is_written(tmp_path):
    path, missing = tmp_path / "found.json", tmp_path / "other.json"
    path.write_text("before")
    seen = []

    @click.command()
    @json_option
    def look(json_to):
        seen.append((path.read_text(), missing.exists()))

    for each in (path, missing):
        assert CliRunner().invoke(look, ["--json", str(each)]).exit_code == 0
    assert seen == [("before", False)] * 2
