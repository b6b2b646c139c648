"""Models of transformers laid over ranks by their own plans train as one process does."""

import copy
from typing import Any

import pytest
import torch
import transformers
from torch.testing import assert_close

import tritondt as T
from tests.interop.transformers import models
from tritondt.comm.transports.threads import run_ranks
from tritondt.interop.transformers import parallelize

# 4 ranks of 3 key heads: two share one. 3 ranks have one each, 2 ranks two and one. All share the only one of 1.
# 5 experts whose 34 features are 10, 8, 8 and 8 on 4 ranks; torch's grouped product of experts takes 32 alone.
CASES = [
    ("Qwen3ForCausalLM", 4, {}),
    ("MixtralForCausalLM", 4, {"experts_implementation": "eager"}),
    ("GPT2LMHeadModel", 4, {}),
    ("BertForMaskedLM", 4, {}),
    ("LlamaForCausalLM", 4, {"tie_word_embeddings": True}),
    ("LlamaForCausalLM", 2, {}),
    ("LlamaForCausalLM", 3, {"attention_bias": True, "mlp_bias": True}),
    ("Qwen3ForCausalLM", 4, {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    ("LlamaForCausalLM", 4, {"attn_implementation": "eager"}),
    ("MixtralForCausalLM", 3, {"intermediate_size": 32, "tie_word_embeddings": True}),
    ("MixtralForCausalLM", 2, {"experts_implementation": "batched_mm"}),
    ("GPT2LMHeadModel", 3, {"attn_implementation": "eager", "reorder_and_upcast_attn": True}),
    ("GPT2LMHeadModel", 2, {"tie_word_embeddings": False}),
    ("GPT2DoubleHeadsModel", 4, {"num_labels": 1}),
    ("BertForMaskedLM", 3, {"tie_word_embeddings": False}),
    ("BertForMaskedLM", 2, {"attn_implementation": "eager"}),
    ("BertLMHeadModel", 3, {"is_decoder": True}),
]


@pytest.mark.in_core(4)
@pytest.mark.parametrize(("name", "num_ranks", "options"), CASES)
def test_three_steps_are_those_of_one_process(name, num_ranks, options):
    single = models.model_of(getattr(transformers, name), **options)
    check(single, num_ranks, None)


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [
        (4, {"experts_implementation": "eager"}),
        (3, {"intermediate_size": 32}),
        (2, {"experts_implementation": "batched_mm"}),
    ],
)
def test_mixtral_with_whole_experts_on_ranks_trains_as_one_process(num_ranks, options):
    single = models.model_of(transformers.MixtralForCausalLM, **options)
    plan = {
        **{f"model.{name}": style for name, style in single.config.base_model_ep_plan.items()},
        **{f"model.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
        "model.layers.*.self_attn.o_proj": "rowwise",
    }
    check(single, num_ranks, plan)


def test_experts_to_which_no_token_comes_wait_for_nobody_and_get_gradients_of_zeros():
    single = models.model_of(transformers.MixtralForCausalLM, experts_implementation="eager")
    with torch.no_grad():
        for layer in single.model.layers:
            layer.mlp.gate.weight.zero_()  # all choose the first two experts, which rank 0 has
    check(single, 4, {"model.layers.*.mlp.experts.*_proj": "grouped_gemm"}, num_steps=1)


@pytest.mark.parametrize(
    ("name", "num_ranks", "parameter", "placement"),
    [
        ("GPT2LMHeadModel", 4, "transformer.h.0.attn.c_attn.weight", T.Shard(1, unit=4, sizes=(8, 8, 4, 4), repeats=3)),
        ("GPT2LMHeadModel", 4, "transformer.h.0.attn.c_proj.weight", T.Shard(0, unit=4, sizes=(8, 8, 4, 4))),
        ("GPT2LMHeadModel", 4, "transformer.h.1.mlp.c_fc.weight", T.Shard(1, sizes=(9, 9, 8, 8))),
        ("GPT2LMHeadModel", 4, "transformer.wte.weight", T.Shard(0, sizes=(10, 9, 9, 9))),
        (
            "BertForMaskedLM",
            4,
            "bert.encoder.layer.0.attention.output.dense.weight",
            T.Shard(1, unit=4, sizes=(8, 8, 4, 4)),
        ),
        ("BertForMaskedLM", 4, "cls.predictions.bias", T.Shard(0, sizes=(10, 9, 9, 9))),
        ("MixtralForCausalLM", 4, "model.layers.1.mlp.experts.down_proj", T.Shard(2, unit=2, sizes=(10, 8, 8, 8))),
    ],
)
def test_weights_are_cut_by_whole_heads_and_by_features(name, num_ranks, parameter, placement):
    def body(rank: int) -> Any:
        model: Any = parallelize(models.model_of(getattr(transformers, name)), T.Mesh((num_ranks,)))
        return model.state_dict()[parameter].placements

    assert run_ranks(num_ranks, body) == [(placement,)] * num_ranks


def check(single: Any, num_ranks: int, plan: dict[str, str] | None, num_steps: int = 3) -> None:
    copies = [copy.deepcopy(single) for _ in range(num_ranks)]
    expected = models.train(single, num_steps)

    def body(rank: int) -> tuple[list[float], dict[str, torch.Tensor], set[type]]:
        model = parallelize(copies[rank], T.Mesh((num_ranks,)), plan)
        kinds = {type(parameter.data) for parameter in model.parameters()}
        losses = models.train(model, num_steps)
        return losses, {name: value.full_tensor() for name, value in model.state_dict().items()}, kinds

    for losses, state, kinds in run_ranks(num_ranks, body):
        assert_close(losses, expected, rtol=1e-4, atol=1e-5)
        assert kinds == {T.DTensor}
        assert_close(state, dict(single.state_dict()), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "num_ranks", "options", "key_heads"),
    [
        ("LlamaForCausalLM", 2, {}, [2, 1]),
        ("GPT2LMHeadModel", 4, {}, [2, 2, 1, 1]),
        ("Qwen3ForCausalLM", 4, {}, [1, 1, 1, 1]),  # two ranks share the first
        ("LlamaForCausalLM", 3, {"tie_word_embeddings": True}, [1, 1, 1]),
        ("MixtralForCausalLM", 4, {"experts_implementation": "eager", "output_router_logits": False}, [1, 1, 1, 1]),
        ("BertLMHeadModel", 4, {"is_decoder": True}, [2, 2, 1, 1]),
    ],
)
def test_generate_gives_the_tokens_of_one_process_from_caches_of_a_ranks_heads(name, num_ranks, options, key_heads):
    single = models.model_of(getattr(transformers, name), **options).double()
    copies = [copy.deepcopy(single) for _ in range(num_ranks)]
    asked = {"input_ids": models.TOKENS, "max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
    expected = single.generate(**asked).sequences

    def body(rank: int) -> tuple[torch.Tensor, int]:
        model: Any = parallelize(copies[rank], T.Mesh((num_ranks,)))
        found = model.generate(**asked)
        return found.sequences, found.past_key_values.layers[0].keys.shape[1]

    found = run_ranks(num_ranks, body)
    assert [heads for _, heads in found] == key_heads
    for tokens, _ in found:
        assert_close(tokens, expected, rtol=0, atol=0)
