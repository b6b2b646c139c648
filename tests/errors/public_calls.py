"""Public functions with arguments that they take, and wrong values to give in place of each."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed.tensor as torch_tensor
from torch import nn

import tritondt as T
import tritondt.debug
import tritondt.experimental
import tritondt.fsdp
import tritondt.interop.transformers as transformers
import tritondt.parallel as parallel
import tritondt.random
import tritondt.sharded as sharded
from tritondt import nccl
from tritondt.interop.checkpoint_folder import CheckpointFolder

# Given in place of every argument in turn; what the argument takes all the same is accepted.
WRONG: Mapping[str, Callable[[], Any]] = {
    "an int": lambda: 3,
    "a negative int": lambda: -7,
    "a text": lambda: "S1",
    "a float": lambda: 2.5,
    "an object": object,
    "a list of ints": lambda: [0, 1],
    "a list of texts": lambda: ["S0", "R"],
    "a mapping": lambda: {"a": 1},
    "a plain tensor": lambda: torch.ones(3, 2),
    "a distributed tensor": lambda: T.ones(4, device_mesh=T.Mesh((2,)), placements=[T.Shard(0)]),
    "a tensor on another mesh": lambda: T.ones(4, device_mesh=T.Mesh((1, 2)), placements=[T.Shard(0), T.Replicate()]),
    "a mesh of two axes": lambda: T.Mesh((2, 1)),
    "a mesh of one rank": lambda: T.Mesh((1,), ranks=(1,)),
    "a placement": lambda: T.Shard(1),
    "placements of three axes": lambda: [T.Shard(0), T.Replicate(), T.Partial()],
    "a cut of a dim that is not there": lambda: [T.Shard(5)],
    "a class": lambda: torch_tensor.Shard,
    "a module": lambda: nn.Linear(2, 2),
    "a function": lambda: lambda: None,
    "None": lambda: None,
}  # fmt: skip


class Call(NamedTuple):
    """A public function, arguments with which it does something, and others of which no wrong value is given."""

    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    others: Mapping[str, Any] = {}


def pair() -> T.Mesh:
    return T.Mesh((2,))


def cut_rows() -> Any:
    return T.ones(4, 4, device_mesh=pair(), placements=[T.Shard(0)])


def _spec(placement: T.Placement, shape: tuple[int, ...] = (4, 4)) -> T.DTensorSpec:
    return T.DTensorSpec(pair(), [placement], T.TensorMeta.contiguous(shape))


def _factories() -> Iterator[Call]:
    options = {"device_mesh": pair(), "placements": [T.Shard(0)], "dtype": torch.float32, "order": [0]}
    options |= {"layout": torch.strided, "requires_grad": False}
    for make in (T.empty, T.zeros, T.ones, T.rand, T.randn):
        yield Call(make, {"size": (4, 2), **options})
    yield Call(T.full, {"size": (4, 2), "fill_value": 1.0, **options})
    yield Call(T.linspace, {"start": 0, "end": 1, "steps": 4, **options})
    yield Call(T.logspace, {"start": 0, "end": 1, "steps": 4, "base": 10.0, **options})


def _of_tensors() -> Iterator[Call]:
    x, rows = torch.ones(4, 4), cut_rows()
    yield Call(
        T.distribute_tensor,
        {"tensor": x, "device_mesh": pair(), "placements": [T.Shard(0)], "src_data_rank": 0, "order": [0]},
    )
    yield Call(
        T.DTensor.from_local,
        {"local_tensor": x, "device_mesh": pair(), "placements": [T.Shard(0)], "run_check": True, "shape": (8, 4),
         "stride": (4, 1), "order": [0]},
    )  # fmt: skip
    yield Call(
        rows.redistribute,
        {"device_mesh": pair(), "placements": [T.Shard(1)], "forward_dtype": torch.float32, "order": [0],
         "backward_dtype": torch.float32, "wire_dtype": torch.bfloat16, "async_op": False},
    )  # fmt: skip
    yield Call(cut_rows().requires_grad_().to_local, {"grad_placements": [T.Shard(0)]})
    yield Call(cut_rows().requires_grad_().full_tensor, {"grad_placements": [T.Replicate()]})
    yield Call(
        T.redistribute,
        {"local": torch.ones(2, 4), "source": _spec(T.Shard(0)), "target": _spec(T.Shard(1)),
         "grad_placements": [T.Shard(1)], "wire_dtype": torch.bfloat16, "grad_wire_dtype": torch.bfloat16},
    )  # fmt: skip
    yield Call(T.redistribute_many, {"moves": [(rows, [T.Shard(1)])], "bucket_bytes": 1024, "async_op": False})
    yield Call(
        T.prefetch,
        {"tensor": rows, "placements": [T.Shard(1)], "device_mesh": pair(), "order": [0], "wire_dtype": None},
    )
    yield Call(T.explain, {"source": rows, "target": [T.Shard(1)], "order": [0], "wire_dtype": torch.bfloat16})
    leaf = cut_rows().requires_grad_()
    leaf.grad = cut_rows()
    yield Call(
        T.clip_grad_norm_,
        {"parameters": [leaf], "max_norm": 1.0, "norm_type": 2.0, "error_if_nonfinite": False, "foreach": True},
    )
    yield Call(T.to_torch, {"tensor": rows, "device_mesh": None})
    yield Call(T.from_torch, {"tensor": rows})
    yield Call(
        T.experimental.local_map,
        {
            "func": lambda a: a,
            "out_placements": [T.Shard(0)],
            "in_placements": ([T.Shard(0)],),
            "in_grad_placements": ([T.Shard(0)],),
            "device_mesh": pair(),
            "redistribute_inputs": False,
        },
    )


def _of_layouts() -> Iterator[Call]:
    yield Call(T.Mesh, {"shape": (2,), "names": ("dp",), "ranks": (0, 1), "device_type": "cpu"})
    yield Call(T.Layout, {"mesh_shape": (2,), "placements": [T.Shard(0)], "shape": (4,), "order": (0,)})
    meta = T.TensorMeta.contiguous((4, 4))
    yield Call(T.DTensorSpec, {"mesh": pair(), "placements": [T.Shard(0)], "tensor_meta": meta, "order": [0]})
    yield Call(T.Shard, {"dim": 0, "unit": 1, "sizes": (1, 3), "repeats": 1})
    yield Call(T.Shard, {"block": 2}, {"dim": 0})
    yield Call(T.Partial, {"reduce_op": "sum"})
    yield Call(T.parse_placements, {"text": "S0"})
    yield Call(
        T.compute_local_shape_and_global_offset,
        {"global_shape": (4,), "mesh": pair(), "placements": [T.Shard(0)], "order": [0]},
    )
    yield Call(T.set_timeout, {"mesh": pair(), "seconds": 10.0})
    yield Call(T.random.manual_seed, {"seed": 3, "device_mesh": pair()})
    yield Call(T.random.is_rng_supported_mesh, {"device_mesh": pair()})
    yield Call(T.explicit_redistribution, {"enable": True, "strict": True})
    yield Call(
        T.Transport,
        {"name": "my-sockets", "device_types": ("cpu",), "communicator": "my:Communicator", "connect": None,
         "price": lambda table: table, "check": lambda: None, "wire": "", "crosses_hosts": True},
    )  # fmt: skip


def _of_modules() -> Iterator[Call]:
    yield Call(
        T.distribute_module,
        {"module": nn.Linear(4, 4), "device_mesh": pair(), "partition_fn": lambda *_: None, "input_fn": lambda *_: 1,
         "output_fn": lambda *_: 1},
    )  # fmt: skip
    yield Call(
        parallel.parallelize_module,
        {"module": nn.Linear(4, 4), "device_mesh": pair(), "parallelize_plan": parallel.ColwiseParallel(),
         "src_data_rank": 0, "plain_tensors": "refused"},
    )  # fmt: skip
    yield Call(T.fsdp.fully_shard, {"module": nn.Linear(4, 4), "mesh": pair(), "reshard_after_forward": True})
    yield Call(T.fsdp.fully_shard, {"module": nn.Linear(4, 4), "mesh": pair(), "shard_placement_fn": lambda _: None})
    policies = {"mp_policy": T.fsdp.MixedPrecisionPolicy(), "offload_policy": T.fsdp.OffloadPolicy()}
    policies |= {"ignored_params": None, "dp_mesh_dims": None}
    yield Call(T.fsdp.fully_shard, {"module": nn.Linear(4, 4), "mesh": pair(), **policies})
    yield Call(parallel.input_reshard, {"module": nn.Linear(4, 4), "tp_device_mesh": pair(), "input_reshard_dim": 0})
    yield Call(transformers.parallelize, {"model": nn.Linear(4, 4), "mesh": pair(), "tp_plan": {}, "src_data_rank": 0})
    yield Call(transformers.plan_of, {"model": nn.Linear(4, 4), "tp_plan": {}})
    yield Call(
        transformers.from_pretrained,
        {"folder": "/nowhere", "mesh": pair(), "tp_plan": {}, "dtype": torch.float32},
    )
    yield Call(transformers.ShardedExperts, {"features": {"a": "b"}})
    yield Call(transformers.save_pretrained, {"model": nn.Linear(4, 4), "folder": "/dev/null/nowhere"})


def _of_sharded_modules() -> Iterator[Call]:
    module: Any = T.fsdp.fully_shard(nn.Linear(2, 2), mesh=pair())
    yield Call(module.unshard, {"async_op": False})
    yield Call(module.set_requires_gradient_sync, {"requires_gradient_sync": True, "recurse": True})
    yield Call(module.set_reshard_after_forward, {"reshard_after_forward": True, "recurse": True})
    yield Call(module.set_reshard_after_backward, {"reshard_after_backward": True, "recurse": True})
    yield Call(module.set_modules_to_forward_prefetch, {"modules": [module]})
    yield Call(module.set_modules_to_backward_prefetch, {"modules": [module]})
    yield Call(module.set_gradient_divide_factor, {"factor": 2.0})


def _styles() -> Iterator[Call]:
    whole = T.Replicate()
    cut = {"input_layouts": whole, "output_layouts": whole, "unit": 2, "sizes": [2, 2], "groups": 2}
    flags = {"use_local_output": True, "overlap": False, "transposed": False}
    both: dict[str, Any] = {"input_layouts": (whole,), "desired_input_layouts": (whole,)}
    out: dict[str, Any] = {"output_layouts": (whole,), "desired_output_layouts": (whole,)}
    for style, arguments in (
        (parallel.ColwiseParallel, {**cut, "repeats": 1}),
        (parallel.RowwiseParallel, cut),
        (parallel.ColwiseParallel, {"balanced": False, **flags}),
        (parallel.RowwiseParallel, {"balanced": False, **flags}),
        (parallel.SequenceParallel, {"sequence_dim": 1, "output_layouts": whole, "use_local_output": True}),
        (parallel.ReplicateParallel, {"input_layouts": whole}),
        (parallel.KeyValueParallel, {"unit": 2, "input_layouts": whole}),
        (parallel.ExpertParallel, {"sizes": [1, 1]}),
        (parallel.SharedExpertOverlap, {"experts": "a", "shared": "b"}),
        (parallel.PrepareModuleInput, both),
        (parallel.PrepareModuleOutput, out),
        (parallel.PrepareModuleInputOutput, {**both, **out}),
    ):
        yield Call(style, arguments)


def _of_sequences() -> Iterator[Call]:
    attention = {"device_mesh": pair(), "length": 8, "scale": 1.0}
    heads = {name: torch.ones(1, 2, 4, 4) for name in ("query", "key", "value")}
    yield Call(parallel.ring_attention, {**heads, **attention})
    yield Call(parallel.ring_attention, {"key_length": 8, "is_causal": True, "balanced": False}, {**heads, **attention})
    yield Call(parallel.ulysses_attention, {**heads, **attention})
    yield Call(parallel.ulysses_attention, {"key_length": 8, "is_causal": True}, {**heads, **attention})
    yield Call(
        parallel.context_parallel_shard,
        {"tensor": torch.ones(4, 2), "device_mesh": pair(), "dim": 0, "balanced": False},
    )
    yield Call(
        parallel.context_parallel_unshard,
        {"local": torch.ones(4, 2), "device_mesh": pair(), "dim": 0, "length": 8, "balanced": False},
    )
    counts = torch.tensor([1, 1])
    tokens = {
        "tokens": torch.ones(2, 4),
        "num_tokens_per_expert": counts,
        "device_mesh": pair(),
        "sizes": [1, 1],
        "async_op": False,
    }
    yield Call(parallel.token_dispatch, tokens)
    dispatched = parallel.token_dispatch(torch.ones(2, 4), counts, pair())
    yield Call(parallel.token_combine, {"tokens": dispatched.tokens, "dispatched": dispatched, "async_op": False})
    logits = torch.ones(2, 2)
    yield Call(
        parallel.load_balancing_loss, {"logits": logits, "indices": torch.zeros(2, 1).long(), "device_mesh": pair()}
    )
    yield Call(parallel.router_z_loss, {"logits": logits, "device_mesh": pair()})
    yield Call(
        parallel.all_gather_matmul,
        {"x": torch.ones(2, 4), "weight": torch.ones(3, 4), "bias": torch.ones(3), "source": _spec(T.Shard(0)),
         "chunks_per_peer": 1},
    )  # fmt: skip
    yield Call(
        parallel.matmul_reduce_scatter,
        {"x": torch.ones(4, 4), "weight": torch.ones(4, 4), "target": _spec(T.Shard(0)), "chunks_per_peer": 1},
    )


def _of_shards() -> Iterator[Call]:
    spec = sharded.ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
    group: dict[str, Any] = {"process_group": pair()}
    yield Call(sharded.ChunkShardingSpec, {"dim": 0, "placements": ["rank:0/cpu", "rank:1/cpu"]})
    yield Call(sharded.EnumerableShardingSpec, {"shards": [sharded.ShardMetadata([0], [4], "rank:0/cpu")]})
    yield Call(sharded.DevicePlacementSpec, {"device": "rank:0/cpu"})
    yield Call(sharded.ShardMetadata, {"shard_offsets": [0], "shard_sizes": [4], "placement": "rank:0/cpu"})
    metadata = sharded.ShardMetadata([0], [2], "rank:0/cpu")
    yield Call(sharded.Shard, {"tensor": torch.ones(2), "metadata": metadata})
    yield Call(sharded.TensorProperties, {"dtype": torch.float32, "layout": torch.strided, "pin_memory": False})
    yield Call(sharded.ShardedTensorMetadata, {"shards_metadata": [], "tensor_properties": sharded.TensorProperties()})
    for make in (sharded.empty, sharded.ones, sharded.zeros, sharded.rand, sharded.randn):
        yield Call(make, {"sharding_spec": spec, "size": (4, 2), "dtype": torch.float32, **group})
    yield Call(sharded.full, {"sharding_spec": spec, "size": (4, 2), "fill_value": 1.0, **group})
    yield Call(sharded.shard_tensor, {"tensor": torch.ones(4), "sharding_spec": spec, "src_rank": 0, **group})
    yield Call(
        sharded.init_from_local_tensor,
        {"local_tensor": torch.ones(2, 2), "sharding_spec": spec, "global_size": (4, 2), **group},
    )
    yield Call(sharded.init_from_local_shards, {"local_shards": [], "global_size": (4, 2), **group})
    yield Call(
        sharded.shard_parameter,
        {"module": nn.Linear(4, 4), "param_name": "weight", "sharding_spec": spec, "src_rank": 0, **group},
    )
    yield Call(
        sharded.shard_module,
        {"module": nn.Linear(4, 4), "plan": sharded.ShardingPlan({"weight": spec}), "src_rank": 0, **group},
    )
    yield Call(sharded.collect_local_shard, {"module": nn.Linear(4, 4)})
    yield Call(sharded.reshard_output, {"module": nn.Linear(4, 4), "resharding_spec": spec})
    yield Call(sharded.load_with_process_group, {"process_group": None})
    yield Call(sharded.custom_sharded_op_impl, {"func": torch.add})
    yield Call(sharded.custom_sharding_spec_op, {"sharding_spec_class": sharded.ChunkShardingSpec, "func": torch.add})


def _others() -> Iterator[Call]:
    rows = cut_rows()
    yield Call(tritondt.debug.sharding_text, {"tensor": rows})
    yield Call(tritondt.debug.sharding_html, {"tensor": rows})
    yield Call(tritondt.debug.visualize_sharding, {"dtensor": rows, "header": "", "use_rich": False})
    # A path's cases draw, slowly.
    yield Call(tritondt.debug.write_sharding_image, {"tensor": rows}, {"path": "/dev/null/nowhere.png"})
    yield Call(tritondt.debug.write_flight_record, {"path": "/dev/null/nowhere"})
    yield Call(tritondt.debug.check_plain_gradients, {"module": nn.Linear(2, 2), "mesh": pair()})
    yield Call(
        tritondt.debug.check_against_single_device, {"function": lambda: torch.ones(2), "rtol": 0.1, "atol": 0.1}
    )
    yield Call(CheckpointFolder, {"path": "/dev/null/nowhere", "keep": 1, "process_group": None})
    yield Call(nccl.bootstrap, {"rank": 0, "num_ranks": 1, "name": "x", "options": {}, "timeout": 3})
    yield Call(nccl.init, {"unique_ids": [b""], "num_ranks": 2, "rank": 0, "options": {}})
    yield Call(nccl.join, {"unique_id": b"", "num_ranks": 2, "rank": 0, "options": {}})
    yield Call(nccl.empty, {"shape": (2,), "dtype": torch.float32, "device": "cuda"})
    yield Call(nccl.library, {"path": "/nowhere"})
    yield Call(T.experimental.register_sharding, {"op": torch.ops.aten.sub.Tensor})


GROUPS = (
    *(_factories, _of_tensors, _of_layouts, _of_modules, _of_sharded_modules, _styles, _of_sequences, _of_shards),
    _others,
)
