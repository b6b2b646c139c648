"""Drawing of a statement's arguments: a template's fields, filled with variables and numbers that fit together.

    {x:fi}  a tensor of these kinds of dtypes     {y}  one that broadcasts with x    {z}  one of x's shape
    {d}     a dim of x                            {i}  an index along d              {n}  a small number

All fields are methods of `Draw` named `field_...`; a field that occurs twice is one value.
"""

import random
import re
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

KINDS = {"f": (torch.float32, torch.float64, torch.bfloat16), "i": (torch.int64, torch.int8), "b": (torch.bool,)}
KINDS |= {"c": (torch.complex64,), "d": (torch.float64,), "l": (torch.int64,)}
_FIELD = re.compile(r"\{(\w+)(?::(\w+))?\}")

Fresh = Callable[[Sequence[int], torch.dtype], str]


class NoFitError(Exception):
    """No variable fits a template; another one is drawn."""


class Draw:
    """Arguments of one statement, drawn from the variables of a program; `fresh` makes another one."""

    def __init__(self, chosen: random.Random, tensors: dict[str, torch.Tensor], fresh: Fresh) -> None:
        self.chosen, self.tensors, self._fresh = chosen, tensors, fresh
        self.reads: list[str] = []
        self._fields: dict[str, str] = {}

    def fill(self, template: str) -> str:
        """The template with all its fields filled, x first. Raises NoFitError."""
        for match in _FIELD.finditer(template):
            if match[1] == "x":
                self._value("x", match[2])
                break
        return _FIELD.sub(self._fill_field, template)

    def _fill_field(self, match: re.Match[str]) -> str:
        return self._value(match[1], match[2])

    def _value(self, name: str, argument: str | None = None) -> str:
        """What fills a field, drawn where it is met first."""
        if name not in self._fields:
            made = getattr(self, f"field_{name}")
            self._fields[name] = str(made() if argument is None else made(argument))
        return self._fields[name]

    @property
    def x(self) -> torch.Tensor:
        """The tensor of the field x."""
        return self.tensors[self._fields["x"]]

    def of(self, field: str) -> torch.Tensor:
        """The tensor of a field."""
        return self.tensors[self._fields[field]]

    def pick(self, fits: Callable[[torch.Tensor], bool]) -> str:
        """A variable that fits, later ones more often; noted as read."""
        found = [name for name, tensor in self.tensors.items() if fits(tensor)]
        if not found:
            raise NoFitError
        return self.read(found[max(self.chosen.randrange(len(found)), self.chosen.randrange(len(found)))])

    def read(self, name: str) -> str:
        """The variable, noted as read."""
        if name not in self.reads:
            self.reads.append(name)
        return name

    def fresh(self, shape: Sequence[int], dtype: torch.dtype) -> str:
        """A new variable of this shape."""
        if prod(shape) > 300:
            raise NoFitError
        name = self._fresh(tuple(shape), dtype)
        return self.read(name)

    def pick_or_fresh(self, shape: Sequence[int], dtype: torch.dtype) -> str:
        """A variable of this shape and dtype, an old one where there is one, half of the time."""
        old = [name for name, tensor in self.tensors.items() if tensor.shape == tuple(shape) and tensor.dtype == dtype]
        return self.read(self.chosen.choice(old)) if old and self.chosen.random() < 0.6 else self.fresh(shape, dtype)

    def field_x(self, kinds: str = "fibc") -> str:
        wanted, least = _dtypes(kinds), _digit(kinds)
        return self.pick(lambda tensor: tensor.dtype in wanted and tensor.ndim >= least)

    field_u = field_w = field_x

    def field_y(self, kinds: str = "") -> str:
        x, wanted = self.x, _dtypes(kinds) or (self.x.dtype,)
        if self.chosen.random() < 0.2 and not kinds:
            wanted = KINDS["f"] + KINDS["i"]
        if self.chosen.random() < 0.6:
            try:
                return self.pick(lambda tensor: tensor.dtype in wanted and _broadcasts(tensor.shape, x.shape))
            except NoFitError:
                pass
        shape = [length if self.chosen.random() < 0.8 else 1 for length in x.shape]
        return self.fresh(shape[self.chosen.choice((0, 0, 0, len(shape) // 2)) :], self.chosen.choice(wanted))

    def field_z(self, kinds: str = "") -> str:
        return self.pick_or_fresh(self.x.shape, self.chosen.choice(_dtypes(kinds) or (self.x.dtype,)))

    field_zz = field_z

    def field_mask(self) -> str:
        return self.pick_or_fresh(self.x.shape, torch.bool)

    def field_d(self) -> int:
        if not self.x.ndim:
            raise NoFitError
        return self.chosen.randrange(-self.x.ndim, self.x.ndim)

    field_e = field_d

    @property
    def length(self) -> int:
        """The length of dim d."""
        return self.x.shape[int(self._value("d"))]

    def field_ds(self) -> tuple[int, ...]:
        return tuple(self.chosen.sample(range(self.x.ndim), self.chosen.randint(0, self.x.ndim)))

    def field_perm(self) -> tuple[int, ...]:
        return tuple(self.chosen.sample(range(self.x.ndim), self.x.ndim))

    def field_i(self) -> int:
        if not self.length:
            raise NoFitError
        return self.chosen.randrange(-self.length, self.length)

    def field_n(self) -> int:
        return self.chosen.choice((-2, -1, 1, 2, 3))

    field_m = field_n

    def field_k(self) -> int:
        return self.chosen.choice((1, 1, 2, 2, 3))

    def field_flag(self) -> bool:
        return self.chosen.random() < 0.5

    field_flag2 = field_flag

    def field_off(self) -> int:
        return self.chosen.choice((0, 0, 1, -1))

    def field_dtype(self) -> str:
        kind = self.chosen.choice("ffic" if self.x.is_complex() else "ffib")
        return str(self.chosen.choice(KINDS["c"] if self.x.is_complex() and kind == "c" else KINDS[kind]))

    def field_shape(self) -> tuple[int, ...]:
        """Another shape for as many elements: dims merged and split."""
        found: list[int] = []
        left = self.x.numel()
        while left > 1 and len(found) < 4:
            divisors = [value for value in range(2, left + 1) if left % value == 0]
            found.append(self.chosen.choice(divisors))
            left //= found[-1]
        if left != 1 or self.chosen.random() < 0.2:
            found.append(left)
        if self.chosen.random() < 0.3 and self.x.ndim > 1:
            at = self.chosen.randrange(self.x.ndim - 1)
            found = [*self.x.shape[:at], self.x.shape[at] * self.x.shape[at + 1], *self.x.shape[at + 2 :]]
        return tuple(found)

    def field_split(self) -> tuple[int, ...]:
        parts = [value for value in range(1, self.length + 1) if self.length % value == 0]
        part = self.chosen.choice(parts or [1])
        return (part, self.length // part)

    def field_bigger(self) -> tuple[int, ...]:
        grown = [self.chosen.choice((1, 2, 3)) if length == 1 else length for length in self.x.shape]
        return (*self.chosen.choice(((), (), (2,))), *grown)

    def field_repeats(self) -> tuple[int, ...]:
        return tuple(self.chosen.choice((1, 1, 2)) for _ in range(max(1, self.x.ndim)))

    def field_rest(self) -> int:
        """A length that is there from index `lo` of dim d on."""
        return self.chosen.randint(0, self.length - int(self._value("lo")))

    def field_lo(self) -> int:
        return self.chosen.randint(0, self.length)

    def field_index(self, kinds: str = "") -> str:
        """What stands in brackets behind x: numbers, slices, lists, None and an ellipsis; masks for the kinds `b`."""
        items = []
        for length in self.x.shape[: self.chosen.randint(0, self.x.ndim)]:
            items.append(self._index_item(length, f"nsssslb:{kinds}" if kinds else "nssssl:"))
        if self.chosen.random() < 0.15:
            items.insert(self.chosen.randint(0, len(items)), "None")
        if self.chosen.random() < 0.2:
            items.insert(self.chosen.randint(0, len(items)), "...")
        return ", ".join(items) or "..."

    def _index_item(self, length: int, kinds: str) -> str:
        kind = self.chosen.choice(kinds)
        if kind == "n" and length:
            return str(self.chosen.randrange(-length, length))
        if kind == "l" and length:
            return str([self.chosen.randrange(length) for _ in range(self.chosen.choice((1, 2, 2, 3)))])
        if kind == "b":
            return self.pick_or_fresh((length,), torch.bool)
        if kind == ":":
            return ":"
        start, stop = self.chosen.randint(-length - 1, length), self.chosen.randint(-length, length + 2)
        step = self.chosen.choice(("", "", ":2", ":3"))
        return f"{start if self.chosen.random() < 0.7 else ''}:{stop if self.chosen.random() < 0.6 else ''}{step}"

    def field_places(self) -> str:
        """Indices along dim d, as a variable of whole numbers."""
        if not self.length:
            raise NoFitError
        fits = [name for name, tensor in self.tensors.items() if _are_indices(tensor, self.length, 1)]
        if fits and self.chosen.random() < 0.7:
            return self.read(self.chosen.choice(fits))
        base = self.fresh((self.chosen.randint(1, 4),), torch.int64)
        return f"({base} % {self.length})"

    def field_matrix(self) -> str:
        """A matrix that may stand on the right of x."""
        if not self.x.ndim:
            raise NoFitError
        return self.pick_or_fresh((self.x.shape[-1], self.chosen.choice((1, 2, 3, 4, 6))), self.x.dtype)

    def field_rows(self) -> str:
        """A matrix of as many columns as x has."""
        return self.pick_or_fresh((self.chosen.choice((1, 2, 4, 5)), self.x.shape[-1]), self.x.dtype)

    def field_batch(self) -> str:
        """A batch of matrices for the right of those of x."""
        if self.x.ndim < 3:
            raise NoFitError
        return self.pick_or_fresh((*self.x.shape[:-2], self.x.shape[-1], self.chosen.choice((1, 2, 3))), self.x.dtype)

    def field_vector(self) -> str:
        """A vector as long as x's last dim."""
        if not self.x.ndim:
            raise NoFitError
        return self.pick_or_fresh(self.x.shape[-1:], self.x.dtype)

    field_vector2 = field_vector

    def field_beside(self) -> str:
        """A tensor that can be joined with x along d."""
        shape = list(self.x.shape)
        shape[int(self._value("d"))] = self.chosen.choice((0, 1, 2, 3, 4))
        return self.pick_or_fresh(shape, self.x.dtype)

    def field_part(self) -> str:
        """As x, but with as many elements along d as `places` has."""
        shape = list(self.x.shape)
        places = self.tensors[next(name for name in self.reads if name in self._value("places"))]
        shape[int(self._value("d"))] = places.numel()
        return self.fresh(shape, self.x.dtype)

    def field_index_like(self) -> str:
        """Indices along d in x's shape."""
        if not self.length:
            raise NoFitError
        return f"({self.pick_or_fresh(self.x.shape, torch.int64)} % {self.length})"

    def field_kernel(self) -> str:
        if self.x.ndim != 3 or 0 in self.x.shape:
            raise NoFitError
        return self.fresh((2, self.x.shape[1], self.chosen.choice((1, 2, 3))), self.x.dtype)

    def field_classes(self) -> str:
        """A class for each row of x."""
        if self.x.ndim != 2 or 0 in self.x.shape:
            raise NoFitError
        return f"({self.fresh(self.x.shape[:1], torch.int64)} % {self.x.shape[1]})"


def _dtypes(kinds: str) -> tuple[torch.dtype, ...]:
    found: tuple[Any, ...] = ()
    for kind in kinds:
        found += KINDS.get(kind, ())
    return found


def _digit(kinds: str) -> int:
    return int(kinds[-1]) if kinds[-1].isdigit() else 0


def _broadcasts(one: Sequence[int], other: Sequence[int]) -> bool:
    pairs = zip(reversed(one), reversed(other), strict=False)
    return all(length in (1, of) or of == 1 for length, of in pairs)


def _are_indices(tensor: torch.Tensor, length: int, ndim: int) -> bool:
    if tensor.dtype is not torch.int64 or tensor.ndim != ndim or not tensor.numel() or tensor.is_inference():
        return False
    return bool((tensor >= 0).all()) and bool((tensor < length).all())
