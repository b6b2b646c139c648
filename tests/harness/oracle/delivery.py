"""Carries out the exchanges of all ranks on whole tensors, element by element, and checks that they fit together."""

from collections.abc import Callable, Mapping, Sequence

import torch

from tests.harness.oracle.arithmetic import Coordinate
from tritondt.planning.exchange import Exchange, Part
from tritondt.sharding.intervals import Region


def indices(region: Region) -> tuple[torch.Tensor, ...]:
    """Index tensors that pick a region out of a whole tensor."""
    per_dim = [torch.tensor([i for start, stop in intervals for i in range(start, stop)]) for intervals in region]
    return torch.meshgrid(*per_dim, indexing="ij") if per_dim else ()


def assert_both_sides_agree(exchanges: Mapping[int, Exchange]) -> None:
    """Checks that what each rank sends is, message for message and part for part, what its peer expects."""
    sent = {(rank, item.peer): item.parts for rank, found in exchanges.items() for item in found.sends}
    received = {(item.peer, rank): item.parts for rank, found in exchanges.items() for item in found.receives}
    assert sent == received
    assert all(sender != receiver for sender, receiver in sent), "a rank sends to itself"
    assert sum(len(found.sends) for found in exchanges.values()) == len(sent), "two messages for one peer"


def arrived_terms(
    found: Exchange, own: int, terms_of: Callable[[int], torch.Tensor], shape: Sequence[int], num_terms: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Terms that a rank has after the exchange, (num_terms, *shape), and how often each element of them came.

    `terms_of(rank)` is the whole tensor of which a rank holds its part.
    """
    whole = terms_of(own)
    values = torch.zeros((num_terms, *shape), dtype=whole.dtype)
    times = torch.zeros((num_terms, *shape), dtype=torch.int64)

    def take(part: Part, term: torch.Tensor) -> None:
        at = indices(part.region)
        values[part.contribution][at] = term[at]
        times[part.contribution][at] += 1

    for part in found.keeps:
        take(part, whole)
    for message in found.receives:
        for part in message.parts:
            take(part, terms_of(message.peer))
    return values, times


def whole_terms(
    mesh_shape: Sequence[int], shape: Sequence[int], reduced: Sequence[int]
) -> dict[Coordinate, torch.Tensor]:
    """Random whole tensors by the indices on the axes that are reduced."""
    sizes = [mesh_shape[axis] for axis in reduced]
    return (
        {
            tuple(int(index) for index in at): torch.randint(-99, 100, tuple(shape))
            for at in torch.cartesian_prod(*map(torch.arange, sizes)).reshape(-1, len(sizes))
        }
        if sizes
        else {(): torch.randint(-99, 100, tuple(shape))}
    )
