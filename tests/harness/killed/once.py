"""Program that runs a program on a rank of torchrun, of which the last kills itself in its first start.

    torchrun --standalone --nproc-per-node 2 --max-restarts 1 -m tests.harness.killed.once PROGRAM STEPS

It is killed behind that many steps of an optimizer; started again by torchrun, it lives.
"""

import os
import runpy
import signal
import sys
from itertools import count

from torch.optim.optimizer import register_optimizer_step_post_hook

if __name__ == "__main__":
    is_last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    steps, num_steps = count(1), int(sys.argv[2])

    def strike(*_: object) -> None:
        """Kills this process at the step that was asked for."""
        if next(steps) == num_steps:
            os.kill(os.getpid(), signal.SIGKILL)

    if is_last and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        register_optimizer_step_post_hook(strike)
    runpy.run_path(sys.argv[1], run_name="__main__")
