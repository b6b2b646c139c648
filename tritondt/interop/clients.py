"""Packages that ask isinstance(x, torch.distributed.tensor.DTensor), and find that tensors of ours are.

`answer_clients("trl")` gives the modules of that package an isinstance that knows both classes; everything else, torch
included, goes on telling them apart: torch's own code goes by private parts of its class.
"""

import builtins
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, TracebackType
from typing import Any, get_args

import torch
from torch.distributed.tensor import DTensor as TorchDTensor

from tritondt._importing import LoaderThatAdds
from tritondt.dtensor.tensor import DTensor
from tritondt.errors import ArgumentError

_NEVER = frozenset(("torch", "tritondt", "builtins"))
_NAME = "isinstance"

_changing = threading.Lock()
_answered: Counter[str] = Counter()
_from_local: Callable[..., Any] = TorchDTensor.from_local


class Answers:
    """Packages that are answered, until `undo()` or the end of a `with` block."""

    def __init__(self, packages: tuple[str, ...]) -> None:
        for package in packages:
            if not isinstance(package, str) or not package or package in _NEVER or "." in package:
                raise ArgumentError(
                    f"answer_clients was given {package!r}; allowed are names of packages that ask for torch's "
                    "DTensor, as 'trl', and not torch's own"
                )
        self._packages: tuple[str, ...] = packages
        with _changing:
            _answered.update(packages)
            _set_answering()

    def undo(self) -> None:
        """Leaves the packages to Python's isinstance again, once all others who asked for them have done so too."""
        with _changing:
            _answered.subtract(self._packages)
            self._packages = ()
            _set_answering()

    def __enter__(self) -> "Answers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


def _set_answering() -> None:
    """Gives modules of answered packages our isinstance, and takes it from others; loaded ones and those to come."""
    for module in tuple(sys.modules.values()):
        _add_or_take(module)
    answering = any(_answered.values())
    if answering and _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    elif not answering and _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    TorchDTensor.from_local = staticmethod(_from_local_for_caller if answering else _from_local)  # type: ignore[method-assign]


def _add_or_take(module: ModuleType) -> None:
    scope = getattr(module, "__dict__", {})
    if _is_answered(scope):
        scope.setdefault(_NAME, _is_instance)
    elif scope.get(_NAME) is _is_instance:
        del scope[_NAME]


def _is_answered(scope: dict[str, Any]) -> bool:
    return _answered[str(scope.get("__name__", "")).partition(".")[0]] > 0


def _is_instance(value: Any, kinds: Any) -> bool:
    """As Python's isinstance, and True for a tensor of ours where torch's distributed tensors are among the kinds."""
    if builtins.isinstance(value, kinds):
        return True
    return builtins.isinstance(value, DTensor) and _names_torchs(kinds)


def _names_torchs(kinds: Any) -> bool:
    listed = kinds if builtins.isinstance(kinds, tuple) else get_args(kinds)
    return kinds is TorchDTensor or any(map(_names_torchs, listed))


@wraps(_from_local)
def _from_local_for_caller(local_tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
    """A tensor of ours for an answered package, whose tensors are ours; torch's for all others."""
    made = DTensor.from_local if _is_answered(sys._getframe(1).f_globals) else _from_local
    return made(local_tensor, *args, **options)


class _Finder(MetaPathFinder):
    """Lets other finders find modules of answered packages, and adds to them before anybody calls them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of such a module, with a loader that adds to it; None for all others."""
        if not _answered[fullname.partition(".")[0]]:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                own = spec.loader
                if builtins.isinstance(own, Loader) or hasattr(own, "exec_module"):
                    spec.loader = LoaderThatAdds(own, _add_or_take)  # type: ignore[arg-type]
                return spec
        return None


_finder = _Finder()
