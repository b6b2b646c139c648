"""Sums in windows, by multimem where the GPUs have it and by peers' pointers, against NCCL's all_reduce.

    python -m benchmarks.nccl.window_sum [--ranks N] [--elements N] [--rounds N] [--json FILE]

Ranks have a GPU each where there are as many, else two share one, which takes NCCL 2.30.7 and tells little of time. All
sides are checked to give the same before they are timed, in turns; a round takes as long as its slowest rank.
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
from benchmarks.nccl.own_kernel import started
from tests.harness.gloo_ranks import RanksError
from tests.nccl.devices import why_not
from tritondt.cli.surroundings import surroundings

_LIMIT_S = 240.0


def parser_of() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.nccl.window_sum",
        description="Time sums of bfloat16 over all ranks in a window, in one launch, against NCCL's all_reduce.",
    )
    add = parser.add_argument
    add("--ranks", type=int, default=2, help="ranks, on a GPU each or two on one  [default: 2]")
    add("--elements", type=int, default=1 << 18, help="elements of a rank, bfloat16  [default: 262144]")
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
    on_rank = importlib.import_module("benchmarks.nccl.summed_windows")
    with started(where, given.ranks) as ranks:
        try:
            found = ranks.run(on_rank.timed, where, given.elements, given.rounds, timeout_s=_LIMIT_S)
        except RanksError as error:
            sys.stderr.write(f"{error}\nError: {str(error).strip().splitlines()[-1]}\n")
            return 1
    rounds = slowest(found)
    seconds = {side: median(each) for side, each in rounds.items()}
    times = ", ".join(f"{side} {each * 1e6:.1f} us" for side, each in seconds.items())
    ratios = {side: each / seconds[on_rank.NCCL] for side, each in seconds.items() if side != on_rank.NCCL}
    told = ", ".join(f"{side} {ratio:.2f}" for side, ratio in ratios.items())
    sys.stdout.write(f"sums of {given.elements} bfloat16 on {given.ranks} ranks: {times}; over NCCL's: {told}\n")
    if given.json is not None:
        facts = {"benchmark": "window_sum", **surroundings(), "ranks": given.ranks, "elements": given.elements}
        given.json.write_text(json.dumps({**facts, "rounds": rounds, "seconds": seconds, "ratios": ratios}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
