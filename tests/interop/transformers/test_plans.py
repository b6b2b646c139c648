"""plan_of on modules that are built as those of transformers are: by the names of a tp_plan, and what is refused."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import tritondt as T
from tritondt.comm.transports.threads import run_ranks
from tritondt.errors import ParallelizeError
from tritondt.interop.transformers import parallelize, plan_of
from tritondt.parallel import ColwiseParallel, KeyValueParallel, ReplicateParallel, RowwiseParallel
from tritondt.sharding.placement import Placement

HEADS, HEAD_DIM, HIDDEN = 6, 4, 10
NAMES = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.self_attn.q_norm": "replicated_with_grad_allreduce",
    "lm_head": "colwise_gather_output",
}


class Attention(nn.Module):
    """The attributes of an attention module of transformers; a query has `gates` values for each of its features."""

    def __init__(self, key_heads: int, gates: int = 1) -> None:
        super().__init__()
        self.head_dim, self.num_key_value_groups = HEAD_DIM, HEADS // key_heads
        self.q_proj = nn.Linear(HIDDEN, gates * HEADS * HEAD_DIM)
        self.k_proj, self.v_proj = (nn.Linear(HIDDEN, key_heads * HEAD_DIM) for _ in range(2))
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN)
        self.q_norm = nn.LayerNorm(HEAD_DIM)


class Model(nn.Module):
    """Attention between a table and a head that may share it, with the plan where transformers has it."""

    def __init__(self, key_heads: int = 3, *, tied: bool = False, gates: int = 1, **names: str) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(7, HIDDEN)
        layer = nn.Module()
        layer.self_attn = Attention(key_heads, gates)
        self.layers = nn.ModuleList([layer])
        self.lm_head = nn.Linear(HIDDEN, 7, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight
        self.config = SimpleNamespace(base_model_tp_plan={**NAMES, **names})


def placements(model: nn.Module, num_ranks: int) -> dict[str, dict[str, Placement]]:
    """Placements of parameters by module, as the styles of the plan say them."""
    plan: Any = plan_of(model)
    mesh = T.Mesh((num_ranks,))
    return {name: style.parameter_placements(model.get_submodule(name), mesh) for name, style in plan.items()}


def test_heads_are_cut_whole_and_queries_stay_with_their_key_head():
    model = Model(key_heads=3)
    plan = plan_of(model)
    kinds = {name.rpartition(".")[2]: type(style) for name, style in plan.items()}
    assert kinds == {
        "q_proj": ColwiseParallel,
        "k_proj": KeyValueParallel,
        "v_proj": KeyValueParallel,
        "o_proj": RowwiseParallel,
        "q_norm": ReplicateParallel,
        "lm_head": ColwiseParallel,
        "embed_tokens": ReplicateParallel,
    }
    found = run_ranks(4, lambda rank: placements(model, 4))[0]
    attention = "layers.0.self_attn"
    # Ranks 0 and 1 share the first key head and have one of its two queries each.
    assert found[f"{attention}.q_proj"]["weight"] == T.Shard(0, unit=4, sizes=(4, 4, 8, 8))
    assert found[f"{attention}.o_proj"]["weight"] == T.Shard(1, unit=4, sizes=(4, 4, 8, 8))
    assert found[f"{attention}.k_proj"]["weight"] == T.Shard(0, sizes=(2, 2, 4, 4))
    assert found["lm_head"]["weight"] == T.Shard(0, sizes=(2, 2, 2, 1))


def test_queries_with_gates_beside_them_are_cut_by_head():
    found = run_ranks(2, lambda rank: placements(Model(gates=2), 2))[0]
    assert found["layers.0.self_attn.q_proj"]["weight"] == T.Shard(0, unit=8, sizes=(32, 16))
    assert found["layers.0.self_attn.o_proj"]["weight"] == T.Shard(1, unit=4, sizes=(16, 8))


def test_a_table_that_is_tied_to_the_head_is_cut_alike():
    found = run_ranks(4, lambda rank: placements(Model(tied=True), 4))[0]
    assert found["embed_tokens"]["weight"] == found["lm_head"]["weight"] == T.Shard(0, sizes=(2, 2, 2, 1))


class Experts(nn.Module):
    """The attributes of a layer of experts of transformers."""

    def __init__(self, num_experts: int = 5) -> None:
        super().__init__()
        self.num_experts, self.is_transposed, self.is_concatenated, self._is_expert_parallel = (
            num_experts,
            False,
            True,
            False,
        )
        self.gate_up_proj = nn.Parameter(torch.zeros(num_experts, 2 * 12, HIDDEN))
        self.down_proj = nn.Parameter(torch.zeros(num_experts, HIDDEN, 12))


class Mixture(nn.Module):
    """A layer of experts with a router of its own parameters."""

    def __init__(self, num_experts: int = 5) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, num_experts, bias=False)
        self.experts = Experts(num_experts)


BY_FEATURES = {"experts.gate_up_proj": "packed_colwise", "experts.down_proj": "rowwise", "experts": "moe_tp_experts"}
BY_EXPERTS = {
    "experts.gate_up_proj": "grouped_gemm",
    "experts.down_proj": "grouped_gemm",
    "experts": "ep_dispatch_experts",
}


def test_parameters_of_experts_are_cut_by_features_or_by_experts_as_the_plan_names_them():
    def body(rank: int) -> list[Any]:
        found = []
        for names in (BY_FEATURES, BY_EXPERTS):
            mixture = parallelize(Mixture(), T.Mesh((3,)), names)
            parameters: Any = dict(mixture.named_parameters())
            found.append({name: parameter.placements for name, parameter in parameters.items()})
        return found

    by_features, by_experts = run_ranks(3, body)[0]
    assert by_features == {
        "gate.weight": (T.Replicate(),),
        "experts.gate_up_proj": (T.Shard(1, unit=4, sizes=(4, 4, 4), repeats=2),),
        "experts.down_proj": (T.Shard(2, unit=4, sizes=(4, 4, 4)),),
    }
    assert by_experts["experts.gate_up_proj"] == by_experts["experts.down_proj"] == (T.Shard(0, sizes=(2, 2, 1)),)


def test_more_ranks_than_experts_are_refused_before_anything_is_changed():
    def body(rank: int) -> None:
        mixture = Mixture(2)
        with pytest.raises(ParallelizeError, match="Experts has 2 experts, which over 3 ranks are 1, 1, 0; allowed is"):
            parallelize(mixture, T.Mesh((3,)), BY_EXPERTS)
        assert not any(isinstance(parameter, T.DTensor) for parameter in mixture.parameters())

    run_ranks(3, body)


def test_a_rank_is_told_its_own_numbers_of_heads():
    def body(rank: int) -> int:
        model = parallelize(Model(), T.Mesh((4,)))
        attention: Any = model.get_submodule("layers.0.self_attn")
        return int(attention.num_key_value_groups)

    assert run_ranks(4, body) == [1, 1, 2, 2]


@pytest.mark.parametrize(
    ("model", "names", "said"),
    [
        (Model(), {"lm_head": "diagonal"}, "the tp_plan has 'diagonal' for 'lm_head'; allowed are colwise, rowwise"),
        (
            Model(),
            {"lm_haed": "colwise"},
            "'lm_haed' matches no module and no parameter of Model; near it come 'lm_head'",
        ),
        (Model(qkv_proj="mla_kv_a_proj"), None, "the tp_plan has 'mla_kv_a_proj' for 'qkv_proj'; allowed are colwise"),
        (nn.Linear(2, 2), None, "Linear has no tp_plan, neither its own nor one of its configuration; give one"),
        (
            Model(),
            {"layers.*.self_attn.q_proj": "colwise"},
            "layers.0.self_attn has heads of 4 features, and the tp_plan has 'colwise' for q_proj; known are",
        ),
        (
            Mixture(),
            {"experts.gate_up_proj": "packed_colwise"},
            "the tp_plan cuts gate_up_proj of experts (Experts), which has {'gate_up_proj': (5, 24, 10), 'down_proj'",
        ),
        (
            Mixture(),
            {"experts.gate_up_proj": "grouped_gemm", "experts.down_proj": "rowwise"},
            "the tp_plan has 'grouped_gemm' for experts.gate_up_proj; allowed for parameters are grouped_gemm for all",
        ),
        (Mixture(), {"experts": "moe_tp_experts"}, "'moe_tp_experts' for experts, none of whose parameters it names"),
    ],
)
def test_a_plan_that_cannot_be_followed_is_refused(model, names, said):
    with pytest.raises(ParallelizeError, match=re.escape(said)):
        plan_of(model, names)


def test_a_mesh_on_which_a_rank_would_have_no_head_is_refused_before_anything_is_changed():
    def body(rank: int) -> None:
        model = Model(key_heads=2)
        with pytest.raises(ParallelizeError, match=r"has 6 heads of 2 key heads, which over 7 ranks are 1, 1, 1, 0, 1"):
            parallelize(model, T.Mesh((7,)))
        assert not any(isinstance(parameter, T.DTensor) for parameter in model.parameters())

    run_ranks(7, body)
