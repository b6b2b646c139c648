"""A step of the demo on two hosts of four ranks: the link carries what `explain` says, and what frames it."""

import json
import sys
from pathlib import Path

import pytest

from tests.harness.demo_on_hosts import NUM_HOSTS, SIZE
from tests.harness.two_hosts import run_on_hosts

# Of a message: its own header, that of a frame, and the frame that acknowledges it, 148 in all, or a few more.
FRAMES_OF_MESSAGE = 200
# Of long messages, whose frames hold 1,448 bytes; and notices in the store.
OVERHEAD, CONTROL = 1.06, 20_000


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param("hsdp+tp", marks=pytest.mark.extended),
        *(pytest.param(each, marks=pytest.mark.soak) for each in ("fsdp+tp", "fsdp", "tp", "cp")),
    ],
)
def test_the_link_carries_what_explain_says(tmp_path: Path, parallel: str) -> None:
    program = [sys.executable, "-m", "tests.harness.demo_on_hosts", parallel]
    environment = {"GLOO_SOCKET_IFNAME": "wire", "TRITONDT_TIMEOUT": "120"}
    outputs = run_on_hosts(tmp_path, program, names=("one", "two"), environment=environment, timeout_s=400.0)
    found = [json.loads(line) for text in outputs for line in text.splitlines() if line.startswith('{"rank"')]
    assert len(found) == SIZE
    assert len({tuple(each["losses"]) for each in found}) == 1
    assert all(each["plans"] for each in found)
    hosts = {each["rank"] % NUM_HOSTS: each for each in found}
    sent, idle = (sum(each[name] for each in hosts.values()) for name in ("sent", "idle"))
    brought, messages = (sum(each[name] for each in found) for name in ("brought", "messages"))
    assert brought > 100_000
    assert brought <= sent <= OVERHEAD * brought + FRAMES_OF_MESSAGE * messages + idle + CONTROL, (brought, messages)
