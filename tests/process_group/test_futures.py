"""Futures of the backend's collectives as their readers in C++ and Python take them, in success and failure."""

import importlib
import os
import signal
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import tritondt as T
from tests.harness.gloo_ranks import GlooRanks
from tests.harness.nccl_on_host import backend_ranks
from tests.process_group import training
from tests.process_group.collectives import own
from tests.process_group.conftest import groups
from tritondt.process_group.futures import FailedTensor, fail

RanksOf = Callable[[str, int], GlooRanks]
TIMEOUT_S = 1.0
# Over NCCL, whose watch looks once a second, on its double.
OVER = ("shared-memory", "nccl")


def ddp_of(group: Any, rank: int, **settings: Any) -> DistributedDataParallel:
    return DistributedDataParallel(training.model_of(rank), process_group=group, bucket_cap_mb=0.0002, **settings)


def built_in(kind: dist.BuiltinCommHookType) -> Callable[[Any, int], Any]:
    def make(group: Any, rank: int) -> Any:
        model = ddp_of(group, rank)
        model._register_builtin_comm_hook(kind)
        return model

    return make


def in_python(hook: Any) -> Callable[[Any, int], Any]:
    def make(group: Any, rank: int) -> Any:
        model = ddp_of(group, rank)
        model.register_comm_hook(group, hook)
        return model

    return make


def with_power_sgd(group: Any, rank: int) -> Any:
    # One bucket: of several, Gloo's threads run the callbacks in any order, and its ranks wait for each other.
    model = DistributedDataParallel(training.model_of(rank), process_group=group)
    state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return model


def compressed_to_bf16(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """By another name: torch's own it takes with CUDA alone."""
    return default_hooks.bf16_compress_hook(group, bucket)


def half(group: Any, rank: int) -> Any:
    return DistributedDataParallel(training.model_of(rank).half(), process_group=group)


MODELS: dict[str, Callable[[Any, int], Any]] = {
    "none": ddp_of,
    "views of buckets": lambda group, rank: ddp_of(group, rank, gradient_as_bucket_view=True),
    "static graph": lambda group, rank: ddp_of(group, rank, static_graph=True),
    "float16 parameters": half,
    "C++ allreduce": built_in(dist.BuiltinCommHookType.ALLREDUCE),
    "C++ fp16": built_in(dist.BuiltinCommHookType.FP16_COMPRESS),
    "allreduce_hook": in_python(default_hooks.allreduce_hook),
    "fp16_compress_hook": in_python(default_hooks.fp16_compress_hook),
    "bf16_compress_hook": in_python(compressed_to_bf16),
    "powerSGD_hook": with_power_sgd,
}


def train_twice(rank: int, name: str) -> None:
    found = []
    for group in (groups["gloo"], dist.group.WORLD):
        torch.manual_seed(5)
        model = MODELS[name](group, rank)
        for step in range(4):
            inputs = training.batch(rank, step).to(next(model.parameters()).dtype)
            model(inputs).square().mean().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.25 * parameter.grad
                    parameter.grad = None
        found.append([parameter.detach() for parameter in model.parameters()])
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.in_core(5)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("over", OVER)
def test_ddp_trains_as_on_gloo_with_every_hook(ranks_of: RanksOf, over: str, name: str) -> None:
    ranks_of(over, 2).run(train_twice, name)


def train_with_zero(rank: int) -> None:
    # Importing these warns that torch.jit.script is deprecated, which is an error in tests; not so in ranks.
    optimizers: Any = importlib.import_module("torch.distributed.optim")
    zero: Any = importlib.import_module("torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook")
    model = DistributedDataParallel(training.model_of(rank), gradient_as_bucket_view=True, static_graph=True)
    optimizer = optimizers.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.25)
    model.register_comm_hook(None, zero.hook_with_zero_step(default_hooks.allreduce_hook, model, optimizer))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for step in range(5):
        model(training.batch(rank, step)).square().mean().backward()
    for parameter, old in zip(model.parameters(), before, strict=True):  # torch refuses this on Gloo: "may meet hangs"
        assert not torch.equal(parameter, old)
        both = [torch.empty_like(old) for _ in range(2)]
        dist.all_gather(both, parameter.detach())
        torch.testing.assert_close(*both, rtol=0, atol=0)


@pytest.mark.extended
@pytest.mark.parametrize("over", OVER)
def test_an_optimizer_that_steps_in_the_hook(ranks_of: RanksOf, over: str) -> None:
    ranks_of(over, 2).run(train_with_zero)


@pytest.fixture(
    params=["shared-memory", *(pytest.param(over, marks=pytest.mark.extended) for over in ("nccl", "gloo"))]
)
def mortal_ranks(request: pytest.FixtureRequest) -> Iterator[GlooRanks]:
    started = backend_ranks(request.param, 2, TRITONDT_TIMEOUT="20")
    yield started
    started.kill()


def backward_without_peers(rank: int, names: list[str], is_killed: bool) -> list[tuple[str, str]]:
    """Texts that rank 0 gets from a backward pass that rank 1 does not come to, in models with each hook in turn."""
    told, models = [], []
    for name in names:
        group: Any = dist.new_group()
        models.append(MODELS[name](group, rank))
        for step in range(2):  # in the second, ranks agree about buckets
            inputs = training.batch(rank, step).to(next(models[-1].parameters()).dtype)
            models[-1](inputs).square().mean().backward()
        # Not before: on a busy machine ranks come to their first steps further apart.
        group.set_timeout(timedelta(seconds=TIMEOUT_S))
    if rank and is_killed:
        os.kill(os.getpid(), signal.SIGKILL)
    for model in () if rank else models:
        loss = model(training.batch(rank, 2).to(next(model.parameters()).dtype)).square().mean()
        with pytest.raises(Exception, match=r"rank 0 |rank 1 ") as error:
            loss.backward()
        told.append((error.typename, str(error.value)))
    return told


def check_told(told: list[tuple[str, str]], names: list[str]) -> None:
    for name, (kind, text) in zip(names, told, strict=True):
        # What a callback in Python raises torch itself makes a RuntimeError of, with its text.
        assert kind == ("RuntimeError" if "hook" in name and name != "C++ fp16" else "PeerError"), (name, kind, text)
        assert "all_reduce (sum) of " in text, (name, text)
        assert "PeerError" in text or kind == "PeerError", (name, text)


def test_a_peer_that_does_not_come_to_ddp(mortal_ranks: GlooRanks) -> None:
    names = ["none", "C++ allreduce", "C++ fp16", "views of buckets", "bf16_compress_hook"]
    check_told(mortal_ranks.run(backward_without_peers, names, False)[0], names)


@pytest.mark.extended
def test_a_peer_that_dies_before_it_comes_to_ddp(mortal_ranks: GlooRanks) -> None:
    names = ["none"]
    told, died = mortal_ranks.outcomes(backward_without_peers, names, True)
    assert died.kind == "died"
    check_told(told, names)


def futures_without_peers(rank: int) -> list[str]:
    """What Python's readers of a future that failed are told; each may ask again and again."""
    group: Any = dist.new_group()
    dist.all_reduce(torch.ones(1), group=group)
    group.set_timeout(timedelta(seconds=TIMEOUT_S))
    if rank:
        return []
    work: Any = dist.all_reduce(own(rank), group=group, async_op=True)
    future = work.get_future()
    chained = future.then(lambda done: done.value()[0] / 2)
    told = []
    wait_for_all = torch.futures.collect_all([future]).wait
    for ask in (future.wait, future.value, chained.wait, chained.wait, wait_for_all, work.wait, work.get_future().wait):
        with pytest.raises((T.PeerError, RuntimeError)) as error:
            ask()
        told.append(f"{error.typename}: {error.value}")
    assert work.exception() is not None
    assert not work.is_success()
    return told


def reduce_functionally(tensor: torch.Tensor, group: Any) -> None:
    functional.wait_tensor(functional.all_reduce(tensor, "sum", group))


def reduce_coalesced(tensor: torch.Tensor, group: Any) -> None:
    with dist._coalescing_manager(group, async_ops=True) as manager:
        dist.all_reduce(tensor, group=group)
    manager.wait()


def functional_without_peers(rank: int) -> str:
    """Functional collectives and coalesced ones, whose works C++ waits for."""
    told = []
    for ask in (reduce_functionally, reduce_coalesced):
        group: Any = dist.new_group()
        dist.all_reduce(torch.ones(1), group=group)
        group.set_timeout(timedelta(seconds=TIMEOUT_S))
        if rank:
            continue
        with pytest.raises(T.PeerError) as error:
            ask(own(rank), group)
        told.append(str(error.value))
    return "\n".join(told)


def test_futures_that_fail(mortal_ranks: GlooRanks) -> None:
    told = mortal_ranks.run(futures_without_peers)[0]
    for place, text in enumerate(told):
        chained = "RuntimeError: Got the following error when running the callback: "
        assert text.startswith((chained if place in (2, 3) else "") + "PeerError: rank "), text
        assert "all_reduce (sum) of 6 float32" in text
    assert mortal_ranks.run(functional_without_peers)[0].count("all_reduce (sum) of 6 float32") >= 2


def test_the_result_of_a_failure_raises_it_wherever_it_is_used() -> None:
    """As C++ uses it, which has it from the future's value without asking for an error."""
    future: Any = torch.futures.Future()
    fail(future, [torch.ones(6)], T.PeerError("rank 1 is late"))
    (found,) = torch._jit_internal._extract_tensors(FailedTensor(torch.ones(6), T.PeerError("rank 1 is late")))
    assert (found.shape, found.dtype) == (torch.Size([6]), torch.float32)
    assert repr(found) == "FailedTensor(PeerError('rank 1 is late'))"
    for use in (lambda: found + 1, lambda: torch.ones(6).copy_(found), lambda: found[:3], future.value, future.wait):
        for _ in range(2):
            with pytest.raises(T.PeerError, match="rank 1 is late"):
                use()


def readers_in_python(rank: int) -> None:
    """Works in success: their results, and lists of C++ only where nobody in Python asks."""
    sums = [own(rank, 6, dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32)]
    works: list[Any] = [dist.all_reduce(each, async_op=True) for each in sums]
    assert [work.get_future().wait()[0] is each for work, each in zip(works, sums, strict=True)] == [True] * 3
    again: list[Any] = [work.get_future() for work in works]
    assert torch.futures.wait_all(again)[1][0] is sums[1]
    asked = getattr(works[0], "_".join(("get", "future")))()  # as C++ does
    assert asked.value()[0] is sums[0]
    found = functional.all_reduce(own(rank), "sum", dist.distributed_c10d._get_default_group())
    torch.testing.assert_close(functional.wait_tensor(found), own(0) + own(1), rtol=0, atol=0)


@pytest.mark.parametrize("over", OVER)
def test_futures_that_succeed(ranks_of: RanksOf, over: str) -> None:
    ranks_of(over, 2).run(readers_in_python)
