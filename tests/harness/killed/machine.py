"""Program that runs a program on a rank of torchrun, and ends as a machine does: the rank with its torchrun.

    torchrun --nnodes 1:2 --rdzv-endpoint HOST:PORT -m tests.harness.killed.machine PROGRAM STEPS

Behind that many steps of an optimizer it waits for a second machine where it is alone, and kills torchrun and itself
where it is the one that came second, which has DIES=1. Started again by torchrun, it lives.
"""

import os
import runpy
import signal
import sys
import time
from itertools import count

from torch.optim.optimizer import register_optimizer_step_post_hook

if __name__ == "__main__":
    steps, num_steps = count(1), int(sys.argv[2])
    is_alone, dies = os.environ["WORLD_SIZE"] == "1", "DIES" in os.environ

    def strike(*_: object) -> None:
        """Waits, or kills, at the step that was asked for."""
        if next(steps) == num_steps:
            if is_alone:
                time.sleep(600)  # until torchrun ends this rank, for the other machine has come
            elif dies:
                os.kill(os.getppid(), signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)

    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        register_optimizer_step_post_hook(strike)
    runpy.run_path(sys.argv[1], run_name="__main__")
