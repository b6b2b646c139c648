"""Random programs, the tests marked `soak`, and ranks that may not grow, side by side: `make soak SECONDS=600`.

Two ranks train, move, save and make worlds anew, and their memory, descriptors and threads stay as they are. Seeds
follow from the clock, and are told first, so that no two runs are alike; the exit status is 1 where anything fails.
"""

import argparse
import os
import subprocess
import sys
import time

from tests.programs.generator import FAMILY

# What a test or a program may take beyond the time asked for, and what the longest test may: 1,000 kills, which come
# first; they took 2,000 and 3,300 s on two cores at loads of 10 to 50, and 20 take 10 s of free ones.
GRACE_S = 600
LONGEST_S = 3600


def main() -> int:
    """The exit status: 1 where a program or a test failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.soak", description=__doc__)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--seed", type=int, default=int(time.time()) // FAMILY * FAMILY)
    parser.add_argument("--without", default="", help="kinds of statements that programs leave out")
    asked = parser.parse_args()
    sys.stdout.write(f"random programs from seed {asked.seed} on\n")
    sys.stdout.flush()
    programs = subprocess.Popen([
        *(sys.executable, "-m", "tests.programs", "--seed", str(asked.seed), "--seconds", str(asked.seconds)),
        *("--jobs", "1", "--without", asked.without),
    ])  # fmt: skip
    tests = subprocess.Popen([
        *(sys.executable, "-m", "pytest", "--quiet", "-m", "soak and not alone and not sanitized"),
        # It ends by itself when the time is over: the test that runs then is the last.
        *("-p", "tests.tools.soak_order", "--deselect", "tests/programs"),
    ], env={**os.environ, "TRITONDT_SOAK": f"{asked.seed}:{time.time() + asked.seconds}"})  # fmt: skip
    flat = subprocess.Popen([sys.executable, "-m", "tests.tools.flat", str(asked.seconds)])
    statuses = []
    for process in (programs, flat, tests):
        limit_s = (max(asked.seconds, LONGEST_S) if process is tests else asked.seconds) + GRACE_S
        try:
            statuses.append(process.wait(timeout=limit_s))
        except subprocess.TimeoutExpired:
            process.kill()
            sys.stderr.write(f"no end within {limit_s:g} s: {process.args!r}\n")
            statuses.append(1)
    return int(any(statuses))


if __name__ == "__main__":
    sys.exit(main())
