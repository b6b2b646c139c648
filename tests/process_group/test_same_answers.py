"""A mean of integers, tensors without elements and sizes that do not fit get one answer, whatever carries them."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness.gloo_ranks import GlooRanks

RanksOf = Callable[[str, int], GlooRanks]
Answer = list[Any] | tuple[str, str]
# What follows from the carrier: NCCL has no bitwise ops.
OWN_TO_A_CARRIER = re.compile(r"; allowed is [a-z, ]+")


def answer(call: Callable[..., list[Any]], *arguments: Any) -> Answer:
    """The result of a call, as values, or the kind and text of its error."""
    try:
        return call(*arguments)
    except (RuntimeError, ValueError, TypeError) as error:
        return type(error).__name__, OWN_TO_A_CARRIER.sub("", str(error))


def reduced(x: torch.Tensor, op: Any, group: Any) -> list[Any]:
    dist.all_reduce(x, op=op, group=group)
    return x.tolist()


def gathered(num_elements: int, length: int, group: Any) -> list[Any]:
    whole = torch.zeros(length)
    group._allgather_base(whole, torch.ones(num_elements)).wait()
    return whole.tolist()


def scattered(part: torch.Tensor, length: int, op: Any, group: Any) -> list[Any]:
    dist.reduce_scatter(
        part, [torch.ones(length, dtype=part.dtype) for _ in range(dist.get_world_size(group))], op, group
    )
    return part.tolist()


def answers(rank: int) -> dict[str, Answer]:
    """Of a group of both ranks, and of one alone."""
    ops, found = dist.ReduceOp, dict[str, Answer]()
    alone = [dist.new_group([each]) for each in range(2)][rank]
    for group, name in ((dist.group.WORLD, "both"), (alone, "alone")):
        for dtype in (torch.int32, torch.int64, torch.uint8, torch.bool):
            for length in (3, 0):
                x = torch.ones(length, dtype=dtype)
                found[f"mean of {length} {dtype}, {name}"] = answer(reduced, x, ops.AVG, group)
                part = torch.zeros(length, dtype=dtype)
                found[f"part of a mean of {length} {dtype}, {name}"] = answer(scattered, part, length, ops.AVG, group)
        for length in (2, 0):
            found[f"bitwise of {length} floats, {name}"] = answer(reduced, torch.ones(length), ops.BAND, group)
        found[f"sizes that do not fit, {name}"] = answer(gathered, 2, 5, group)
        found[f"sizes that do not fit, of none, {name}"] = answer(gathered, 0, 1, group)
        found[f"part that does not fit, {name}"] = answer(scattered, torch.zeros(2), 3, ops.SUM, group)
        found[f"none gathered, {name}"] = answer(gathered, 0, 0, group)
        found[f"mean of none, {name}"] = answer(reduced, torch.ones(0), ops.AVG, group)
        found[f"part of none, {name}"] = answer(scattered, torch.zeros(0), 0, ops.SUM, group)
    return found


@pytest.mark.parametrize("over", ["sockets", "nccl"])
def test_answers_are_those_through_shared_memory(ranks_of: RanksOf, over: str) -> None:
    of_ranks = zip(*(ranks_of(each, 2).run(answers) for each in (over, "shared-memory")), strict=True)
    for found, expected in of_ranks:
        assert {name: (each, expected[name]) for name, each in found.items() if each != expected[name]} == {}
        values = [name for name, each in found.items() if isinstance(each, list)]
        assert [name.rpartition(",")[0] for name in values] == ["none gathered", "mean of none", "part of none"] * 2
