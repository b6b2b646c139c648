"""`python -m tritondt`."""

from tritondt.cli.main import main

# The ranks that the demo starts import this file again, under another name.
if __name__ == "__main__":
    main(prog_name="python -m tritondt")
