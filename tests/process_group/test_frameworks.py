"""Frameworks over the backend; each test is skipped where its framework is not installed."""

import importlib
import os
import pickle
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.harness.gloo_ranks import GlooRanks
from tests.harness.nccl_on_host import backend_ranks
from tests.process_group.collectives import own

RanksOf = Callable[[str, int], GlooRanks]


def launched(rank: int, size: int) -> Any:
    """What torchrun tells a process."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "OMP_NUM_THREADS": 1}
    told = {name: str(value) for name, value in names.items()} | {"TORCHELASTIC_RUN_ID": "none"}
    return mock.patch.dict(os.environ, told)


def gradient_of(model: Any, rank: int, backward: Callable[[torch.Tensor], None]) -> list[float]:
    backward(model(own(rank, 2)).sum())
    (weight,) = model.parameters()
    return list(weight.grad.flatten().tolist())


def on_accelerate(rank: int) -> tuple[str, list[int], list[float]]:
    accelerate: Any = importlib.import_module("accelerate")

    with launched(rank, 2):
        accelerator = accelerate.Accelerator(cpu=True)
        model = accelerator.prepare(torch.nn.Linear(2, 1, bias=False))
        gathered = accelerator.gather(torch.tensor([rank])).tolist()
        return dist.get_backend(), gathered, gradient_of(model, rank, accelerator.backward)


def on_fabric(rank: int) -> tuple[str, list[int], list[float]]:
    lightning: Any = importlib.import_module("lightning.fabric")

    with launched(rank, 2):
        strategy = lightning.strategies.DDPStrategy(process_group_backend="tritondt")
        fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=strategy)
        fabric.launch()
        model = fabric.setup(torch.nn.Linear(2, 1, bias=False))
        gathered: Any = fabric.all_gather(torch.tensor([rank]))
        return dist.get_backend(), gathered.flatten().tolist(), gradient_of(model, rank, fabric.backward)


@pytest.mark.parametrize(("package", "body"), [("accelerate", on_accelerate), ("lightning", on_fabric)])
def test_a_framework_takes_the_group_that_is_there(
    package: str, body: Callable[[int], object], ranks_of: RanksOf
) -> None:
    pytest.importorskip(package)
    mean = ((own(0, 2) + own(1, 2)) / 2).tolist()
    assert ranks_of("sockets", 2).run(body) == [("tritondt", [0, 1], mean)] * 2


def wait_for_all(rank: int) -> str:
    group: Any = dist.group.WORLD
    group.monitored_barrier()
    try:
        dist.monitored_barrier()
    except ValueError as refused:
        return str(refused)
    return ""


def test_a_monitored_barrier_is_a_method_of_the_group(ranks_of: RanksOf) -> None:
    """torch's function takes groups of Gloo alone, by name, before 2.14."""
    refusal = "" if torch.__version__ >= "2.14" else "monitored_barrier is only implemented for GLOO backend."
    assert ranks_of("sockets", 2).run(wait_for_all) == [refusal] * 2


def dumped(rank: int) -> list[str]:
    dist.all_reduce(torch.ones(2))
    dist.broadcast(torch.ones(2), 0)
    dump: Any = getattr(torch._C._distributed_c10d, "_dump_fr_trace", None)
    return ["no dump"] if dump is None else [entry["profiling_name"] for entry in pickle.loads(dump())["entries"]]


@pytest.mark.extended
def test_torchs_flight_recorder_names_what_ranks_have_issued_on_the_cpu() -> None:
    with backend_ranks("gloo", 2, TORCH_FR_BUFFER_SIZE="50") as ranks:
        found = ranks.run(dumped, timeout_s=100)
    if found == [["no dump"]] * 2:
        pytest.skip(f"torch {torch.__version__} dumps its flight recorder for NCCL alone")
    assert [names[-2:] for names in found] == [["gloo:all_reduce", "gloo:broadcast"]] * 2


def hooked(rank: int) -> list[tuple[list[float], bool]] | None:
    hook: Any = getattr(torch._C._distributed_c10d, "HealthCheckHook", None)
    if hook is None:
        return None
    found = []
    groups: list[Any] = [dist.group.WORLD, dist.new_group([0, 1])]
    for group in groups:
        hook.attach(group)
        sums = torch.full((2,), rank + 1.0)
        dist.all_reduce(sums, group=group)
        found.append((sums.tolist(), group.supports_abort_hooks))
    return found


def test_torchs_health_check_attaches_and_is_told_that_nothing_calls_it(ranks_of: RanksOf) -> None:
    """torch attaches it to each group as it is made, since 2.15: a part that refused it would end the group."""
    found = ranks_of("sockets", 2).run(hooked)
    if found == [None] * 2:
        pytest.skip(f"torch {torch.__version__} has no HealthCheckHook")
    assert found == [[([3.0, 3.0], False)] * 2] * 2
