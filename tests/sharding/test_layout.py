"""Which boxes every coordinate holds, against torch.chunk arithmetic, and layouts as interned values."""

import copy
import gc
import pickle
import random
import re
import threading
from itertools import product

import pytest
import torch

import tritondt as T
from tests.harness.oracle.arithmetic import coordinates, indices_of
from tests.harness.oracle.random_layouts import MESH_SHAPES, random_placements, random_shape
from tests.harness.work import num_calls
from tritondt.sharding import layout as layouts
from tritondt.sharding.layout import Layout


def layout_of(seed: int) -> Layout:
    """A random layout on up to 8 ranks."""
    chosen = random.Random(seed)
    mesh_shape = chosen.choice(MESH_SHAPES[chosen.randint(1, 8)])
    shape = random_shape(chosen)
    placements, order = random_placements(chosen, mesh_shape, shape, torch.float32)
    return Layout(mesh_shape, placements, shape, order)


def indices_held(layout: Layout, coordinate: tuple[int, ...]) -> list[list[int]]:
    """Per dim, the indices that a coordinate's region lists."""
    return [
        [index for start, stop in intervals for index in range(start, stop)] for intervals in layout.region(coordinate)
    ]


def expected_indices(layout: Layout, coordinate: tuple[int, ...]) -> list[list[int]]:
    return [kept.tolist() for kept in indices_of(layout, coordinate)]


@pytest.mark.parametrize("chunk", range(4))
def test_regions_are_those_of_torch_chunk(chunk: int) -> None:
    for seed in range(chunk * 250, (chunk + 1) * 250):
        layout = layout_of(seed)
        for coordinate in coordinates(layout.mesh_shape):
            expected = expected_indices(layout, coordinate)
            assert indices_held(layout, coordinate) == expected, (layout, coordinate)
            assert layout.local_shape(coordinate) == tuple(map(len, expected))
            longest = layout.max_local_shape
            assert all(len(kept) <= most for kept, most in zip(expected, longest, strict=True)), (layout, coordinate)


@pytest.mark.parametrize("chunk", range(4))
def test_holders_are_found_without_asking_every_coordinate(chunk: int) -> None:
    for seed in range(chunk * 100, (chunk + 1) * 100):
        layout, chosen = layout_of(seed), random.Random(seed)
        wanted_by = Layout(layout.mesh_shape, [T.Replicate()] * len(layout.mesh_shape), layout.shape)
        if layout.shape:
            cut = [T.Shard(chosen.randrange(len(layout.shape))) for _ in layout.mesh_shape]
            wanted_by = wanted_by.with_placements(cut)
        wanted = wanted_by.region(tuple(chosen.randrange(size) for size in layout.mesh_shape))
        pinned = {axis: chosen.randrange(size) for axis, size in enumerate(layout.mesh_shape) if chosen.random() < 0.4}
        found = {}
        for coordinate, held in layout.holders(wanted, pinned):
            assert coordinate not in found, "a coordinate came twice"
            found[coordinate] = [[i for start, stop in dim for i in range(start, stop)] for dim in held]
        assert found == holders_one_by_one(layout, wanted, pinned), (layout, wanted, pinned)


def holders_one_by_one(
    layout: Layout, wanted: tuple[tuple[tuple[int, int], ...], ...], pinned: dict[int, int]
) -> dict[tuple[int, ...], list[list[int]]]:
    lists = [[i for start, stop in intervals for i in range(start, stop)] for intervals in wanted]
    found = {}
    for coordinate in coordinates(layout.mesh_shape):
        if any(coordinate[axis] != index for axis, index in pinned.items()):
            continue
        common = [sorted(set(a) & set(b)) for a, b in zip(expected_indices(layout, coordinate), lists, strict=True)]
        if all(common):
            found[coordinate] = common
    return found


def test_boxes_are_one_without_repeats_and_several_with() -> None:
    assert Layout((2,), (T.Shard(0),), (5, 3)).boxes((1,)) == (((3, 5), (0, 3)),)
    assert Layout((2,), (T.Shard(1, repeats=3),), (2, 12)).boxes((0,)) == (
        ((0, 2), (0, 2)),
        ((0, 2), (4, 6)),
        ((0, 2), (8, 10)),
    )
    assert Layout((4,), (T.Shard(0),), (2,)).boxes((3,)) == ()
    assert Layout((2,), (T.Replicate(),), ()).boxes((1,)) == ((),)


def test_equal_layouts_are_one_object() -> None:
    made = Layout((2, 2), (T.Shard(0), T.Shard(-1)), (4, 6))
    assert made is Layout([2, 2], [T.Shard(-2), T.Shard(1)], [4, 6])
    assert made is not Layout((2, 2), (T.Shard(0), T.Shard(1)), (4, 7))
    assert pickle.loads(pickle.dumps(made)) is made
    assert copy.deepcopy(made) is made
    assert copy.copy(made) is made
    assert made.with_placements(made.placements) is made


def test_order_counts_only_among_axes_that_cut_one_dim() -> None:
    mesh, shape = (2, 2, 2), (8, 8)
    placements = T.Shard(0), T.Shard(1), T.Shard(0)
    left_to_right = Layout(mesh, placements, shape)
    assert left_to_right is Layout(mesh, placements, shape, order=(0, 2, 1))
    assert left_to_right is Layout(mesh, placements, shape, order=(1, 0, 2))
    backwards = Layout(mesh, placements, shape, order=(2, 1, 0))
    assert backwards is not left_to_right
    assert backwards is Layout(mesh, placements, shape, order=backwards.order)
    assert str(backwards) == "(S0, S1, S0) in order (2, 1, 0)"
    assert str(left_to_right) == "(S0, S1, S0)"


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0), (1, 2, 0)])
def test_order_is_kept_per_dim(order: tuple[int, ...]) -> None:
    for placements in product((T.Shard(0), T.Shard(1), T.Replicate()), repeat=3):
        layout = Layout((2, 3, 2), placements, (12, 12), order)
        assert layout is Layout((2, 3, 2), placements, (12, 12), layout.order)
        for dim, axes in enumerate(layout.axes_of_dim):
            assert axes == tuple(axis for axis in order if placements[axis].is_shard(dim))


def test_layouts_made_by_many_threads_at_once_are_one_object() -> None:
    start = threading.Barrier(8)
    found: list[Layout] = []

    def make() -> None:
        start.wait()
        found.extend(Layout((3,), (T.Shard(0),), (1000 + number,)) for number in range(200))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 200


def test_the_table_of_layouts_lets_go() -> None:
    gc.collect()
    before = len(layouts._interned)
    kept = [Layout((2,), (T.Shard(0),), (10_000 + number,)) for number in range(100)]
    assert len(layouts._interned) == before + 100
    del kept
    gc.collect()
    assert len(layouts._interned) <= before


def test_layouts_say_what_they_are() -> None:
    assert repr(Layout((2, 4), (T.Shard(0), T.Replicate()), (5, 3))) == "Layout((S0, R) of (5, 3) on 2x4)"


# Mesh, placements, shape and order; what the error says of them.
REFUSED: list[tuple[tuple[int, ...], str, tuple[int, ...], tuple[int, ...] | None, str]] = [
    ((2, 0), "R, R", (4,), None, "needs positive mesh sizes and lengths of 0 or more, got (2, 0) and (4,)"),
    ((2,), "R", (4, -1), None, "needs positive mesh sizes and lengths of 0 or more, got (2,) and (4, -1)"),
    ((2, 3), "R", (4,), None, "a mesh of shape (2, 3) takes 2 placements, one per axis; got 1: (R)"),
    ((2,), "S2", (4, 4), None, "axis 0 shards dim 2, but a tensor of shape (4, 4) has dims 0..1"),
    ((2,), "S-3", (4, 4), None, "axis 0 shards dim -3, but a tensor of shape (4, 4) has dims 0..1"),
    ((2,), "S0", (), None, "axis 0 shards dim 0, but a tensor of shape () has no dims"),
    ((2, 2), "P, P(max)", (4,), None, "(P(sum), P(max)) reduces by max and sum on different axes, and the result"),
    ((2, 2), "R, R", (4,), (0, 0), "order=(0, 0) must list each of the axes (0, 1) once"),
    ((2, 2), "S0, S0(sizes=2/2)", (4,), None, "axis 1 cuts dim 0 by sizes=(2, 2) after axis 0 has cut it"),
    ((2, 2), "S0(unit=4), S0(unit=6)", (24,), None, "must divide every earlier one: give axis 0 unit=12"),
    ((2,), "S0(repeats=3)", (4,), None, "repeats must divide the length"),
    ((2,), "S0(unit=3)", (4,), None, "the unit must divide the length"),
    ((2,), "S0(unit=3, repeats=2)", (8,), None, "the unit must divide a block's length 4"),
    ((2,), "S0(sizes=1/1/2)", (4,), None, "3 sizes were given, allowed are 2, one per coordinate"),
    ((2,), "S0(sizes=1/2)", (4,), None, "the sizes sum to 3, they must sum to 4"),
    ((3,), "S0(unit=2, sizes=4/1/3)", (8,), None, "every size must be a multiple of the unit"),
]


def test_what_cannot_be_laid_out_is_refused() -> None:
    for mesh_shape, placements, shape, order, sentence in REFUSED:
        with pytest.raises(T.LayoutError, match=rf"{re.escape(sentence)}(?!\w)"):
            Layout(mesh_shape, T.parse_placements(placements), shape, order)
    with pytest.raises(T.LayoutError, match="axis 1 got 'S0'; allowed are Shard, Replicate and Partial"):
        Layout((2, 2), (T.Replicate(), "S0"), (4,))  # type: ignore[arg-type]


def test_coordinates_and_positions_are_row_major() -> None:
    layout = Layout((2, 3, 2), (T.Replicate(),) * 3, (4,))
    for position, coordinate in enumerate(coordinates((2, 3, 2))):
        assert layout.position(coordinate) == position
        assert layout.coordinate(position) == coordinate


def test_a_layout_of_65536_ranks_is_not_listed() -> None:
    calls = num_calls(ask_a_layout_of_65536_ranks)
    assert calls < 65_536 // 64, f"{calls} calls"


def ask_a_layout_of_65536_ranks() -> None:
    layout = Layout((256, 256), (T.Shard(0), T.Shard(1)), (1 << 20, 1 << 20))
    assert layout.local_shape((255, 255)) == (4096, 4096)
    wanted = (((4095, 8193),), ((0, 4097),))
    assert [coordinate for coordinate, _ in layout.holders(wanted, {})] == [
        (0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1),
    ]  # fmt: skip
    assert layout.max_local_numel == 4096 * 4096
