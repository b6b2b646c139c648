"""Public calls before whose exchanges one rank may refuse alone, by a check of its own or a function of the user's.

Each is called with the rank, and whether this rank has it wrong; all ranks of three call it.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import tritondt as T
import tritondt.debug as debug
import tritondt.parallel as parallel
import tritondt.sharded as sharded
from tritondt.experimental import local_map
from tritondt.fsdp import fully_shard
from tritondt.interop.checkpoint_folder import CheckpointFolder
from tritondt.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

SIZE = 3
Call = Callable[[int, bool], object]
# As programs without type checkers call them.
_t: Any = T
_parallel: Any = parallel
_sharded: Any = sharded
_debug: Any = debug
_module: Any = parallelize_module
WORDS: Any = "a text"


def mesh() -> T.Mesh:
    return T.Mesh((SIZE,))


def rows(rank: int) -> T.DTensor:
    return T.DTensor.from_local(torch.full((2, 6), float(rank)), mesh(), [T.Shard(0)])


def freed(x: torch.Tensor, is_wrong: bool) -> torch.Tensor:
    """The tensor, without its memory where it is to be wrong."""
    held = x.to_local() if isinstance(x, T.DTensor) else x
    if is_wrong:
        held.untyped_storage().resize_(0)
    return x


def freed_rows(rank: int, is_wrong: bool) -> Any:
    return freed(rows(rank), is_wrong)


# Distributed tensors -------------------------------------------------------------------------------------------------


def distribute_sparse(rank: int, is_wrong: bool) -> object:
    x = torch.ones(6, 6)
    return T.distribute_tensor(x.to_sparse() if is_wrong else x, mesh(), [T.Shard(0)])


def distribute_from_nowhere(rank: int, is_wrong: bool) -> object:
    return T.distribute_tensor(torch.ones(6, 6), mesh(), [T.Shard(0)], src_data_rank=9 if is_wrong else 0)


def distribute_a_list(rank: int, is_wrong: bool) -> object:
    return _t.distribute_tensor([1] if is_wrong else torch.ones(6), mesh(), [T.Shard(0)])


def distribute_as_a_number(rank: int, is_wrong: bool) -> object:
    return _t.distribute_tensor(torch.ones(6), mesh(), 3 if is_wrong else [T.Shard(0)])


def full_tensor_freed(rank: int, is_wrong: bool) -> object:
    return freed_rows(rank, is_wrong).full_tensor()


def redistribute_freed(rank: int, is_wrong: bool) -> object:
    return freed_rows(rank, is_wrong).redistribute(placements=[T.Shard(1)])


def redistribute_freed_later(rank: int, is_wrong: bool) -> object:
    return freed_rows(rank, is_wrong).redistribute(placements=[T.Shard(1)], async_op=True).to_local()


def redistribute_of_words(rank: int, is_wrong: bool) -> object:
    return rows(rank).redistribute(placements=[T.Shard(1)], wire_dtype=WORDS if is_wrong else torch.bfloat16)


def redistribute_to_words(rank: int, is_wrong: bool) -> object:
    return rows(rank).redistribute(placements=[T.Shard(1)], forward_dtype=WORDS if is_wrong else torch.float64)


def _specs() -> tuple[T.DTensorSpec, T.DTensorSpec]:
    source = T.DTensorSpec(mesh(), [T.Shard(0)], T.TensorMeta.contiguous((6, 6)))
    return source, source.with_placements([T.Shard(1)])


def redistribute_local_words(rank: int, is_wrong: bool) -> object:
    return T.redistribute(WORDS if is_wrong else torch.ones(2, 6), *_specs())


def redistribute_local_wire(rank: int, is_wrong: bool) -> object:
    return T.redistribute(torch.ones(2, 6), *_specs(), wire_dtype=torch.int8 if is_wrong else torch.bfloat16)


def redistribute_local_gradient(rank: int, is_wrong: bool) -> object:
    local = torch.ones(2, 6, requires_grad=True)
    return T.redistribute(local, *_specs(), grad_placements=[T.Shard(0)] if is_wrong else None)


def many_freed(rank: int, is_wrong: bool) -> object:
    moves = [(x, [T.Replicate()]) for x in (rows(rank), freed_rows(rank, is_wrong))]
    return [x.to_local() for x in T.redistribute_many(moves)]


def from_local_sparse(rank: int, is_wrong: bool) -> object:
    local = torch.ones(2, 6)
    return T.DTensor.from_local(local.to_sparse() if is_wrong else local, mesh(), [T.Shard(0)], run_check=True)


def from_local_shape(rank: int, is_wrong: bool) -> object:
    return T.DTensor.from_local(torch.ones(2, 7 if is_wrong else 6), mesh(), [T.Shard(0)], run_check=True)


def from_local_words(rank: int, is_wrong: bool) -> object:
    return T.DTensor.from_local(WORDS if is_wrong else torch.ones(2, 6), mesh(), [T.Shard(0)], run_check=True)


def _with_gradient(gradient: Any) -> nn.Parameter:
    parameter = nn.Parameter(torch.ones_like(gradient))
    parameter.grad = gradient
    return parameter


def clip_a_plain_gradient(rank: int, is_wrong: bool) -> object:
    plain = nn.Parameter(torch.ones(3))
    plain.grad = torch.ones(3) if is_wrong else None
    return T.clip_grad_norm_([_with_gradient(rows(rank)), plain], 1.0)


def clip_a_freed_gradient(rank: int, is_wrong: bool) -> object:
    parameter = _with_gradient(rows(rank))
    freed(parameter.grad, is_wrong)  # type: ignore[arg-type]
    return T.clip_grad_norm_([parameter], 1.0)


def clip_a_number(rank: int, is_wrong: bool) -> object:
    found = _with_gradient(rows(rank))
    return _t.clip_grad_norm_([found, 3] if is_wrong else [found], 1.0)


def clip_by_words(rank: int, is_wrong: bool) -> object:
    return T.clip_grad_norm_([_with_gradient(rows(rank))], 1.0, norm_type=WORDS if is_wrong else 2.0)


def module_of_sparse(rank: int, is_wrong: bool) -> object:
    module = nn.Linear(6, 6)
    module.register_buffer("table", torch.ones(3).to_sparse() if is_wrong else torch.ones(3))
    return T.distribute_module(module, mesh())


def module_of_words(rank: int, is_wrong: bool) -> object:
    return T.distribute_module(WORDS if is_wrong else nn.Linear(6, 6), mesh())


def module_twice(rank: int, is_wrong: bool) -> object:
    module = nn.Linear(6, 6)
    module._tritondt_distributed = is_wrong  # type: ignore[assignment]
    return T.distribute_module(module, mesh())


def module_hook(rank: int, is_wrong: bool) -> object:
    return T.distribute_module(nn.Linear(6, 6), mesh(), None, (lambda a: a) if is_wrong else (lambda a, b, c: b))


def partition_fn(rank: int, is_wrong: bool) -> object:
    def partition(name: str, module: nn.Module, device_mesh: Any) -> None:
        if isinstance(module, nn.Linear):
            if is_wrong:
                raise KeyError("no such layer")
            weight = T.distribute_tensor(module.weight, device_mesh, [T.Shard(0)])
            module.register_parameter("weight", nn.Parameter(weight))

    return T.distribute_module(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), mesh(), partition)


def partition_fn_that_sends_nothing(rank: int, is_wrong: bool) -> object:
    def partition(name: str, module: nn.Module, device_mesh: Any) -> None:
        if is_wrong:
            raise KeyError("no such layer")
        for key, value in list(module.named_parameters(recurse=False)):
            made = T.distribute_tensor(value, device_mesh, [T.Shard(0)], src_data_rank=None)
            module.register_parameter(key, nn.Parameter(made))

    return T.distribute_module(nn.Sequential(nn.Linear(6, 6)), mesh(), partition)


def partition_fn_refused(rank: int, is_wrong: bool) -> object:
    """The others are told by what the function itself asks for."""

    def partition(name: str, module: nn.Module, device_mesh: Any) -> None:
        if isinstance(module, nn.Linear):
            weight = T.distribute_tensor(module.weight, device_mesh, [T.Shard(5 if is_wrong else 0)])
            module.register_parameter("weight", nn.Parameter(weight))

    return T.distribute_module(nn.Sequential(nn.Linear(6, 6)), mesh(), partition)


def _uneven() -> T.DTensor:
    return T.distribute_tensor(torch.ones(7), mesh(), [T.Shard(0)], src_data_rank=None)


def mapped_function(rank: int, is_wrong: bool) -> object:
    def double(x: torch.Tensor) -> torch.Tensor:
        if is_wrong:
            raise ValueError("no product")
        return 2 * x

    return local_map(double, out_placements=[T.Shard(0)], device_mesh=mesh())(_uneven())


def mapped_to_words(rank: int, is_wrong: bool) -> object:
    return local_map(lambda x: WORDS if is_wrong else x, out_placements=[T.Shard(0)], device_mesh=mesh())(_uneven())


def mapped_to_a_number(rank: int, is_wrong: bool) -> object:
    return local_map(lambda x: x.sum() if is_wrong else x, out_placements=[T.Shard(0)], device_mesh=mesh())(_uneven())


# Modules over a tensor axis ------------------------------------------------------------------------------------------


def plan_of_another_module(rank: int, is_wrong: bool) -> object:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU() if is_wrong else nn.Linear(6, 6))
    return parallelize_module(model, mesh(), {"0": ColwiseParallel(), "1": ColwiseParallel()})


def plan_of_another_name(rank: int, is_wrong: bool) -> object:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    return parallelize_module(model, mesh(), {"7" if is_wrong else "0": ColwiseParallel()})


def plan_of_a_number(rank: int, is_wrong: bool) -> object:
    return _module(nn.Linear(6, 6), mesh(), 3 if is_wrong else ColwiseParallel())


def plan_for_words(rank: int, is_wrong: bool) -> object:
    return _module(WORDS if is_wrong else nn.Linear(6, 6), mesh(), ColwiseParallel())


class OwnStyle(parallel.ParallelStyle):
    """A style of a user's that raises on one rank."""

    def __init__(self, is_wrong: bool) -> None:
        self.is_wrong = is_wrong

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        if self.is_wrong:
            raise ValueError("no style")
        weight: Any = module.weight
        module.register_parameter("weight", nn.Parameter(T.distribute_tensor(weight, device_mesh, [T.Shard(0)])))
        return module


def own_style(rank: int, is_wrong: bool) -> object:
    return parallelize_module(nn.Linear(6, 6), mesh(), OwnStyle(is_wrong))


def own_style_before_others(rank: int, is_wrong: bool) -> object:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    return parallelize_module(model, mesh(), {"0": OwnStyle(is_wrong), "1": ColwiseParallel()})


def own_style_behind_others(rank: int, is_wrong: bool) -> object:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    return parallelize_module(model, mesh(), {"0": ColwiseParallel(), "1": OwnStyle(is_wrong)})


class Odd(nn.Linear):
    """A layer whose forward does on one rank what `how` says."""

    how = ""

    def forward(self, input: torch.Tensor) -> Any:
        if self.how == "raise":
            raise ValueError("no product")
        if self.how == "words":
            return WORDS
        found = super().forward(input)
        return found[:, :3] if self.how == "shape" else freed(found, self.how == "freed")


def _odd_rows(how: str) -> Call:
    def call(rank: int, is_wrong: bool) -> object:
        odd = Odd(6, 6)
        odd.how = how if is_wrong else ""
        model = nn.Sequential(nn.Linear(6, 6), odd)
        parallelize_module(model, mesh(), {"0": ColwiseParallel(), "1": RowwiseParallel()})
        return model(torch.ones(2, 6))

    return call


def freed_weight(rank: int, is_wrong: bool) -> object:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    parallelize_module(model, mesh(), {"0": ColwiseParallel(), "1": RowwiseParallel()})
    held: Any = model[1].weight
    freed(held, is_wrong)
    return model(torch.ones(2, 6))


_INPUTS: dict[str, Any] = {"input_layouts": T.Shard(0), "desired_input_layouts": T.Replicate()}
_TWO_INPUTS: dict[str, Any] = {name: (layout, layout) for name, layout in _INPUTS.items()}
_TWO_OUTPUTS: dict[str, Any] = {name.replace("in", "out"): layouts for name, layouts in _TWO_INPUTS.items()}


def input_of_words(rank: int, is_wrong: bool) -> object:
    module = parallelize_module(nn.Linear(6, 6), mesh(), parallel.PrepareModuleInput(**_INPUTS))
    return module(WORDS if is_wrong else torch.ones(2, 6))


def one_input_of_two(rank: int, is_wrong: bool) -> object:
    style = parallel.PrepareModuleInput(**_TWO_INPUTS, use_local_output=True)
    module = parallelize_module(nn.Bilinear(6, 6, 6), mesh(), style)
    return module(*[torch.ones(2, 6)] * (1 if is_wrong else 2))


def second_input_of_words(rank: int, is_wrong: bool) -> object:
    style = parallel.PrepareModuleInput(**_TWO_INPUTS, use_local_output=True)
    module = parallelize_module(nn.Bilinear(6, 6, 6), mesh(), style)
    return module(torch.ones(2, 6), WORDS if is_wrong else torch.ones(2, 6))


class Two(nn.Module):
    """A module of two outputs, which on one rank raises or gives one."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: torch.Tensor) -> Any:
        if self.how == "raise":
            raise ValueError("no outputs")
        return (x,) if self.how == "one" else (x, x)


def _two_outputs(how: str) -> Call:
    def call(rank: int, is_wrong: bool) -> object:
        style = parallel.PrepareModuleOutput(**_TWO_OUTPUTS)
        return parallelize_module(Two(how if is_wrong else ""), mesh(), style)(torch.ones(2, 6))

    return call


def _chunked(function: Any, positions: int, weights: int, key: str, **wrong: Any) -> Call:
    def call(rank: int, is_wrong: bool) -> object:
        spec = T.DTensorSpec(mesh(), [T.Shard(0)], T.TensorMeta.contiguous((6, 4)))
        features = 4 if positions == 2 else 3
        given = {"x": torch.ones(positions, features), "weight": torch.ones(weights, features)}
        return function(**{**given, **(wrong if is_wrong else {})}, **{key: spec}, chunks_per_peer=2)

    return call


def plain_gradients_of_words(rank: int, is_wrong: bool) -> object:
    module = nn.Linear(2, 2)
    return _debug.check_plain_gradients(WORDS if is_wrong else module, mesh())


# Experts -------------------------------------------------------------------------------------------------------------

_COUNTS = torch.ones(3, dtype=torch.long)


def _dispatch(**wrong: Any) -> Call:
    def call(rank: int, is_wrong: bool) -> object:
        given: dict[str, Any] = {"tokens": torch.ones(3, 2), "num_tokens_per_expert": _COUNTS, "sizes": None}
        return _parallel.token_dispatch(device_mesh=mesh(), **{**given, **(wrong if is_wrong else {})})

    return call


def dispatch_freed(rank: int, is_wrong: bool) -> object:
    return parallel.token_dispatch(freed(torch.ones(3, 2), is_wrong), _COUNTS, mesh())


def dispatch_freed_later(rank: int, is_wrong: bool) -> object:
    return parallel.token_dispatch(freed(torch.ones(3, 2), is_wrong), _COUNTS, mesh(), async_op=True).wait()


def _combine(change: Callable[[torch.Tensor], Any], async_op: bool = False) -> Call:
    def call(rank: int, is_wrong: bool) -> object:
        found = parallel.token_dispatch(torch.ones(3, 2), _COUNTS, mesh())
        given = change(found.tokens.clone()) if is_wrong else found.tokens
        combined = _parallel.token_combine(given, found, async_op=async_op)
        return combined.wait() if async_op else combined

    return call


class Experts(nn.Module):
    """Experts that on one rank raise, or give something else."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 2))
        self.how = how

    def forward(self, tokens: torch.Tensor, counts: torch.Tensor) -> Any:
        if self.how == "raise":
            raise ValueError("no experts")
        return {"": 2 * tokens, "none": None, "words": WORDS, "shape": tokens[:, :1]}[self.how]


def _experts(how: str) -> Call:
    def call(rank: int, is_wrong: bool) -> object:
        module = parallelize_module(Experts(how if is_wrong else ""), mesh(), parallel.ExpertParallel())
        return module(torch.ones(3, 2), _COUNTS)

    return call


def experts_of_words(rank: int, is_wrong: bool) -> object:
    module = parallelize_module(Experts(""), mesh(), parallel.ExpertParallel())
    return module(WORDS if is_wrong else torch.ones(3, 2), _COUNTS)


def _router(name: str, **wrong: Any) -> Call:
    def call(rank: int, is_wrong: bool) -> object:
        given: dict[str, Any] = {"logits": torch.ones(3, 2)}
        if name == "load_balancing_loss":
            given["indices"] = torch.ones(3, 2, dtype=torch.long)
        return getattr(_parallel, name)(**{**given, **(wrong if is_wrong else {})}, device_mesh=mesh())

    return call


# Sequences -----------------------------------------------------------------------------------------------------------


def _attention(name: str, change: Callable[[torch.Tensor], Any], width: int = 4) -> Call:
    def call(rank: int, is_wrong: bool) -> object:
        part = parallel.context_parallel_shard(torch.ones(1, 3, 6, width), mesh(), 2)
        key = change(part.clone()) if is_wrong else part
        return getattr(_parallel, name)(part, key, part, mesh(), length=6)

    return call


def scale_of_words(rank: int, is_wrong: bool) -> object:
    part = parallel.context_parallel_shard(torch.ones(1, 3, 6, 4), mesh(), 2)
    return parallel.ulysses_attention(part, part, part, mesh(), length=6, scale=WORDS if is_wrong else None)


def mask_of_words(rank: int, is_wrong: bool) -> object:
    part = parallel.context_parallel_shard(torch.ones(1, 3, 6, 4), mesh(), 2)
    mask = WORDS if is_wrong else None
    return parallel.context_parallel_flex_attention(part, part, part, mesh(), length=6, block_mask=mask)


def _unshard(change: Callable[[torch.Tensor], Any], wrong_dim: int = 0) -> Call:
    def call(rank: int, is_wrong: bool) -> object:
        part = torch.ones(2)
        dim = wrong_dim if is_wrong else 0
        return parallel.context_parallel_unshard(change(part) if is_wrong else part, mesh(), dim, length=6)

    return call


# Modules over a data axis --------------------------------------------------------------------------------------------


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> Any:
        return self.b(self.a(x))


def _fully_sharded(is_mixed: bool = False) -> Any:
    model: Any = Pair()
    if is_mixed:
        model.a.bias = nn.Parameter(model.a.bias.detach().double())
        model.a.forward = lambda x: F.linear(x, model.a.weight, model.a.bias.float())
    for layer in (model.a, model.b):
        fully_shard(layer, mesh=mesh())
    return fully_shard(model, mesh=mesh())


def _freed_shard(layer: str, is_mixed: bool = False) -> Call:
    def call(rank: int, is_wrong: bool) -> object:
        model = _fully_sharded(is_mixed)
        freed(getattr(model, layer).weight, is_wrong)
        return model(torch.ones(2, 6))

    return call


def freed_shard_in_unshard(rank: int, is_wrong: bool) -> object:
    model = _fully_sharded()
    freed(model.b.weight, is_wrong)
    return model.b.unshard()


def freed_shard_in_backward(rank: int, is_wrong: bool) -> object:
    model = _fully_sharded()
    output = model(torch.ones(2, 6))
    freed(model.a.weight, is_wrong)
    return output.sum().backward()


def assigned_weight(rank: int, is_wrong: bool) -> object:
    model = _fully_sharded()
    if is_wrong:
        model.b._parameters["weight"] = nn.Parameter(torch.ones(6, 6))
    return model(torch.ones(2, 6))


def sparse_gradient(rank: int, is_wrong: bool) -> object:
    model: Any = nn.Sequential(nn.Embedding(6, 3, sparse=is_wrong), nn.Linear(3, 3))
    for layer in model:
        fully_shard(layer, mesh=mesh())
    output = fully_shard(model, mesh=mesh())(torch.tensor([rank]))
    return output.sum().backward()


# Sharded tensors -----------------------------------------------------------------------------------------------------


def _by_rows() -> sharded.ChunkShardingSpec:
    return sharded.ChunkShardingSpec(0, [f"rank:{rank}/cpu" for rank in range(SIZE)])


def _local_shards(*size: Any, shards: Any = None, **options: Any) -> Call:
    def call(rank: int, is_wrong: bool) -> object:
        own = [sharded.Shard.from_tensor_and_offsets(torch.ones(2, 2), [2 * rank, 0], rank)]
        if not is_wrong:
            return sharded.init_from_local_shards(own, 6, 2)
        return _sharded.init_from_local_shards(own if shards is None else shards, *(size or (6, 2)), **options)

    return call


def shards_of_words(rank: int, is_wrong: bool) -> object:
    return sharded.shard_tensor(WORDS if is_wrong else torch.ones(6, 2), _by_rows())


def shards_by_words(rank: int, is_wrong: bool) -> object:
    return sharded.shard_tensor(torch.ones(6, 2), WORDS if is_wrong else _by_rows())


def parameter_of_no_name(rank: int, is_wrong: bool) -> object:
    return sharded.shard_parameter(nn.Linear(2, 6), "nothing" if is_wrong else "weight", _by_rows())


def parameter_of_words(rank: int, is_wrong: bool) -> object:
    return sharded.shard_parameter(WORDS if is_wrong else nn.Linear(2, 6), "weight", _by_rows())


class OwnSharder(sharded.Sharder):
    """A Sharder of a user's that raises on one rank."""

    def __init__(self, is_wrong: bool) -> None:
        self.is_wrong = is_wrong

    def shard(self, module: nn.Module) -> nn.Module:
        """The module with a sharded weight."""
        if self.is_wrong:
            raise ValueError("no shards")
        sharded.shard_parameter(module, "weight", _by_rows())
        return module


def own_sharder(rank: int, is_wrong: bool) -> object:
    plan = sharded.ShardingPlan({"0": OwnSharder(is_wrong)})
    return sharded.shard_module(nn.Sequential(nn.Linear(2, 6)), plan)


def plan_of_words(rank: int, is_wrong: bool) -> object:
    plan = sharded.ShardingPlan(WORDS if is_wrong else {"0.weight": _by_rows()})
    return sharded.shard_module(nn.Sequential(nn.Linear(2, 6)), plan)


def gather_to_two(rank: int, is_wrong: bool) -> object:
    x = sharded.ones(_by_rows(), 6, 2)
    return x.gather(0, torch.empty(6, 2) if rank == 0 or is_wrong else None)  # type: ignore[func-returns-value]


def gather_to_words(rank: int, is_wrong: bool) -> object:
    x = sharded.ones(_by_rows(), 6, 2)
    return x.gather(0, WORDS if is_wrong else torch.empty(6, 2) if rank == 0 else None)  # type: ignore[func-returns-value]


def reshard_freed(rank: int, is_wrong: bool) -> object:
    x = sharded.ones(_by_rows(), 6, 3)
    freed(x.local_tensor(), is_wrong)
    return x.reshard(sharded.ChunkShardingSpec(1, _by_rows().placements))


def _on_table(call: Callable[[Any, bool], object]) -> Call:
    return lambda rank, is_wrong: call(sharded.ones(_by_rows(), 6, 3), is_wrong)


# Checkpoints ---------------------------------------------------------------------------------------------------------


class Broken:
    """An object whose state one rank cannot give."""

    def state_dict(self) -> dict[str, Any]:
        raise ValueError("no state")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise ValueError("no state")


def _folder() -> CheckpointFolder:
    path = Path(tempfile.gettempdir()) / f"tritondt-local-checks-{T.Mesh((SIZE,)).identity.generation}"
    return CheckpointFolder(path)


def save_a_broken_state(rank: int, is_wrong: bool) -> object:
    return _folder().save({"x": torch.ones(2), "broken": Broken() if is_wrong else torch.ones(1)}, 1)


def load_another_shape(rank: int, is_wrong: bool) -> object:
    checkpoints = _folder()
    checkpoints.save({"x": torch.ones(2)}, 2)
    return checkpoints.load({"x": torch.ones(3 if is_wrong else 2)}, 2)


# Of processes alone: torch.distributed.checkpoint knows no rank threads.
OF_PROCESSES: dict[str, Call] = {each.__name__: each for each in (save_a_broken_state, load_another_shape)}

_shorter: Callable[[torch.Tensor], Any] = lambda part: torch.ones(1, 3, 5, 4)  # noqa: E731
_to_words: Callable[[torch.Tensor], Any] = lambda part: WORDS  # noqa: E731
_to_double: Callable[[torch.Tensor], Any] = lambda part: part.double()  # noqa: E731
_to_nothing: Callable[[torch.Tensor], Any] = lambda part: freed(part, True)  # noqa: E731
_to_sparse: Callable[[torch.Tensor], Any] = lambda part: part.to_sparse()  # noqa: E731

CALLS: dict[str, Call] = {
    **{
        each.__name__: each
        for each in (
            *(distribute_sparse, distribute_from_nowhere, distribute_a_list, distribute_as_a_number),
            *(full_tensor_freed, redistribute_freed, redistribute_freed_later, redistribute_of_words),
            *(redistribute_to_words, redistribute_local_words, redistribute_local_wire, redistribute_local_gradient),
            *(many_freed, from_local_sparse, from_local_shape, from_local_words),
            *(clip_a_plain_gradient, clip_a_freed_gradient, clip_a_number, clip_by_words),
            *(module_of_sparse, module_of_words, module_twice, module_hook),
            *(partition_fn, partition_fn_that_sends_nothing, partition_fn_refused),
            *(mapped_function, mapped_to_words, mapped_to_a_number),
            *(plan_of_another_module, plan_of_another_name, plan_of_a_number, plan_for_words),
            *(own_style, own_style_before_others, own_style_behind_others, freed_weight),
            *(input_of_words, one_input_of_two, second_input_of_words, plain_gradients_of_words),
            *(dispatch_freed, dispatch_freed_later, experts_of_words, scale_of_words, mask_of_words),
            *(freed_shard_in_unshard, freed_shard_in_backward, assigned_weight, sparse_gradient),
            *(shards_of_words, shards_by_words, parameter_of_no_name, parameter_of_words, own_sharder, plan_of_words),
            *(gather_to_two, gather_to_words, reshard_freed),
        )
    },
    **{f"rows that {how}": _odd_rows(how) for how in ("raise", "words", "shape", "freed")},
    **{f"outputs: {how}": _two_outputs(how) for how in ("raise", "one")},
    **{f"experts: {how}": _experts(how) for how in ("raise", "none", "words", "shape")},
    **{
        f"{name}: {how}": _attention(name, change)
        for name in ("ring_attention", "ulysses_attention", "context_parallel_flex_attention")
        for how, change in {
            "another length": _shorter,
            "words": _to_words,
            "another dtype": _to_double,
            "freed": _to_nothing,
        }.items()
    },
    # Four buckets of a list of tensors, but one exchange of attention.
    "ulysses_attention: of 5 MB": _attention("ulysses_attention", _shorter, 1 << 17),
    **{
        f"unshard: {how}": _unshard(change, dim)
        for how, (change, dim) in {
            "another length": (lambda part: torch.ones(3), 0),
            "words": (_to_words, 0),
            "no dim": (lambda part: part, 3),
        }.items()
    },
    "gathered matmul: words": _chunked(parallel.all_gather_matmul, 2, 3, "source", x=WORDS),
    "gathered matmul: width": _chunked(parallel.all_gather_matmul, 2, 3, "source", x=torch.ones(2, 5)),
    "gathered matmul: weight": _chunked(parallel.all_gather_matmul, 2, 3, "source", weight=torch.ones(3, 5)),
    "scattered matmul: words": _chunked(parallel.matmul_reduce_scatter, 6, 4, "target", x=WORDS),
    "scattered matmul: width": _chunked(parallel.matmul_reduce_scatter, 6, 4, "target", x=torch.ones(6, 5)),
    "dispatch: words": _dispatch(tokens=WORDS),
    "dispatch: counts of words": _dispatch(num_tokens_per_expert=WORDS),
    "dispatch: counts of floats": _dispatch(num_tokens_per_expert=torch.ones(3)),
    "dispatch: sizes": _dispatch(sizes=(1, 2)),
    "dispatch: sizes of words": _dispatch(sizes=3),
    **{
        f"combine: {how}": _combine(change)
        for how, change in {
            "words": _to_words,
            "rows": lambda part: torch.ones(7, 2),
            "freed": _to_nothing,
            "sparse": _to_sparse,
        }.items()
    },
    "combine later: rows": _combine(lambda part: torch.ones(7, 2), async_op=True),
    "z loss: dims": _router("router_z_loss", logits=torch.ones(3)),
    "z loss: words": _router("router_z_loss", logits=WORDS),
    "balance: floats": _router("load_balancing_loss", indices=torch.ones(3, 2)),
    "balance: words": _router("load_balancing_loss", logits=WORDS),
    "balance: below": _router("load_balancing_loss", indices=torch.full((3, 2), -1)),
    "balance: above": _router("load_balancing_loss", indices=torch.full((3, 2), 7)),
    "freed shard: first": _freed_shard("a"),
    "freed shard: second": _freed_shard("b"),
    "freed shard: first of two dtypes": _freed_shard("a", is_mixed=True),
    "local shards: number": _local_shards(shards=3),
    "local shards: object": _local_shards(shards=[object()]),
    "local shards: size": _local_shards(6, "a"),
    "local shards: rrefs": _local_shards(init_rrefs=True),
    "table: rows": _on_table(lambda x, is_wrong: F.linear(torch.ones(2, 4 if is_wrong else 3), x)),
    "table: sparse rows": _on_table(
        lambda x, is_wrong: F.linear(torch.ones(2, 3).to_sparse() if is_wrong else torch.ones(2, 3), x)
    ),
    "table: float indices": _on_table(
        lambda x, is_wrong: F.embedding(torch.ones(2) if is_wrong else torch.tensor([1, 2]), x)
    ),
    "table: indices": _on_table(lambda x, is_wrong: F.embedding(torch.tensor([1, 99 if is_wrong else 2]), x)),
    "table: options": _on_table(
        lambda x, is_wrong: F.embedding(torch.tensor([1, 2]), x, max_norm=1.0 if is_wrong else None)
    ),
    "table: bags": _on_table(
        lambda x, is_wrong: F.embedding_bag(torch.tensor([1, 2]), x, torch.tensor([[0]] if is_wrong else [0]))
    ),
    "table: bags of words": _on_table(
        lambda x, is_wrong: F.embedding_bag(WORDS if is_wrong else torch.tensor([1, 2]), x, torch.tensor([0]))
    ),
}
