"""Memory that a plan predicts, and what torch's profiler counts in a step of real processes."""

import ctypes
import gc
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tritondt as T
from tests.found_plan.models import Llama, seeded, tokens_of
from tritondt.cli.demo.model import GPT, Model
from tritondt.cli.launch import run_on_ranks
from tritondt.found_plan import FoundPlan, find_plan
from tritondt.found_plan.recomputation import recompute
from tritondt.planning.cost import CostTable

RANKS = 4


class WithLoss(nn.Module):
    """A model that gives its loss, so that a plan sees it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        output = self.model(**inputs)
        scores = getattr(output, "logits", output).flatten(0, -2)
        return F.cross_entropy(scores, torch.arange(scores.shape[0]) % scores.shape[1])


def gpt(layers: int = 2) -> nn.Module:
    return WithLoss(GPT(Model(heads=6, layers=layers, width=48, sequence=32)))


def llama() -> nn.Module:
    return WithLoss(Llama(length=3))


def bert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=48, num_hidden_layers=2, intermediate_size=96, vocab_size=21, num_attention_heads=6,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return WithLoss(transformers.BertForMaskedLM(config))


def inputs_of(make: Callable[[], nn.Module]) -> dict[str, Any]:
    if make is gpt:
        return {"tokens": tokens_of(0, 32), "positions": torch.arange(32)}
    return {"tokens" if make is llama else "input_ids": tokens_of(0, 32)}


def count_on_rank(send: Any, jobs: list[tuple[Callable[[], nn.Module], str]]) -> list[int]:
    """The most bytes that live at one time in two steps of each plan on this rank, parameters among them."""
    return [most_bytes(make, FoundPlan.from_json(text)) for make, text in jobs]


def most_bytes(make: Callable[[], nn.Module], plan: FoundPlan) -> int:
    model, inputs = seeded(make), inputs_of(make)
    if plan.mesh.num_ranks > 1:
        plan.apply(model, T.Mesh((plan.mesh.num_ranks,), ("tp",)))
    recompute(model, plan.laid_out.recomputed)
    optimizer = torch.optim.AdamW(model.parameters())
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        for _ in range(2):
            optimizer.zero_grad()
            model(**inputs).backward()
            optimizer.step()
    found: Any = profile.profiler
    events = [event for event in found.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    parts = (it.to_local() if isinstance(it, T.DTensor) else it for it in model.parameters())
    return most + sum(part.nbytes for part in parts)


def compare(make: Callable[[], nn.Module]) -> None:
    jobs = []
    for objective in ("step time", "memory"):
        costs = CostTable(flop_rate=1e7)
        plan = find_plan(seeded(make), {"tp": RANKS}, inputs_of(make), objective=objective, costs=costs)
        assert plan.laid_out.styles, plan
        jobs.append((make, plan.to_json(), plan.step.memory.most))
    counted, *_ = run_on_ranks(RANKS, count_on_rank, [job[:2] for job in jobs], on_message=print)
    assert isinstance(counted, list)
    for (_, _, predicted), found in zip(jobs, counted, strict=True):
        check(predicted, found)


def count_all_threads(send: Any, jobs: list[tuple[Callable[[], nn.Module], str]]) -> list[int]:
    """The most bytes of tensors that live at one time in the third step of each plan on this rank, on all threads."""
    return [most_of_all_threads(make, FoundPlan.from_json(text)) for make, text in jobs]


# Ranks are forked from a server, which a process that has started ranks before has without the library.
_COUNTING = """
import pickle, sys
from pathlib import Path
from tests.found_plan.test_memory_of_a_step import RANKS, count_all_threads
from tritondt.cli.launch import run_on_ranks
jobs = pickle.loads(Path(sys.argv[1]).read_bytes())
found, *_ = run_on_ranks(RANKS, count_all_threads, jobs, on_message=print)
print(*found)
"""


def most_of_all_threads(make: Callable[[], nn.Module], plan: FoundPlan) -> int:
    counted: Any = ctypes.CDLL(None)
    counted.counted_bytes.restype = counted.most_counted_bytes.restype = ctypes.c_long
    gc.collect()
    before: int = counted.counted_bytes()
    model, inputs = seeded(make), inputs_of(gpt)
    plan.apply(model, T.Mesh(plan.mesh.sizes, plan.mesh.names))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        counted.count_anew()
        model(**inputs).backward()
        optimizer.step()
    return int(counted.most_counted_bytes()) - before


@pytest.mark.extended
def test_memory_of_a_step_with_a_data_axis(tmp_path):
    library = tmp_path / "counted_memory.so"
    source = Path(__file__).with_name("counted_memory.cpp")
    subprocess.run(["g++", "-O1", "-shared", "-fPIC", str(source), "-o", str(library), "-ldl"], check=True)
    make = partial(gpt, 3)
    jobs = []
    for sizes in ({"dp": 4}, {"dp": 2, "tp": 2}):
        for objective in ("memory", "step time"):
            costs = CostTable(flop_rate=1e7)
            jobs.append(find_plan(seeded(make), sizes, inputs_of(gpt), objective=objective, costs=costs))
    bound = int(jobs[0].step.memory.most * 0.9)
    jobs.append(find_plan(seeded(make), {"dp": 4}, inputs_of(gpt), memory_bytes=bound))
    assert jobs[-1].recomputed
    assert {plan.laid_out.sharded for plan in jobs} == {("model.blocks.*",), ()}
    texts = tmp_path / "jobs"
    texts.write_bytes(pickle.dumps([(make, plan.to_json()) for plan in jobs]))
    variables = {**os.environ, "LD_PRELOAD": str(library)}
    ran = subprocess.run(
        [sys.executable, "-c", _COUNTING, str(texts)], env=variables, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    found = map(int, ran.stdout.split())
    for plan, counted in zip(jobs, found, strict=True):
        # The library sees what is no tensor as well: some 26,000 bytes of a step over the tensor axis.
        assert 0.95 * counted < plan.step.memory.most < 1.02 * counted, (str(plan.mesh), plan.step.memory, counted)


def check(predicted: int, counted: int) -> None:
    """The two are equal but for the numbers of steps, one for each parameter, that AdamW holds."""
    assert 0.97 * counted < predicted <= counted


@pytest.mark.parametrize("make", [gpt, llama])
def test_memory_of_a_step_of_one_process(make):
    plan = find_plan(seeded(make), {"tp": 1}, inputs_of(make))
    check(plan.step.memory.most, most_bytes(make, plan))


@pytest.mark.parametrize("share", [0.9, pytest.param(0.8, marks=pytest.mark.extended)])
def test_memory_of_a_step_whose_blocks_compute_activations_again(share):
    free = find_plan(seeded(llama), {"tp": 1}, inputs_of(llama))
    bound = int(free.step.memory.most * share)
    plan = find_plan(seeded(llama), {"tp": 1}, inputs_of(llama), memory_bytes=bound)
    assert plan.recomputed
    check(plan.step.memory.most, most_bytes(llama, plan))


@pytest.mark.extended
@pytest.mark.parametrize("make", [gpt, *(pytest.param(make, marks=pytest.mark.soak) for make in (llama, bert))])
def test_memory_of_a_step_of_four_processes(make):
    compare(make)
