"""Plain tensors within the forward of a module: refused beside distributed ones, or counted as replicated."""

from typing import Any, Literal, get_args

from torch import nn

from tritondt.errors import ParallelizeError
from tritondt.ops.propagation.replication import count_as_replicated

PlainTensors = Literal["refused", "replicated"]

_HOOKS = "_tritondt_plain_tensors"


def check_plain_tensors(plain_tensors: str) -> None:
    """Raises ParallelizeError for what is no such choice."""
    if plain_tensors not in get_args(PlainTensors):
        allowed = " and ".join(map(repr, get_args(PlainTensors)))
        raise ParallelizeError(f"parallelize_module got plain_tensors={plain_tensors!r}; allowed are {allowed}")


class _Replicated:
    """Hooks around a module's forward, within which plain tensors count as replicated; copied with the module."""

    def __init__(self) -> None:
        self._before: list[bool] = []

    def __getstate__(self) -> dict[str, Any]:
        return {"_before": []}

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Begins to count plain tensors as replicated."""
        self._before.append(count_as_replicated(True))

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Goes back to what held before, also where the forward raised."""
        if self._before:
            count_as_replicated(self._before.pop())


def replicate_plain_tensors(module: nn.Module) -> None:
    """Lets plain tensors within the module's forward count as replicated."""
    if _HOOKS not in module.__dict__:
        hooks = module.__dict__[_HOOKS] = _Replicated()
        module.register_forward_pre_hook(hooks.before, prepend=True)
        module.register_forward_hook(hooks.after, always_call=True)
