"""Regions that heads or features can be cut through: linear layers in, whatever is between, one linear layer out.

Found in a recording by going back from the input of a linear layer: a region begins at linear layers alone, and nothing
of it is read outside.
"""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import NamedTuple

from torch import nn

from tritondt.found_plan.recording import Call, Recording
from tritondt.parallel.linear import linear_features

# Operators that hand parts of a projection's features on as they are.
_SPLITS = ("aten.split.Tensor", "aten.split_with_sizes.default", "aten.unbind.int", "aten.chunk.default")
_SAME = ("aten.transpose.int", "aten.permute.default", "aten.t.default", "aten.clone.default", "aten.detach.default")


_RANDOM = ("dropout", "bernoulli", "rand")


class FeatureUnits(NamedTuple):
    """How features of a projection stay together: `unit` neighbours, in `repeats` equal blocks that are cut alike."""

    unit: int = 1
    repeats: int = 1


class Region(NamedTuple):
    """Linear layers in, with the units that the code between gives their features; those between; and one out.

    `fed_by` is the layer whose output the entries take in, and nothing else reads; "" where there is none. `draws` says
    that random numbers are drawn between.
    """

    entries: tuple[str, ...]
    units: tuple[tuple[FeatureUnits, ...], ...]
    inside: tuple[str, ...]
    exit: str
    fed_by: str = ""
    draws: bool = False

    @property
    def shared_from(self) -> str:
        """The layer whose output several entries take in; "" where there is none."""
        return self.fed_by if len(self.entries) > 1 else ""


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer that the styles cut: nn.Linear, or Conv1D of transformers."""
    return isinstance(module, nn.Linear) or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """Whether the weight of a linear layer is (input, output)."""
    return type(module).__name__ == "Conv1D" and not isinstance(module, nn.Linear)


def regions_of(model: nn.Module, recording: Recording) -> list[Region]:
    """All regions of a model, in the order in which they end."""
    search = _Search(model, recording)
    found = (search.region(call) for call in recording.calls if call.name in search.linear)
    return [region for region in found if region is not None]


class _Search:
    """A walk back over the calls of a recording."""

    def __init__(self, model: nn.Module, recording: Recording) -> None:
        self._recording = recording
        self._makers, self._readers = recording.makers_of(), recording.readers_of()
        modules = dict(model.named_modules())
        named = {call.name for call in recording.calls if call.name} - recording.answered
        once = {name for name in named if len(recording.calls_of(name)) == 1}
        self.linear: Mapping[str, nn.Module] = {name: modules[name] for name in once if is_linear(modules[name])}
        self._all_linear = {name for name, module in modules.items() if is_linear(module)}
        self._once, self._modules = once, modules
        # Values that follow from parameters: masks and positions do not.
        self._weighted = set(recording.parameters)
        for call in recording.calls:
            if call.name or any(value.number in self._weighted for value in call.inputs):
                self._weighted |= {value.number for value in call.outputs}

    def region(self, end: Call) -> Region | None:
        """The region that ends at a call of a linear layer; None where there is none."""
        entries: dict[str, Call] = {}
        inside: list[Call] = []
        seen: set[int] = set()
        waiting = [value.number for value in end.inputs[:1]]
        while waiting:
            number = waiting.pop()
            if number in seen or number not in self._weighted:
                continue
            seen.add(number)
            makers = self._makers.get(number, [])
            if makers and makers[0].name in self.linear:
                entries.setdefault(makers[0].name, makers[0])
                makers = makers[1:]
            elif not makers:
                return None
            if not all(map(self._may_be_inside, makers)):
                return None
            inside += makers
            waiting += [value.number for maker in makers for value in maker.inputs]
        if not entries or end.name in entries or not self._is_closed(entries, inside, end):
            return None
        return self._made(entries, inside, end)

    def _may_be_inside(self, maker: Call) -> bool:
        """Whether a call is an operator, or a layer that runs once and is neither a table nor linear."""
        if not maker.name:
            return True
        is_other = maker.name not in self._all_linear and not isinstance(self._modules[maker.name], nn.Embedding)
        return is_other and maker.name in self._once

    def _made(self, entries: Mapping[str, Call], inside: list[Call], end: Call) -> Region:
        names = tuple(sorted(entries, key=lambda name: self._recording.calls.index(entries[name])))
        units = tuple(tuple(self._units(entries[name], {id(call) for call in inside})) for name in names)
        layers = tuple(dict.fromkeys(call.name for call in inside if call.name))
        draws = any(word in call.op for call in inside for word in _RANDOM)
        return Region(names, units, layers, end.name, self._fed_by([entries[name] for name in names]), draws)

    def _fed_by(self, entries: list[Call]) -> str:
        """The layer, neither a table nor linear, that makes what the entries take in, and nothing else reads."""
        taken = {call.inputs[0].number for call in entries}
        makers = self._makers.get(min(taken), [])
        if len(taken) > 1 or len(makers) != 1 or makers[0].name not in self._once:
            return ""
        (maker,) = makers
        readers = {call.name for call in self._readers[min(taken)]}
        is_other = not isinstance(self._modules[maker.name], nn.Embedding) and maker.name not in self._all_linear
        is_read_by_them = readers == {call.name for call in entries} and not taken & self._recording.results
        return maker.name if is_other and is_read_by_them else ""

    def _is_closed(self, entries: Mapping[str, Call], inside: list[Call], end: Call) -> bool:
        """Whether nothing that is made in the region is read outside of it."""
        readers = {id(call) for call in (*inside, end)}
        made = {value.number for call in (*entries.values(), *inside) for value in call.outputs}
        if made & self._recording.results:
            return False
        return all(id(call) in readers for number in made for call in self._readers.get(number, ()) if _reads(call))

    def _units(self, entry: Call, inside: set[int]) -> Iterator[FeatureUnits]:
        """Units that views of a projection's output give its features, most likely first."""
        width = entry.outputs[0].shape[-1]
        yield from dict.fromkeys((*self._viewed(entry.outputs[0].number, width, 1, inside), FeatureUnits()))

    def _viewed(self, number: int, width: int, repeats: int, inside: set[int]) -> Iterator[FeatureUnits]:
        for call in self._readers.get(number, ()):
            if id(call) not in inside:
                continue
            if call.op in _SPLITS and call.outputs and width % call.outputs[0].shape[-1] == 0:
                first = call.outputs[0]
                parts = width // first.shape[-1]
                alike = all(value.shape == first.shape for value in call.outputs)
                if alike and parts == len(call.outputs):
                    yield from self._viewed(first.number, first.shape[-1], repeats * parts, inside)
                    yield FeatureUnits(1, repeats * parts)
            elif call.outputs and call.outputs[0].shape[-1] == width:
                if call.op in _SAME or call.op.startswith("aten.view") or call.op.startswith("aten._unsafe_view"):
                    yield from self._viewed(call.outputs[0].number, width, repeats, inside)
            elif call.outputs and "view" in call.op:
                yield from _of_shape(call.outputs[0].shape, width, repeats)


def _reads(call: Call) -> bool:
    """Whether a call reads values, and not shapes alone."""
    return bool(call.name) or not call.op.startswith(("aten.sym_", "prim."))


def _of_shape(shape: tuple[int, ...], width: int, repeats: int) -> Iterator[FeatureUnits]:
    """Units of `width` features that a view has made dims of.

    >>> list(_of_shape((2, 7, 3, 6, 4), 72, 1))
    [FeatureUnits(unit=4, repeats=3), FeatureUnits(unit=24, repeats=1)]
    """
    if len(shape) >= 2 and shape[-1] * shape[-2] == width:
        yield FeatureUnits(shape[-1], repeats)
    elif len(shape) >= 3 and shape[-1] * shape[-2] * shape[-3] == width:
        yield FeatureUnits(shape[-1], repeats * shape[-3])
        yield FeatureUnits(shape[-1] * shape[-2], repeats)


def unit_patterns(region: Region) -> Iterator[tuple[FeatureUnits, ...]]:
    """Units for all entries of a region, most likely first; entries of as many kinds take those of one place."""
    seen = set()
    longest = max(map(len, region.units))
    for place in range(longest):
        found = tuple(units[min(place, len(units) - 1)] for units in region.units)
        seen.add(found)
        yield found
    for found in product(*region.units):
        if found not in seen and len(seen) < 8:
            seen.add(found)
            yield found


def num_features(module: nn.Module) -> tuple[int, int]:
    """Numbers of input and output features of a linear layer."""
    return linear_features(module)
