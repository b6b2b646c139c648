"""One measurement's sizes: how many elements every rank gives and gets, as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass

from tritondt.cli.bench.collective.kinds import KINDS, Kind
from tritondt.cli.bench.collective.splits import Matrix, aligned, divide, skewed_matrix, skewed_weights


@dataclass(frozen=True)
class Case:
    """A collective of `num_ranks` ranks on elements of `type` (nccl-tests' names).

    `matrix` has a row for each rank that sends and a column for each that receives where the collective is an
    all-to-all; where it divides otherwise, one row with each rank's part; else one number, what every rank has.
    """

    kind: Kind
    num_ranks: int
    type: str
    itemsize: int
    redop: str
    root: int
    matrix: Matrix

    @property
    def is_all_to_all(self) -> bool:
        """Whether each pair of ranks has a number of elements of its own."""
        return self.kind.name.startswith("all_to_all")

    @property
    def total(self) -> int:
        """Number of elements of all parts together, or of the one buffer."""
        return sum(self.matrix[0])

    def parts(self) -> tuple[int, ...]:
        """Number of elements of each rank's part of the whole."""
        return self.matrix[0]

    def sends(self, rank: int) -> tuple[int, ...]:
        """Number of elements that `rank` sends to each rank in an all-to-all."""
        return self.matrix[rank]

    def receives(self, rank: int) -> tuple[int, ...]:
        """Number of elements that `rank` gets from each rank in an all-to-all."""
        return tuple(row[rank] for row in self.matrix)

    def input_length(self, rank: int) -> int:
        """Number of elements of the buffer that `rank` gives."""
        name = self.kind.name.removesuffix("_v")
        if name == "all_to_all":
            return sum(self.sends(rank))
        if name in ("all_gather", "gather"):
            return self.parts()[rank]
        return 0 if name == "scatter" and rank != self.root else self.total

    def output_length(self, rank: int) -> int:
        """Number of elements of the buffer in which `rank` finds the result; 0 where only the root has one."""
        name = self.kind.name.removesuffix("_v")
        if name == "all_to_all":
            return sum(self.receives(rank))
        if name in ("reduce_scatter", "scatter"):
            return self.parts()[rank]
        return 0 if name in ("gather", "reduce") and rank != self.root else self.total

    @property
    def size(self) -> int:
        """Bytes of the largest buffer that a rank gives or gets: nccl-tests' size, and what algbw counts."""
        ranks = range(self.num_ranks)
        return self.itemsize * max(max(self.input_length(rank), self.output_length(rank)) for rank in ranks)

    @property
    def count(self) -> int:
        """Number of elements in nccl-tests' column: of one rank's part where parts are equal, else of the buffer."""
        if self.kind.divides and not self.kind.has_uneven_parts:
            return self.parts()[0]
        return self.size // self.itemsize

    def __str__(self) -> str:
        return f"{self.kind.name} of {self.size} bytes of {self.type}"


def make_case(
    name: str, num_ranks: int, type_and_size: tuple[str, int], redop: str, root: int, num_bytes: int, skew: float
) -> Case | None:
    """Case of about `num_bytes`, rounded down as in nccl-tests; None where nothing is left for a rank.

    >>> make_case("all_gather", 4, ("float", 4), "sum", 0, 1000, 0.5).matrix
    ((60, 60, 60, 60),)
    >>> make_case("all_gather_v", 4, ("float", 4), "sum", 0, 1000, 0.5).matrix
    ((30, 50, 70, 90),)
    >>> make_case("all_gather", 4, ("float", 4), "sum", 0, 8, 0.5) is None
    True
    """
    kind = KINDS[name]
    type_name, itemsize = type_and_size
    per_rank = aligned(num_bytes // num_ranks, itemsize) if kind.divides else num_bytes // itemsize
    if per_rank == 0:
        return None
    total = per_rank * num_ranks
    if name.startswith("all_to_all"):
        matrix = skewed_matrix(total, num_ranks, skew if kind.has_uneven_parts else 0.0)
    elif kind.has_uneven_parts:
        matrix = (divide(total, skewed_weights(num_ranks, skew)),)
    else:
        matrix = ((per_rank,) * num_ranks,) if kind.divides else ((per_rank,),)
    return _case(kind, num_ranks, type_name, itemsize, redop, root, matrix)


def case_of_matrix(
    name: str, num_ranks: int, type_and_size: tuple[str, int], redop: str, root: int, bytes_matrix: Matrix
) -> Case:
    """Case whose parts are a file's bytes, each rounded down to whole 16 bytes."""
    type_name, itemsize = type_and_size
    matrix = tuple(tuple(aligned(number, itemsize) for number in row) for row in bytes_matrix)
    return _case(KINDS[name], num_ranks, type_name, itemsize, redop, root, matrix)


def case_of_elements(
    name: str, num_ranks: int, type_and_size: tuple[str, int], redop: str, root: int, parts: tuple[int, ...]
) -> Case:
    """Case of so many elements: of each rank's part, of each pair's in an all-to-all, or of the one buffer.

    >>> case_of_elements("all_to_all", 2, ("float", 4), "none", 0, (3, 3)).matrix
    ((3, 3), (3, 3))
    """
    type_name, itemsize = type_and_size
    matrix = (parts,) * num_ranks if name.startswith("all_to_all") else (parts,)
    return _case(KINDS[name], num_ranks, type_name, itemsize, redop, root, matrix)


def _case(kind: Kind, num_ranks: int, type_name: str, itemsize: int, redop: str, root: int, matrix: Matrix) -> Case:
    return Case(
        kind,
        num_ranks,
        type_name,
        itemsize,
        redop if kind.reduces else "none",
        root if kind.has_root else -1,
        matrix,
    )
