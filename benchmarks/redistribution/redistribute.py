"""`python -m benchmarks.redistribution.redistribute`: `python -m tritondt bench redistribute`, which is installed."""

from tritondt.cli.main import redistribute

# The ranks that the benchmark starts import this file again, under another name.
if __name__ == "__main__":
    redistribute(prog_name="python -m benchmarks.redistribution.redistribute")
