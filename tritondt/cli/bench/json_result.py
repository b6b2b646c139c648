"""The options `--json [FILE]` (`-J`, as in nccl-tests) and `--csv [FILE]` of the benchmarks: one JSON object, or lines.

A file that cannot be written is refused before anything is measured.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from tritondt.cli.outputs import writable

_STDOUT = "-"


_PATH = click.Path(dir_okay=False, allow_dash=True)


def _json_path(context: click.Context, parameter: click.Parameter, path: str | None) -> str | None:
    """The path, as `writable` has it; a name that ends in .csv asks for the other option."""
    if path is not None and path.endswith(".csv"):
        raise click.UsageError(f"--json (-J) writes JSON, and {path} is named like CSV; write --csv {path}")
    return writable(context, parameter, path)


# The command is given `json_to`: None without the option, else where the object goes.
json_option = click.option(
    *("-J", "--json", "--output_file", "json_to"),
    is_flag=False,
    flag_value=_STDOUT,
    type=_PATH,
    callback=_json_path,
    help="Write one JSON object to a file, or without one to stdout, where all else then goes to stderr.",
)
# So too, `csv_to`.
csv_option = click.option(
    "--csv",
    "csv_to",
    is_flag=False,
    flag_value=_STDOUT,
    type=_PATH,
    callback=writable,
    help="Write a line for each measurement to a file, or without one to stdout.",
)


def refuse_one_place(json_to: str | None, csv_to: str | None) -> None:
    """UsageError where both go to one file, or to stdout."""
    if json_to is not None and json_to == csv_to:
        raise click.UsageError(f"--json and --csv both go to {'stdout' if is_printed(json_to) else json_to}")


def is_printed(*paths: str | None) -> bool:
    """Whether stdout is where one of these goes."""
    return _STDOUT in paths


def write_json(result: Mapping[str, Any], json_to: str | None) -> None:
    """Write the object where `--json` says, in one line; nothing without the option."""
    write_text(json.dumps(result) + "\n", json_to)


def write_text(text: str, path: str | None) -> None:
    """Write a text to a file or to stdout; nothing without a path."""
    if path is None:
        return
    if is_printed(path):
        click.echo(text, nl=False)
    else:
        Path(path).write_text(text, encoding="utf-8")
