"""Forward passes of trees of modules, in which the gradients of replicated parameters are summed together."""

import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from tritondt.parallel.gradients import Terms, begin_pass, end_pass
from tritondt.parallel.local_run import LocalRun, run_of

_PASS = "_tritondt_forward_pass"
# On a module whose parameters another owner lays out and passes on, in passes of its own.
APART = "_tritondt_apart"
# What torch says of a length -1 beside a length 0.
_AMBIGUOUS = "is ambiguous"
_EXPLANATION = "this rank has no part of some layers"
_ADVICE = (
    "Their styles take balanced=True, or sizes= with a number for each rank, by which every rank has heads where there "
    "are as many; or write the length in place of -1, which torch cannot tell of an empty tensor"
)


class ForwardPassHooks:
    """Hooks around the forward of the root of a tree of modules; copied with it."""

    def __init__(self) -> None:
        # Weak, for modules that are taken out of the tree.
        self._modules: list[weakref.ref[nn.Module]] = []
        self._num_installed = -1

    def __getstate__(self) -> dict[str, Any]:
        return {"_modules": [], "_num_installed": -1}

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Begins a pass; under torch.compile modules sum by themselves."""
        if not is_dynamo_compiling() and torch.is_grad_enabled():
            begin_pass(self, lambda: self._terms(module))

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Ends the pass, also where the forward raised."""
        if is_dynamo_compiling():
            return
        end_pass(self)
        if output is None:  # torch is about to raise what the forward has raised, which hooks cannot replace
            _explain(module, sys.exc_info()[1])

    def _terms(self, root: nn.Module) -> Iterator[Terms]:
        """Parameters of the tree whose gradients come as terms, in the order of its modules."""
        if self._num_installed != LocalRun.num_installed:
            self._num_installed = LocalRun.num_installed
            self._modules = [weakref.ref(module) for module in root.modules() if run_of(module) is not None]
        for reference in self._modules:
            module = reference()
            if module is not None and APART not in module.__dict__:
                yield from terms_of(module)


def _explain(root: nn.Module, error: BaseException | None) -> None:
    """Adds to torch's error of a reshape by -1 which layers have nothing on this rank, and what to write."""
    if not isinstance(error, RuntimeError) or _AMBIGUOUS not in str(error) or _EXPLANATION in str(error):
        return
    empty = []
    for name, module in root.named_modules():
        run = run_of(module)
        for tensor in () if run is None else run.parameters(module).tensors:
            if tensor.numel() and not tensor._local_tensor.numel():
                empty.append(f"{name or type(module).__name__} {tensor._spec}")
                break
    if empty:
        error.args = (f"{error}; {_EXPLANATION}: {', '.join(empty)}. {_ADVICE}",)


def terms_of(module: nn.Module) -> Iterator[Terms]:
    """Parameters of one module whose gradients come as terms."""
    run = run_of(module)
    if run is not None:
        parameters = run.parameters(module)
        for place in parameters.terms:
            yield Terms(parameters.tensors[place], parameters.gradients[place])


def sum_together(root: nn.Module) -> None:
    """Lets the modules below `root` sum their gradients together, once for a root."""
    runs = [run_of(module) for module in root.modules() if module is not root]
    if any(run is not None for run in runs) and _PASS not in root.__dict__:
        hooks = root.__dict__[_PASS] = ForwardPassHooks()
        root.register_forward_pre_hook(hooks.before, prepend=True)
        root.register_forward_hook(hooks.after, always_call=True)
