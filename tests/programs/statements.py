"""Statements of a program, as values that print as Python, and the program that they make."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType
from typing import TypeAlias


@dataclass(frozen=True)
class Make:
    """A tensor of random small numbers under some placements."""

    name: str
    seed: int
    shape: tuple[int, ...]
    dtype: str
    placements: tuple[str, ...]
    order: tuple[int, ...] | None = None
    requires_grad: bool = False

    kind = "make"
    reads: tuple[str, ...] = ()

    @property
    def makes(self) -> tuple[str, ...]:
        """The variable that it sets."""
        return (self.name,)

    @property
    def source(self) -> str:
        """The statement in Python."""
        text = ", ".join(self.placements)
        arguments = (self.seed, self.shape, self.dtype, text, self.order, self.requires_grad)
        return f"{self.name} = place.make({', '.join(map(repr, arguments))})"


@dataclass(frozen=True)
class Move:
    """A redistribution, at once or asynchronous, or only its prefetch (which makes nothing)."""

    name: str | None
    tensor: str
    placements: tuple[str, ...]
    order: tuple[int, ...] | None = None
    async_op: bool = False

    @property
    def kind(self) -> str:
        """The name by which such statements are left out."""
        return "prefetch" if self.name is None else "async" if self.async_op else "redistribute"

    @property
    def makes(self) -> tuple[str, ...]:
        """The variable that it sets."""
        return () if self.name is None else (self.name,)

    @property
    def reads(self) -> tuple[str, ...]:
        """The variable that it needs."""
        return (self.tensor,)

    @property
    def source(self) -> str:
        """The statement in Python."""
        text = ", ".join(self.placements)
        if self.name is None:
            return f"place.prefetch({self.tensor}, {text!r}, {self.order})"
        asked = ", async_op=True" if self.async_op else ""
        return f"{self.name} = place.move({self.tensor}, {text!r}, {self.order}{asked})"


@dataclass(frozen=True)
class Call:
    """Any other statement: its Python text, what it reads and sets, and the autograd mode around it."""

    kind: str
    code: str
    reads: tuple[str, ...]
    makes: tuple[str, ...] = ()
    mode: str = ""

    @property
    def source(self) -> str:
        """The statement in Python."""
        if not self.mode:
            return self.code
        return f"with torch.{self.mode}():\n" + "\n".join(f"    {line}" for line in self.code.split("\n"))


Statement: TypeAlias = Make | Move | Call


@dataclass(frozen=True)
class Program:
    """Statements, the mesh that they run on, and the numbers of those that one device refuses."""

    seed: int
    world_size: int
    mesh_shape: tuple[int, ...]
    ranks: tuple[int, ...]
    statements: tuple[Statement, ...]
    refused_by_one_device: frozenset[int] = frozenset()


@lru_cache(maxsize=4096)
def compiled(source: str) -> CodeType:
    """The code of a statement."""
    return compile(source, f"<{source}>", "exec")


def without(statements: Sequence[Statement], dropped: set[int]) -> list[Statement]:
    """The statements but for some, and for those that need what these set."""
    return [statements[number] for number in kept_numbers(statements, dropped)]


def kept_numbers(statements: Sequence[Statement], dropped: set[int]) -> Iterator[int]:
    """The numbers of the statements that can run when some are dropped."""
    known: set[str] = set()
    for number, statement in enumerate(statements):
        if number not in dropped and known.issuperset(statement.reads):
            known.update(statement.makes)
            yield number
