"""PrepareModuleInput and PrepareModuleOutput: redistribution of the inputs and outputs of modules without weights to
cut.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tritondt.dtensor.tensor import DTensor
from tritondt.errors import ParallelizeError, was_told
from tritondt.errors.arguments import checked
from tritondt.parallel.boundary import activation_spec
from tritondt.parallel.style import ParallelStyle, Role, check_free, checked_layout, claim
from tritondt.redistribution.refusals import refuse_redistribution
from tritondt.sharding.mesh import Mesh, canonical_mesh
from tritondt.sharding.placement import Placement, Shard

# One layout for a lone tensor, or one for each tensor, None where it is left as it is.
Layouts: TypeAlias = "Placement | Sequence[Placement | None] | None"


class LayoutChange:
    """Layouts from which and to which tensors go; tensors without a wanted layout stay distributed as they were
    given.
    """

    def __init__(self, given: Layouts, wanted: Layouts, *, local: bool, what: str) -> None:
        self.given, self.wanted = _listed(given, what), _listed(wanted, f"desired_{what}")
        self.local, self.what = local, what
        if len(self.given) != len(self.wanted):
            raise ParallelizeError(
                f"{what} lists {len(self.given)} layouts and desired_{what} {len(self.wanted)}; allowed are as many"
            )

    def change_all(self, values: Sequence[Any], mesh: Mesh, module: nn.Module) -> tuple[Any, ...]:
        """All values, laid out as wanted."""
        if len(values) != len(self.given):
            error = ParallelizeError(
                f"{self.what} lists {len(self.given)} layouts, but {type(module).__name__} was met with {len(values)} "
                "values; allowed is one layout for each, None for one that is left as it is"
            )
            self.refuse_from(0, mesh, error)
            raise error
        changed = []
        for place, (value, given, wanted) in enumerate(zip(values, self.given, self.wanted, strict=True)):
            try:
                changed.append(self.change(value, given, wanted, mesh))
            except Exception as error:
                self.refuse_from(place + 1 if was_told(error) else place, mesh, error)
                raise
        return tuple(changed)

    def refuse_from(self, first: int, mesh: Mesh, error: Exception) -> None:
        """Tells the others that wait for this rank's values from number `first` on why these do not come."""
        for given, wanted in zip(self.given[first:], self.wanted[first:], strict=True):
            if given is not None and wanted is not None:
                # As many exchanges for any tensor: the lengths are those of no one.
                dims = [place.dim for place in (given, wanted) if isinstance(place, Shard)]
                shape = (len(mesh.ranks),) * (max([2, *(dim + 1 if dim >= 0 else -dim for dim in dims)]))
                source, target = (activation_spec(mesh, place, shape, torch.float32) for place in (given, wanted))
                refuse_redistribution(source, target, error)

    def change(self, value: Any, given: Placement | None, wanted: Placement | None, mesh: Mesh) -> Any:
        """One value, laid out as wanted; a plain tensor is taken for a part under `given`."""
        if given is None:
            return value
        if not isinstance(value, torch.Tensor):
            raise ParallelizeError(f"{self.what} has {given} for {value!r}, which is no tensor; allowed is None")
        tensor = value if isinstance(value, DTensor) else DTensor.from_local(value, mesh, (given,))
        if wanted is not None:
            tensor = _redistributed(tensor, wanted)
        return tensor.to_local() if self.local else tensor


def _redistributed(x: DTensor, wanted: Placement) -> DTensor:
    """Tensor under `wanted`; `x` itself where it is laid out so, for gradients of several users to meet as they
    come.
    """
    spec = x._spec
    if spec.layout is activation_spec(spec.mesh, wanted, spec.shape, spec.dtype).layout:
        return x
    return x.redistribute(placements=(wanted,))


def _listed(layouts: Layouts, what: str) -> tuple[Placement | None, ...]:
    if layouts is None:
        return ()
    listed = (layouts,) if not isinstance(layouts, Sequence) else layouts
    return tuple(checked_layout(layout, what) for layout in listed)


class PrepareModuleInput(ParallelStyle):
    """Style that redistributes a module's inputs to the layouts that it needs.

    Plain tensors count as parts under `input_layouts`, with one entry per positional argument (None leaves it alone),
    and are redistributed to `desired_input_layouts`; named arguments likewise. The module gets distributed tensors, or
    local ones with `use_local_output`. Every forward is then a collective call. Raises ParallelizeError where the
    numbers of layouts differ. Source: torch.distributed.tensor.parallel.PrepareModuleInput.

    >>> from tritondt.comm.transports.threads import run_ranks
    >>> from tritondt.parallel.parallelize import parallelize_module
    >>> from tritondt.sharding.placement import Replicate, Shard
    >>> layouts = {"input_layouts": Shard(0), "desired_input_layouts": Replicate()}
    >>> def input_on(rank):
    ...     style = PrepareModuleInput(**layouts, use_local_output=True)
    ...     return parallelize_module(nn.Identity(), Mesh((2,)), style)(torch.tensor([rank])).tolist()
    >>> run_ranks(2, input_on)
    [[0, 1], [0, 1]]
    """

    @checked
    def __init__(
        self,
        *,
        input_layouts: Layouts = None,
        desired_input_layouts: Layouts = None,
        input_kwarg_layouts: Mapping[str, Placement] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placement] | None = None,
        use_local_output: bool = False,
    ) -> None:
        self._positional = LayoutChange(
            input_layouts, desired_input_layouts, local=use_local_output, what="input_layouts"
        )
        given, wanted = dict(input_kwarg_layouts or {}), dict(desired_input_kwarg_layouts or {})
        if given.keys() != wanted.keys():
            raise ParallelizeError(
                f"input_kwarg_layouts names {sorted(given)} and desired_input_kwarg_layouts {sorted(wanted)}; allowed "
                "are the same names"
            )
        self._keywords = tuple(given)
        self._by_keyword = LayoutChange(
            tuple(given.values()), tuple(wanted.values()), local=use_local_output, what="input_kwarg_layouts"
        )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh | Mesh) -> nn.Module:
        check_free(module, self, "input")
        claim(module, self, "input")
        self.install(module, canonical_mesh(device_mesh))
        return module

    def install(self, module: nn.Module, mesh: Mesh) -> None:
        """Registers the hook that redistributes the inputs."""
        hook = _InputHook(mesh, self._positional, self._keywords, self._by_keyword)
        module.register_forward_pre_hook(hook, with_kwargs=True)


class _InputHook:
    """Forward pre-hook of PrepareModuleInput; copied with its module."""

    def __init__(
        self, mesh: Mesh, positional: LayoutChange, keywords: tuple[str, ...], by_keyword: LayoutChange
    ) -> None:
        self._mesh, self._positional, self._keywords, self._by_keyword = mesh, positional, keywords, by_keyword

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self._positional.given:
            args = self._positional.change_all(args, self._mesh, module)
        layouts = zip(self._keywords, self._by_keyword.given, self._by_keyword.wanted, strict=True)
        changed = {
            name: self._by_keyword.change(kwargs[name], given, wanted, self._mesh)
            for name, given, wanted in layouts
            if name in kwargs
        }
        return args, {**kwargs, **changed}


class PrepareModuleOutput(ParallelStyle):
    """Style that redistributes a module's outputs to the layouts that its callers need.

    Plain outputs count as parts under `output_layouts`, with one entry each (None leaves it alone), and are
    redistributed to `desired_output_layouts`, as local tensors unless `use_local_output=False`. Every forward is then a
    collective call. Raises ParallelizeError where the numbers of layouts differ. Source:
    torch.distributed.tensor.parallel.PrepareModuleOutput.

    >>> from tritondt.comm.transports.threads import run_ranks
    >>> from tritondt.parallel.parallelize import parallelize_module
    >>> from tritondt.sharding.placement import Partial, Replicate
    >>> def output_on(rank):
    ...     style = PrepareModuleOutput(output_layouts=Partial(), desired_output_layouts=Replicate())
    ...     return parallelize_module(nn.Identity(), Mesh((2,)), style)(torch.tensor([rank])).tolist()
    >>> run_ranks(2, output_on)
    [[1], [1]]
    """

    @checked
    def __init__(
        self, *, output_layouts: Layouts, desired_output_layouts: Layouts, use_local_output: bool = True
    ) -> None:
        self._layout_change = LayoutChange(
            output_layouts, desired_output_layouts, local=use_local_output, what="output_layouts"
        )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh | Mesh) -> nn.Module:
        check_free(module, self, "output")
        claim(module, self, "output")
        self.install(module, canonical_mesh(device_mesh))
        return module

    def install(self, module: nn.Module, mesh: Mesh) -> None:
        """Registers the hook that redistributes the outputs."""
        module.register_forward_hook(_OutputHook(mesh, self._layout_change), always_call=True)


class _OutputHook:
    """Forward hook of PrepareModuleOutput; copied with its module."""

    def __init__(self, mesh: Mesh, layout_change: LayoutChange) -> None:
        self._mesh, self._layout_change = mesh, layout_change

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """The output as wanted; called with None where the forward raised, of which the others hear."""
        raised = sys.exc_info()[1] if output is None else None
        if raised is not None:
            if isinstance(raised, Exception) and not was_told(raised):
                self._layout_change.refuse_from(0, self._mesh, raised)
            return None
        if not isinstance(output, tuple):
            return self._layout_change.change_all((output,), self._mesh, module)[0]
        return self._layout_change.change_all(output, self._mesh, module)


class PrepareModuleInputOutput(ParallelStyle):
    """Style of PrepareModuleInput and PrepareModuleOutput in one.

    Arguments are those of the two; `use_local_input` is `use_local_output` of PrepareModuleInput. Every forward is then
    a collective call. Raises ParallelizeError like both of them. Source:
    torch.distributed.tensor.parallel.PrepareModuleInputOutput.

    >>> from tritondt.comm.transports.threads import run_ranks
    >>> from tritondt.parallel.parallelize import parallelize_module
    >>> from tritondt.sharding.placement import Replicate, Shard
    >>> inside = {"input_layouts": Shard(0), "desired_input_layouts": Replicate()}
    >>> outside = {"output_layouts": Replicate(), "desired_output_layouts": Shard(0)}
    >>> def output_on(rank):
    ...     style = PrepareModuleInputOutput(**inside, **outside)
    ...     return parallelize_module(nn.Identity(), Mesh((2,)), style)(torch.tensor([rank])).tolist()
    >>> run_ranks(2, output_on)
    [[0], [1]]
    """

    @checked
    def __init__(
        self,
        *,
        input_layouts: Layouts = None,
        desired_input_layouts: Layouts = None,
        input_kwarg_layouts: Mapping[str, Placement] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placement] | None = None,
        use_local_input: bool = False,
        output_layouts: Layouts,
        desired_output_layouts: Layouts,
        use_local_output: bool = True,
    ) -> None:
        self._input = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
        )
        self._output = PrepareModuleOutput(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh | Mesh) -> nn.Module:
        roles: tuple[Role, ...] = ("input", "output")
        check_free(module, self, *roles)
        claim(module, self, *roles)
        mesh = canonical_mesh(device_mesh)
        self._input.install(module, mesh)
        self._output.install(module, mesh)
        return module


# Styles that leave parameters alone.
PREPARING = (PrepareModuleInput, PrepareModuleOutput, PrepareModuleInputOutput)
