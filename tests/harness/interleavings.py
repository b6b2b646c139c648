"""Programs of asynchronous redistributions that all ranks run alike, while each waits when and in what order it likes.

A program is a tuple of actions as plain values. `run` performs one on a rank and holds every result against the whole
tensors, on which the same actions are plain arithmetic.
"""

import random
from collections.abc import Sequence
from math import prod
from typing import Any, Literal, NamedTuple

import torch
from hypothesis import strategies as st

import tritondt as T
from tests.harness.oracle.arithmetic import indices_of, take
from tests.ops.sharded import distribute
from tritondt.sharding.placement import parse_placements

SHAPES = ((7, 11), (9, 4), (5, 1), (2, 3))
# Ranks of the mesh in each world; those outside take no part in what happens to its tensors.
MESHES: dict[int, tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]] = {
    2: (((2,), (0, 1)), ((1, 2), (0, 1))),
    3: (((3,), (0, 1, 2)), ((3,), (2, 0, 1)), ((2,), (2, 0))),
    4: (((4,), (0, 1, 2, 3)), ((2, 2), (0, 1, 2, 3)), ((2, 2), (3, 1, 0, 2)), ((2,), (1, 3))),
}
Kind = Literal["issue", "issue again", "now", "prefetch", "add", "double", "backward", "drop"]
KINDS: tuple[Kind, ...] = ("issue", "issue", "issue again", "now", "prefetch", "add", "double", "backward", "drop")


class Tensor(NamedTuple):
    """A tensor that a program begins with."""

    shape: tuple[int, ...]
    mesh: int
    placements: str


class Action(NamedTuple):
    """What happens to tensor number `tensor`, or to result number `tensor` of those that are there by then."""

    kind: Kind
    tensor: int
    placements: tuple[str, str]  # to where, on one axis or on two


class Program(NamedTuple):
    """What all ranks do alike; `seed` decides when each of them waits, and for what."""

    size: int
    tensors: tuple[Tensor, ...]
    actions: tuple[Action, ...]
    seed: int


def programs(size: int) -> st.SearchStrategy[Program]:
    """Programs for a world of `size` ranks."""
    one = st.sampled_from(("S0", "S1", "R", "P"))
    places = st.integers(0, 7)

    def of_mesh(mesh: int) -> st.SearchStrategy[Tensor]:
        axes = [one] * len(MESHES[size][mesh][0])
        return st.builds(Tensor, st.sampled_from(SHAPES), st.just(mesh), st.tuples(*axes).map(",".join))

    tensors = st.lists(st.integers(0, len(MESHES[size]) - 1).flatmap(of_mesh), min_size=1, max_size=3).map(tuple)
    actions = st.lists(st.builds(Action, st.sampled_from(KINDS), places, st.tuples(one, one)), min_size=4, max_size=14)
    return st.builds(Program, st.just(size), tensors, actions.map(tuple), st.integers(0, 2**32))


class _Result(NamedTuple):
    found: Any
    full: torch.Tensor


class _Rank:
    """One rank's side of a program."""

    def __init__(self, program: Program, rank: int) -> None:
        self._rank, self._size = rank, program.size
        self._own = random.Random(f"{program.seed} {rank}")
        self._tensors = [self._begin(number, tensor) for number, tensor in enumerate(program.tensors)]
        self._results: list[_Result] = []

    def _begin(self, number: int, tensor: Tensor) -> tuple[Any, torch.Tensor] | None:
        shape, ranks = MESHES[self._size][tensor.mesh]
        if self._rank not in ranks:
            return None
        # Multiples of 60, so that the terms of a sum over 2, 3 or 4 ranks are whole numbers.
        full = 720.0 * (torch.arange(float(prod(tensor.shape)), dtype=torch.float64).view(tensor.shape) + number + 1)
        return distribute(full, T.Mesh(shape, ranks=ranks), tensor.placements), full

    def act(self, action: Action) -> None:
        """Does what all ranks of the mesh do."""
        number = action.tensor % len(self._tensors)
        held = self._tensors[number]
        if held is None:
            return
        x, full = held
        target = parse_placements(",".join(action.placements[: x.device_mesh.ndim]))
        if target == x.placements and action.kind not in ("add", "double", "drop"):
            return  # the same tensor, which shares its memory
        if action.kind == "add" and any(placement.is_partial() for placement in x.placements):
            return
        if action.kind in ("add", "double"):
            _ = x.add_(1) if action.kind == "add" else x.mul_(2)
            self._tensors[number] = x, full + 1 if action.kind == "add" else full * 2
        elif action.kind == "prefetch":
            T.prefetch(x, target)
        elif action.kind == "now":
            self._results.append(_Result(x.redistribute(placements=target), full))
        elif action.kind == "backward":
            self._results += self._backward(x, full, target)
        elif action.kind == "drop":
            self._forget(x.device_mesh)
        else:
            moved = x.redistribute(placements=target, async_op=True)
            if action.kind == "issue again":
                moved = moved.redistribute(placements=x.placements, async_op=True)
            self._results.append(_Result(moved, full))

    def _backward(self, x: Any, full: torch.Tensor, target: Sequence[T.Placement]) -> list[_Result]:
        """The way there and the way back of the gradient, of which nobody has waited for either."""
        leaf = x.detach().clone().requires_grad_()
        moved = leaf.redistribute(placements=target, async_op=True)
        seed = 3 * full
        layout = ",".join("R" if placement.is_partial() else str(placement) for placement in target)
        moved.backward(distribute(seed, x.device_mesh, layout))
        return [_Result(moved.detach(), full), _Result(leaf.grad, seed)]

    def _forget(self, mesh: Any) -> None:
        """Lets go of the latest result on a mesh, under way or not, as all of its ranks do."""
        for place in reversed(range(len(self._results))):
            if self._results[place].found.device_mesh is mesh:
                del self._results[place]
                return

    def maybe_wait(self) -> None:
        """Waits for some results, or none, in an order of this rank's own."""
        for result in self._own.sample(self._results, self._own.randint(0, len(self._results))):
            if self._own.random() < 0.3:
                self._use(result)

    def finish(self) -> None:
        """Waits for everything in an order of its own, then gathers what no rank can judge alone."""
        for result in self._own.sample(self._results, len(self._results)):
            self._use(result)
        for found, full in self._results:
            torch.testing.assert_close(found.full_tensor(), full, rtol=0, atol=0)
            assert found.wait().work is None
            assert type(found) is T.DTensor, "a tensor that was waited for is of its class again"
        for held in self._tensors:
            if held is not None:
                torch.testing.assert_close(held[0].full_tensor(), held[1], rtol=0, atol=0)

    def _use(self, result: _Result) -> None:
        found, full = result
        way = self._own.randrange(4)
        if way == 0:
            found.wait()
        elif way == 1 and found.work is not None:
            found.work.wait()
        local = (found * 1 if way == 2 else found).to_local()
        if not any(placement.is_partial() for placement in found.placements):
            expected = take(full, indices_of(found._spec.layout, found._spec.coordinate))
            torch.testing.assert_close(local, expected, rtol=0, atol=0)


def run(program: Program, rank: int) -> None:
    """Runs a program on a rank of a world of its size."""
    here = _Rank(program, rank)
    for action in program.actions:
        here.act(action)
        here.maybe_wait()
    here.finish()
