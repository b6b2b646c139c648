"""Chart of the steps of an explanation, by matplotlib, which is imported for it alone."""

import importlib
from collections.abc import Sequence
from typing import Any, Protocol

_WIDTH = 0.26
_BARS = (("sends", "#0b6e99"), ("receives", "#c4501b"), ("temporary", "#8a8a8a"))


class Step(Protocol):
    """The part of a step's report that is drawn."""

    @property
    def kind(self) -> str:
        """Kind of the step."""
        ...

    @property
    def source(self) -> str:
        """Layout before."""
        ...

    @property
    def target(self) -> str:
        """Layout after."""
        ...

    @property
    def sent_bytes(self) -> int:
        """Bytes that the rank sends."""
        ...

    @property
    def received_bytes(self) -> int:
        """Bytes that it receives."""
        ...

    @property
    def packed_bytes(self) -> int:
        """Temporary bytes of what is packed."""
        ...

    @property
    def staged_bytes(self) -> int:
        """Temporary bytes of what arrives."""
        ...

    @property
    def seconds(self) -> float:
        """Predicted seconds."""
        ...


def step_chart(title: str, steps: Sequence[Step]) -> Any:
    """Figure with three bars for each step: bytes sent, received and temporary."""
    try:
        figure = importlib.import_module("matplotlib.figure").Figure(figsize=(7, 3.6), layout="constrained")
    except ModuleNotFoundError as error:
        raise ImportError(
            "explain().plot() needs matplotlib, which is not installed: pip install matplotlib"
        ) from error
    axes = figure.subplots()
    values = [(step.sent_bytes, step.received_bytes, step.packed_bytes + step.staged_bytes) for step in steps]
    for place, (name, colour) in enumerate(_BARS):
        places = [number + (place - 1) * _WIDTH for number in range(len(steps))]
        axes.bar(places, [found[place] for found in values], _WIDTH, label=name, color=colour)
    labels = [f"{step.kind}\n{step.source} -> {step.target}\n{step.seconds * 1e6:,.0f} us" for step in steps]
    axes.set(title=title, ylabel="bytes")
    axes.set_xticks(range(len(steps)), labels)
    figure.legend(loc="outside right upper")  # beside the bars, which it would hide within
    return figure
