"""`python -m tritondt`, and the command `tritondt`."""

import importlib
import sys

# The extra "cli"; a command imports what it needs when it is asked for.
_PACKAGES = ("click", "rich", "matplotlib")


def run(prog_name: str | None = None) -> None:
    """Runs the command line; a line with what to install, and status 1, where a package of the extra is missing.

    Ctrl-C while commands are still being imported ends it with one line and status 130.
    """
    try:
        importlib.import_module("tritondt.cli.main").main(prog_name=prog_name)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _PACKAGES:
            raise
        sys.exit(f"{missing} is missing, which tritondt's commands need: pip install {' '.join(_PACKAGES)}")
    except KeyboardInterrupt:
        sys.stderr.write("Error: interrupted\n")
        sys.exit(130)


# The ranks that the demo starts import this file again, under another name.
if __name__ == "__main__":
    run(prog_name="python -m tritondt")
