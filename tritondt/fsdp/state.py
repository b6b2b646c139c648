"""Hooks of a sharded module: parameters are gathered before its forward and backward, freed and reduced after them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from tritondt.fsdp.group import ParameterGroup
from tritondt.fsdp.reduction import Policy
from tritondt.fsdp.tree import ShardedModule, ShardedTree, is_in_backward
from tritondt.parallel.forward_pass import terms_of
from tritondt.parallel.gradients import begin_pass, end_pass
from tritondt.parallel.graphs import outside_of_graphs


class ShardedState:
    """State of the modules of one call of `fully_shard`; `group` is None where others have all their parameters."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        managed: Sequence[nn.Module],
        group: ParameterGroup | None,
        policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | None,
    ) -> None:
        self.modules, self.group, self.policy = list(modules), group, policy
        self._managed = list(managed)
        self.reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = self.syncs = True
        self.divisor: float | None = None
        self.forward_prefetch: list[ShardedState] | None = None
        self.backward_prefetch: list[ShardedState] | None = None
        self.tree = ShardedTree(self)
        # Modules of the call that have not run in this pass.
        self._to_run: set[int] = set()
        # Forward passes whose backward has not come, and whether the parameters were asked for by `unshard`.
        self._num_forwards, self.is_held = 0, False
        for module in self.modules:
            module.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._after, always_call=True)

    # Forward ---------------------------------------------------------------------------------------------------------

    def _before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if is_dynamo_compiling():
            return outside_of_graphs(self._before)(module, args, kwargs)
        self.tree.forget_failure()
        self.tree.enter(self)
        if id(module) not in self._to_run:
            self._to_run = set(map(id, self.modules))
        if self.group is not None:
            self.group.issue_gather()
            self.group.wait()
            self.group.register(whole=True)
            if torch.is_grad_enabled():
                begin_pass(self, self._terms, is_apart=True)
        if not is_in_backward():
            self._prefetch(self.forward_prefetch, self.tree.following(self))
        args, kwargs = self._cast_inputs(args, kwargs)
        return self._watch_inputs(args, kwargs)

    def _terms(self) -> Any:
        return [terms for module in self._managed for terms in terms_of(module)]

    def _cast_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        dtype = self.policy.param_dtype
        if dtype is None or not self.policy.cast_forward_inputs:
            return args, kwargs
        found: tuple[Any, Any] = tree_map(lambda value: _as_dtype(value, dtype), (args, kwargs))
        return found

    def _watch_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Inputs through a node of the graph whose backward comes when all of the module's has."""
        if self.group is None or not torch.is_grad_enabled():
            return args, kwargs
        values, structure = tree_flatten((args, kwargs))
        places = [
            place for place, value in enumerate(values) if isinstance(value, torch.Tensor) and value.requires_grad
        ]
        if places:
            watched = _EndOfBackward.apply(self, *[values[place] for place in places])  # type: ignore[no-untyped-call]
            for place, value in zip(places, watched, strict=True):
                values[place] = value
        found: tuple[Any, Any] = tree_unflatten(values, structure)
        return found

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Output hook; runs with None where the forward, or a hook before it, raised."""
        if is_dynamo_compiling():
            return outside_of_graphs(self._after)(module, args, output)
        self._to_run.discard(id(module))
        end_pass(self)
        if output is None:
            self._to_run.clear()
        if self.group is not None and not self._to_run:
            if not self.is_held:
                self.group.register(whole=False)
            if self._frees_after_forward() and not is_in_backward():
                self.group.free()
        self.tree.leave(self)
        if output is None:
            return None
        if self.policy.output_dtype is not None:
            output = tree_map(lambda value: _as_dtype(value, self.policy.output_dtype), output)
        return self._watch_outputs(output)

    def _frees_after_forward(self) -> bool:
        if self.is_held:
            return False
        if self.reshard_after_forward is None:
            return self.tree.root is not self
        return self.reshard_after_forward

    def _watch_outputs(self, output: Any) -> Any:
        if not torch.is_grad_enabled():
            return output
        found = [value for value in tree_flatten(output)[0] if isinstance(value, torch.Tensor) and value.requires_grad]
        for value in found:
            value.register_hook(self._before_backward)
        if found and self.group is not None and not is_in_backward():
            self._num_forwards += 1
        return output

    # Backward --------------------------------------------------------------------------------------------------------

    def _before_backward(self, grad: torch.Tensor) -> None:
        self.tree.await_end()
        if self.group is not None:
            self.group.issue_gather()
            self.group.wait()
            self._prefetch(self.backward_prefetch, self.tree.preceding(self))

    def after_backward(self) -> None:
        """Reduces the gradients, and frees the parameters, once the module's backward has run."""
        self.tree.await_end()
        self._num_forwards = max(0, self._num_forwards - 1)
        self._reduce()

    def reduce_late(self) -> None:
        """Reduces gradients of a module whose inputs have none, so that nothing tells when they are there."""
        if self.group is not None and (self._num_forwards or self.group.has_gradients()):
            self._num_forwards = 0
            self._reduce()

    def _reduce(self) -> None:
        if self.group is None:
            return
        if self.reshard_after_backward and not self.is_held:
            self.group.free()
        with torch.no_grad():
            policy = Policy(self.policy.reduce_dtype, self.divisor)
            if self.syncs:
                self.group.issue_reduction(policy)
            else:
                self.group.keep_gradients(policy)

    def end_backward(self) -> None:
        """Ends the pass: gradients are those of the sharded parameters now."""
        if self.group is not None:
            with torch.no_grad():
                self.group.finish_reductions()
            if not self.is_held:
                self.group.register(whole=False)
                if self.reshard_after_backward:
                    self.group.free()

    def abandon_backward(self) -> None:
        """Drops the gradients of a pass that raised, those that earlier ones have kept excepted."""
        self._num_forwards = 0
        if self.group is not None:
            self.group.drop_gradients()

    # Gathers by request ----------------------------------------------------------------------------------------------

    def _prefetch(self, given: "list[ShardedState] | None", found: ShardedModule | None) -> None:
        """Issues the gathers that were asked for, or else that of the module that comes next."""
        chosen = [found] if given is None else given
        for state in chosen:
            if isinstance(state, ShardedState) and state.group is not None and not state.group.is_whole:
                state.group.issue_gather()

    def unshard(self) -> None:
        """Issues the gather of the parameters, which stay until `reshard`."""
        self.is_held = True
        if self.group is not None:
            self.group.issue_gather()

    def wait(self) -> None:
        """Puts the whole parameters in place of the sharded ones."""
        if self.group is not None and self.is_held:
            self.group.wait()
            self.group.register(whole=True)

    def reshard(self) -> None:
        """Puts the sharded parameters in place, and frees the whole ones."""
        self.is_held = False
        if self.group is not None:
            self.group.register(whole=False)
            self.group.free()


class _EndOfBackward(torch.autograd.Function):
    """Inputs of a module as they are; the backward tells that the module's own is done."""

    @staticmethod
    def forward(ctx: Any, state: ShardedState, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Inputs unchanged."""
        ctx.state = state
        ctx.set_materialize_grads(False)
        return tuple(value.view_as(value) for value in inputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        """Gradients unchanged."""
        ctx.state.after_backward()
        return None, *grads


def _as_dtype(value: Any, dtype: torch.dtype | None) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point() and dtype is not None:
        return value.to(dtype)
    return value
