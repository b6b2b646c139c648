"""Layouts of reshapes and slices: who holds what before and after, without a tensor."""

import random
from math import prod

import pytest
import torch

import tritondt as T
from tests.harness.oracle.arithmetic import coordinates, indices_of, take
from tests.harness.oracle.random_layouts import MESH_SHAPES, random_placements, random_shape
from tritondt.ops.rules.reshape_layouts import reshaped
from tritondt.ops.rules.view_layouts import local_slice, sliced
from tritondt.sharding.placement import parse_placements


def layout_of(mesh_shape, text, shape, order=None) -> T.Layout:
    return T.Layout(mesh_shape, parse_placements(text), shape, order)


@pytest.mark.parametrize(
    ("mesh_shape", "before", "shape", "after", "target"),
    [
        # Flatten: outermost, not outermost, with units, sizes and repeats.
        ((4,), "S0", (6, 5), "S0(unit=5)", (30,)),
        ((4,), "S0(unit=2)", (6, 5), "S0(unit=10)", (30,)),
        ((3,), "S0(sizes=1/0/5)", (6, 5), "S0(unit=5, sizes=5/0/25)", (30,)),
        ((4,), "S1", (6, 5), "S0(repeats=6)", (30,)),
        ((4,), "S1(repeats=5)", (6, 5), "S0(repeats=30)", (30,)),
        ((4,), "S1", (3, 6, 5), "S0(unit=5, repeats=3)", (90,)),
        ((2, 3), "S0, S1", (4, 6), "S0(unit=6), S0(repeats=4)", (24,)),
        # What an axis cuts by sizes inside another cut is kept where a unit gives the same pieces.
        ((2, 2), "S0, S1(sizes=4/2)", (4, 6), "S0(unit=6), S0(unit=2, repeats=4)", (24,)),
        # Unflatten: the outer part, the inner part, cuts that happen to end on boundaries.
        ((4,), "S0(unit=5)", (30,), "S0", (6, 5)),
        ((4,), "S0(repeats=6)", (30,), "S1", (6, 5)),
        ((3,), "S0", (30,), "S0", (6, 5)),
        ((3,), "S0(sizes=5/0/25)", (30,), "S0(sizes=1/0/5)", (6, 5)),
        ((2,), "S0(unit=6)", (24,), "S0(unit=3)", (6, 4)),
        ((4,), "S2(unit=5)", (2, 3, 30), "S2", (2, 3, 6, 5)),
        # Several axes on one dim: both in the outer part; the later one in the rows that the former leaves.
        ((2, 2), "S0, S0", (24,), "S0, S0", (4, 6)),
        ((2, 2), "S0, S0", (24,), "S0, S1", (2, 12)),
        # Dims of length 1.
        ((3,), "S1", (1, 7), "S0", (7,)),
        ((3,), "S0", (7,), "S1", (1, 7, 1)),
        ((2,), "S1", (4, 1, 6), "S1(unit=6)", (4, 6)),
        ((2,), "P(max)", (6,), "P(max)", (2, 3)),
    ],
)
def test_layouts_of_reshapes(mesh_shape, before, shape, after, target):
    found = reshaped(layout_of(mesh_shape, before, shape), target)
    assert found is layout_of(mesh_shape, after, target, found.order), f"{found}, expected {after}"


def test_axes_of_outer_dims_cut_first():
    found = reshaped(layout_of((2, 3), "S1, S0", (4, 6)), (24,))
    assert found is layout_of((2, 3), "S0(repeats=4), S0(unit=6)", (24,), (1, 0))
    assert reshaped(found, (4, 6)) is layout_of((2, 3), "S1, S0", (4, 6))


def elements(layout: T.Layout, coordinate: tuple[int, ...]) -> list[int]:
    """Row-major numbers of the elements held, in the order of the local tensor."""
    return take(torch.arange(layout.numel).reshape(layout.shape), indices_of(layout, coordinate)).flatten().tolist()


def random_factors(chosen: random.Random, number: int) -> tuple[int, ...]:
    factors = [] if chosen.random() < 0.5 else [1]
    while number > 1:
        factors.append(chosen.choice([k for k in range(2, number + 1) if number % k == 0]))
        number //= factors[-1]
    chosen.shuffle(factors)
    return tuple(factors)


@pytest.mark.parametrize("chunk", range(4))
def test_every_rank_keeps_its_elements_through_any_reshape(chunk):
    kept, refusals = 0, []
    for seed in range(chunk * 250, (chunk + 1) * 250):
        chosen = random.Random(seed)
        mesh_shape, shape = chosen.choice(MESH_SHAPES[chosen.randint(1, 8)]), random_shape(chosen)
        placements, order = random_placements(chosen, mesh_shape, shape, torch.float32)
        layout = T.Layout(mesh_shape, placements, shape, order)
        merged = list(shape)
        if len(merged) > 1:
            at = chosen.randrange(len(merged) - 1)
            merged[at : at + 2] = [merged[at] * merged[at + 1]]
        for target in (tuple(merged), random_factors(chosen, prod(shape)) if prod(shape) else shape):
            try:
                found = reshaped(layout, target)
            except T.LayoutError as error:
                refusals.append((target == tuple(merged), f"{layout!r} as {target}: {error}"))
                continue
            kept += 1
            forms = [found, reshaped(found, shape)] if target == tuple(merged) else [found]
            for coordinate in coordinates(mesh_shape):
                held = elements(layout, coordinate)
                for form in forms:
                    assert elements(form, coordinate) == held, f"{layout!r} -> {forms!r} at {coordinate}"
    assert kept > 400
    # Merging dims is always possible, but for a cut by sizes inside another one, and blocks dealt inside of a dim.
    reasons = ("sizes are kept only", "would deal its blocks anew")
    assert all(any(reason in text for reason in reasons) for merges, text in refusals if merges), refusals
    assert len(refusals) > 20


def held_of(layout: T.Layout, dim: int, coordinate: tuple[int, ...]) -> list[int]:
    """Indices of a dim that a coordinate holds, in the order of the local tensor."""
    return indices_of(layout, coordinate)[dim].tolist()


@pytest.mark.parametrize("chunk", range(4))
def test_every_rank_keeps_what_it_holds_of_any_slice(chunk):
    kept, refused = 0, 0
    for seed in range(chunk * 400, (chunk + 1) * 400):
        chosen = random.Random(seed)
        mesh_shape, shape = chosen.choice(MESH_SHAPES[chosen.randint(1, 8)]), random_shape(chosen)
        if not shape:
            continue
        placements, order = random_placements(chosen, mesh_shape, shape, torch.float32)
        layout = T.Layout(mesh_shape, placements, shape, order)
        dim = chosen.randrange(len(shape))
        start, stop = sorted(chosen.randint(0, shape[dim]) for _ in range(2))
        indices = range(start, stop, chosen.choice((1, 1, 2, 3)))
        try:
            found = sliced(layout, dim, indices.start, indices.stop, indices.step)
        except T.LayoutError:
            refused += 1
            continue
        kept += 1
        for coordinate in coordinates(mesh_shape):
            first, end = local_slice(layout.intervals(dim, coordinate), indices)
            before = held_of(layout, dim, coordinate)[first : end : indices.step]
            after = [indices[index] for index in held_of(found, dim, coordinate)]
            assert before == after, f"{layout!r} -> {found!r} by {indices} of dim {dim} at {coordinate}"
    assert kept > 250
    assert refused > 5
