"""Base of the parallel styles, each of which lays one module over one mesh axis, once."""

from abc import ABC, abstractmethod
from typing import Any, Literal

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils.parametrize import is_parametrized

from tritondt.errors import LayoutError, ParallelizeError
from tritondt.sharding.mesh import Mesh
from tritondt.sharding.placement import Placement, as_placement

# What a style takes care of; a module has one style for each, and one that runs it on local tensors takes all three.
Role = Literal["input", "output", "weights"]

_STYLES = "_tritondt_parallel_styles"


class ParallelStyle(ABC):
    """Base class of styles: a subclass lays one module out over a mesh axis in its `_apply`.

    `parallelize_module` sets `src_data_rank`: the mesh rank whose values of a parameter count, or None for every rank's
    own. `_apply(module, device_mesh)` changes the module in place or returns a replacement; all ranks of the mesh call
    it. Source: torch.distributed.tensor.parallel.ParallelStyle.

    >>> class Frozen(ParallelStyle):
    ...     def _apply(self, module, device_mesh):
    ...         return module.requires_grad_(False)
    >>> Frozen()._apply(nn.Linear(2, 2), device_mesh=None).weight.requires_grad
    False
    """

    src_data_rank: int | None = 0

    @abstractmethod
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh | Mesh) -> nn.Module:
        """Changes `module`, or gives one in place of it; ParallelizeError where it cannot."""


def check_free(module: nn.Module, style: ParallelStyle, *roles: Role) -> None:
    """Raises ParallelizeError where another style takes care of these parts of the module."""
    for taken, by in module.__dict__.get(_STYLES, {}).items():
        if taken in roles or "weights" in (taken, *roles):
            raise ParallelizeError(
                f"it is parallelized already, by {by}, and cannot have {type(style).__name__} as well; name it once in "
                "one plan, or parallelize a fresh module"
            )


def claim(module: nn.Module, style: ParallelStyle, *roles: Role) -> None:
    """Notes that `style` takes care of these parts of the module from now on."""
    module.__dict__.setdefault(_STYLES, {}).update(dict.fromkeys(roles, type(style).__name__))


def checked_layout(layout: Any, what: str) -> Placement | None:
    """Layout, if it is a placement, ours or torch's, or None; ParallelizeError for anything else."""
    try:
        layout = as_placement(layout)
    except LayoutError as error:
        raise ParallelizeError(f"{what}: {error}") from error
    if layout is None or isinstance(layout, Placement):
        return layout
    kind = f"{type(layout).__module__.split('.')[0]}'s {type(layout).__name__}"
    raise ParallelizeError(f"{what} got {layout!r}, {kind}; allowed are tritondt's Shard, Replicate and Partial")


def check_own_weights(module: nn.Module, style: ParallelStyle) -> None:
    """Raises ParallelizeError where a parametrization computes a parameter of the module, as weight_norm does."""
    names = list(module.parametrizations) if is_parametrized(module) else []  # type: ignore[arg-type]
    names += [getattr(hook, "name", "weight") for hook in module._forward_pre_hooks.values() if _parametrizes(hook)]
    if names:
        raise ParallelizeError(
            f"{type(style).__name__} cuts parameters, and the module's {names[0]} is computed by a parametrization, as "
            "weight_norm makes; make it a parameter again before parallelize_module: "
            f"torch.nn.utils.parametrize.remove_parametrizations(module, {names[0]!r}), or "
            "torch.nn.utils.remove_weight_norm(module) after torch.nn.utils.weight_norm"
        )


def _parametrizes(hook: Any) -> bool:
    """Whether a forward pre-hook is one of torch's older parametrizations."""
    return type(hook).__module__ in ("torch.nn.utils.weight_norm", "torch.nn.utils.spectral_norm")
