"""Where the parts of a message lie in storage: the right elements, in the fewest boxes."""

import random
from collections.abc import Iterable
from itertools import product

import pytest
import torch

import tritondt as T
from tests.harness.oracle.arithmetic import coordinates, indices_of, take
from tests.harness.oracle.random_layouts import random_pair
from tritondt.planning.exchange import exchange
from tritondt.planning.storage import Joint, blocks, contiguous_offset, joint_boxes, message_block
from tritondt.sharding.intervals import Region
from tritondt.sharding.layout import Layout


def flat_positions(offset: int, lengths: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    """Storage positions of a strided box, row-major."""
    return [
        offset + sum(index * stride for index, stride in zip(at, strides, strict=True))
        for at in product(*map(range, lengths))
    ]


@pytest.mark.parametrize("chunk", range(4))
def test_boxes_pair_each_element_of_storage_with_its_place_in_the_message(chunk: int) -> None:
    for seed in range(chunk * 50, (chunk + 1) * 50):
        source, target = random_pair(random.Random(seed), torch.float32)
        for coordinate in list(coordinates(source.mesh_shape))[:3]:
            check_messages(source, target, coordinate)


def check_messages(source: Layout, target: Layout, coordinate: tuple[int, ...]) -> None:
    stored = blocks(source, coordinate)
    kept = indices_of(source, coordinate)
    lengths = tuple(map(len, kept))
    local = torch.arange(int(torch.tensor(lengths).prod()) if lengths else 1).reshape(lengths)
    for message in exchange(source, target, coordinate).sends:
        for part in message.parts:
            found = places_of(joint_boxes([stored, [message_block(part.region)]], part.region), part.numel)
            wanted = [[index for start, stop in dim for index in range(start, stop)] for dim in part.region]
            at = [torch.searchsorted(held, torch.tensor(listed)) for held, listed in zip(kept, wanted, strict=True)]
            assert torch.equal(found, take(local, at).reshape(-1)), (source, target, coordinate)
            offset = contiguous_offset(stored, part.region)
            steps = found.diff()
            assert (offset is not None) == bool((steps == 1).all()), (source, target, coordinate)
            assert offset is None or offset == found[0]


def places_of(joints: Iterable[Joint], numel: int) -> torch.Tensor:
    """Where each element of a message lies in storage, -1 for those that no box holds."""
    found = torch.full((numel,), -1)
    for lengths, ((from_offset, from_strides), (to_offset, to_strides)) in joints:
        to = flat_positions(to_offset, lengths, to_strides)
        found[to] = torch.tensor(flat_positions(from_offset, lengths, from_strides))
    return found


def test_indices_that_lie_together_in_every_storage_are_one_box() -> None:
    """The part skips what neither side holds, so that (0, 2) and (6, 8) follow each other on both."""
    part: Region = (((0, 2), (6, 8)), ((0, 3),))
    stored = message_block(part)
    (found,) = joint_boxes([[stored], [stored]], part)
    assert found.lengths == (4, 3)
    assert found.places == ((0, (3, 1)), (0, (3, 1)))
    assert contiguous_offset([stored], part) == 0


def test_repeats_cost_one_box_per_block_and_no_more() -> None:
    source, target = (Layout((2,), T.parse_placements(text), (12, 5)) for text in ("S0(repeats=3)", "R"))
    (message,) = exchange(source, target, (0,)).sends
    (part,) = message.parts
    whole = blocks(target, (0,))
    assert len(joint_boxes([blocks(source, (0,)), whole], part.region)) == 3
    assert len(joint_boxes([blocks(source, (0,)), [message_block(part.region)]], part.region)) == 1


@pytest.mark.parametrize(
    ("strides", "expected"), [((4, 1), 0), ((1, 3), None), ((8, 2), None), ((4, 2), None), ((0, 0), None)]
)
def test_only_dense_storage_is_one_run(strides: tuple[int, int], expected: int | None) -> None:
    layout = Layout((1,), (T.Replicate(),), (3, 4))
    assert contiguous_offset(blocks(layout, (0,), strides), layout.region((0,))) == expected


def test_strides_of_dims_of_one_do_not_matter() -> None:
    layout = Layout((1,), (T.Replicate(),), (1, 4, 1))
    assert contiguous_offset(blocks(layout, (0,), (99, 1, 7)), layout.region((0,))) == 0
