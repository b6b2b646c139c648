"""Execution of modules on local tensors: parameters look plain while a forward runs, and distributed otherwise."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.nn.utils.parametrize import is_parametrized

from tritondt.dtensor.tensor import DTensor
from tritondt.errors import ParallelizeError, check_not_of_torch, was_told
from tritondt.parallel.boundary import InputPlan, OutputPlan, output_plan_of
from tritondt.parallel.crossing import Parameters, enter, leave
from tritondt.parallel.graphs import outside_of_graphs
from tritondt.sharding.mesh import Mesh
from tritondt.sharding.placement import Partial, Placement, Shard
from tritondt.sharding.spec import DTensorSpec

# What was found on entering and is needed on leaving, kept in the module while its forward runs.
_CALL = "_tritondt_call"
# The hooks of a module, kept in the module.
_RUN = "_tritondt_run"
# Kinds of inputs, parameters and outputs that a module keeps what it decided about.
_MAX_KINDS = 256


class _Known(NamedTuple):
    """Contents of a module when its parameters were last looked at, all by id and the distributed ones by spec.

    `held` is kept so that nothing new gets the id of something that has gone.
    """

    held: list[Any]
    ids: list[int]
    specs: list[DTensorSpec]
    names: list[str]
    parameters: Parameters

    def is_of(self, held: Mapping[str, Any]) -> bool:
        """Whether a module that holds `held` has these parameters, laid out alike."""
        if [id(value) for value in held.values()] != self.ids:
            return False
        return [parameter._spec for parameter in self.parameters.tensors] == self.specs


class LocalRun(ABC):
    """Hooks around the forward of one kind of module.

    Kept by the module's hooks, which are copied with the module: it holds plain values, and everything that belongs to
    one call lies in the module.
    """

    # Of this process: while it stays, so do the modules that have hooks.
    num_installed: ClassVar[int] = 0
    # Whether outputs go out as the module gave them, tuples too.
    hands_out_as_is = False

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.name = mesh, ""
        self._input_plans: dict[object, InputPlan] = {}
        self._output_plans: dict[object, OutputPlan] = {}
        self._known: _Known | None = None
        self._names: tuple[str, ...] = ()
        self._distributed: tuple[str, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_input_plans": {}, "_output_plans": {}, "_known": None}

    @abstractmethod
    def input_plan(self, module: nn.Module, x: torch.Tensor) -> InputPlan:
        """Plan that brings in the module's first argument."""

    def gradient(self, name: str) -> Placement | None:
        """Placement of the gradient of a parameter's local part; None where that is the parameter's."""
        return None

    def inputs(self, module: nn.Module, local: torch.Tensor, parameters: dict[str, Any]) -> tuple[torch.Tensor, Any]:
        """First argument of the forward, and a value for `output`; may change the attributes that the forward finds."""
        return local, None

    @abstractmethod
    def output(self, module: nn.Module, output: torch.Tensor, input_plan: InputPlan, call: Any) -> torch.Tensor:
        """Output of the module as its caller takes it."""

    def leave_out(self, module: nn.Module, input_plan: InputPlan, call: Any, error: Exception) -> None:
        """Tells the others why this rank has no output, where they wait for it: by default they do not."""
        return

    def install(self, module: nn.Module) -> None:
        """Registers the hooks next to the forward: hooks of others see what crosses the boundary."""
        module.register_forward_pre_hook(self._before, with_kwargs=True)
        module.register_forward_hook(self._after, prepend=True, always_call=True)
        module.__dict__[_RUN] = self
        self._names = tuple(name for name, value in module._parameters.items() if value is not None)
        self._distributed = tuple(name for name in self._names if isinstance(module._parameters[name], DTensor))
        LocalRun.num_installed += 1

    def _before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        take_in = outside_of_graphs(self._take_in) if is_dynamo_compiling() else self._take_in
        if args:
            x = take_in(module, args[0])
            return (x, *args[1:]), kwargs
        first = next(iter(kwargs), "")
        x = take_in(module, kwargs.get(first))
        return args, {**kwargs, first: x}

    def _take_in(self, module: nn.Module, x: Any) -> torch.Tensor:
        check_input(module, x)
        input_plan = self._known_input_plan(module, x)
        known = self._look(module)
        # Only here: those of a module whose forward has not begun may be put away, as by FullyShardedDataParallel.
        if len(known.names) < len(self._distributed):
            self._check_distributed(module)
        local, *found = enter(input_plan, x, known.parameters)
        shadows: dict[str, Any] = dict(zip(known.names, found, strict=True))
        local, call = self.inputs(module, local, shadows)
        state = module.__dict__
        # What a shadow hides of the module's own attributes comes back when it goes.
        hidden = {name: state[name] for name in shadows if name in state}
        state[_CALL] = (input_plan, call, shadows, hidden)
        state.update(shadows)
        return local

    def _known_input_plan(self, module: nn.Module, x: torch.Tensor) -> InputPlan:
        key: object = x._spec if isinstance(x, DTensor) else (x.shape, x.dtype)
        found = self._input_plans.get(key)
        if found is None:
            _make_room(self._input_plans)
            found = self._input_plans[key] = self.input_plan(module, x)
        return found

    def _look(self, module: nn.Module) -> _Known:
        """Distributed parameters of the module, looked up again where the module has been given others."""
        held: Mapping[str, Any] = module._parameters or self._shown(module)
        if self._known is None or not self._known.is_of(held):
            found: dict[str, Any] = {name: value for name, value in held.items() if isinstance(value, DTensor)}
            tensors, specs = list(found.values()), [value._spec for value in found.values()]
            everything = list(held.values())
            parameters = Parameters.of(
                tensors,
                [
                    spec if gradient is None else spec.with_placements((gradient,))
                    for spec, gradient in zip(specs, map(self.gradient, found), strict=True)
                ],
                [place for place, name in enumerate(found) if isinstance(self.gradient(name), Partial)],
            )
            self._known = _Known(everything, [id(value) for value in everything], specs, list(found), parameters)
        return self._known

    def _check_distributed(self, module: nn.Module) -> None:
        """Raises ParallelizeError where a parameter that was laid out is plain by now, or none any more."""
        held: Mapping[str, Any] = module._parameters or self._shown(module)
        for name in self._distributed:
            now = held.get(name)
            if isinstance(now, torch.Tensor) and not isinstance(now, DTensor):
                raise ParallelizeError(
                    f"{self._full_name(module, name)} is plain now, of shape {tuple(now.shape)}, and was laid out as a "
                    "distributed parameter; load_state_dict(assign=True), setattr and functional_call put a plain one "
                    "in its place: load whole tensors by torch.distributed.checkpoint.state_dict.set_model_state_dict("
                    "model, state_dict, options=StateDictOptions(full_state_dict=True)), which cuts them"
                )
            if now is None and is_parametrized(module, name):
                raise ParallelizeError(
                    f"{self._full_name(module, name)} is computed by a parametrization now, as weight_norm makes, and "
                    "was laid out as a parameter; parametrize modules that the plan leaves plain"
                )

    def _full_name(self, module: nn.Module, name: str) -> str:
        return f"{self.name}.{name}" if self.name else f"the {name} of a {type(module).__name__}"

    def _shown(self, module: nn.Module) -> dict[str, Any]:
        """Parameters that are plain attributes, as those that FullyShardedDataParallel has flattened are in forward."""
        state = module.__dict__
        return {name: state[name] for name in self._names if isinstance(state.get(name), DTensor)}

    def parameters(self, module: nn.Module) -> Parameters:
        """Distributed parameters of the module as they are now."""
        return self._look(module).parameters

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> torch.Tensor | None:
        """Output hook; runs with None where the forward, or a hook before it, raised."""
        if is_dynamo_compiling():
            return outside_of_graphs(self._give_out)(module, output)
        return self._give_out(module, output)

    def _give_out(self, module: nn.Module, output: Any) -> torch.Tensor | None:
        state = module.__dict__
        if _CALL not in state:
            return None
        input_plan, call, shadows, hidden = state.pop(_CALL)
        for name in shadows:
            state.pop(name, None)
        state.update(hidden)
        if not isinstance(output, torch.Tensor):
            raised = sys.exc_info()[1] if output is None else None
            if self.hands_out_as_is:
                return cast("torch.Tensor | None", output)
            text = f"a parallelized {type(module).__name__} gives a tensor, not {output!r}"
            error = ParallelizeError(text) if raised is None else raised
            if isinstance(error, Exception) and not was_told(error):
                self.leave_out(module, input_plan, call, error)
            if raised is None:
                raise error
            return None
        return self.output(module, output, input_plan, call)

    def hand_out(
        self,
        output: torch.Tensor,
        found: Placement,
        wanted: Placement,
        shape: tuple[int, ...],
        *,
        bias: torch.Tensor | None = None,
        use_local_output: bool,
    ) -> torch.Tensor:
        """Output of global `shape`, laid out as `found`, as its caller takes it."""
        key = (shape, output.dtype, found is wanted)
        output_plan = self._output_plans.get(key)
        if output_plan is None:
            _make_room(self._output_plans)
            output_plan = self._output_plans[key] = output_plan_of(self.mesh, found, wanted, tuple(shape), output.dtype)
        return leave(output_plan, output, bias, use_local_output=use_local_output)


def check_input(module: nn.Module, x: Any) -> None:
    """Raises ParallelizeError for a first argument that is no tensor."""
    kind = type(module).__name__
    check_not_of_torch(x, f"a parallelized {kind}")
    if not isinstance(x, torch.Tensor):
        raise ParallelizeError(f"a parallelized {kind} takes a tensor as its first argument, got {x!r}")


def distributed_parameter(module: nn.Module, name: str) -> Any:
    """Parameter of a module outside of its forward, where it may be a plain attribute; None where there is none."""
    found = module._parameters.get(name)
    return module.__dict__.get(name) if found is None else found


def run_of(module: nn.Module) -> LocalRun | None:
    """Hooks of a module; None for one that is not run on local tensors."""
    found: LocalRun | None = module.__dict__.get(_RUN)
    return found


def call_of(module: nn.Module) -> tuple[InputPlan, Any] | None:
    """Input plan and values kept for the call that the module is in; None where it is in no call."""
    call = module.__dict__.get(_CALL)
    return None if call is None else call[:2]


def _make_room(kinds: dict[Any, Any]) -> None:
    if len(kinds) >= _MAX_KINDS:
        kinds.clear()


class CutRun(LocalRun):
    """A module whose weight is cut: inputs are taken for `given`, outputs go out as `wanted`.

    `features` is how the features, or the rows of a table, are cut; `overlap` says that a matmul computes while its
    input or output travels.
    """

    def __init__(
        self,
        mesh: Mesh,
        given: Placement,
        features: Shard,
        wanted: Placement,
        use_local_output: bool,
        overlap: bool = False,
    ) -> None:
        super().__init__(mesh)
        self.given, self.wanted, self.use_local_output = given, wanted, use_local_output
        self.features, self.overlap = features, overlap
