"""Blocks of a model that repeat: children of one list that have the same classes, names and shapes all the way down."""

from collections.abc import Iterator

from torch import nn

_LISTS = (nn.ModuleList, nn.Sequential)
# Attributes by which blocks know their place, which tells no kinds apart.
_PLACES = ("layer_idx", "layer_id", "layer_index", "layer_number", "index", "idx")


class RepeatedBlocks:
    """Groups of like blocks in the outermost lists of a model; the first of each group stands for the others.

    >>> layers = nn.ModuleList([nn.Sequential(nn.Linear(2, 2)) for _ in range(3)])
    >>> blocks = RepeatedBlocks(nn.ModuleDict({"layers": layers}))
    >>> blocks.number_of("layers.0"), blocks.pattern("layers.0"), blocks.block_of("layers.2.0")
    (3, 'layers.*', 'layers.2')
    """

    def __init__(self, model: nn.Module) -> None:
        self._groups: dict[str, list[list[int]]] = {}
        for name, module in model.named_modules():
            inside = any(name.startswith(f"{other}.") for other in self._groups)
            if not isinstance(module, _LISTS) or inside or len(module) < 2:
                continue
            by_kind: dict[object, list[int]] = {}
            for index, child in enumerate(module):
                by_kind.setdefault(_kind(child), []).append(index)
            if len(by_kind) < len(module) and all(map(_is_block, module)):
                self._groups[name] = list(by_kind.values())

    def kept(self) -> dict[str, list[int]]:
        """Lists by name, and the indices of those children that stand for others."""
        return {name: [indices[0] for indices in groups] for name, groups in self._groups.items()}

    def kept_with_another(self) -> Iterator[tuple[int, dict[str, list[int]]]]:
        """For each kind of which there are several: how many others stand behind the first, and `kept` with one more.

        >>> list(RepeatedBlocks(nn.Sequential(*(nn.Sequential(nn.Linear(2, 2)) for _ in range(5)))).kept_with_another())
        [(4, {'': [0, 1]})]
        """
        for name, groups in self._groups.items():
            for indices in groups:
                if len(indices) > 1:
                    yield len(indices) - 1, {**self.kept(), name: sorted([*self.kept()[name], indices[1]])}

    def names(self) -> list[str]:
        """Names of all blocks of the lists."""
        return [
            f"{name}.{index}".lstrip(".")
            for name, groups in self._groups.items()
            for indices in groups
            for index in indices
        ]

    def _place(self, name: str) -> tuple[str, int, str, list[list[int]]] | None:
        """The list that a module is in, its index there, the rest of its name, and the groups; None outside of all."""
        for listed, groups in self._groups.items():
            prefix = f"{listed}." if listed else ""
            index, _, rest = name.removeprefix(prefix).partition(".")
            if name.startswith(prefix) and index.isdecimal():
                return prefix, int(index), rest, groups
        return None

    def _in_list(self, name: str, wanted: object, found: tuple[str, int, str, list[list[int]]]) -> str:
        prefix, _, rest, _ = found
        return f"{prefix}{wanted}.{rest}" if rest else f"{prefix}{wanted}"

    def block_of(self, name: str) -> str:
        """Name of the block that a module is in; "" outside of all."""
        found = self._place(name)
        return "" if found is None else f"{found[0]}{found[1]}"

    def from_stand_in(self, name: str) -> str:
        """Name in the model of a module of a stand-in."""
        found = self._place(name)
        return name if found is None else self._in_list(name, found[3][found[1]][0], found)

    def all_alike(self, name: str) -> list[str]:
        """Names of all modules like one of a first block."""
        found = self._place(name)
        if found is None:
            return [name]
        indices = next((indices for indices in found[3] if found[1] in indices), [found[1]])
        return [self._in_list(name, index, found) for index in indices]

    def number_of(self, name: str) -> int:
        """Number of modules like one of a first block."""
        return len(self.all_alike(name))

    def pattern(self, name: str) -> str:
        """Pattern of all modules like one: a star for the index where all blocks of the list are alike."""
        found = self._place(name)
        return self._in_list(name, "*", found) if found is not None and len(found[3]) == 1 else name


def _is_block(module: nn.Module) -> bool:
    return next(module.children(), None) is not None and next(module.parameters(), None) is not None


def _kind(module: nn.Module) -> object:
    own = tuple(
        (name, None if held is None else (tuple(held.shape), held.dtype, held.requires_grad))
        for name, held in (*module._parameters.items(), *module._buffers.items())
    )
    # Plain attributes, as a layer's window of attention, tell layers of one class apart.
    plain = tuple(
        (name, value)
        for name, value in sorted(vars(module).items())
        if isinstance(value, bool | int | float | str | tuple) and name[:1] != "_" and name not in _PLACES
    )
    return (type(module), own, repr(plain), tuple((name, _kind(child)) for name, child in module.named_children()))
