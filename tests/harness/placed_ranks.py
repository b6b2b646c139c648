"""Ranks whose messages are packed into each other's memory, on the doubles of NCCL and of CUDA's driver."""

import os
from typing import Any

import torch

import tritondt as T
from tests.harness.gloo_ranks import GlooRanks
from tests.harness.nccl_on_host import use_fake_nccl
from tritondt.comm import world
from tritondt.comm.packing.placed_transfer import PlacedTransfer
from tritondt.comm.transports import device_arenas


def placed_ranks(size: int, prepare: Any = use_fake_nccl, **variables: str) -> GlooRanks:
    return GlooRanks(size, {"TRITONDT_SLOTS": "1", "TRITONDT_TIMEOUT": "30", **variables}, prepare=prepare)


def use_two_hosts() -> None:
    """Ranks 0 and 1 on a host, and 2 and 3 on another one."""
    host = int(os.environ["RANK"]) // 2
    device_arenas.machine = lambda: f"host {host}"  # type: ignore[attr-defined]  # the module's own name for it
    use_fake_nccl()


def communicator_of(mesh: T.Mesh) -> Any:
    return world.current().communicator(mesh.ranks)


def whole_tensor(rows: int = 64, columns: int = 96) -> torch.Tensor:
    return torch.arange(float(rows * columns)).reshape(rows, columns)


def plans_of(mesh: T.Mesh) -> list[Any]:
    """A list of what this rank runs from now on."""
    communicator = communicator_of(mesh)
    plans = []
    original = communicator._run_plan

    def noted(plan: Any, *arguments: Any) -> None:
        plans.append(plan)
        original(plan, *arguments)

    communicator._run_plan = noted
    communicator._issue = lambda *arguments: False  # part by part, not by a program of the extension
    return plans


def left_to_nccl(plans: list[Any]) -> list[Any]:
    """How many messages of each exchange NCCL was asked to send; "all" where none went through a slot."""
    return [len(plan.far_sends) if isinstance(plan, PlacedTransfer) else "all" for plan in plans]
