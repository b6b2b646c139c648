"""The program of a test of two hosts that do not fit each other: what each rank finds in its first redistributions.

It is one host, HOST_NUMBER, of two ranks. With APART=1 each rank has a namespace of processes and a /dev/shm of its
own, as in a container of its own. A rank writes a line of JSON, and stays until all have: the first has the store.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import tritondt as T
from tests.harness.two_hosts import ADDRESSES
from tests.process_group import random_collectives

RANKS_PER_HOST = 2
SIZE = 2 * RANKS_PER_HOST
_OWN_CONTAINER = ("unshare", "--pid", "--fork", "--mount-proc", "--ipc", "--mount", "--kill-child", "sh", "-c")
_OWN_SHM = 'mount -t tmpfs none /dev/shm && exec "$@"'


def found() -> str:
    """ "right", or the error."""
    dist.init_process_group("tritondt")
    try:
        whole = torch.arange(256.0 * 520).view(256, 520)
        terms = T.DTensor.from_local(whole * dist.get_rank(), T.Mesh((SIZE,)), [T.Partial()])
        torch.testing.assert_close(terms.full_tensor(), whole * sum(range(SIZE)), rtol=0, atol=0)
        assert dist.group.WORLD is not None
        random_collectives.run(dist.group.WORLD, 5, 12)
    except T.TritondtError as error:
        return f"{type(error).__name__}: {error}"
    T.close()
    dist.destroy_process_group()
    return "right"


def main() -> None:
    """One rank, or the ranks of this host as processes that start apart."""
    if "RANK" in os.environ:
        torch.set_num_threads(1)
        line = {"rank": int(os.environ["RANK"]), "found": found()}
        os.write(1, (json.dumps(line) + "\n").encode())
        folder = Path(os.environ["FOLDER"])
        (folder / f"found-{line['rank']}").touch()
        while not all((folder / f"found-{rank}").exists() for rank in range(SIZE)):
            time.sleep(0.05)
        os._exit(0)  # a world that has failed is not closed
    first = int(os.environ["HOST_NUMBER"]) * RANKS_PER_HOST
    os.environ.update(WORLD_SIZE=str(SIZE), MASTER_ADDR=ADDRESSES[0], MASTER_PORT="29501")
    os.environ["LOCAL_WORLD_SIZE"] = str(RANKS_PER_HOST)
    apart = (*_OWN_CONTAINER, _OWN_SHM, "sh") if os.environ.get("APART") else ()
    program = [*apart, sys.executable, "-m", "tests.harness.set_up_on_hosts"]
    running = [
        subprocess.Popen(program, env={**os.environ, "RANK": str(first + place)}) for place in range(RANKS_PER_HOST)
    ]
    sys.exit(max(abs(each.wait()) for each in running))


if __name__ == "__main__":
    main()
