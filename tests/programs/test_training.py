"""Random trainings of sharded modules against one process, and a planted fault that they must find."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from tests.programs.models import Node
from tests.programs.training import Axes, Program, Step, World, check, minimised, random_program
from tritondt.fsdp.group import ParameterGroup

# Programs do what torch warns of, such as checkpoints of inputs without gradients.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("first", [0, 200, 400, 600, 800])
def test_gradients_are_those_of_one_process(first: int) -> None:
    torch.set_num_threads(1)
    for seed in range(first, first + 12):
        program = random_program(seed)
        text = check(program)
        assert text is None, f"python -m tests.programs.training --seed {seed} --count 1\n{text}\n{program}"


@pytest.mark.extended
def test_a_difference_is_found_and_made_small() -> None:
    """Reductions lose the gradient of one parameter: little of the program is needed to show it."""
    tree = Node(
        "residual",
        (Node("mlp", wrap="wrapper", unit="outside"), Node("norm"), Node("twice", (Node("linear"),), hook="scaled")),
        unit="outside",
    )
    program = Program(1, World((2,), Axes("a")), tree, True, False, (Step("penalty"), Step("plain")))
    assert check(program) is None
    before = ParameterGroup.finish_reductions

    def lost(self: ParameterGroup) -> None:
        before(self)
        for parameter in self.parameters[:1]:
            if parameter.sharded.grad is not None:
                nn.init.zeros_(parameter.sharded.grad)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ParameterGroup, "finish_reductions", lost)
        assert "from what one process has" in str(check(program))
        small = minimised(program, float("inf"))
        assert (len(small.steps), len(small.tree.children)) == (1, 1)


@pytest.mark.extended
def test_the_command_line_counts() -> None:
    command = [sys.executable, "-m", "tests.programs.training", "--seed", "40", "--count", "2"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert (found.returncode, found.stdout) == (0, "2 programs, 0 failures\n"), found.stderr
