"""Tensor parallelism for plain modules: a plan names modules and their styles, and the modules stay as written.

    plan = {"layers.*.attention.w[qkv]": ColwiseParallel(unit=head_dim, use_local_output=False),
            "layers.*.attention.wo": RowwiseParallel(unit=head_dim, output_layouts=Shard(1), use_local_output=False)}
    parallelize_module(model, mesh, plan)

Parameters become distributed tensors; a forward pass runs on local ones and communicates where a module begins or ends.
With `overlap=True` a column- or row-wise nn.Linear multiplies parts of a sequence while the rest travels;
`all_gather_matmul` and `matmul_reduce_scatter` do the same as functions. torch.compile makes graphs of the code between
messages.
"""

import importlib
from typing import TYPE_CHECKING

from tritondt.parallel.context.flex_attention import context_parallel_block_mask, context_parallel_flex_attention
from tritondt.parallel.context.ring_attention import ring_attention
from tritondt.parallel.context.sequence_cut import context_parallel_shard, context_parallel_unshard
from tritondt.parallel.context.ulysses import ulysses_attention
from tritondt.parallel.experts.expert_parallel import ExpertParallel
from tritondt.parallel.experts.router_losses import load_balancing_loss, router_z_loss
from tritondt.parallel.experts.shared_expert import SharedExpertOverlap
from tritondt.parallel.experts.token_dispatch import DispatchedTokens, TokensUnderWay, token_combine, token_dispatch
from tritondt.parallel.input_reshard import input_reshard
from tritondt.parallel.key_value import KeyValueParallel
from tritondt.parallel.loss import loss_parallel
from tritondt.parallel.overlap import all_gather_matmul, matmul_reduce_scatter
from tritondt.parallel.parallelize import parallelize_module
from tritondt.parallel.prepare import PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput
from tritondt.parallel.replicated import ReplicateParallel
from tritondt.parallel.sequence import SequenceParallel
from tritondt.parallel.style import ParallelStyle
from tritondt.parallel.weights import ColwiseParallel, RowwiseParallel

__all__ = [
    "ColwiseParallel",
    "DispatchedTokens",
    "ExpertParallel",
    "KeyValueParallel",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "ReplicateParallel",
    "RowwiseParallel",
    "SequenceParallel",
    "SharedExpertOverlap",
    "TokensUnderWay",
    "all_gather_matmul",
    "context_parallel_block_mask",
    "context_parallel_flex_attention",
    "context_parallel_shard",
    "context_parallel_unshard",
    "input_reshard",
    "load_balancing_loss",
    "loss_parallel",
    "matmul_reduce_scatter",
    "parallelize_module",
    "ring_attention",
    "router_z_loss",
    "token_combine",
    "token_dispatch",
    "ulysses_attention",
]

if not TYPE_CHECKING:  # type checkers find them in tritondt.found_plan

    def __getattr__(name: str) -> object:
        # By name: plans are found with fully_shard and models of transformers, which stand above the styles.
        if name in ("FoundMesh", "FoundPlan", "find_mesh", "find_plan"):
            return getattr(importlib.import_module("tritondt.found_plan"), name)
        raise AttributeError(f"module 'tritondt.parallel' has no attribute {name!r}")
