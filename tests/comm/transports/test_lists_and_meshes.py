"""Lists of tensors and two meshes through one exchange: the same function with more boxes."""

from dataclasses import replace

import pytest
import torch

from tests.harness.oracle.arithmetic import indices_of, take
from tritondt.comm import world
from tritondt.comm.communicator import Reduction, Transfer
from tritondt.comm.transports.threads import run_ranks
from tritondt.planning.exchange import Exchange, Message, exchange, exchange_across, merge
from tritondt.planning.storage import blocks
from tritondt.sharding.layout import Layout
from tritondt.sharding.placement import parse_placements


def local_part(full, layout, coordinate):
    """What a coordinate holds of a tensor whose layout cuts dims only."""
    return take(full, indices_of(layout, coordinate))


def test_a_list_of_tensors_of_different_widths_moves_and_reduces_in_one_exchange():
    mesh_shape = (3,)
    moves = [
        ("S0", "S1", torch.arange(35, dtype=torch.int8).reshape(5, 7)),
        ("P", "S1", torch.arange(20.0, dtype=torch.float64).reshape(4, 5)),
        ("S1", "R", torch.arange(21).reshape(3, 7).to(torch.bfloat16)),
        ("P(max)", "S0", torch.arange(8, dtype=torch.int16)),
    ]

    def body(rank):
        communicator = world.current().communicator(range(3))
        layouts = [
            tuple(Layout(mesh_shape, parse_placements(text), full.shape) for text in (source, target))
            for source, target, full in moves
        ]
        singles = [exchange(source, target, (rank,)) for source, target in layouts]
        itemsizes = [full.dtype.itemsize for _, _, full in moves]
        transfer = Transfer(
            exchange=merge(singles, rank, itemsizes),
            source_blocks=tuple(blocks(source, (rank,)) for source, _ in layouts),
            target_blocks=tuple(blocks(target, (rank,)) for _, target in layouts),
            dtypes=tuple(full.dtype for _, _, full in moves),
            reductions=(None, Reduction("sum", 1), None, Reduction("max", 1)),
            fingerprint=1,
            description="a list of tensors",
        )
        sources = [
            full - rank if "P" in text else local_part(full, source, (rank,))
            for (text, _, full), (source, _) in zip(moves, layouts, strict=True)
        ]
        expected = [
            local_part({"P": 3 * full - 3, "P(max)": full}.get(text, full), target, (rank,))
            for (text, _, full), (_, target) in zip(moves, layouts, strict=True)
        ]
        targets = [torch.full_like(part, 77) for part in expected]
        communicator.exchange(sources, targets, transfer)
        for found, part in zip(targets, expected, strict=True):
            torch.testing.assert_close(found, part, rtol=0, atol=0)
        sent = sum(part.numel * itemsizes[part.tensor] for message in transfer.exchange.sends for part in message.parts)
        assert communicator.traffic.sent_bytes == sent
        assert communicator.traffic.num_sent == len(transfer.exchange.sends) <= 2

    run_ranks(3, body)


@pytest.mark.parametrize(
    ("source_mesh", "source_ranks", "source_text", "target_mesh", "target_ranks", "target_text"),
    [
        ((2,), (0, 1), "S0", (3,), (2, 3, 4), "S1"),  # disjoint
        ((2, 2), (0, 1, 2, 3), "S0,R", (3,), (2, 3, 4), "S0"),  # sharing ranks, replicas dealt out
        ((3,), (4, 1, 2), "S1", (2, 2), (1, 2, 3, 0), "R,S0"),  # in another order
        ((2,), (3, 4), "P", (3,), (0, 1, 2), "S0"),  # terms add up on the other mesh
        ((2,), (0, 1), "R", (2,), (3, 4), "R"),
    ],
)
def test_between_two_meshes_of_one_world(
    source_mesh, source_ranks, source_text, target_mesh, target_ranks, target_text
):
    full = torch.arange(35.0).reshape(5, 7)
    source = Layout(source_mesh, parse_placements(source_text), (5, 7))
    target = Layout(target_mesh, parse_placements(target_text), (5, 7))
    reduced = "P" in source_text

    def body(rank):
        found: Exchange = exchange_across(source, source_ranks, target, target_ranks, rank)
        at_source = source.coordinate(source_ranks.index(rank)) if rank in source_ranks else None
        at_target = target.coordinate(target_ranks.index(rank)) if rank in target_ranks else None
        transfer = Transfer(
            exchange=found,
            source_blocks=(() if at_source is None else blocks(source, at_source),),
            target_blocks=(() if at_target is None else blocks(target, at_target),),
            dtypes=(torch.float32,),
            reductions=(Reduction("sum", 1) if reduced else None,),
            fingerprint=2,
            description="between two meshes",
        )
        held = torch.empty(0) if at_source is None else local_part(full, source, at_source)
        expected = torch.empty(0) if at_target is None else local_part(full, target, at_target)
        result = torch.full_like(expected, -1.0)
        world.current().communicator(range(5)).exchange([held], [result], transfer)
        torch.testing.assert_close(result, expected * (2 if reduced else 1), rtol=0, atol=0)
        return sum(message.numel for message in found.receives)

    received = sum(run_ranks(5, body))
    lacking = 0
    for position, rank in enumerate(target_ranks):
        wanted = set(elements(target, target.coordinate(position)))
        if rank in source_ranks and not reduced:
            wanted -= set(elements(source, source.coordinate(source_ranks.index(rank))))
        lacking += len(wanted)
    assert received == lacking * (2 if reduced else 1)


def elements(layout, coordinate):
    index = torch.arange(layout.numel).reshape(layout.shape)
    return local_part(index, layout, coordinate).flatten().tolist()


def test_messages_of_a_list_are_one_per_pair_of_ranks():
    source, target = (Layout((4,), parse_placements(text), (8, 8)) for text in ("S0", "S1"))
    single = exchange(source, target, (1,))
    both = merge([single, single], 1, [4, 8])
    assert [message.peer for message in both.sends] == [message.peer for message in single.sends] == [2, 3, 0]
    assert both.sends[0] == Message(
        2, (replace(single.sends[0].parts[0], tensor=1), replace(single.sends[0].parts[0], tensor=0))
    )
