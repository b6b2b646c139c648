"""Random trainings of sharded modules: python -m tests.programs.training --seed 0 --count 100.

A tree of modules, units, checkpoints and hooks is drawn (models.py), and steps that end in a backward: gradients after
each step that reduces, and parameters at the end, must be those of one process with the whole batch.
"""

import argparse
import math
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

import tritondt as T
from tests.programs.models import RESHARDS, WIDTH, Mlp, Node, Unit, add_hooks, build, random_node
from tritondt.comm.transports.threads import run_ranks
from tritondt.errors import MixedTensorsError
from tritondt.fsdp import fully_shard
from tritondt.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

ROWS = 24  # for 2, 3, 4 and 8 ranks
LOSSES = ("plain", "double", "accumulated", "retained", "penalty", "kept", "of kept", "inputs", "kept alone")
REFUSED = "modified by an inplace operation"
TOLERANCE = 1e-7


class Axes(NamedTuple):
    """Names of data axes, as torch's DataParallelMeshDims has them."""

    shard: Any
    replicate: Any = None


class World(NamedTuple):
    """A mesh, its axes for data, and whether the last one is for tensors."""

    shape: tuple[int, ...]
    axes: Axes
    has_tensor_axis: bool = False

    @property
    def num_shards(self) -> int:
        """Ranks that shard a parameter among themselves."""
        return math.prod(self.shape["abc".index(name)] for name in self.axes.shard)


WORLDS = (
    World((2,), Axes("a")), World((3,), Axes("a")), World((4,), Axes("a")), World((2, 2), Axes("b", "a")),
    World((2, 2), Axes(("a", "b"))), World((2, 2), Axes("a"), has_tensor_axis=True),
    World((2, 2, 2), Axes(("b", "c"), "a")), World((2, 2, 2), Axes("b", "a"), has_tensor_axis=True),
    World((4, 2), Axes("a"), has_tensor_axis=True),
)  # fmt: skip


class Step(NamedTuple):
    """The loss of a step, the modules that reduce gradients, and whether an optimizer or an evaluation follows."""

    loss: str
    syncs: str = "all"
    is_optimized: bool = False
    is_evaluated: bool = False


class Program(NamedTuple):
    """A training."""

    seed: int
    world: World
    tree: Node
    are_hooks_first: bool
    keeps_after_backward: bool
    steps: tuple[Step, ...]


def random_program(seed: int) -> Program:
    """The program of a seed; a step that one process refuses is left out."""
    chosen = random.Random(seed)
    world = chosen.choice(WORLDS)
    children = tuple(random_node(chosen, chosen.randint(0, 3)) for _ in range(chosen.randint(1, 3)))
    tree = Node("residual", children, unit="outside", reshard=chosen.choice(RESHARDS))
    if world.has_tensor_axis:
        tree = _without(tree, "reads weights")
    steps = tuple(_random_step(chosen) for _ in range(chosen.randint(1, 4)))
    program = Program(seed, world, tree, chosen.random() < 0.5, chosen.random() < 0.2, steps)
    while program.steps:
        failed = next((found for found in run_alone(program) if isinstance(found, int)), None)
        if failed is None:
            return program
        program = program._replace(steps=(*program.steps[:failed], *program.steps[failed + 1 :]))
    return program._replace(steps=(Step("plain"),))


def _random_step(chosen: random.Random) -> Step:
    loss = chosen.choice(LOSSES[:-1]) if chosen.random() < 0.95 else LOSSES[-1]
    syncs = chosen.choice(("all", "all", "none", "root"))
    return Step(loss, syncs, syncs == "all" and chosen.random() < 0.6, chosen.random() < 0.3)


def _without(node: Node, hook: str) -> Node:
    children = tuple(_without(child, hook) for child in node.children)
    return node._replace(children=children, hook=None if node.hook == hook else node.hook)


def loss_of(kind: str, model: Any, x: torch.Tensor) -> torch.Tensor:
    """The loss of a step: a mean over the rows, whose gradients are means over parts of the rows."""
    seen: list[torch.Tensor] = []
    inner = getattr(model.inner[0], "_checkpoint_wrapped_module", model.inner[0])
    hook = inner.register_forward_hook(lambda module, args, output: seen.append(output))
    run: Callable[[torch.Tensor], torch.Tensor] = model
    x = x.requires_grad_()
    output = run(x)
    hook.remove()
    if kind == "double":
        return (output + run(x * 0.5)).square().mean()
    if kind == "accumulated":
        output.square().mean().backward()
        return run(x.detach() * 0.5).square().mean()
    if kind == "retained":
        output.square().mean().backward(retain_graph=True)
    elif kind == "penalty":
        (found,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return output.square().mean() + found.square().mean()
    elif kind == "kept":
        return output.square().mean() + seen[0].square().mean()
    elif kind == "of kept":
        (found,) = torch.autograd.grad(output.square().sum(), seen[0], create_graph=True)
        return output.square().mean() + found.square().mean()
    elif kind == "inputs":
        (found,) = torch.autograd.grad(output.square().sum(), x, retain_graph=True)
        return output.square().mean() + (output * found.mean(0)).mean() * 0
    elif kind == "kept alone":
        return seen[0].square().mean()
    return output.square().mean()


class Seen(NamedTuple):
    """The gradients after a step, or the parameters at the end, by name."""

    number: int
    values: dict[str, torch.Tensor | None]


def made(program: Program) -> tuple[nn.Module, list[Unit]]:
    """The model of a program before it is laid out."""
    torch.manual_seed(program.seed)
    units: list[Unit] = []
    return build(program.tree, units), units


def rows(program: Program, step: int) -> torch.Tensor:
    """The whole batch of a step."""
    return torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(program.seed + step))


def whole(value: Any) -> torch.Tensor | None:
    """Values of a gradient or a parameter, wherever they are."""
    if value is None:
        return None
    found: torch.Tensor = (value.full_tensor() if isinstance(value, T.DTensor) else value).detach()
    return found.clone()


def train(program: Program, model: Any, part: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[Seen]:
    """Values after each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, step in enumerate(program.steps):
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(step.syncs == "all")
            if step.syncs == "root":
                model.set_requires_gradient_sync(True, recurse=False)
        loss_of(step.loss, model, part(rows(program, number)).clone()).backward()
        if step.syncs == "all":
            yield Seen(number, {name: whole(value.grad) for name, value in model.named_parameters()})
            if step.is_optimized:
                optimizer.step()
                optimizer.zero_grad()
        if step.is_evaluated:
            with torch.no_grad():
                model(part(rows(program, number)))
    yield Seen(len(program.steps), {name: whole(value) for name, value in model.named_parameters()})


def run_alone(program: Program) -> Iterator[Seen | int]:
    """Values of one process; the number of a step that it refuses."""
    model, _ = made(program)
    add_hooks(program.tree, model)
    number = -1
    steps = train(
        program._replace(steps=tuple(step._replace(syncs="all") for step in program.steps)), model, lambda x: x
    )
    while True:
        try:
            seen = next(steps)
        except StopIteration:
            return
        except RuntimeError:
            yield number + 1
            return
        number = seen.number
        yield seen


def lay_out(program: Program, rank: int) -> tuple[nn.Module, int, int]:
    """The model on a rank, and the number and position of its part of the batch."""
    model, units = made(program)
    world, size = program.world, program.world.shape[-1]
    arguments: dict[str, Any] = {"mesh": T.Mesh(world.shape, "abc"[: len(world.shape)]), "dp_mesh_dims": world.axes}
    num_parts, part = torch.Size(world.shape).numel(), rank
    if world.has_tensor_axis:
        first, names = rank // size * size, "abc"[: len(world.shape)]
        mlps = [name for name, module in model.named_modules() if isinstance(module, Mlp)]
        plan = {f"{name}.up": ColwiseParallel() for name in mlps} | {f"{name}.down": RowwiseParallel() for name in mlps}
        tensor_mesh = T.Mesh((size,), names[-1:], ranks=range(first, first + size))
        parallelize_module(model, tensor_mesh, plan, src_data_rank=None)
        num_parts, part = num_parts // size, rank // size
    if program.are_hooks_first:
        add_hooks(program.tree, model)
    sharded: Any = model
    for unit in units:
        is_even = program.world.num_shards % 2 == 0
        reshard = unit.reshard if is_even or unit.reshard != 2 else True
        fully_shard(unit.modules, reshard_after_forward=reshard, **arguments)
    if program.keeps_after_backward:
        sharded.set_reshard_after_backward(False)
    if not program.are_hooks_first:
        add_hooks(program.tree, model)
    return model, num_parts, part


def run_on_rank(program: Program, rank: int) -> list[Seen | str]:
    """Values of a rank; last the text of the error of freed parameters that ended the program, if one did."""
    found: list[Seen | str] = []
    model, num_parts, part = lay_out(program, rank)
    try:
        found.extend(train(program, model, lambda x: x.chunk(num_parts)[part]))
    except (RuntimeError, MixedTensorsError) as error:
        if REFUSED not in str(error) and not isinstance(error, MixedTensorsError):
            raise
        found.append(str(error))
    return found


def check(program: Program) -> str | None:
    """The first difference from one process; None where there is none."""
    expected = {seen.number: seen.values for seen in run_alone(program) if isinstance(seen, Seen)}
    try:
        found = run_ranks(torch.Size(program.world.shape).numel(), lambda rank: run_on_rank(program, rank))
    except Exception as error:  # noqa: BLE001  whatever a rank raises is told
        return f"{type(error).__name__}: {error}"
    for rank, seen in enumerate(found):
        for item in seen:
            if isinstance(item, str):
                if not any(step.loss == "kept alone" for step in program.steps):
                    return f"rank {rank}: {item}"
                continue
            text = _difference(item, expected[item.number])
            if text is not None:
                return f"rank {rank}, after step {item.number}: {text}"
    return None


def _difference(seen: Seen, expected: dict[str, torch.Tensor | None]) -> str | None:
    for name, wanted in expected.items():
        value = seen.values[name]
        if (value is None) != (wanted is None):
            return f"{name} is {value}, expected {wanted}"
        if value is not None and wanted is not None:
            apart = float((value - wanted).abs().max())
            if not apart <= TOLERANCE * max(1.0, float(wanted.abs().max())):
                return f"{name} is {apart:.1e} from what one process has"
    return None


def smaller(program: Program) -> Iterator[Program]:
    """Programs with a step, or something of the tree, left out."""
    for number in range(len(program.steps) if len(program.steps) > 1 else 0):
        yield program._replace(steps=(*program.steps[:number], *program.steps[number + 1 :]))
    for tree in _smaller_trees(program.tree):
        yield program._replace(tree=tree)


def _smaller_trees(node: Node) -> Iterator[Node]:
    for smaller_node in (node._replace(wrap=None), node._replace(hook=None), node._replace(is_frozen=False)):
        if smaller_node != node:
            yield smaller_node
    for number, child in enumerate(node.children):
        if len(node.children) > 1 and node.kind == "residual":
            yield node._replace(children=(*node.children[:number], *node.children[number + 1 :]))
        for tree in (*child.children, *_smaller_trees(child), *([child._replace(unit=None)] if child.unit else [])):
            yield node._replace(children=(*node.children[:number], tree, *node.children[number + 1 :]))


def minimised(program: Program, until: float) -> Program:
    """The smallest program that is found, in time, by leaving parts out, and that still fails."""
    for candidate in smaller(program):
        if time.time() > until:
            break
        if not any(isinstance(found, int) for found in run_alone(candidate)) and check(candidate) is not None:
            return minimised(candidate, until)
    return program


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(arguments: list[str]) -> int:
    """Runs a range of seeds."""
    parser = argparse.ArgumentParser(prog="python -m tests.programs.training", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=100, help="how many programs")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="none is begun after so long")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    began, num_failures, num_programs = time.time(), 0, 0
    for seed in range(options.seed, options.seed + options.count):
        if time.time() - began > options.seconds:
            break
        program = random_program(seed)
        text, num_programs = check(program), num_programs + 1
        if num_programs % 100 == 0:
            _say(f"{num_programs} programs, {num_failures + (text is not None)} failures so far")
        if text is not None:
            num_failures += 1
            small = minimised(program, time.time() + 20)
            _say(f"seed {seed}: {text[-1500:]}\n{small}\n{(check(small) or '')[-600:]}")
    _say(f"{num_programs} programs, {num_failures} failures")
    return int(num_failures > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
