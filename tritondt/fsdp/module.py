"""The class that a sharded module gets: its own, with what can be asked of a sharded module besides."""

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial, wraps
from typing import Any, Literal, NoReturn, overload

import torch
from torch import nn

from tritondt.errors import FullyShardError
from tritondt.errors.arguments import checked, checked_class
from tritondt.fsdp.state import ShardedState

_STATE = "_tritondt_fully_sharded"


def state_of(module: nn.Module) -> ShardedState | None:
    """State of a module that `fully_shard` was called on; None for any other."""
    found: ShardedState | None = module.__dict__.get(_STATE)
    return found


class UnshardHandle:
    """Gather of a module's parameters in progress."""

    def __init__(self, state: ShardedState) -> None:
        self._state = state

    def wait(self) -> None:
        """Waits until the module has its whole parameters; forward waits by itself."""
        self._state.wait()


@checked_class
class FSDPModule(nn.Module):
    """A module that `fully_shard` was called on. Source: torch.distributed.fsdp.FSDPModule."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A module of the class before: slices of a sharded nn.Sequential are plain ones."""
        original: Any = cls.__mro__[2]
        made = original.__new__(original)
        original.__init__(made, *args, **kwargs)
        return made

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise FullyShardError("a sharded module cannot be copied; copy it before fully_shard, or load its state dict")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise FullyShardError("a sharded module cannot be pickled; save its state dict, whose tensors are distributed")

    def _state(self) -> ShardedState:
        found = state_of(self)
        assert found is not None, f"{type(self).__name__} is the class of sharded modules only"
        return found

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As for any module; returns the sharded parameters even after a backward that raised and left whole ones in
        place."""
        self._state().tree.forget_failure_before_reading()
        return super().named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of any module, of the sharded parameters; see `named_parameters`."""
        self._state().tree.forget_failure_before_reading()
        return super().state_dict(*args, **kwargs)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Converts the sharded parameters: `to`, `to_empty` from meta, `double` and others call it."""
        self._state().reshard()
        made = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._state().convert()
        return made

    def _states(self, recurse: bool) -> Iterable[ShardedState]:
        """State of this module, and of those inside."""
        found = [state_of(module) for module in self.modules()] if recurse else [self._state()]
        return [state for state in found if state is not None]

    @overload
    def unshard(self, async_op: Literal[False] = ...) -> None: ...
    @overload
    def unshard(self, async_op: Literal[True]) -> UnshardHandle: ...
    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers the parameters of this module, not of those inside, until `reshard`: a collective call.

        With `async_op` the call returns at once; the handle's `wait`, or forward, installs the parameters.
        """
        state = self._state()
        state.unshard()
        if async_op:
            return UnshardHandle(state)
        state.wait()
        return None

    def reshard(self) -> None:
        """Restores the sharded parameters of this module, not of those inside, and frees the whole ones."""
        self._state().reshard()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Sets whether backward reduces gradients; otherwise each rank accumulates its own until a backward that
        does."""
        for state in self._states(recurse):
            state.syncs = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Sets whether backward adds gradients up over replicas. Where a mesh has replicas, each rank otherwise
        accumulates its own gradients until a backward that does.
        """
        for state in self._states(recurse):
            state.reduces_over_replicas = requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Sets whether backward, of all modules of this one's tree, waits for the gradients that it reduces; otherwise
        `grad` has them after a backward that does."""
        self._state().tree.is_last_backward = is_last_backward

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Sets whether a mean of gradients is a sum on the way, divided by the number of ranks after it."""
        self._state().forces_sums = enable

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Sets whether whole parameters are freed between forward and backward."""
        for state in self._states(recurse):
            state.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Sets whether whole parameters are freed after backward; kept ones serve the next forward until they are
        written to.
        """
        for state in self._states(recurse):
            state.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: list[nn.Module]) -> None:
        """Sets the modules that are gathered while this module's forward runs, instead of the module that ran next the
        last time."""
        self._state().forward_prefetch = _states_of(modules, "set_modules_to_forward_prefetch")

    def set_modules_to_backward_prefetch(self, modules: list[nn.Module]) -> None:
        """Sets the modules that are gathered while this module's backward runs, instead of the module that ran before
        it."""
        self._state().backward_prefetch = _states_of(modules, "set_modules_to_backward_prefetch")

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Sets the divisor of the sum of the ranks' gradients, instead of the number of ranks."""
        if not factor > 0:
            raise FullyShardError(f"set_gradient_divide_factor got {factor!r}; allowed is a number above 0")
        for state in self._states(recurse=True):
            state.divisor = float(factor)


@checked
def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Makes a method of a sharded module gather and free the parameters as forward does; of any other module, it does
    nothing.

    From then on a call of the method is a collective call of the module's mesh, in backward too. Raises
    FullyShardError for a method that the module lacks. Source: torch.distributed.fsdp.register_fsdp_forward_method.

    >>> from tritondt.comm.transports.threads import run_ranks
    >>> from tritondt.fsdp import fully_shard
    >>> from tritondt.sharding.mesh import Mesh
    >>> class Doubled(nn.Linear):
    ...     def twice(self, x):
    ...         return 2 * nn.functional.linear(x, self.weight)
    >>> def body(rank):
    ...     model = fully_shard(Doubled(3, 5), mesh=Mesh((2,)))
    ...     register_fsdp_forward_method(model, "twice")
    ...     return tuple(model.twice(torch.ones(1, 3)).shape)
    >>> run_ranks(2, body)
    [(1, 5), (1, 5)]
    """
    state = state_of(module)
    if state is None:
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise FullyShardError(
            f"register_fsdp_forward_method got {method_name!r}, and {type(module).__name__} has no method of this name"
        )
    setattr(module, method_name, wraps(method)(partial(state.run, module, method)))


def _states_of(modules: list[nn.Module], call: str) -> list[ShardedState]:
    found = [state_of(module) for module in modules]
    for module, state in zip(modules, found, strict=True):
        if state is None:
            raise FullyShardError(f"{call} got {type(module).__name__}, which was not sharded; shard it before")
    return [state for state in found if state is not None]


@lru_cache(maxsize=1024)  # one class for each class of a program's modules
def sharded_class(original: type[nn.Module]) -> type[nn.Module]:
    """Subclass of a module's class for sharded modules."""
    return type(f"FSDP{original.__name__}", (FSDPModule, original), {"__module__": original.__module__})
