"""Loggers under "tritondt": the levels that the environment gives, and what each tells."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tritondt as T
from tests.harness.gloo_ranks import GlooRanks
from tritondt import environment, logs
from tritondt.comm.transports.threads import run_ranks

REPOSITORY = Path(__file__).parents[1]


def gather(rank: int) -> None:
    T.DTensor.from_local(torch.full((2, 3), float(rank)), T.Mesh((2,)), [T.Shard(0)]).full_tensor()


@pytest.mark.parametrize(
    ("text", "levels"),
    [
        ("0", {}),
        ("1", {"": logging.INFO, "moves": logging.DEBUG}),
        ("DEBUG", {"": logging.DEBUG}),
        ("warning, exchanges=debug", {"": logging.WARNING, "exchanges": logging.DEBUG}),
        ("world=error", {"world": logging.ERROR}),
    ],
)
def test_levels_are_one_for_all_or_by_name(text: str, levels: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITONDT_LOG", text)
    assert environment.log_levels() == levels


@pytest.mark.parametrize(("torchs", "expected"), [("OFF", {}), ("INFO", {"": 20}), ("DETAIL", {"": 20})])
def test_torchs_debug_level_holds_where_ours_are_unset(
    torchs: str, expected: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITONDT_LOG", raising=False)
    monkeypatch.delenv("TRITONDT_DEBUG", raising=False)
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", torchs)
    assert environment.log_levels() == expected
    assert environment.compares() == (torchs == "DETAIL")
    monkeypatch.setenv("TRITONDT_LOG", "0")
    monkeypatch.setenv("TRITONDT_DEBUG", "0")
    assert environment.log_levels() == {}
    assert not environment.compares()


def test_steps_are_told_at_debug_and_levels_end_with_the_variable(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run_ranks(2, gather)
    assert caplog.messages == []
    monkeypatch.setenv("TRITONDT_LOG", "exchanges=debug")
    run_ranks(2, gather)
    told = "exchange of (4, 3) from (S0) to (R): sent 24 bytes in 1 messages, received 24 bytes in 1, "
    starts = sorted(message[: len(told) + 8] for message in caplog.messages)
    assert starts == [f"rank {rank}: {told}" for rank in range(2)], caplog.messages
    monkeypatch.delenv("TRITONDT_LOG")
    run_ranks(2, gather)
    assert len(caplog.messages) == 2
    assert logs.exchanges.level == logging.NOTSET


def made_and_closed(rank: int) -> list[str]:
    """The records of a world, its communicator, and a group."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logs.world.addHandler(handler)
    try:
        gather(rank)
        T.close()
        torch.distributed.destroy_process_group(torch.distributed.new_group([0, 1], backend="tritondt"))
    finally:
        logs.world.removeHandler(handler)
    return found


def test_worlds_communicators_and_groups_are_told_at_info() -> None:
    with GlooRanks(2, {"TRITONDT_LOG": "info", "TRITONDT_TIMEOUT": "60"}) as ranks:
        for rank, found in enumerate(ranks.run(made_and_closed)):
            world, communicator, closes, group = found
            assert world == f"rank {rank}: world of 2 ranks made, timeout 0:01:00"
            assert communicator == (f"rank {rank}: SharedMemoryCommunicator for tensors on cpu made of ranks (0, 1)")
            assert closes == f"rank {rank}: world of 2 ranks closes"
            assert group.startswith(f"rank {rank}: process group ")
            assert group.endswith(" made of ranks (0, 1)")


@pytest.mark.parametrize(
    "variables", [{"TRITONDT_LOG": "exchanges=debug"}, {"TORCH_LOGS": "+tritondt"}], ids=["ours", "torch's"]
)
def test_a_program_without_logging_of_its_own_has_the_records_on_stderr(variables: dict[str, str]) -> None:
    program = """
from tests.test_logs import gather
from tritondt.comm.transports.threads import run_ranks
run_ranks(2, gather)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)} | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("exchange of (4, 3) from (S0) to (R): sent 24 bytes") == 2, ended.stderr
