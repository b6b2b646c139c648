"""Entries of a model and the tensors of files that they are made of, which may have other names and be parts of one.

Experts that are one parameter of a model are a tensor each in many files. Which name becomes which, and how tensors are
joined, says transformers' own mapping for a model.
"""

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from tritondt.errors import CheckpointError
from tritondt.interop.transformers.weight_files import Weight

# Joined by these, in this order, a tensor of a file is a box of the parameter.
_JOINED = (["MergeModulelist"], ["MergeModulelist", "Concatenate"])


class Piece(NamedTuple):
    """A tensor of a file as a box of an entry of a model, at `offsets`; the whole of it for none.

    A box of a parameter of experts has one dim more than the tensor of the file: that of the expert.
    """

    weight: Weight
    path: Path
    offsets: tuple[int, ...] = ()

    def overlap(self, box: Sequence[slice]) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
        """The part of this tensor in a box of the entry, as slices of the tensor and of the box; None for no part.

        >>> import torch
        >>> piece = Piece(Weight("w", (4, 3), torch.float32), Path(), (2, 4, 0))
        >>> piece.overlap([slice(1, 3), slice(6, 9), slice(0, 2)])
        ((slice(2, 4, None), slice(0, 2, None)), (slice(1, 2, None), slice(0, 2, None), slice(0, 2, None)))
        """
        own, within = [], []
        for wanted, offset, length in zip(box, self.offsets, (1, *self.weight.shape), strict=True):
            start, stop = max(wanted.start, offset), min(wanted.stop, offset + length)
            if start >= stop:
                return None
            own.append(slice(start - offset, stop - offset))
            within.append(slice(start - wanted.start, stop - wanted.start))
        return tuple(own[1:]), tuple(within)


class Pieces(NamedTuple):
    """The tensors of files that an entry of a model is made of, and the shape of the entry."""

    shape: tuple[int, ...]
    parts: tuple[Piece, ...]


def pieces_of(model: Any, found: Mapping[str, tuple[Weight, Path]]) -> dict[str, Pieces]:
    """Pieces of the entries of a model by the names that its files' tensors get in it.

    Raises CheckpointError for tensors that are joined in a way of which no part can be read.
    """
    alone: dict[str, Pieces] = {}
    joined: dict[str, tuple[Any, dict[str, list[Piece]]]] = {}
    for name, target, converter, pattern in _renamed(model, found):
        weight, path = found[name]
        if converter is None:
            alone[target] = Pieces(weight.shape, (Piece(weight, path),))
        else:
            joined.setdefault(target, (converter, {}))[1].setdefault(pattern, []).append(Piece(weight, path))
    return {**{name: _joined(name, converter, parts) for name, (converter, parts) in joined.items()}, **alone}


def _renamed(model: Any, found: Mapping[str, Any]) -> Iterator[tuple[str, str, Any, str]]:
    """Names of files, those in the model, and the converter that joins them and its pattern, if any."""
    if find_spec("transformers.conversion_mapping") is None or not hasattr(model, "base_model_prefix"):
        for name in found:
            yield name, name, None, ""
        return
    loading = import_module("transformers.core_model_loading")
    mapping = import_module("transformers.conversion_mapping").get_model_conversion_mapping(model)
    converters = [each for each in mapping if isinstance(each, loading.WeightConverter)]
    renamings = [each for each in mapping if not isinstance(each, loading.WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state = model.state_dict(keep_vars=True)
    for name in found:
        target, pattern = loading.rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        # A converter meets names that are those of the model already, too.
        is_own = name in state or pattern is None
        yield name, name if name in state else target, None if is_own else by_pattern[pattern], pattern or ""


def _joined(name: str, converter: Any, parts: Mapping[str, list[Piece]]) -> Pieces:
    """Pieces of a parameter of experts: a tensor for each expert, of one kind or of several below each other."""
    names = [type(operation).__name__ for operation in converter.operations]
    dims = [operation.dim for operation in converter.operations if hasattr(operation, "dim")]
    if names not in _JOINED or dims != list(range(len(names))):
        raise CheckpointError(
            f"transformers makes {name} of {len(parts)} kinds of tensors by {', '.join(names)}, of which no part can "
            "be read alone; allowed are experts that are stacked, or stacked and concatenated"
        )
    numbers = {len(pieces) for pieces in parts.values()}
    shapes = {piece.weight.shape[1:] for pieces in parts.values() for piece in pieces}
    if set(parts) != set(converter.source_patterns) or len(numbers) != 1 or len(shapes) != 1:
        counts = ", ".join(f"{len(parts.get(pattern, ()))} of {pattern}" for pattern in converter.source_patterns)
        raise CheckpointError(f"{name} has {counts} in the files; allowed are as many of each, of one width")
    placed: list[Piece] = []
    at = 0
    for pattern in converter.source_patterns:
        ordered = sorted(parts[pattern], key=lambda piece: _natural(piece.weight.name))
        rows = {piece.weight.shape[0] for piece in ordered}
        if len(rows) != 1:
            raise CheckpointError(f"{name} has {pattern} of {sorted(rows)} rows in the files; allowed is one number")
        placed += [piece._replace(offsets=(expert, at, 0)) for expert, piece in enumerate(ordered)]
        at += rows.pop()
    return Pieces((numbers.pop(), at, *shapes.pop()), tuple(placed))


def _natural(name: str) -> list[tuple[int, str]]:
    """Key by which numbers between dots are in the order of their values.

    >>> sorted(["e.10.w", "e.9.w"], key=_natural)
    ['e.9.w', 'e.10.w']
    """
    return [(int(part), "") if part.isdecimal() else (0, part) for part in name.split(".")]
