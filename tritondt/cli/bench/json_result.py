"""The option `--json [FILE]` of the benchmarks: measurements as one JSON object."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

_STDOUT = "-"

# The command is given `json_to`: None without the option, else where the object goes.
json_option = click.option(
    "--json",
    "json_to",
    is_flag=False,
    flag_value=_STDOUT,
    type=click.Path(dir_okay=False, allow_dash=True),
    help="Write one JSON object to a file, or as the last line printed.",
)


def is_printed(json_to: str | None) -> bool:
    """Whether stdout is where the object goes."""
    return json_to == _STDOUT


def write_json(result: Mapping[str, Any], json_to: str | None) -> None:
    """Write the object where `--json` says, in one line; nothing without the option."""
    if json_to is None:
        return
    text = json.dumps(result)
    if is_printed(json_to):
        click.echo(text)
    else:
        Path(json_to).write_text(text + "\n", encoding="utf-8")
