"""Ranks of a trace that this command starts: processes with torchrun's variables, and a store that outlives them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from tritondt.cli.launch import num_cores
from tritondt.cli.outputs import INTERRUPTED

# A failing rank drags others down with it; within this time they have said so, and left their records.
_FAILURE_GRACE_S = 10.0
_PAUSE_S = 0.05


def run_ranks(num_ranks: int, command: Sequence[str]) -> tuple[int, Any]:
    """Exit status of `command` on so many ranks, the first that is not 0, and the store in which they met.

    Ctrl-C reaches them, too; those that have not ended some seconds later, or after another has failed, are killed.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, num_cores() // num_ranks))),
    }
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(num_ranks):
            own = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(subprocess.Popen(command, env=own))
        return _wait(processes), store
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    status, deadline = 0, float("inf")
    while True:
        try:
            codes = [process.poll() for process in processes]
            failed = next((code for code in codes if code), 0)
            if failed and not status:
                status, deadline = (failed if failed > 0 else 128 - failed), time.monotonic() + _FAILURE_GRACE_S
            if all(code is not None for code in codes) or time.monotonic() > deadline:
                return status
            time.sleep(_PAUSE_S)
        except KeyboardInterrupt:
            sys.stderr.write("interrupted: what was recorded is written\n")
            status, deadline = INTERRUPTED, min(deadline, time.monotonic() + _FAILURE_GRACE_S)
