"""Interval and region arithmetic against sets of single indices."""

from itertools import pairwise, product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tritondt.sharding import intervals as regions
from tritondt.sharding.intervals import Intervals, Region


def listed(intervals: Intervals) -> list[int]:
    """All indices, in order."""
    return [index for start, stop in intervals for index in range(start, stop)]


def from_indices(indices: set[int]) -> Intervals:
    """The intervals of a set of indices, touching ones joined."""
    found: list[tuple[int, int]] = []
    for index in sorted(indices):
        if found and found[-1][1] == index:
            found[-1] = found[-1][0], index + 1
        else:
            found.append((index, index + 1))
    return tuple(found)


index_sets = st.sets(st.integers(0, 15))
intervals_strategy = index_sets.map(from_indices)
region_strategy = st.tuples(intervals_strategy, intervals_strategy)


def elements(region: Region) -> set[tuple[int, ...]]:
    """All elements of a region."""
    return set(product(*map(listed, region)))


@given(index_sets, st.lists(st.integers(0, 15), max_size=4))
def test_merge_drops_empty_intervals_and_joins_touching_ones(indices: set[int], cuts: list[int]) -> None:
    pieces = []
    for start, stop in from_indices(indices):
        bounds = sorted({start, stop, *(cut for cut in cuts if start < cut < stop)})
        for cut in (start, *cuts):
            pieces.append((cut, cut))
        pieces += list(pairwise(bounds))
    assert regions.merge(pieces) == from_indices(indices)


@given(index_sets, index_sets)
def test_intersection_of_intervals_is_that_of_sets(left: set[int], right: set[int]) -> None:
    assert regions.intersect_intervals(from_indices(left), from_indices(right)) == from_indices(left & right)


@given(intervals_strategy, st.integers(0, 17), st.integers(0, 17))
def test_positions_are_slices_of_the_list(intervals: Intervals, start: int, stop: int) -> None:
    assert listed(regions.at_positions(intervals, start, stop)) == listed(intervals)[start:stop]


@given(index_sets, st.sets(st.integers(0, 15)))
def test_positions_find_where_inner_intervals_start(outer: set[int], some: set[int]) -> None:
    inner = from_indices(outer & some)
    held = listed(from_indices(outer))
    assert regions.positions(from_indices(outer), inner) == [held.index(start) for start, _ in inner]


@given(region_strategy, region_strategy)
def test_intersection_of_regions_is_that_of_their_elements(left: Region, right: Region) -> None:
    common = elements(left) & elements(right)
    found = regions.intersect(left, right)
    assert (elements(found) if found is not None else set()) == common
    assert (found is None) == (not common)


@given(region_strategy)
def test_boxes_make_up_the_region_in_row_major_order(region: Region) -> None:
    found = [element for box in regions.boxes(region) for element in product(*(range(*interval) for interval in box))]
    assert len(found) == len(set(found)) == regions.numel(region)
    assert set(found) == elements(region)
    corners = [tuple(start for start, _ in box) for box in regions.boxes(region)]
    assert corners == sorted(corners)
    assert regions.num_boxes(region) == len(corners)


def test_a_region_without_dims_is_one_element() -> None:
    assert regions.numel(()) == 1
    assert list(regions.boxes(())) == [()]
    assert regions.intersect((), ()) == ()


@pytest.mark.parametrize(
    "shape", [(), (1,), (5,), (3, 4), (1, 6), (4, 1), (2, 3, 3), (3, 1, 2), (2, 2, 2, 3), (0,), (2, 0)]
)
def test_flat_boxes_are_the_flat_range_in_order(shape: tuple[int, ...]) -> None:
    size = prod(shape)
    flat = list(product(*map(range, shape)))
    for start in range(size + 1):
        for stop in range(start, size + 1):
            boxes = regions.flat_boxes(shape, start, stop)
            found = [element for box in boxes for element in product(*(range(*interval) for interval in box))]
            assert found == flat[start:stop]
            assert len(boxes) <= max(1, 2 * len(shape))
            assert all(low < high for box in boxes for low, high in box)
