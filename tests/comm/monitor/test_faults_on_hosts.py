"""Faults of ranks on two hosts, and of the link between them: who is named on all others, in time; and all go on."""

import json
import re
import sys
from pathlib import Path

import pytest

from tests.harness.faults_on_hosts import FAULTS, LAST, SIZE, survivors
from tests.harness.two_hosts import run_on_hosts

pytestmark = pytest.mark.extended

IN_TIME_S = 60


@pytest.mark.parametrize(
    ("operation", "mtu", "transport"),
    [
        ("collective", 1500, ""),
        ("collective", 1500, "gloo"),
        ("hsdp", 576, ""),  # redistributions in stages and inside hosts, in forward and in backward
        pytest.param("redistribution", 576, "", marks=pytest.mark.soak),
        pytest.param("redistribution", 1500, "gloo", marks=pytest.mark.soak),
        pytest.param("collective", 576, "sockets", marks=pytest.mark.soak),
        pytest.param("hsdp", 1500, "gloo", marks=pytest.mark.soak),
        pytest.param("fsdp", 1500, "", marks=pytest.mark.soak),
        pytest.param("asynchronous", 1500, "", marks=pytest.mark.soak),
        pytest.param("list", 576, "", marks=pytest.mark.soak),
        pytest.param("list", 1500, "sockets", marks=pytest.mark.soak),
    ],
)
def test_faults(tmp_path: Path, operation: str, mtu: int, transport: str) -> None:
    setting = {"TRITONDT_TRANSPORT": transport} if transport else {}
    found = told_by_ranks(tmp_path, operation, mtu, **setting)
    expected = {(fault, rank) for fault in FAULTS for rank in (*survivors(fault), LAST)}
    expected -= {("killed", LAST), ("vanished", LAST)}
    assert set(found) == expected
    for (fault, rank), (text, seconds) in found.items():
        culprits = {LAST}
        if fault in ("unplugged", "vanished"):
            culprits = {2, 3} if rank < SIZE // 2 else {0, 1}
        if rank != LAST or fault == "unplugged":
            assert any(re.search(rf"ranks? (\d, )*{culprit}\b", text) for culprit in culprits), (fault, rank, text)
            assert not text.startswith("RefusalError"), (fault, rank, text)  # exchanges inside the host are over
            assert seconds < IN_TIME_S, (fault, rank, text)


def told_by_ranks(
    folder: Path, operation: str, mtu: int, **environment: str
) -> dict[tuple[str, int], tuple[str, float]]:
    """Error and seconds, by fault and rank."""
    preparing = f'mount -t tmpfs none /dev/shm && ip link set wire mtu {mtu} && exec "$@"'
    program = [sys.executable, "-m", "tests.harness.faults_on_hosts", operation, str(folder)]
    outputs = run_on_hosts(
        folder,
        ["sh", "-c", preparing, "sh", *program],
        names=("one", "two"),
        environment={
            **environment,
            "TRITONDT_SOCKET_IFNAME": "^lo",
            "GLOO_SOCKET_IFNAME": "wire",
            "TRITONDT_TIMEOUT": "90",
        },
        timeout_s=400.0,
    )
    lines = [json.loads(line) for text in outputs for line in text.splitlines() if line.startswith('{"rank"')]
    return {(line["fault"], line["rank"]): (line["text"], line["seconds"]) for line in lines}
