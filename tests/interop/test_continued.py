"""The demo's training, saved with any --parallel, goes on bit for bit on as many ranks and on others."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.testing import assert_close

from tritondt.cli.demo import PARALLEL
from tritondt.cli.demo.experiment import DTensorStyle, Experiment, Learner, ignore
from tritondt.cli.demo.model import Model
from tritondt.cli.launch import run_on_ranks

SAVED_ON = 4
# Grids of 8 ranks cut 3 heads in two and share the batch of 9 among four.
OTHER_WORLDS = {3: ("tp", "fsdp", "ep", "cp"), 8: ("fsdp+tp", "hsdp+tp", "ddp+tp")}
STEPS_BEFORE = 2
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


class Continued(NamedTuple):
    """Loss of the step behind the checkpoint, and all tensors before and behind it, whole."""

    loss: float
    before: dict[str, Any]
    behind: dict[str, Any]


def learner(parallel: str) -> Learner:
    sizes = Model(heads=3, layers=1, width=24, sequence=17, experts=5 if parallel == "ep" else 0)
    experiment = Experiment(sizes, steps=STEPS_BEFORE + 1, batch=9, seed=0)
    return DTensorStyle(parallel=parallel).on_ranks(experiment, ignore)


def state(made: Learner, options: StateDictOptions | None = None) -> dict[str, Any]:
    of_model, of_optimizer = get_state_dict(made.model, made.optimizer, options=options)
    return {"model": of_model, "optimizer": of_optimizer}


def set_again(made: Learner, found: dict[str, Any], options: StateDictOptions | None = None) -> None:
    # One by one: torch's set_state_dict waits forever where all but rank 0 pass empty ones. It keeps what it gets.
    set_model_state_dict(made.model, deepcopy(found["model"]), options=options)
    set_optimizer_state_dict(made.model, made.optimizer, deepcopy(found["optimizer"]), options=options)


def goes_on(made: Learner) -> Continued:
    before = deepcopy(state(made, FULL))  # tensors that every rank has whole are not copies
    loss = made.run_step(STEPS_BEFORE)
    return Continued(loss, before, state(made, FULL))


def save_and_go_on(send: Callable[[object], None], folder: Path) -> dict[str, Continued]:
    found = {}
    for parallel in PARALLEL:
        made = learner(parallel)
        for index in range(STEPS_BEFORE):
            made.run_step(index)
        dcp.save(state(made), checkpoint_id=folder / parallel)
        found[parallel] = goes_on(made)
    return found if dist.get_rank() == 0 else {}


def load_and_go_on(send: Callable[[object], None], folder: Path, ways: tuple[str, ...]) -> dict[str, list[Continued]]:
    """What follows from the checkpoint, and what from its tensors given whole to a learner of the same ranks."""
    found = {}
    for parallel in ways:
        by_checkpoint = with_other_values(parallel)
        tensors = state(by_checkpoint)
        dcp.load(tensors, checkpoint_id=folder / parallel)
        set_again(by_checkpoint, tensors)
        first = goes_on(by_checkpoint)

        by_whole_tensors = with_other_values(parallel)
        broadcast = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_again(by_whole_tensors, first.before, broadcast)
        found[parallel] = [first, goes_on(by_whole_tensors)]
    return found if dist.get_rank() == 0 else {}


def with_other_values(parallel: str) -> Learner:
    """A learner whose tensors are not those of the checkpoint, and whose learning rate is that of its step."""
    made = learner(parallel)
    for _ in range(STEPS_BEFORE):
        made.run_step(STEPS_BEFORE)
    return made


def assert_same(found: dict[str, Any], expected: dict[str, Any], rtol: float = 0, atol: float = 0) -> None:
    for state in (found, expected):
        for group in state["optimizer"]["param_groups"]:
            group["betas"] = tuple(group["betas"])  # torch makes a list of what it broadcasts
    assert found["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]
    for part in (lambda state: state["model"], lambda state: state["optimizer"]["state"]):
        assert_close(part(found), part(expected), rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    "worlds",
    [
        pytest.param({SAVED_ON: PARALLEL, 8: ("hsdp+tp",)}, marks=pytest.mark.extended, id="one other"),
        pytest.param(OTHER_WORLDS, marks=pytest.mark.soak, id="all others"),
    ],
)
def test_training_goes_on_bit_for_bit_on_as_many_ranks_and_on_others(
    tmp_path: Path, worlds: dict[int, tuple[str, ...]]
) -> None:
    (unbroken, *_) = run_on_ranks(SAVED_ON, save_and_go_on, tmp_path, on_message=ignore)
    assert isinstance(unbroken, dict)
    assert sorted(unbroken) == sorted(PARALLEL)
    for num_ranks, ways in worlds.items():
        (continued, *_) = run_on_ranks(num_ranks, load_and_go_on, tmp_path, ways, on_message=ignore)
        assert isinstance(continued, dict)
        for parallel in ways:
            expected, (by_checkpoint, by_whole_tensors) = unbroken[parallel], continued[parallel]
            assert len(by_checkpoint.before["optimizer"]["state"]) == len(by_checkpoint.before["model"]) > 0
            assert_same(by_checkpoint.before, expected.before)
            assert_same(by_checkpoint.behind, by_whole_tensors.behind)
            assert by_checkpoint.loss == by_whole_tensors.loss
            before, behind = expected.before["model"], expected.behind["model"]
            assert not any(torch.equal(behind[name], tensor) for name, tensor in before.items())
            if num_ranks == SAVED_ON:
                assert_same(by_checkpoint.behind, expected.behind)
                assert by_checkpoint.loss == expected.loss
            else:
                assert_same(by_checkpoint.behind, expected.behind, rtol=1e-4, atol=1e-5)
                assert abs(by_checkpoint.loss - expected.loss) <= 1e-5
