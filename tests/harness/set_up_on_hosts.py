"""The program of tests of two hosts that do not fit each other: what each rank finds in its first redistributions.

It is one host, HOST_NUMBER, of two ranks for each of CASES, the fields of `Case` as JSON. They are forked once torch is
imported, and all cases run at once: most wait. A rank writes a line of JSON, and stays until all of its case have: the
first has the store.
"""

import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

import tritondt as T
from tests.harness.two_hosts import ADDRESSES
from tests.process_group import random_collectives

RANKS_PER_HOST = 2
SIZE = 2 * RANKS_PER_HOST
_NEW_NAMESPACES = 0x20000 | 0x08000000 | 0x20000000  # of mounts, of what processes share by name, and of processes


class Case(NamedTuple):
    """Variables of the ranks of both hosts, and of one each.

    Where ranks `are_apart`, each has a namespace of processes and a /dev/shm of its own, as in a container. The
    ranks meet in a collective of the backend where the case `begins_with_collective`, else in a redistribution.
    """

    name: str
    everywhere: Mapping[str, str]
    on_host: tuple[Mapping[str, str], Mapping[str, str]] = ({}, {})
    are_apart: bool = False
    begins_with_collective: bool = False


def reduce_all() -> None:
    """A collective that goes in stages, and is right."""
    total = torch.full((50_000,), float(dist.get_rank()))
    dist.all_reduce(total)
    assert bool((total == sum(range(SIZE))).all())


def found(*, begins_with_collective: bool) -> tuple[str, float]:
    """ "right", or the error, and after how many seconds."""
    dist.init_process_group("tritondt", timeout=timedelta(seconds=float(os.environ["TRITONDT_TIMEOUT"])))
    began = time.monotonic()
    try:
        if begins_with_collective:
            reduce_all()
        whole = torch.arange(256.0 * 520).view(256, 520)
        terms = T.DTensor.from_local(whole * dist.get_rank(), T.Mesh((SIZE,)), [T.Partial()])
        torch.testing.assert_close(terms.full_tensor(), whole * sum(range(SIZE)), rtol=0, atol=0)
        reduce_all()
        if os.environ.get("TRITONDT_TRANSPORT") != "gloo":  # which has fewer dtypes
            assert dist.group.WORLD is not None
            random_collectives.run(dist.group.WORLD, 5, 12)
    except T.TritondtError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began
    seconds = time.monotonic() - began
    T.close()
    dist.destroy_process_group()
    return "right", seconds


def run_rank(rank: int, case: Case, folder: Path) -> None:
    """Finds out, tells it, and returns when all have."""
    os.environ["RANK"] = str(rank)
    torch.set_num_threads(1)
    text, seconds = found(begins_with_collective=case.begins_with_collective)
    os.write(1, (json.dumps({"rank": rank, "case": case.name, "found": text, "seconds": seconds}) + "\n").encode())
    (folder / f"found-{case.name}-{rank}").touch()
    while not all((folder / f"found-{case.name}-{other}").exists() for other in range(SIZE)):
        time.sleep(0.05)


def go_apart() -> None:
    """Goes on in namespaces of this process's own; the one that has them is another one, whose end this one awaits."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_NAMESPACES) != 0:
        raise OSError(ctypes.get_errno(), "this process gets no namespaces of its own")
    child = os.fork()
    if child:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    for what in (["--make-rprivate", "/"], ["-t", "proc", "none", "/proc"], ["-t", "tmpfs", "none", "/dev/shm"]):
        subprocess.run(["mount", *what], check=True)


def start(number: int, case: Case) -> list[int]:
    """Both ranks of this host, as processes."""
    host, children = int(os.environ["HOST_NUMBER"]), []
    for place in range(RANKS_PER_HOST):
        child = os.fork()
        if child == 0:
            try:
                os.environ.update(WORLD_SIZE=str(SIZE), MASTER_ADDR=ADDRESSES[0], MASTER_PORT=str(29501 + number))
                os.environ.update({"LOCAL_WORLD_SIZE": str(RANKS_PER_HOST), **case.everywhere, **case.on_host[host]})
                if case.are_apart:
                    go_apart()
                run_rank(host * RANKS_PER_HOST + place, case, Path(os.environ["FOLDER"]))
            except BaseException:  # noqa: BLE001  its parent sees how it ends
                sys.excepthook(*sys.exc_info())
                os._exit(1)
            os._exit(0)  # a world that has failed is not closed
        children.append(child)
    return children


def main() -> None:
    """All cases; the exit status of a rank that fails."""
    cases = [Case(*fields) for fields in json.loads(os.environ["CASES"])]
    children = [child for number, case in enumerate(cases) for child in start(number, case)]
    sys.exit(max(abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) for child in children))


if __name__ == "__main__":
    main()
