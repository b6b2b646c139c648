"""Random collectives and messages on a group, each compared exactly with what one process computes of all ranks' input.

Every rank draws the same calls from a seed, and knows what the others bring. Values are small whole numbers.
"""

import random
from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _make_nccl_premul_sum

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
DTYPES = (*FLOATS, *INTEGERS, torch.bool, torch.complex64)
MOVED = (*DTYPES, torch.complex128, torch.float8_e4m3fn)
# float32 of more than 64 and 256 KB, which do not divide.
LENGTHS = (0, 1, 5, 64, 1000, 40_003, 100_003)
BITWISE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


class Draw(NamedTuple):
    """The choices that a call is drawn from, and where it runs."""

    group: Any
    rank: int
    size: int
    numbers: random.Random
    seed: int

    def terms(self, length: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """The tensors that each rank brings."""
        generator = torch.Generator().manual_seed(self.seed)
        found = torch.randint(0, 4, (self.size, length), generator=generator)
        return [row.to(torch.float32).to(dtype) if dtype is torch.float8_e4m3fn else row.to(dtype) for row in found]

    def own(self, terms: list[torch.Tensor]) -> torch.Tensor:
        """This rank's term, with gaps now and then, which is a rank's own affair."""
        term = terms[self.rank]
        if random.Random(f"{self.seed}/{self.rank}").random() < 0.3 and term.dtype is not torch.float8_e4m3fn:
            return torch.stack([term, term], dim=1)[:, 0]
        return term.clone()

    def reduction(self) -> tuple[torch.dtype, Any, Callable[[list[torch.Tensor]], torch.Tensor]]:
        """A dtype, an op, and the reduction of terms by it."""
        dtype = self.numbers.choice(DTYPES)
        ops = ["SUM"]
        if not dtype.is_complex:
            ops += ["PRODUCT", "MIN", "MAX"]
        if dtype.is_floating_point:
            ops += ["AVG", "PREMUL_SUM"]
        if not dtype.is_floating_point and not dtype.is_complex:
            ops += BITWISE
        name = self.numbers.choice(ops)
        op = _make_nccl_premul_sum(0.5) if name == "PREMUL_SUM" else getattr(dist.ReduceOp, name)
        return dtype, op, lambda terms: reduced(name, terms)


def reduced(name: str, terms: list[torch.Tensor]) -> torch.Tensor:
    """The reduction of terms, with sums of short floats in float32."""
    dtype = terms[0].dtype
    if name in BITWISE:
        return reduce(BITWISE[name], terms)
    if name in ("MIN", "MAX"):
        return reduce(torch.minimum if name == "MIN" else torch.maximum, terms)
    if dtype is torch.bool:
        return reduce(torch.logical_and if name == "PRODUCT" else torch.logical_or, terms)
    wide = [term.float() if dtype in (torch.bfloat16, torch.float16) else term for term in terms]
    if name == "PRODUCT":
        return reduce(torch.mul, wide).to(dtype)
    if name == "PREMUL_SUM":
        wide = [term * 0.5 for term in wide]
    total = reduce(torch.add, wide)
    return (total / len(terms) if name == "AVG" else total).to(dtype)


def _wait(work: Any) -> None:
    if work is not None:
        work.wait()


def all_reduce(draw: Draw) -> None:
    dtype, op, reference = draw.reduction()
    terms = draw.terms(draw.numbers.choice(LENGTHS), dtype)
    found = draw.own(terms)
    _wait(dist.all_reduce(found, op, draw.group, async_op=draw.numbers.random() < 0.5))
    same(found, reference(terms))


def reduce_to_one(draw: Draw) -> None:
    dtype, op, reference = draw.reduction()
    terms, root = draw.terms(draw.numbers.choice(LENGTHS), dtype), draw.numbers.randrange(draw.size)
    found = draw.own(terms)
    dist.reduce(found, group=draw.group, group_dst=root, op=op)
    same(found, reference(terms) if draw.rank == root else terms[draw.rank])


def reduce_scatter(draw: Draw) -> None:
    dtype, op, reference = draw.reduction()
    length = draw.numbers.choice(LENGTHS)
    terms = draw.terms(length * draw.size, dtype)
    found = torch.zeros(length, dtype=dtype)
    dist.reduce_scatter_tensor(found, draw.own(terms), op, draw.group)
    same(found, reference(terms)[draw.rank * length :][:length])


def reduce_scatter_uneven(draw: Draw) -> None:
    dtype, op, reference = draw.reduction()
    lengths = [draw.numbers.choice(LENGTHS) for _ in range(draw.size)]
    terms = draw.terms(sum(lengths), dtype)
    found = torch.zeros(lengths[draw.rank], dtype=dtype)
    dist.reduce_scatter(found, list(draw.own(terms).split(lengths)), op, draw.group)
    same(found, reference(terms).split(lengths)[draw.rank])


def all_gather(draw: Draw) -> None:
    terms = draw.terms(draw.numbers.choice(LENGTHS), draw.numbers.choice(MOVED))
    found = torch.cat(terms).clone().zero_() if terms[0].dtype is not torch.float8_e4m3fn else torch.cat(terms).clone()
    _wait(dist.all_gather_into_tensor(found, draw.own(terms), draw.group, async_op=draw.numbers.random() < 0.5))
    same(found, torch.cat(terms))


def all_gather_uneven(draw: Draw) -> None:
    lengths = [draw.numbers.choice(LENGTHS) for _ in range(draw.size)]
    dtype = draw.numbers.choice(DTYPES)
    expected = [term[:length] for term, length in zip(draw.terms(max(lengths), dtype), lengths, strict=True)]
    found = [torch.zeros_like(each) for each in expected]
    dist.all_gather(found, expected[draw.rank], group=draw.group)
    same(found, expected)


def broadcast(draw: Draw) -> None:
    length, dtype, root = draw.numbers.choice(LENGTHS), draw.numbers.choice(MOVED), draw.numbers.randrange(draw.size)
    terms = draw.terms(length, dtype)
    found = draw.own(terms)
    _wait(dist.broadcast(found, group=draw.group, group_src=root, async_op=draw.numbers.random() < 0.5))
    same(found, terms[root])


def gather_uneven(draw: Draw) -> None:
    root, lengths = draw.numbers.randrange(draw.size), [draw.numbers.choice(LENGTHS) for _ in range(draw.size)]
    dtype = draw.numbers.choice(DTYPES)
    expected = [term[:length] for term, length in zip(draw.terms(max(lengths), dtype), lengths, strict=True)]
    found = [torch.zeros_like(each) for each in expected] if draw.rank == root else None
    dist.gather(expected[draw.rank], found, group=draw.group, group_dst=root)
    same(found or [], expected if draw.rank == root else [])


def scatter_uneven(draw: Draw) -> None:
    root, lengths = draw.numbers.randrange(draw.size), [draw.numbers.choice(LENGTHS) for _ in range(draw.size)]
    dtype = draw.numbers.choice(DTYPES)
    expected = [term[:length] for term, length in zip(draw.terms(max(lengths), dtype), lengths, strict=True)]
    found = torch.zeros_like(expected[draw.rank])
    dist.scatter(found, expected if draw.rank == root else None, group=draw.group, group_src=root)
    same(found, expected[draw.rank])


def all_to_all_uneven(draw: Draw) -> None:
    dtype = draw.numbers.choice(DTYPES)
    lengths = [[draw.numbers.choice(LENGTHS[:5]) for _ in range(draw.size)] for _ in range(draw.size)]
    terms = draw.terms(max(map(sum, lengths)), dtype)
    parts = [list(term[: sum(row)].split(row)) for term, row in zip(terms, lengths, strict=True)]
    expected = torch.cat([parts[source][draw.rank] for source in range(draw.size)])
    found, coming = torch.zeros_like(expected), [row[draw.rank] for row in lengths]
    dist.all_to_all_single(found, torch.cat(parts[draw.rank]), coming, lengths[draw.rank], draw.group)
    same(found, expected)


def messages(draw: Draw) -> None:
    """Three to the next rank, with tags, that are received in another order; one of a length of its own."""
    lengths = [draw.numbers.choice(LENGTHS) for _ in range(3)]
    terms = draw.terms(max(lengths), draw.numbers.choice(DTYPES))
    after, before = (draw.rank + 1) % draw.size, (draw.rank - 1) % draw.size
    sent = [terms[draw.rank][:length].roll(tag) for tag, length in enumerate(lengths)]
    works = [dist.isend(each, tag=tag, group=draw.group, group_dst=after) for tag, each in enumerate(sent)]
    order = draw.numbers.sample(range(3), 3)
    found = {tag: torch.zeros_like(sent[tag]) for tag in order}
    for tag in order:
        dist.recv(found[tag], tag=tag, group=draw.group, group_src=before)
    for work in works:
        _wait(work)
    for tag, length in enumerate(lengths):
        same(found[tag], terms[before][:length].roll(tag))


def from_any_rank(draw: Draw) -> None:
    terms, root = draw.terms(draw.numbers.choice(LENGTHS), torch.float32), draw.numbers.randrange(draw.size)
    if draw.rank != root:
        dist.send(terms[draw.rank], group=draw.group, group_dst=root, tag=7)
        return
    seen = set()
    for _ in range(draw.size - 1):
        found = torch.zeros_like(terms[0])
        source = dist.recv(found, group=draw.group, tag=7)
        place = dist.get_group_rank(draw.group, source)
        same(found, terms[place])
        seen.add(place)
    assert seen == set(range(draw.size)) - {root}


KINDS = (
    *(all_reduce, reduce_to_one, reduce_scatter, reduce_scatter_uneven, all_gather, all_gather_uneven, broadcast),
    *(gather_uneven, scatter_uneven, all_to_all_uneven, messages, from_any_rank),
)


def same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def run(group: Any, seed: int, count: int) -> None:
    """So many calls of a seed, every kind in its turn."""
    rank, size, numbers = dist.get_rank(group), dist.get_world_size(group), random.Random(seed)
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        try:
            kind(Draw(group, rank, size, random.Random(numbers.getrandbits(32)), seed * 1000 + number))
        except Exception as error:
            raise AssertionError(f"call {number} of seed {seed}, {kind.__name__}, on rank {rank} of {size}") from error
