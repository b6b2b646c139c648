"""Hooks of a sharded module: parameters are gathered before its forward and backward, freed and reduced after them."""

from collections.abc import Callable, Sequence
from functools import partial
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


class Call:
    """One forward of `module`, which the hooks of its backward are told apart by."""

    def __init__(self, module: nn.Module | None) -> None:
        self.module = module


class ShardedState:
    """State of the modules of one call of `fully_shard`; `group` is None where others have all their parameters."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        managed: Sequence[nn.Module],
        group: ParameterGroup | None,
        policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | int | None,
    ) -> None:
        self.modules, self.group, self.policy = list(modules), group, policy
        self._managed = list(managed)
        self.reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = self.syncs = self.reduces_over_replicas = True
        self.divisor: float | None = None
        self.forces_sums = False
        self.forward_prefetch: list[ShardedState] | None = None
        self.backward_prefetch: list[ShardedState] | None = None
        self.tree = ShardedTree(self)
        # Modules of the call that have not run in this pass.
        self._to_run: set[int] = set()
        # Forward passes whose backward has not come, and whether the parameters were asked for by `unshard`.
        self._num_forwards, self.is_held = 0, False
        # Calls whose forward runs, innermost last, and those whose backward has begun and not ended.
        self._calls: list[Call] = []
        self._begun: set[Call] = set()
        # Whether gradients were kept since the last reduction, on this rank or another.
        self._has_kept = False
        # Whether a graph of gradients was made, whose nodes read the whole parameters without telling.
        self._has_graph_of_gradients = False
        for module in self.modules:
            module.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._after, always_call=True)
        for module in self._managed if group is not None else ():
            if module._parameters and module not in self.modules:
                module.register_forward_pre_hook(self._before_inside, prepend=True)

    # Forward ---------------------------------------------------------------------------------------------------------

    def _before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if is_dynamo_compiling():
            return outside_of_graphs(self._before)(module, args, kwargs)
        self.tree.forget_failure()
        self.tree.enter(self)
        self._calls.append(Call(module))
        if id(module) not in self._to_run:
            self._to_run = set(map(id, self.modules))
        if self.group is not None:
            self.group.issue_gather()
            self.group.wait()
            self.group.register(whole=True)
            if torch.is_grad_enabled():
                begin_pass(self, self._terms, is_apart=True)
        if is_in_backward():
            self.tree.await_end()
        else:
            self._prefetch(self.forward_prefetch, self.tree.following(self))
        args, kwargs = self._cast_inputs(args, kwargs)
        return self._watch_inputs(args, kwargs)

    def _before_inside(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Hook of the modules inside: recomputed in a backward that began there, they need the whole parameters."""
        if not is_dynamo_compiling() and is_in_backward() and not self._calls and not self._begun:
            self.tree.await_end()
            self._begin_backward(Call(None))

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
            watched = _EndOfBackward.apply(self, self._calls[-1], *[values[place] for place in places])  # type: ignore[no-untyped-call]
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
        call = self._end_call(module)
        if output is None:
            self._to_run.clear()
        # What was recomputed in backward is read there until that of the module has ended.
        if not self._to_run and not is_in_backward():
            frees = self._frees_after_forward()
            self._put_shards_back(frees=bool(frees), num_keepers=0 if frees is True else frees)
        self.tree.leave(self)
        if output is None:
            return None
        if self.policy.output_dtype is not None:
            output = tree_map(lambda value: _as_dtype(value, self.policy.output_dtype), output)
        return self._watch_outputs(output, call)

    def _end_call(self, module: nn.Module) -> Call:
        """Takes the call that ends off those that run; a hook before `_before` may have raised, and there is none."""
        if self._calls and self._calls[-1].module is module:
            return self._calls.pop()
        return Call(module)

    def _put_shards_back(self, *, frees: bool, num_keepers: int = 0) -> None:
        """Puts the sharded parameters in place unless something still reads the whole ones, which `frees` frees.

        Each `num_keepers` ranks keep those cut among themselves.
        """
        if self.group is None or self.is_held or self._calls or self._begun:
            return
        self.group.register(whole=False)
        if frees and not self._has_graph_of_gradients:
            self.group.free(num_keepers)

    def _frees_after_forward(self) -> bool | int:
        """Whether whole parameters are freed after forward; a number where each so many ranks keep them."""
        if self.reshard_after_forward is None:
            return self.tree.root is not self
        return self.reshard_after_forward

    def _watch_outputs(self, output: Any, call: Call) -> Any:
        if not torch.is_grad_enabled():
            return output
        found = [value for value in tree_flatten(output)[0] if isinstance(value, torch.Tensor) and value.requires_grad]
        for value in found:
            value.register_hook(partial(self.before_backward, call))
            _put_last_hook_first(value)
        if found and self.group is not None and not is_in_backward():
            self._num_forwards += 1
        return output

    # Backward --------------------------------------------------------------------------------------------------------

    def before_backward(self, call: Call, grad: torch.Tensor) -> None:
        """Puts the whole parameters in place, which recomputations and hooks in backward read as forward did."""
        self.tree.await_end(creates_graph=torch.is_grad_enabled())
        if self.group is None:
            return
        self._has_graph_of_gradients |= torch.is_grad_enabled()
        self._begin_backward(call)
        self._prefetch(self.backward_prefetch, self.tree.preceding(self))

    def _begin_backward(self, call: Call) -> None:
        assert self.group is not None, "modules without parameters of their own have none to put in place"
        self._begun.add(call)
        self.group.issue_gather()
        self.group.wait()
        self.group.register(whole=True)

    def after_backward(self, call: Call) -> None:
        """Reduces the gradients, and frees the parameters, once the module's backward has run."""
        self.tree.await_end(creates_graph=torch.is_grad_enabled())
        self._begun.discard(call)
        self._num_forwards = max(0, self._num_forwards - 1)
        if not self._begun:
            self._reduce()

    def watch_gradients(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Lets the backward of gradients, which ends with the pass, find the whole parameters."""
        call = Call(None)
        for grad in grads:
            if grad is not None and grad.requires_grad:
                grad.register_hook(partial(self.before_backward, call))

    def reduce_late(self) -> None:
        """Reduces gradients of a module whose inputs have none, so that nothing tells when they are there."""
        self._begun.clear()
        is_behind = self.group is not None and self._has_kept and self._reduces
        if self.group is not None and (self._num_forwards or is_behind or self.group.has_gradients()):
            self._num_forwards = 0
            self._reduce()

    def _reduce(self) -> None:
        if self.group is None:
            return
        self._put_shards_back(frees=self.reshard_after_backward)
        with torch.no_grad():
            is_mean = self.divisor is None and not self.forces_sums
            divisor = None if is_mean else self.divisor or float(self.group.num_ranks)
            policy = Policy(self.policy.reduce_dtype, divisor)
            self._has_kept = not self._reduces
            if self._reduces:
                self.group.issue_reduction(policy)
            else:
                self.group.keep_gradients(policy)

    @property
    def _reduces(self) -> bool:
        """Whether this backward reduces gradients."""
        assert self.group is not None, "modules without parameters of their own have no gradients"
        return self.syncs and (self.reduces_over_replicas or not self.group.has_replicas)

    def end_backward(self, *, creates_graph: bool) -> None:
        """Ends the pass: gradients are those of the sharded parameters now."""
        self._begun.clear()
        if not creates_graph:
            self._has_graph_of_gradients = False
        if self.group is not None:
            if self.tree.is_last_backward:
                with torch.no_grad():
                    self.group.finish_reductions()
            else:
                self.group.postpone_reductions()
            self._put_shards_back(frees=self.reshard_after_backward)

    def abandon_backward(self) -> None:
        """Drops the gradients of a pass that raised, those that earlier ones have kept excepted."""
        self._num_forwards = 0
        self._begun.clear()
        if self.group is not None:
            self.group.drop_gradients()
        self._put_shards_back(frees=self.reshard_after_backward)

    # Forward by another name, and gathers by request -----------------------------------------------------------------

    def run(self, module: nn.Module, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A method of a module, run as its forward is."""
        output = None
        args, kwargs = self._before(module, args, kwargs)
        try:
            output = method(*args, **kwargs)
        finally:
            found = self._after(module, args, output)
        return found

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

    def convert(self) -> None:
        """Takes over parameters that were given another device or dtype."""
        if self.group is not None:
            self.group.convert()


class _EndOfBackward(torch.autograd.Function):
    """Inputs of a module as they are; the backward tells that the module's own is done."""

    generate_vmap_rule = True

    @staticmethod
    def forward(state: ShardedState, call: Call, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Inputs unchanged."""
        return tuple(value.view_as(value) for value in inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Notes which call ends."""
        ctx.state, ctx.call, *_ = inputs
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        """Gradients unchanged."""
        ctx.state.after_backward(ctx.call)
        if torch.is_grad_enabled():
            ctx.state.watch_gradients(grads)
        return None, None, *grads

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> tuple[Any, ...]:
        """Tangents unchanged."""
        return tuple(None if tangent is None else tangent.view_as(tangent) for tangent in tangents[2:])


def _put_last_hook_first(tensor: Any) -> None:
    """Runs the hook that was registered last before those of a module's last layer, which may read parameters."""
    hooks: dict[int, Any] = tensor._backward_hooks
    if len(hooks) > 1:  # autograd runs them in the order in which they came into the dict
        *others, (key, last) = hooks.items()
        hooks.clear()
        hooks[key] = last
        hooks.update(others)


def _as_dtype(value: Any, dtype: torch.dtype | None) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point() and dtype is not None:
        return value.to(dtype)
    return value
