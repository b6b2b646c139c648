"""Cases of the redistribute benchmark: pairs of placements on meshes of all ranks, and sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isqrt, prod

from tritondt.errors import LayoutError
from tritondt.sharding.layout import Layout
from tritondt.sharding.placement import Partial, Placement, ReduceOp, Replicate, Shard, parse_placements

# One axis: what tensor and data parallel training does at its boundaries. Two axes: the pairs with
# which DTensor's bytes were compared to the minimum, and their neighbours with a Partial.
_DEFAULT_PAIRS = (
    *("S0->R", "S1->R", "S0->S1", "S1->S0", "R->S1", "P->R", "P->S0", "P->S1"),
    *("S0,S0->R,S0", "S0,S1->S1,S0", "S0,R->R,S0", "S0,S0->S1,S1", "P,S0->S0,S0", "R,S0->S0,S0"),
    *("P,P->R,R", "S0,S1->R,R", "S1,S0->S0,S1", "P,S1->S0,S1", "P,P->S0,S1", "R,P->S0,R"),
)


@dataclass(frozen=True)
class Pair:
    """Placements before and after, one of each per mesh axis."""

    source: tuple[Placement, ...]
    target: tuple[Placement, ...]

    @property
    def reduce_op(self) -> ReduceOp | None:
        """How terms become one, which is the same on all axes; None where there are none."""
        return next((placement.reduce_op for placement in self.source if isinstance(placement, Partial)), None)

    def reduced_by(self, op: ReduceOp) -> Pair:
        """The pair with another reduction in place of its own."""
        return replace(
            self,
            source=tuple(Partial(op) if isinstance(placement, Partial) else placement for placement in self.source),
        )


@dataclass(frozen=True)
class Case:
    """One redistribution: a tensor of `shape`, on a mesh that all ranks make up, from and to placements."""

    shape: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    pair: Pair

    @property
    def source(self) -> Layout:
        """Layout before the redistribution."""
        return Layout(self.mesh_shape, self.pair.source, self.shape)

    @property
    def target(self) -> Layout:
        """Layout after the redistribution."""
        return Layout(self.mesh_shape, self.pair.target, self.shape)

    @property
    def size(self) -> str:
        """Shape as text, as in 64x96."""
        return "x".join(map(str, self.shape))

    @property
    def pair_text(self) -> str:
        """Placements as `--pairs` takes them, as in P,S1->S0,S1."""
        sides = (",".join(map(str, placements)) for placements in (self.pair.source, self.pair.target))
        return "->".join(sides).replace("P(sum)", "P")

    @property
    def numel(self) -> int:
        """Number of elements of the whole tensor."""
        return prod(self.shape)

    def __str__(self) -> str:
        mesh = "x".join(map(str, self.mesh_shape))
        return f"{self.size} {self.source} -> {self.target} on {mesh}"


def parse_sizes(text: str) -> tuple[tuple[int, ...], ...]:
    """Shapes from text; LayoutError for anything else.

    >>> parse_sizes("64x96,1023x1025")
    ((64, 96), (1023, 1025))
    """
    try:
        return tuple(tuple(int(length) for length in size.split("x")) for size in text.split(","))
    except ValueError as error:
        raise LayoutError(
            f"cannot read the sizes {text!r}; allowed are lengths joined by x, sizes joined by "
            "commas, for example 64x96,1023x1025"
        ) from error


def shape_of(num_bytes: int, itemsize: int) -> tuple[int, int]:
    """Shape of a matrix of about so many bytes, with up to 1,024 columns.

    >>> shape_of(1 << 20, 4), shape_of(100, 4)
    ((512, 512), (6, 4))
    """
    numel = max(num_bytes // itemsize, 1)
    columns = min(1 << (isqrt(numel).bit_length() - 1), 1024)
    return numel // columns, columns


def parse_pairs(text: str) -> tuple[Pair, ...]:
    """Pairs from text such as "S0->R; S0,S1->R,R".

    LayoutError for what cannot be read, and for what has no one right result that plain torch could
    give: a target with a Partial, cuts other than torch.chunk's, several reductions in one pair.

    >>> parse_pairs("S0->R; P,S0->S0,S0")[1]
    Pair(source=(P(sum), S0), target=(S0, S0))
    """
    return tuple(_parse_pair(item) for item in text.split(";") if item.strip())


def _parse_pair(text: str) -> Pair:
    before, arrow, after = text.partition("->")
    if not arrow:
        raise LayoutError(
            f"cannot read the pair {text.strip()!r}; allowed is source->target, for example "
            '"S0->R" or, on a mesh of two axes, "S0,S1->R,R"; pairs are joined by ;'
        )
    pair = Pair(parse_placements(before), parse_placements(after))
    if len(pair.source) != len(pair.target):
        raise LayoutError(
            f"the pair {text.strip()!r} has {len(pair.source)} placements before and "
            f"{len(pair.target)} after; both need one per mesh axis"
        )
    plain = [Replicate(), *(Shard(p.dim) for p in pair.source + pair.target if isinstance(p, Shard))]
    if pair.reduce_op is not None:
        plain.append(Partial(pair.reduce_op))
    is_plain = all(placement in plain for placement in pair.source + pair.target)
    if not is_plain or any(isinstance(placement, Partial) for placement in pair.target):
        raise LayoutError(
            f"the pair {text.strip()!r} cannot be checked element by element against plain torch; "
            "allowed are R and S<dim>, before the arrow also P, or P(max) and the like alike on all axes"
        )
    return pair


def mesh_shape(num_ranks: int, num_axes: int) -> tuple[int, ...] | None:
    """Shape of a mesh of all ranks with the given number of axes of two or more ranks, as even as it goes; None if
    there is none.

    >>> mesh_shape(4, 1), mesh_shape(4, 2), mesh_shape(12, 2), mesh_shape(5, 2)
    ((4,), (2, 2), (3, 4), None)
    """
    if num_axes == 1:
        return (num_ranks,)
    first = round(num_ranks ** (1 / num_axes))
    while first > 1:
        rest = None if num_ranks % first else mesh_shape(num_ranks // first, num_axes - 1)
        if rest is not None and min(rest) > 1:
            return (first, *rest)
        first -= 1
    return None


def with_reductions(pairs: Sequence[Pair], ops: Sequence[ReduceOp]) -> tuple[Pair, ...]:
    """Pairs with terms once for each of the reductions, in place of their own, and the others once.

    >>> [str(pair.source) for pair in with_reductions(parse_pairs("S0->R; P->R"), ("max", "min"))]
    ['(S0,)', '(P(max),)', '(P(min),)']
    """
    return tuple(
        other for pair in pairs for other in ([pair] if pair.reduce_op is None else [pair.reduced_by(op) for op in ops])
    )


def default_pairs(num_ranks: int) -> tuple[Pair, ...]:
    """Pairs that are measured unless others are asked for, those for which `num_ranks` make a mesh."""
    pairs = parse_pairs(";".join(_DEFAULT_PAIRS))
    return tuple(pair for pair in pairs if mesh_shape(num_ranks, len(pair.source)) is not None)


def make_cases(num_ranks: int, shapes: Sequence[tuple[int, ...]], pairs: Sequence[Pair]) -> tuple[Case, ...]:
    """Cases of every pair at every size; LayoutError where a size, a pair and the ranks do not go together.

    >>> [str(case) for case in make_cases(4, [(64, 96)], parse_pairs("S0->R; S0,S1->R,R"))]
    ['64x96 (S0) -> (R) on 4', '64x96 (S0, S1) -> (R, R) on 2x2']
    """
    found = []
    for shape in shapes:
        for pair in pairs:
            sizes = mesh_shape(num_ranks, len(pair.source))
            if sizes is None:
                raise LayoutError(
                    f"{num_ranks} ranks make no mesh of {len(pair.source)} axes with two or more "
                    f"ranks each, which {pair.source} -> {pair.target} needs"
                )
            case = Case(shape, sizes, pair)
            assert case.source.shape == case.target.shape, "both layouts can exist"
            found.append(case)
    return tuple(found)
