"""Placements of a tensor along one mesh axis, as plain values that know nothing of ranks or of torch.

The text form is short and reads back: ``S0``, ``S1(unit=128)``, ``S0(sizes=5/0/3)``, ``S0(repeats=3)``,
``S0(block=64)``, ``R``, ``P(sum)``; a tuple of placements is written ``(S0, R)``.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import lcm
from typing import Any, Literal, cast, get_args

from tritondt.errors import LayoutError
from tritondt.errors.arguments import checked, checked_class
from tritondt.sharding.cut import BlockCyclicCut, ChunkCut, Cut

ReduceOp = Literal["sum", "avg", "max", "min", "product"]
ElementKind = Literal["float", "complex", "int", "bool"]

REDUCE_OPS: tuple[ReduceOp, ...] = get_args(ReduceOp)

# bool has or (max) and and (min); a mean needs division; complex numbers have no order.
OPS_OF_KIND: dict[ElementKind, tuple[ReduceOp, ...]] = {
    "float": REDUCE_OPS,
    "complex": ("sum", "avg", "product"),
    "int": ("sum", "max", "min", "product"),
    "bool": ("max", "min"),
}


class Placement:
    """Base of `Shard`, `Replicate` and `Partial`: placement of a tensor along one mesh axis.

    Placements are frozen values: hashable, equal by value, and written as short text that `parse_placements` reads.

    >>> [placement.is_shard(0) for placement in (Shard(0), Shard(1), Replicate(), Partial())]
    [True, False, False, False]
    """

    __slots__ = ()

    def is_shard(self, dim: int | None = None) -> bool:
        """Whether the axis cuts a tensor dim; with `dim`, whether that is the dim."""
        return isinstance(self, Shard) and dim in (None, self.dim)

    def is_replicate(self) -> bool:
        """Whether every coordinate of the axis holds equal values."""
        return isinstance(self, Replicate)

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Whether the coordinates of the axis hold terms of a reduction; with `reduce_op`, of one by that op."""
        return isinstance(self, Partial) and (reduce_op is None or _name_of(reduce_op) == self.reduce_op)


def _name_of(reduce_op: Any) -> Any:
    """The name of an op of torch.distributed.ReduceOp, whose names are in capitals; anything else as it is."""
    name = getattr(reduce_op, "name", None)  # an enumeration of C++, known by its form: torch is not imported here
    return name.lower() if isinstance(name, str) and hasattr(type(reduce_op), "__members__") else reduce_op


class _SizeAndOffset:
    """`Shard.local_shard_size_and_offset`: of the class, a plain cut; of a placement, that one's."""

    def __get__(self, shard: "Shard | None", owner: type["Shard"]) -> Callable[[int, int, int], tuple[int, int]]:
        return partial(_size_and_offset, owner(0) if shard is None else shard)


def _size_and_offset(shard: "Shard", curr_local_size: int, num_chunks: int, rank: int) -> tuple[int, int]:
    """Length of piece `rank` of so many indices cut in `num_chunks` pieces, and the place where it starts among them.

    The place is relative to the `curr_local_size` indices that are cut. An empty piece starts at their end. LayoutError
    for a piece of several blocks (`repeats`, `block`), which has no one place.
    """
    held = shard.cut(num_chunks, curr_local_size).piece(((0, curr_local_size),) if curr_local_size else (), rank)
    if len(held) > 1:
        raise LayoutError(
            f"{shard} gives piece {rank} of {curr_local_size} indices {len(held)} blocks, at no one offset"
        )
    start, stop = held[0] if held else (curr_local_size, curr_local_size)
    return stop - start, start


@checked_class
@dataclass(frozen=True, slots=True)
class Shard(Placement):
    """Placement that gives each coordinate of the axis one piece of tensor dim `dim`, cut as torch.chunk cuts.

    `dim` is a tensor dim, counted from the end where negative. `unit` is a number of indices that stay together: pieces
    are whole multiples of it (heads, quantisation blocks). `sizes` are the lengths of the pieces in indices, one per
    coordinate. They sum to the dim's length, and only the first cut of a dim may have them. With `repeats` the dim is
    that many equal blocks, each cut in the same way (merged q, k and v). With `block`, alone, blocks of that many
    indices are dealt to the coordinates in turn: ScaLAPACK's block-cyclic distribution, in which each coordinate keeps
    its share of every part of the dim. The last block may be short. Pieces may be uneven and empty; nothing is padded.

    Raises LayoutError for values that no tensor can have; `Layout` refuses those that its tensor cannot have.

    >>> Shard(0), Shard(1, unit=128), Shard(0, sizes=(5, 0, 3)), Shard(0, repeats=3), Shard(0, block=64)
    (S0, S1(unit=128), S0(sizes=5/0/3), S0(repeats=3), S0(block=64))
    """

    dim: int
    unit: int = 1
    sizes: Sequence[int] | None = None
    repeats: int = 1
    block: int | None = None

    # torch calls this of the class as well as of a placement.
    local_shard_size_and_offset = _SizeAndOffset()

    def __post_init__(self) -> None:
        if isinstance(self.dim, bool) or not isinstance(self.dim, int):
            raise LayoutError(f"Shard takes a tensor dim as an int, got {self.dim!r}")
        counts = (("unit", self.unit), ("repeats", self.repeats), ("block", 1 if self.block is None else self.block))
        for name, value in counts:
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise LayoutError(f"Shard({self.dim}) got {name}={value!r}; allowed is an int of 1 or more")
        if self.sizes is not None:
            sizes = tuple(self.sizes)
            if any(not isinstance(size, int) or size < 0 for size in sizes):
                raise LayoutError(f"Shard({self.dim}) got sizes={sizes}; allowed are ints of 0 or more")
            object.__setattr__(self, "sizes", sizes)
        if self.block is not None and (self.unit, self.sizes, self.repeats) != (1, None, 1):
            given = ", ".join(self._details())
            raise LayoutError(
                f"Shard({self.dim}) got {given}; allowed is block alone: blocks are dealt in turns, without "
                "unit, sizes and repeats"
            )

    def __hash__(self) -> int:
        return self.dim  # equal placements have equal dims; a hash of four fields takes three times as long

    def __repr__(self) -> str:
        details = self._details()
        return f"S{self.dim}" + (f"({', '.join(details)})" if details else "")

    def _details(self) -> list[str]:
        """The fields beside the dim that say something, as text that `parse_placements` reads."""
        details = []
        if self.unit != 1:
            details.append(f"unit={self.unit}")
        if self.sizes is not None:
            details.append("sizes=" + "/".join(map(str, self.sizes)))
        if self.repeats != 1:
            details.append(f"repeats={self.repeats}")
        if self.block is not None:
            details.append(f"block={self.block}")
        return details

    def cut(self, parts: int, length: int) -> Cut:
        """Division of `length` indices among `parts` coordinates.

        >>> Shard(0, block=2).cut(2, 7).piece(((0, 7),), 1)
        ((2, 4), (6, 7))
        """
        if self.block is not None:
            return BlockCyclicCut(parts, length, self.block)
        return ChunkCut(parts, length, self.unit, self.sizes, self.repeats)

    def misfit(self, parts: int, length: int) -> str | None:
        """Reason why `length` indices cannot be cut this way among `parts` coordinates; None where they can."""
        block = length // self.repeats
        if length % self.repeats:
            return "repeats must divide the length"
        if block % self.unit:
            what = "the length" if self.repeats == 1 else f"a block's length {block}"
            return f"the unit must divide {what}"
        if self.sizes is None:
            return None
        if len(self.sizes) != parts:
            return f"{len(self.sizes)} sizes were given, allowed are {parts}, one per coordinate"
        if sum(self.sizes) != block:
            return f"the sizes sum to {sum(self.sizes)}, they must sum to {block}"
        if any(size % self.unit for size in self.sizes):
            return "every size must be a multiple of the unit"
        return None

    @property
    def is_one_run(self) -> bool:
        """Whether each piece is one run of what is cut."""
        return self.repeats == 1 and self.block is None

    @property
    def grain(self) -> int:
        """Number of indices of which every piece has whole multiples, if the length has; units of later cuts must
        divide it.

        >>> Shard(0, unit=4).grain, Shard(0, block=6).grain
        (4, 6)
        """
        return self.unit if self.block is None else self.block

    @property
    def grain_name(self) -> str:
        """Name of the field that defines the grain."""
        return "unit" if self.block is None else "block"

    def cut_of_block(self, parts: int, length: int) -> ChunkCut | None:
        """Cut of each of the `repeats` equal blocks, of which coordinates have one run; None where blocks are dealt."""
        return ChunkCut(parts, length // self.repeats, self.unit, self.sizes) if self.block is None else None

    def on(self, dim: int) -> "Shard":
        """The same cut of another dim, as long.

        >>> Shard(0, unit=4).on(2)
        S2(unit=4)
        """
        return Shard(dim, self.unit, self.sizes, self.repeats, self.block)

    def whole_length(self, held: int, parts: int, index: int) -> int:
        """Length of a dim of which coordinate `index` holds `held`; without sizes, the length if all coordinates held
        as much."""
        if self.sizes is None:
            return held * parts
        own = self.sizes[index]
        return held // own * sum(self.sizes) if own else sum(self.sizes) * self.repeats

    def scaled(self, outer: int, inner: int) -> "Shard":
        """The cut of this dim merged with `outer` indices outside it and `inner` inside.

        LayoutError where that is no one cut.

        >>> Shard(0, unit=2).scaled(3, 5), Shard(0, block=2).scaled(1, 5)
        (S0(unit=10, repeats=3), S0(block=10))
        """
        if self.block is not None:
            if outer != 1:
                raise LayoutError(f"{self!r} would deal its blocks anew in each of {outer} indices outside it")
            return Shard(self.dim, block=max(self.block * inner, 1))
        sizes = None if self.sizes is None else tuple(size * inner for size in self.sizes)
        return Shard(self.dim, max(self.unit * inner, 1), sizes, self.repeats * outer)

    def divided(self, inner: int) -> "Shard | None":
        """The cut of a dim whose every index is `inner` indices of this dim; None where a piece ends inside one.

        Without sizes and blocks pieces end where their units do, whose lengths the caller must know to be multiples.

        >>> Shard(0, unit=10).divided(5), Shard(0, sizes=(4, 6)).divided(4), Shard(0, block=6).divided(3)
        (S0(unit=2), None, S0(block=2))
        """
        if self.block is not None:
            return None if self.block % inner else Shard(self.dim, block=self.block // inner)
        if self.sizes is None:
            return Shard(self.dim, lcm(self.unit, inner) // inner, None, self.repeats)
        if any(size % inner for size in self.sizes):
            return None
        sizes = tuple(size // inner for size in self.sizes)
        return Shard(self.dim, lcm(self.unit, inner) // inner, sizes, self.repeats)

    def of_whole_blocks(self, parts: int, length: int, start: int, stop: int, *, is_lone: bool) -> "Shard | None":
        """Cut of the indices [start, stop) that lets coordinates keep their own whole blocks; None where none exists.

        `is_lone` is True if no other axis cuts the dim.

        >>> Shard(0, repeats=3).of_whole_blocks(2, 12, 4, 12, is_lone=True)
        S0(repeats=2)
        >>> Shard(0, block=2).of_whole_blocks(2, 12, 4, 9, is_lone=True)
        S0(block=2)
        """
        if self.block is not None:
            return self if is_lone and start % (parts * self.block) == 0 else None
        block = length // self.repeats
        if start % block or stop % block:
            return None
        return Shard(self.dim, self.unit, self.sizes, int((stop - start) // block))


def joined(shards: Sequence[Shard], lengths: Sequence[int], parts: int, *, is_lone: bool) -> Shard | None:
    """The cut of tensors joined along the dim that `shards` cut, if each coordinate's parts are its part of the whole.

    `is_lone` is True if no other axis cuts the dim.

    >>> joined([Shard(0), Shard(0, repeats=2)], [4, 8], 2, is_lone=True)
    S0(repeats=3)
    >>> [joined([Shard(0, block=2)] * 2, lengths, 2, is_lone=True) for lengths in ([4, 3], [3, 4])]
    [S0(block=2), None]
    """
    first = shards[0]
    if any(shard.block is not None for shard in shards):
        alike = is_lone and all(shard == first for shard in shards)
        return first if alike and all(length % (parts * first.grain) == 0 for length in lengths[:-1]) else None
    blocks = [(length // shard.repeats, shard.unit, shard.sizes) for shard, length in zip(shards, lengths, strict=True)]
    if any(block != blocks[0] for block in blocks):  # lengths that a graph leaves open have no hash
        return None
    return Shard(first.dim, first.unit, first.sizes, sum(shard.repeats for shard in shards))


@dataclass(frozen=True, slots=True)
class Replicate(Placement):
    """Placement under which every coordinate of the axis holds equal values.

    >>> Replicate(), Replicate() == Replicate()
    (R, True)
    """

    def __repr__(self) -> str:
        return "R"


@checked_class
@dataclass(frozen=True, slots=True)
class Partial(Placement):
    """Placement that gives each coordinate of the axis one term; `reduce_op` over the terms gives the tensor.

    `reduce_op` is sum, avg, max, min or product, by name or as torch.distributed's ReduceOp (kept by name); every term
    has the tensor's shape along this axis. avg is a sum divided once by the number of coordinates. A redistribution to
    Replicate or Shard reduces, in coordinate order: half types in float32, rounded once. Several Partial axes of one
    tensor have one op, or sum with avg. Which dtypes have which ops is checked by DTensorSpec.

    Raises LayoutError for any other op.

    >>> Partial(), Partial("avg"), Partial().is_partial("avg")
    (P(sum), P(avg), False)
    """

    reduce_op: ReduceOp = "sum"

    def __post_init__(self) -> None:
        if not isinstance(self.reduce_op, str):
            object.__setattr__(self, "reduce_op", _name_of(self.reduce_op))
        if self.reduce_op not in REDUCE_OPS:
            raise LayoutError(f"Partial got reduce_op={self.reduce_op!r}; allowed are {', '.join(REDUCE_OPS)}")

    def __repr__(self) -> str:
        return f"P({self.reduce_op})"


def as_placement(given: Any) -> Any:
    """The placement of a placement of torch.distributed.tensor; anything else as it is.

    Torch's is known by the names of its class and module, so that torch is not imported to ask. Raises LayoutError for
    one that has no such form, as torch's _StridedShard.
    """
    if isinstance(given, Placement) or not type(given).__module__.startswith("torch.distributed.tensor"):
        return given
    name = type(given).__name__
    if name == "Shard":
        return Shard(given.dim)
    if name == "Replicate":
        return Replicate()
    if name == "Partial":
        return Partial(given.reduce_op)
    raise LayoutError(
        f"{given!r} is torch's {name}, which says less than a layout; write tritondt's Shard, Replicate or Partial, "
        "with order=... where axes cut a dim from right to left, or convert the tensor by tritondt.from_torch(x)"
    )


def as_placements(given: Any) -> tuple[Placement, ...]:
    """Placements of all axes as a tuple, torch's as ours; LayoutError for a text, or a placement by itself.

    >>> as_placements([Shard(0), Replicate()])
    (S0, R)
    """
    if isinstance(given, (list, tuple)):  # nearly always: each redistribution passes here
        for item in given:
            if not isinstance(item, Placement):
                return tuple([as_placement(item) for item in given])
        return tuple(given)
    if isinstance(given, str):
        raise LayoutError(
            f"placements were given as the text {given!r}; allowed are placements, one per mesh axis: "
            f"tritondt.parse_placements({given!r}) reads a text"
        )
    given = as_placement(given)
    if isinstance(given, Placement):
        raise LayoutError(
            f"placements were given as {given!r} by itself; allowed are placements, one per mesh axis: "
            f"{placements_code([given])}"
        )
    if not isinstance(given, Iterable):
        raise LayoutError(f"placements were given as {given!r}; allowed are placements, one per mesh axis: [Shard(0)]")
    return tuple(map(as_placement, given))


def placements_text(placements: Iterable[Placement]) -> str:
    """Placements of all axes as short text, which `parse_placements` reads.

    >>> placements_text((Shard(0), Replicate(), Partial()))
    '(S0, R, P(sum))'
    """
    return "(" + ", ".join(map(repr, placements)) + ")"


def placements_code(placements: Iterable[Placement]) -> str:
    """Placements of all axes as the Python expression that makes them.

    >>> placements_code((Shard(0, unit=4), Replicate(), Partial("avg")))
    "[Shard(0, unit=4), Replicate(), Partial('avg')]"
    """
    return "[" + ", ".join(map(_placement_code, placements)) + "]"


def _placement_code(placement: Placement) -> str:
    if isinstance(placement, Partial):
        return "Partial()" if placement.reduce_op == "sum" else f"Partial({placement.reduce_op!r})"
    if not isinstance(placement, Shard):
        return "Replicate()"
    details = [str(placement.dim)]
    for name, default in (("unit", 1), ("sizes", None), ("repeats", 1), ("block", None)):
        value = getattr(placement, name)
        if value != default:
            details.append(f"{name}={value}")
    return f"Shard({', '.join(details)})"


_SHARD = re.compile(r"S(-?\d+)(?:\((.*)\))?")
_PARTIAL = re.compile(r"P(?:\((\w+)\))?")
_DETAIL = re.compile(r"\s*(?:(unit|repeats|block)=(\d+)|sizes=(\d+(?:/\d+)*))\s*")


def _parse_placement(text: str) -> Placement:
    if text == "R":
        return Replicate()
    if match := _PARTIAL.fullmatch(text):
        return Partial(cast(ReduceOp, match[1] or "sum"))
    match = _SHARD.fullmatch(text)
    details = [_DETAIL.fullmatch(item) for item in (match[2] or "").split(",") if item] if match else []
    if match is None or None in details:
        raise LayoutError(
            f"cannot read the placement {text!r}; allowed are R, P, P(op), S<dim> and "
            "S<dim>(unit=4, sizes=5/0/3, repeats=2) or S<dim>(block=64), for example (S0, R)"
        )
    found: dict[str, Any] = {}
    for name, count, sizes in (detail.groups() for detail in details if detail is not None):
        if sizes is None:
            found[name] = int(count)
        else:
            found["sizes"] = tuple(map(int, sizes.split("/")))
    return Shard(int(match[1]), **found)


@checked
def parse_placements(text: str) -> tuple[Placement, ...]:
    """Placements that a text names: S0, R, P or P(op), separated by commas, in parentheses or not.

    A shard may have unit, sizes and repeats, or block: S0(unit=4), S0(sizes=5/0/3), S0(block=64). Raises LayoutError
    for any other text.

    >>> parse_placements("S0(unit=4, repeats=2), R, P")
    (S0(unit=4, repeats=2), R, P(sum))
    """
    text = text.strip()
    if text.startswith("(") and text.endswith(")"):
        text = text[1:-1]
    items = re.split(r",(?![^(]*\))", text)
    return tuple(_parse_placement(item.strip()) for item in items if item.strip())
