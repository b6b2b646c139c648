"""Modules with sharded parameters, and outputs that are resharded or handed out shard by shard."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tritondt.errors import ArgumentError
from tritondt.errors.arguments import check_types, checked
from tritondt.redistribution.agreement import check_agreed
from tritondt.redistribution.refusals import refusing_comparison
from tritondt.sharded.agreement import agreed
from tritondt.sharded.construct import shard_tensor
from tritondt.sharded.groups import Group, mesh_of
from tritondt.sharded.plans import Sharder, ShardingPlan
from tritondt.sharded.specs import ChunkShardingSpec, ShardingSpec, check_spec
from tritondt.sharded.tensor import ShardedTensor


@checked
def shard_parameter(
    module: nn.Module,
    param_name: str,
    sharding_spec: ShardingSpec,
    src_rank: int = 0,
    process_group: Group = None,
) -> None:
    """Shards the parameter `param_name` of `module`, with the values of group rank `src_rank`.

    A collective call. Raises AttributeError for a name that the module lacks, ValueError for a parameter that is not a
    contiguous tensor, and the errors of `shard_tensor`. Where only some ranks raise, the others raise
    ShardingMismatchError, before anything is sent.

    >>> from tritondt.comm.transports.threads import run_ranks
    >>> def body(rank):
    ...     linear = nn.Linear(3, 5)
    ...     shard_parameter(linear, "weight", ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"]))
    ...     return tuple(linear.weight.local_tensor().shape)
    >>> run_ranks(2, body)
    [(3, 3), (2, 3)]
    """

    def prepare() -> tuple[str, torch.Tensor]:
        check_spec(sharding_spec)
        kind = type(module).__name__
        if not hasattr(module, param_name):
            raise AttributeError(
                f"{kind} has no attribute {param_name!r}; its parameters are {[name for name, _ in _own(module)]}"
            )
        found = getattr(module, param_name)
        if not isinstance(found, torch.Tensor):
            raise ArgumentError(f"{kind}.{param_name} is to be a tensor, found {type(found).__name__}")
        if isinstance(found, ShardedTensor):
            raise ArgumentError(f"{kind}.{param_name} is a sharded tensor already; reshard it")
        return f"{param_name!r} of {kind}", found

    tensor = agreed(mesh_of(process_group), "shard_parameter", prepare)
    found = shard_tensor(tensor.detach().requires_grad_(tensor.requires_grad), sharding_spec, src_rank, process_group)
    module.register_parameter(param_name, nn.Parameter(found, requires_grad=tensor.requires_grad))


def _own(module: nn.Module) -> Any:
    return module.named_parameters(recurse=False)


@checked
def shard_module(module: nn.Module, plan: ShardingPlan, src_rank: int = 0, process_group: Group = None) -> None:
    """Shards a module in place as a plan says: parameters and submodules, then outputs. A collective call.

    The whole plan is checked first, on all ranks alike, and nothing is changed where it is refused. Raises RuntimeError
    for a parameter below the path of a Sharder, KeyError for a Sharder of the module itself, TypeError for a value that
    is neither a spec nor a Sharder, AttributeError for a path that the module lacks, and the errors of
    `shard_parameter`. Ranks whose own plan is valid raise ShardingMismatchError.

    >>> from tritondt.comm.transports.threads import run_ranks
    >>> def body(rank):
    ...     net = nn.Sequential(nn.Linear(4, 6, bias=False))
    ...     rows = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
    ...     shard_module(net, ShardingPlan({"0.weight": rows}, {"": rows}, [""]))
    ...     return tuple(net(torch.ones(3, 4)).shape)
    >>> run_ranks(2, body)
    [(3, 6), (3, 6)]
    """

    def prepare() -> tuple[str, None]:
        _check_plan(module, plan)
        parts = (plan.plan, plan.output_plan, plan.return_local_tensor)
        return f"a plan for {' and '.join(str(sorted(part or ())) for part in parts)}, src_rank={src_rank}", None

    mesh = mesh_of(process_group)
    agreed(mesh, "shard_module", prepare)
    for name, found in plan.plan.items():
        path, _, last = name.rpartition(".")
        parent = module.get_submodule(path)
        if isinstance(found, Sharder):
            with refusing_comparison(mesh):
                setattr(parent, last, found.shard(module.get_submodule(name)))
        else:
            shard_parameter(parent, last, found, src_rank, process_group)
    if any(isinstance(found, Sharder) for found in plan.plan.values()):  # one may have raised on one rank
        check_agreed(mesh, "shard_module", "Sharders that are through")
    for name, spec in (plan.output_plan or {}).items():
        reshard_output(module.get_submodule(name), spec)
    for name in plan.return_local_tensor or ():
        collect_local_shard(module.get_submodule(name))


def _check_plan(module: nn.Module, plan: ShardingPlan) -> None:
    parts = (plan.plan, plan.output_plan or {})
    if not all(isinstance(part, Mapping) for part in parts) or isinstance(plan.return_local_tensor, str):
        check_types(ShardingPlan.__init__, **vars(plan))
    sharders = [name for name, found in plan.plan.items() if isinstance(found, Sharder)]
    for name, found in plan.plan.items():
        if isinstance(found, Sharder):
            if not name:
                raise KeyError("a Sharder replaces a submodule, and '' is the module itself; give a submodule's path")
            module.get_submodule(name)
        elif isinstance(found, ShardingSpec):
            _check_parameter(module, name, sharders)
        else:
            raise ArgumentError(
                f"the plan gives {name!r} a {type(found).__name__}; allowed are a ShardingSpec and a Sharder"
            )
    for name, spec in (plan.output_plan or {}).items():
        if not isinstance(spec, ShardingSpec):
            raise ArgumentError(f"output_plan gives {name!r} a {type(spec).__name__}; allowed is a ShardingSpec")
        module.get_submodule(name)
    for name in plan.return_local_tensor or ():
        module.get_submodule(name)


def _check_parameter(module: nn.Module, name: str, sharders: list[str]) -> None:
    """Refuses a parameter that the module does not have, or that a Sharder of the plan has."""
    for path in sharders:
        if name.startswith(f"{path}."):
            raise RuntimeError(
                f"the plan shards the parameter {name!r}, and has a Sharder for the submodule {path!r} that contains "
                "it; leave one of them out"
            )
    path, _, last = name.rpartition(".")
    if not hasattr(module.get_submodule(path), last):
        raise AttributeError(f"the plan shards {name!r}, which {type(module).__name__} does not have")


@checked
def reshard_output(module: nn.Module, resharding_spec: ShardingSpec) -> nn.Module:
    """Makes every forward of a module reshard its sharded output to a spec, and returns the module; other outputs stay.

    Its forward is then a collective call. Raises TypeError for anything but a spec.

    >>> from tritondt.comm.transports.threads import run_ranks
    >>> def body(rank):
    ...     rows, columns = (ChunkShardingSpec(dim, ["rank:0/cpu", "rank:1/cpu"]) for dim in (0, 1))
    ...     net = reshard_output(nn.Identity(), columns)
    ...     return tuple(net(ones(rows, 4, 6)).local_tensor().shape)
    >>> from tritondt.sharded import ones
    >>> run_ranks(2, body)
    [(4, 3), (4, 3)]
    """
    check_spec(resharding_spec)

    def reshard(_: nn.Module, inputs: Any, output: Any) -> Any:
        return output.reshard(resharding_spec) if isinstance(output, ShardedTensor) else output

    module.register_forward_hook(reshard)
    return module


@checked
def collect_local_shard(module: nn.Module) -> nn.Module:
    """Makes every forward of a module return this rank's shard of its sharded output, with gradients, and returns the
    module.

    The dim that a ChunkShardingSpec cuts is removed where the shard's size is 1: of a (4, 16) output on 4 ranks each
    gets a (16,) tensor. Forward raises NotImplementedError on a rank that holds no shard or several; it leaves other
    outputs alone.

    >>> from tritondt.comm.transports.threads import run_ranks
    >>> from tritondt.sharded import ones
    >>> rows = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
    >>> run_ranks(2, lambda rank: tuple(collect_local_shard(nn.Identity())(ones(rows, 4, 6)).shape))
    [(2, 6), (2, 6)]
    """

    def collect(_: nn.Module, inputs: Any, output: Any) -> Any:
        if not isinstance(output, ShardedTensor):
            return output
        local, spec = output.local_tensor(), output.sharding_spec()
        if isinstance(spec, ChunkShardingSpec) and local.size(spec.dim) == 1:
            return local.squeeze(spec.dim)
        return local

    module.register_forward_hook(collect)
    return module


def state_dict_hook(module: nn.Module, destination: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Hook for `module._register_state_dict_hook`: adds attributes that are sharded tensors but not parameters.

    >>> from tritondt.comm.transports.threads import run_ranks
    >>> from tritondt.sharded import ones
    >>> def body(rank):
    ...     net = nn.Module()
    ...     net.table = ones(ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"]), 4, 6)
    ...     net._register_state_dict_hook(state_dict_hook)
    ...     return list(net.state_dict())
    >>> run_ranks(2, body)
    [['table'], ['table']]
    """
    for path, submodule in module.named_modules():
        for name, found in vars(submodule).items():
            if isinstance(found, ShardedTensor):
                destination[_key(prefix, path, name)] = found


def pre_load_state_dict_hook(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: Any,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Hook for `module._register_load_state_dict_pre_hook`, called with the module: loads attributes that are sharded
    tensors.

    >>> from tritondt.comm.transports.threads import run_ranks
    >>> from tritondt.sharded import ones, zeros
    >>> def body(rank):
    ...     net, rows = nn.Module(), ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
    ...     net.table = zeros(rows, 4, 6)
    ...     net._register_load_state_dict_pre_hook(pre_load_state_dict_hook, with_module=True)
    ...     net.load_state_dict({"table": ones(rows, 4, 6)}, strict=False)
    ...     return net.table.local_tensor().sum().item()
    >>> run_ranks(2, body)
    [12.0, 12.0]
    """
    for path, submodule in module.named_modules():
        for name in list(vars(submodule)):
            found = state_dict.get(_key(prefix, path, name))
            if isinstance(found, ShardedTensor):
                setattr(submodule, name, found)


def _key(prefix: str, path: str, name: str) -> str:
    return prefix + (f"{path}.{name}" if path else name)
