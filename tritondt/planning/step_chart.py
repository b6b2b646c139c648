"""Chart of the steps of an explanation, by matplotlib, which is imported for it alone."""

import importlib
from collections.abc import Sequence
from typing import Any

from tritondt.planning.step_report import StepReport

_WIDTH = 0.26
_BARS = (("sends", "#0b6e99"), ("receives", "#c4501b"), ("temporary", "#8a8a8a"))


def step_chart(title: str, steps: Sequence[StepReport]) -> Any:
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
