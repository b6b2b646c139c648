"""A kernel of one's own that reads peers' memory, against a gather and a product apart: examples/own_fused_kernel.py.

    python -m benchmarks.nccl.own_kernel [--ranks N] [--rows N] [--rounds N] [--json FILE]

Ranks have a GPU each where there are as many, else two share one, which takes NCCL 2.30.7 and tells little of time.
Both sides are checked to give the same before they are timed, in turns; a round takes as long as its slowest rank.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch

from benchmarks.nccl.judging import slowest
from tests.harness.gloo_ranks import GlooRanks, RanksError
from tests.nccl.devices import ON_ONE_MACHINE, start, why_not
from tritondt.cli.surroundings import surroundings

_LIMIT_S = 240.0


def use_own_gpu() -> None:
    """The preparation of a rank that has a GPU for itself."""
    torch.cuda.set_device(int(os.environ["RANK"]))


def started(where: str, num_ranks: int) -> GlooRanks:
    """Ranks on a GPU each, with NCCL's settings as they are; or on one, or over the double."""
    if where == "gpu" and torch.cuda.device_count() >= num_ranks:
        on_rank = importlib.import_module("benchmarks.nccl.own_kernel")
        return GlooRanks(num_ranks, dict(ON_ONE_MACHINE), prepare=on_rank.use_own_gpu, backend="tritondt", fresh=True)
    return start(where, num_ranks)


def parser_of() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.nccl.own_kernel",
        description="Time rows of all ranks that a kernel reads in peers' memory, tile by tile of a product, against a "
        "gather and a product apart; float32.",
    )
    add = parser.add_argument
    add("--ranks", type=int, default=2, help="ranks, on a GPU each or two on one  [default: 2]")
    add("--rows", type=int, default=512, help="rows of a rank  [default: 512]")
    add("--inner", type=int, default=1024, help="elements of a row  [default: 1024]")
    add("--columns", type=int, default=1024, help="columns of the weight  [default: 1024]")
    add("--rounds", type=int, default=50, help="times that each side takes its turn  [default: 50]")
    add("--double", action="store_true", help="over the test double, interpreted: that it runs")
    add("--json", type=Path, help="file for the measurements")
    return parser


def main(arguments: Sequence[str]) -> int:
    """The exit status: 1 where there is no GPU, or no memory that ranks share."""
    given = parser_of().parse_args(arguments)
    where = "host" if given.double else "gpu"
    reason = why_not(where, 1 if torch.cuda.device_count() >= given.ranks else given.ranks)
    if reason is not None:
        sys.stderr.write(f"Error: {f'this benchmark {reason}' if reason.startswith('needs') else reason}\n")
        return 1
    if given.double:
        os.environ["TRITON_INTERPRET"] = "1"
    on_rank = importlib.import_module("benchmarks.nccl.gathered_product")
    case = on_rank.Case(given.rows, given.inner, given.columns)
    with started(where, given.ranks) as ranks:
        try:
            found = ranks.run(on_rank.timed, where, case, given.rounds, timeout_s=_LIMIT_S)
        except RanksError as error:
            sys.stderr.write(f"{error}\nError: {str(error).strip().splitlines()[-1]}\n")
            return 1
    rounds = slowest(found)
    seconds = {side: median(each) for side, each in rounds.items()}
    ratio = seconds[on_rank.FUSED] / seconds[on_rank.APART]
    times = ", ".join(f"{side} {each * 1e6:.1f} us" for side, each in seconds.items())
    sys.stdout.write(f"{given.ranks} ranks of {case.rows} x {case.inner}: {times}; ratio {ratio:.2f}\n")
    if given.json is not None:
        told = {"benchmark": "own_kernel", **surroundings(), "ranks": given.ranks, "case": case._asdict()}
        given.json.write_text(json.dumps({**told, "rounds": rounds, "seconds": seconds, "ratio": ratio}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
