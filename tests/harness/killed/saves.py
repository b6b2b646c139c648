"""Program that saves checkpoints in processes that kill themselves, each after so many calls of functions.

    python -m tests.harness.killed.saves FOLDER SEED TRIALS

After each, the newest checkpoint must be the one before or the one that was being saved, whole, and its bytes right.
Ends with a line: how many kills left the old one, the new one, and how many saves ended before their kill.
"""

import os
import random
import signal
import sys
import warnings
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from tritondt.interop import saves
from tritondt.interop.checkpoint_folder import CheckpointFolder

KEEP = 2


def state(step: int) -> dict[str, Any]:
    """Values that tell the step in every element."""
    return {"weights": torch.full((1000, 33), float(step)), "nested": {"moment": torch.full((7,), -step)}, "at": step}


def killed_after(calls: int, folder: Path, step: int) -> int:
    """The status of a process that saves `step` and is killed at its function call of that number."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    left = [calls]

    def count(frame: FrameType, event: str, argument: object) -> None:
        left[0] -= 1
        if left[0] <= 0:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(count)
    CheckpointFolder(folder, keep=KEEP).save(state(step), step)
    sys.setprofile(None)
    os._exit(0)


def num_calls(folder: Path) -> int:
    """How many calls and returns a save takes."""
    counted = [0]

    def count(frame: FrameType, event: str, argument: object) -> None:
        counted[0] += 1

    for step in (1, 2, 3):  # the last removes an old one
        counted[0] = 0
        sys.setprofile(count)
        CheckpointFolder(folder, keep=KEEP).save(state(step), step)
        sys.setprofile(None)
    return counted[0]


def check(folder: Path, before: int, step: int) -> int:
    """The step of the newest checkpoint, which has been loaded and looked at."""
    checkpoints, found = CheckpointFolder(folder, keep=KEEP), state(0)
    latest = checkpoints.load(found)
    assert latest in (before, step), f"{latest} after a kill in the save of {step}, {before} before it"
    torch.testing.assert_close(found, state(latest), rtol=0, atol=0)
    kept = saves.found_in(folder)
    # One more where the kill came before the oldest was removed.
    assert KEEP <= len(kept) <= KEEP + 1, kept
    return latest


def main(folder: Path, seed: int, trials: int) -> Counter[str]:
    """What became of the saves."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    calls, draw, outcomes = num_calls(folder), random.Random(seed), Counter[str]()
    latest = 3
    for step in range(4, 4 + trials):
        # The last calls, in which a save comes to be and an old one goes, are met as often as all those before.
        at = draw.choice((draw.randint(1, calls), draw.randint(calls * 3 // 4, calls + 20)))
        status = killed_after(at, folder, step)
        assert status in (0, -signal.SIGKILL), status
        before, latest = latest, check(folder, latest, step)
        assert status or latest == step, "a save that ended was lost"
        outcomes["ended" if status == 0 else "new" if latest != before else "old"] += 1
    CheckpointFolder(folder, keep=KEEP).save(state(0), 0)
    left = sorted(path.name for path in folder.iterdir() if not path.name[0].isdigit())
    assert left == [".lock"], f"left behind by killed saves: {left}"
    return outcomes


if __name__ == "__main__":
    found = main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    sys.stdout.write(f"old {found['old']}, new {found['new']}, ended {found['ended']}\n")
