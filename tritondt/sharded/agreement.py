"""Checks that all ranks of a group ask for one and the same thing, and what they tell each other to find out."""

import json
from array import array
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from tritondt.errors import MismatchError
from tritondt.redistribution import agreement
from tritondt.redistribution.agreement import lengths_on_all
from tritondt.sharding.mesh import Mesh

Result = TypeVar("Result")


class ShardingMismatchError(MismatchError, ValueError):
    """Different sharding requests of ranks; a ValueError too, as in torch."""


def agreed(mesh: Mesh, call: str, prepare: Callable[[], tuple[str, Result]]) -> Result:
    """Second result of `prepare` where its first, a text of the request, is alike on all ranks: a collective call.

    Where `prepare` raises on some ranks, these raise what it raised and the others ShardingMismatchError with its
    text; nothing else has been sent.
    """
    return agreement.agreed(mesh, call, prepare, ShardingMismatchError)


def values_on_all(mesh: Mesh, own: Any) -> list[Any]:
    """Values of all ranks, by mesh position, on all of them; what JSON can write. A collective call."""
    content = json.dumps(own).encode()
    num_bytes = max(length for (length,) in lengths_on_all(mesh, [len(content)]))
    num_words = -(-num_bytes // 8)
    words = torch.frombuffer(bytearray(content.ljust(num_words * 8)), dtype=torch.int64)
    return [json.loads(array("q", row).tobytes()) for row in lengths_on_all(mesh, words.tolist())]


def all_ranks(mesh: Mesh, own: bool) -> bool:
    """Whether `own` is true on every rank of the mesh: a collective call."""
    return all(found for (found,) in lengths_on_all(mesh, [int(own)]))
