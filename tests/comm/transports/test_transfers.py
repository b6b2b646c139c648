"""Lists of tensors, and meshes that differ, through a communicator: the same exchange with more boxes."""

import random
from dataclasses import replace
from math import prod

import pytest
import torch

import tritondt as T
from tests.harness.oracle import arithmetic
from tests.harness.oracle.random_layouts import MESH_SHAPES, random_placements, random_shape
from tritondt.comm import world
from tritondt.comm.communicator import Reduction, Transfer
from tritondt.comm.transports.threads import run_ranks
from tritondt.planning.exchange import Exchange, exchange, exchange_across, merge
from tritondt.planning.storage import Block, blocks
from tritondt.sharding.layout import Layout

DTYPES = torch.bool, torch.float16, torch.float32, torch.complex128, torch.int8


def transfer(
    found: Exchange,
    source_blocks: list[tuple[Block, ...]],
    target_blocks: list[tuple[Block, ...]],
    dtypes: list[torch.dtype],
    reductions: list[Reduction | None],
) -> Transfer:
    return Transfer(
        found, tuple(source_blocks), tuple(target_blocks), tuple(dtypes), tuple(reductions), 4711, "the test's exchange"
    )


def no_terms(placements: tuple[T.Placement, ...]) -> tuple[T.Placement, ...]:
    return tuple(T.Replicate() if item.is_partial() else item for item in placements)


@pytest.mark.parametrize("seed", range(20))
def test_a_list_of_tensors_travels_in_one_message_per_peer(seed: int) -> None:
    chosen = random.Random(seed)
    mesh_shape = chosen.choice(MESH_SHAPES[chosen.randint(2, 6)])
    size, dtypes = prod(mesh_shape), [chosen.choice(DTYPES) for _ in range(chosen.randint(1, 4))]
    wholes, sides = [], []
    for dtype in dtypes:
        shape = random_shape(chosen)
        wholes.append(arithmetic.whole_tensor(shape, dtype))
        pair = [random_placements(chosen, mesh_shape, shape, dtype) for _ in range(2)]
        source, target = (Layout(mesh_shape, no_terms(placements), shape, order) for placements, order in pair)
        sides.append((source, target))
    given, expected = (
        [
            arithmetic.local_tensors(whole, mesh_shape, pair[side].placements, pair[side].order)
            for whole, pair in zip(wholes, sides, strict=True)
        ]
        for side in range(2)
    )

    def body(rank: int) -> int:
        at = sides[0][0].coordinate(rank)
        found = merge([exchange(*pair, at) for pair in sides], rank, [dtype.itemsize for dtype in dtypes])
        moved = transfer(
            found,
            [blocks(pair[0], at) for pair in sides],
            [blocks(pair[1], at) for pair in sides],
            dtypes,
            [None] * len(dtypes),
        )
        targets = [torch.empty_like(local[at]) for local in expected]
        communicator = world.current().communicator(range(size))
        communicator.exchange([local[at] for local in given], targets, moved)
        for target, local in zip(targets, expected, strict=True):
            torch.testing.assert_close(target, local[at], rtol=0, atol=0)
        assert communicator.traffic.num_sent <= size - 1
        assert communicator.traffic.sent_bytes == sum(
            part.numel * dtypes[part.tensor].itemsize for message in found.sends for part in message.parts
        )
        return communicator.traffic.received_bytes - communicator.traffic.sent_bytes

    assert sum(run_ranks(size, body)) == 0


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("op", [None, "sum", "max"])
def test_a_tensor_moves_from_one_mesh_to_another(op: str | None, seed: int) -> None:
    chosen = random.Random(f"{op} {seed}")
    meshes = [chosen.choice(MESH_SHAPES[chosen.randint(1, 4)]) for _ in range(2)]
    shape, world_size = random_shape(chosen), 6
    source_ranks, target_ranks = (chosen.sample(range(world_size), prod(mesh_shape)) for mesh_shape in meshes)
    layouts = []
    for side, mesh_shape in enumerate(meshes):
        placements, order = random_placements(chosen, mesh_shape, shape, torch.float32)
        plain = no_terms(placements)
        if op is not None and side == 0:
            plain = (T.Partial(op), *plain[1:])  # type: ignore[arg-type]
        layouts.append(Layout(mesh_shape, plain, shape, order))
    source, target = layouts
    whole = arithmetic.whole_tensor(shape, torch.float32)
    given = arithmetic.local_tensors(whole, source.mesh_shape, source.placements, source.order)
    expected = arithmetic.local_tensors(whole, target.mesh_shape, target.placements, target.order)
    reduction = None if op is None else Reduction(op, 1)  # type: ignore[arg-type]

    def body(rank: int) -> None:
        found = exchange_across(source, source_ranks, target, target_ranks, rank)
        local, source_blocks = torch.empty(0), tuple[Block, ...]()
        if rank in source_ranks:
            at = source.coordinate(source_ranks.index(rank))
            local, source_blocks = given[at], blocks(source, at)
        result, target_blocks, wanted = torch.empty(0), tuple[Block, ...](), torch.empty(0)
        if rank in target_ranks:
            at = target.coordinate(target_ranks.index(rank))
            wanted, target_blocks = expected[at], blocks(target, at)
            result = torch.empty_like(wanted)
        moved = transfer(found, [source_blocks], [target_blocks], [torch.float32], [reduction])
        world.current().communicator(range(world_size)).exchange([local], [result], moved)
        torch.testing.assert_close(result, wanted, rtol=0, atol=0)

    run_ranks(world_size, body)


@pytest.mark.parametrize(
    ("compiled_for", "given_on", "sentence"),
    [
        ("cpu", "meta", r"ThreadCommunicator was given a tensor on meta; it carries tensors on cpu and cuda only"),
        ("cuda:1", "cpu", r"^the test's exchange was compiled for tensors on cuda:1 and given one on cpu$"),
    ],
)
def test_tensors_on_another_device_are_refused(compiled_for: str, given_on: str, sentence: str) -> None:
    nothing = transfer(Exchange((), (), (), (1,)), [()], [()], [torch.float32], [None])
    nothing = replace(nothing, device=torch.device(compiled_for))

    def body(rank: int) -> None:
        communicator, local = world.current().communicator(range(2)), torch.empty(0, device=given_on)
        with pytest.raises(T.TransportError, match=sentence):
            communicator.exchange([local], [local], nothing)

    run_ranks(2, body)
