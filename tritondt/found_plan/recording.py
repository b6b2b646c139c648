"""One forward pass of a model without memory: which modules and operators ran, and which tensors go where."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tritondt.errors import ParallelizeError
from tritondt.found_plan.given_results import is_answered


class Value(NamedTuple):
    """A tensor of the pass: its number, and its shape."""

    number: int
    shape: tuple[int, ...]


class Call(NamedTuple):
    """A call of a layer that has parameters and no layers inside, or of an operator outside of all such layers.

    `name` is that of the layer, "" for an operator, and `op` that of the operator.
    """

    name: str
    op: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]


class Crossing(NamedTuple):
    """Tensors that cross a module: its first argument and its first result, None for others, and the number of each.

    The number of results is 1 for a lone one.
    """

    taken: Value | None
    given: Value | None
    num_args: int
    num_results: int


@dataclass
class Recording:
    """Calls of one pass in their order; `results` are the numbers of what the model gives back, and `gives_loss` says
    whether that is one number.

    `called` has the modules that were run, and whether a tensor was their first argument, `answered` those that gave
    results by hand, and `num_calls` how often both were called; `crossings` are the last calls of modules with others
    inside, `parameters` the numbers of parameters that operators outside of layers read, and `written` the names of
    buffers that were written.
    """

    calls: list[Call] = field(default_factory=list)
    results: frozenset[int] = frozenset()
    gives_loss: bool = False
    called: dict[str, bool] = field(default_factory=dict)
    answered: set[str] = field(default_factory=set)
    num_calls: Counter[str] = field(default_factory=Counter)
    crossings: dict[str, Crossing] = field(default_factory=dict)
    parameters: frozenset[int] = frozenset()
    written: frozenset[str] = frozenset()

    def calls_of(self, name: str) -> list[Call]:
        """Calls of one layer."""
        return [call for call in self.calls if call.name == name]

    def makers_of(self) -> dict[int, list[Call]]:
        """The calls that made each value, by its number: one, and those that have written to it in place."""
        found: dict[int, list[Call]] = {}
        for call in self.calls:
            for number in {value.number for value in call.outputs}:
                found.setdefault(number, []).append(call)
        return found

    def readers_of(self) -> dict[int, list[Call]]:
        """The calls that read each value, by its number."""
        found: dict[int, list[Call]] = {}
        for call in self.calls:
            for number in {value.number for value in call.inputs}:
                found.setdefault(number, []).append(call)
        return found


class _Numbers:
    """Numbers of tensors, which are kept so that no other gets the id of one."""

    def __init__(self) -> None:
        self._held: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}

    def values(self, tree: Any) -> tuple[Value, ...]:
        return tuple(self._value(leaf) for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))

    def _value(self, tensor: torch.Tensor) -> Value:
        if id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = len(self._held)
            self._held.append(tensor)
        return Value(self._numbers[id(tensor)], tuple(tensor.shape))


class _Recorder(TorchDispatchMode):
    """Notes operators outside of layers with parameters, and the module in which one fails."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording, self.numbers = Recording(), _Numbers()
        self.running: list[str] = []
        self.depth = 0
        self.failed: tuple[str, str] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            found = func(*args, **(kwargs or {}))
        except Exception:
            place = self.running[-1] if self.running else ""
            self.failed = self.failed or (str(func), place or "the model itself")
            raise
        if not self.depth:
            inputs = self.numbers.values((args, kwargs))
            self.recording.calls.append(Call("", str(func), inputs, self.numbers.values(found)))
        return found

    def before(self, name: str, *, is_layer: bool) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.running.append(name)
            self.recording.num_calls[name] += 1
            first = next(iter((*args, *kwargs.values())), None)
            called = self.recording.called
            if is_answered(module):
                self.recording.answered.add(name)
            else:
                called[name] = called.get(name, True) and isinstance(first, torch.Tensor)
            if is_layer:
                self.depth += 1

        return hook

    def after(self, name: str, *, is_layer: bool) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self.running.pop()
            if is_layer:
                self.depth -= 1
                inputs, outputs = self.numbers.values((args, kwargs)), self.numbers.values(output)
                if not self.depth:
                    self.recording.calls.append(Call(name, "", inputs, outputs))
            elif not self.depth:
                results = output if isinstance(output, tuple) else (output,)
                firsts = [each[0] if each and isinstance(each[0], torch.Tensor) else None for each in (args, results)]
                taken, given = (None if first is None else self.numbers.values(first)[0] for first in firsts)
                self.recording.crossings[name] = Crossing(taken, given, len(args), len(results))

        return hook


def is_layer(module: nn.Module) -> bool:
    """Whether a module has parameters of its own, and no modules inside."""
    has_own = any(held is not None for held in module._parameters.values())
    return has_own and next(module.children(), None) is None


def record(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Recording:
    """The recording of one forward pass; called where tensors take no memory.

    ParallelizeError, with the operator and the module, where one needs the values of a tensor.
    """
    recorder, ends = _Recorder(), []
    versions = {name: buffer._version for name, buffer in model.named_buffers()}
    for name, module in model.named_modules():
        kind = is_layer(module) or is_answered(module)
        ends.append(module.register_forward_pre_hook(recorder.before(name, is_layer=kind), with_kwargs=True))
        ends.append(module.register_forward_hook(recorder.after(name, is_layer=kind), with_kwargs=True))
    try:
        with torch.no_grad(), recorder:
            output = model(*args, **kwargs)
    except Exception as error:
        raise ParallelizeError(_failure_text(model, recorder, error)) from error
    finally:
        for end in ends:
            end.remove()
    recorder.recording.results = frozenset(value.number for value in recorder.numbers.values(output))
    recorder.recording.gives_loss = isinstance(output, torch.Tensor) and not output.ndim
    recorder.recording.parameters = frozenset(
        value.number for value in recorder.numbers.values(list(model.parameters()))
    )
    recorder.recording.written = frozenset(
        name for name, buffer in model.named_buffers() if versions.get(name) != buffer._version
    )
    return recorder.recording


def _failure_text(model: nn.Module, recorder: _Recorder, error: Exception) -> str:
    place = recorder.running[-1] if recorder.running else ""
    op, where = recorder.failed or ("the code", place or "the model itself")
    kind = type(model.get_submodule(where)).__name__ if where != "the model itself" else type(model).__name__
    return (
        f"find_plan runs {type(model).__name__} on tensors without values, and {op} in {where} ({kind}) failed there: "
        f"{type(error).__name__}: {(str(error) or '-').splitlines()[0]}; allowed is a forward whose shapes and "
        "branches follow from shapes alone, with example_inputs that fit it, or module_results={name: a tensor} with "
        "the results of a module that needs values"
    )
