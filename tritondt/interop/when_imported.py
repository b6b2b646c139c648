"""Additions to a module of torch's at the moment a program imports it, so that the package need not import it first."""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def when_imported(name: str, add: Callable[[ModuleType], None]) -> None:
    """Calls `add` with the module `name`: now where it is loaded, else as soon as it has been."""
    module = sys.modules.get(name)
    if module is None:
        sys.meta_path.insert(0, _Finder(name, add))
    else:
        add(module)


class _Finder(MetaPathFinder):
    """Lets other finders find one module, and adds to it once."""

    def __init__(self, name: str, add: Callable[[ModuleType], None]) -> None:
        self.name, self.add = name, add

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of the module, with a loader that adds to it; None for every other one."""
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = LoaderThatAdds(spec.loader, self.add)
        return spec


class LoaderThatAdds(Loader):
    """A module's own loader, and what is added once it has run."""

    def __init__(self, own: Loader, add: Callable[[ModuleType], None]) -> None:
        self.own, self.add = own, add

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """The module that its own loader makes."""
        return self.own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Runs the module, under its own loader from here on, and adds to it."""
        module.__loader__ = self.own
        if module.__spec__ is not None:
            module.__spec__.loader = self.own
        self.own.exec_module(module)
        self.add(module)
