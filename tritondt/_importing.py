"""Import of the package: its extension is checked, torch is told of it, its modules come when they are asked for."""

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

_PACKAGE = Path(__file__).parent
# The name of the backend of torch.distributed.
BACKEND = "tritondt"


def check_extension() -> None:
    """Raises ImportError, with what to run, where `tritondt._C` has not been built."""
    if find_spec("tritondt._C") is not None:
        return
    version = ".".join(map(str, sys.version_info[:2]))
    missing = f"the extension tritondt._C has not been built for Python {version} in {_PACKAGE}"
    installed = _installed()
    if installed is not None:
        raise ImportError(
            f"{missing}, which comes before {installed} on sys.path, where it has been built; use the command "
            f"`tritondt` instead of `python -m tritondt`, start Python in another folder than {_PACKAGE.parent}, or "
            f"run `{sys.executable} setup.py build_ext --inplace` there"
        )
    raise ImportError(
        f"{missing}; run `{sys.executable} -m pip install {_PACKAGE.parent}`, or, to use it from there, "
        f"`{sys.executable} setup.py build_ext --inplace` in {_PACKAGE.parent}"
    )


def _installed() -> Path | None:
    others = (Path(folder) / _PACKAGE.name for folder in sys.path)
    return next((other for other in others if PathFinder.find_spec("_C", [str(other)]) is not None), None)


def import_quickly(name: str) -> ModuleType:
    """The module, imported while the garbage collection pauses."""
    with without_collections():
        return import_module(name)


@contextmanager
def without_collections() -> Iterator[None]:
    """Leaves cyclic garbage alone where nearly all that is made stays.

    One look at all that torch has made takes 0.1 s of an import; a plan of 65,536 ranks takes 0.7 of its time so.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def tell_torch() -> None:
    """Tells torch, where it is loaded or once it is, of the backend and of what distributed tensors need of it."""
    when_imported("torch.distributed.distributed_c10d", register_backend)
    when_imported("torch.distributed.rendezvous", _add_starts)
    when_imported(f"{_PACKAGE.name}.dtensor.tensor", _add_to_torch)


def register_backend(c10d: ModuleType) -> None:
    """Makes the backend known by its name; its module is imported when a group is made."""
    c10d.Backend.register_backend(BACKEND, group, extended_api=True, devices=["cpu", "cuda"])


def group(options: Any, backend_options: object = None) -> Any:
    """The group of one rank, as torch.distributed makes it of its DistributedBackendOptions."""
    return import_quickly(f"{_PACKAGE.name}.process_group").TritondtProcessGroup(options, backend_options)


def _add_starts(rendezvous: ModuleType) -> None:
    """Has init_process_group take stores of torchrun by `comm.store.starts`, from now on."""
    global came_late
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    came_late = c10d is not None and hasattr(c10d, "is_initialized") and c10d.is_initialized()
    handlers = rendezvous._rendezvous_handlers
    for scheme in ("env", "tcp"):
        handlers[scheme] = _with_own_keys(handlers[scheme])


# Whether a process group stood when the package was imported: its store may have what dead ranks wrote.
came_late = False


def _with_own_keys(handler: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(handler)
    def handled(*arguments: Any, **named: Any) -> Any:
        return import_quickly(f"{_PACKAGE.name}.comm.store.starts").with_own_keys(handler(*arguments, **named))

    return handled


def _add_to_torch(_: ModuleType) -> None:
    import_module(f"{_PACKAGE.name}.interop.registration")


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
        spec = find_spec(fullname)
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
