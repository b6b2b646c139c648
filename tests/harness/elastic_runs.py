"""Program that runs a program as ranks, several times, each time in a folder and with a number of ranks.

    python -m tests.harness.elastic_runs PROGRAM '[[FOLDER, COPIED_FROM, RANKS, KILLED_AT], ...]'

The folder begins as a copy of another one unless that is "". With KILLED_AT above 0 the last rank is killed in its
exchange of that number, and all must fail; else none may. What ranks print is in FOLDER/rank-N.txt, of the last time.
Torch is imported once: ranks are forks, as in tests of examples.
"""

import importlib
import json
import os
import runpy
import shutil
import sys
from pathlib import Path

from tests.harness.killed import rank as killed_rank
from tests.harness.ports import free_port


def run(program: str, folder: str, num_ranks: int, killed_at: int) -> bool:
    """Whether the ranks ended as they should."""
    port = free_port()
    for rank in range(num_ranks):
        if os.fork() == 0:
            os.chdir(folder)
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            output = os.open(f"rank-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            if killed_at and rank == num_ranks - 1:
                killed_rank.kill_at(killed_at)
            runpy.run_path(program, run_name="__main__")
            sys.exit()
    statuses = [os.wait()[1] for _ in range(num_ranks)]
    return all(statuses) if killed_at else not any(statuses)


def main() -> int:
    """The exit status: the number of the run that ended otherwise, from 1 on."""
    for module in ("torch._dynamo", "tritondt", "tritondt.interop.checkpoint_folder", "tritondt.parallel"):
        importlib.import_module(module)
    for number, (folder, copied_from, num_ranks, killed_at) in enumerate(json.loads(sys.argv[2]), 1):
        if copied_from:
            shutil.copytree(copied_from, folder)
        else:
            Path(folder).mkdir()
        if not run(sys.argv[1], folder, num_ranks, killed_at):
            return number
    return 0


if __name__ == "__main__":
    sys.exit(main())
