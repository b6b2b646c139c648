"""Which plain tensors may stand beside distributed ones: those that are surely alike on every rank."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any

import torch
from torch.autograd.graph import _engine_run_backward

_NO_BACKWARD = -1
_OWN = (__name__.partition(".")[0], "torch")

_allowed: ContextVar[bool] = ContextVar("plain tensors are replicated", default=False)


@contextmanager
def implicit_replication() -> Iterator[None]:
    """Takes plain tensors beside distributed ones, within, for replicated: every rank must hold the same.

    Nothing is checked. Elsewhere only plain tensors without dims are taken so, others raise MixedTensorsError. Holds
    for the calling thread.

        with tritondt.implicit_replication():
            y = x + torch.arange(x.shape[-1])
    """
    token = _allowed.set(True)
    try:
        yield
    finally:
        _allowed.reset(token)


def has_lists(index: Any) -> bool:
    """Whether an index has lists of numbers, which torch would make plain tensors of."""
    if type(index) is tuple:
        return any(type(item) is list and _are_numbers(item) for item in index)
    return type(index) is list and _are_numbers(index)


def _are_numbers(items: list[Any]) -> bool:
    return all(_are_numbers(item) if type(item) is list else isinstance(item, int) for item in items)


def are_replicated() -> bool:
    """Whether plain tensors of the call that is dispatched count as replicated.

    Within `implicit_replication()`, and where autograd itself calls: what its formulas make, they make of shapes and
    numbers.
    """
    return _allowed.get() or is_called_by_autograd()


def is_called_by_autograd() -> bool:
    """Whether no code of the user's stands between autograd's engine and the dispatch of an operator.

    Dispatch modes may: they are handed what the engine asks for.
    """
    if torch._C._current_graph_task_id() == _NO_BACKWARD:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _engine_run_backward.__code__:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in _OWN and frame.f_code.co_name != "__torch_dispatch__":
            return False
        frame = frame.f_back
    # Engine threads of devices have no Python below.
    return True
