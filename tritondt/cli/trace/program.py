"""A user's program, run in this process as Python would run it."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from tritondt.cli.outputs import INTERRUPTED


def run_program(program: Sequence[str]) -> tuple[int, str]:
    """Exit status of `SCRIPT ARGS` or `-m MODULE ARGS`, and what ended it early; its own exceptions are printed."""
    is_module = program[0] == "-m"
    name, arguments = (program[1], program[2:]) if is_module else (program[0], program[1:])
    sys.argv = [name, *arguments]
    sys.path[0] = str(Path.cwd() if is_module else Path(name).resolve().parent)
    try:
        if is_module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(name, run_name="__main__")
    except SystemExit as ending:
        return _status_of(ending.code)
    except KeyboardInterrupt:
        return INTERRUPTED, "interrupted"
    except BaseException as error:  # noqa: BLE001  it ends the program, not the trace
        error.with_traceback(_own_frames(error.__traceback__))
        sys.excepthook(type(error), error, error.__traceback__)
        return 1, f"{type(error).__name__}: {error}"
    return 0, ""


def _status_of(code: object) -> tuple[int, str]:
    """Status that Python ends with for sys.exit(code), which prints a text."""
    if code is None or code == 0:
        return 0, ""
    if isinstance(code, int):
        return code, f"exited with {code}"
    sys.stderr.write(f"{code}\n")
    return 1, str(code)


def _own_frames(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the program's first frame on."""
    found = trace
    while found is not None and (
        found.tb_frame.f_code.co_filename == __file__ or "runpy" in found.tb_frame.f_code.co_filename
    ):
        found = found.tb_next
    return found or trace
