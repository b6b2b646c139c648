"""torch's data-parallel wrappers, which refuse distributed parameters before they change a module.

torch's fully_shard would cut a part as if it were the whole, and DistributedDataParallel average parts of different
elements. Each is asked where it looks at the parameters first.
"""

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tritondt.dtensor.tensor import DTensor
from tritondt.errors import FullyShardError
from tritondt.ops.propagation.replication import are_replicated

_CURE = "call tritondt.fsdp.fully_shard(module, mesh=mesh['dp']) in place of it"


def guard_fully_shard(fsdp_init: ModuleType) -> None:
    """Lets torch's fully_shard, and replicate where that is made of it, refuse our parameters at once."""
    verify: Callable[[str, nn.Parameter], None] = fsdp_init._verify_managed_param

    @wraps(verify)
    def refuse(name: str, param: nn.Parameter) -> None:
        if isinstance(param, DTensor):
            raise FullyShardError(
                f"torch's fully_shard, or replicate, was given the parameter {name!r}, a tritondt DTensor "
                f"{param._spec}, which it would cut as if its part were the whole; {_CURE}"
            )
        verify(name, param)

    fsdp_init._verify_managed_param = refuse  # type: ignore[attr-defined]


def guard_replicate(replicate: ModuleType) -> None:
    """Lets the replicate that wraps DistributedDataParallel refuse our parameters at once, not in the first forward."""
    state: Any = replicate._ReplicateState
    record: Callable[..., None] = state.record_init_args

    @wraps(record)
    def refuse(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        try:
            _check_replicas("torch's replicate", module, _group_of(kwargs))
        except FullyShardError:
            _remove_hooks(module, self)
            raise
        record(self, module, *args, **kwargs)

    state.record_init_args = refuse


def _remove_hooks(module: nn.Module, state: Any) -> None:
    """Removes the hooks that replicate has registered just before; they would run in the next forward."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in tuple(hooks.items()):
            if (
                getattr(hook, "__self__", None) is state
                or getattr(hook, "__module__", "") == "torch.distributed.tensor.parallel.ddp"
            ):
                del hooks[key]


def guard_distributed_data_parallel() -> None:
    """Lets DistributedDataParallel refuse our parameters, but over ranks that hold the same parts."""
    start: Callable[..., None] = DistributedDataParallel.__init__

    @wraps(start)
    def refuse(self: DistributedDataParallel, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if isinstance(module, nn.Module):
            _check_replicas("DistributedDataParallel", module, _group_of(kwargs))
        start(self, module, *args, **kwargs)

    DistributedDataParallel.__init__ = refuse  # type: ignore[method-assign]


def _group_of(options: dict[str, Any]) -> dist.ProcessGroup | None:
    mesh = options.get("device_mesh")
    return options.get("process_group") if mesh is None else mesh.get_group(mesh_dim=0)


def _check_replicas(taker: str, module: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Raises FullyShardError for distributed parameters of which the group's ranks hold different parts."""
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    named = [(name, parameter) for name, parameter in module.named_parameters() if name not in ignored]
    distributed = [(name, parameter) for name, parameter in named if isinstance(parameter, DTensor)]
    if not distributed:
        return
    ranks = set(dist.get_process_group_ranks(group or dist.group.WORLD)) if dist.is_initialized() else set[int]()
    for name, parameter in distributed:
        if len(ranks.intersection(parameter._spec.mesh.ranks)) > 1:
            raise FullyShardError(
                f"{taker} was given the parameter {name!r}, a tritondt DTensor {parameter._spec} on "
                f"{parameter._spec.mesh}, and a group of ranks of that mesh, whose parts of it are different elements; "
                f"{_CURE}, or give it the group of another axis, process_group=mesh['dp'].get_group()"
            )
    if len(distributed) < len(named) and not are_replicated():
        plain = next(name for name, parameter in named if not isinstance(parameter, DTensor))
        raise FullyShardError(
            f"{taker} was given distributed parameters, as {distributed[0][0]!r}, and plain ones, as {plain!r}; "
            f"{_CURE}, or construct and run it within tritondt.implicit_replication(), where plain ones count as "
            "replicated"
        )
