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
CASES = [
    ("Qwen3", 4, {}),
    ("Llama", 4, {"tie_word_embeddings": True}),
    ("Llama", 2, {}),
    ("Llama", 3, {"attention_bias": True, "mlp_bias": True}),
    ("Qwen3", 4, {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    ("Llama", 4, {"attn_implementation": "eager"}),
]


@pytest.mark.parametrize(("name", "num_ranks", "options"), CASES)
def test_three_steps_are_those_of_one_process(name, num_ranks, options):
    single = models.causal_lm(getattr(transformers, f"{name}ForCausalLM"), **options)
    copies = [copy.deepcopy(single) for _ in range(num_ranks)]
    expected = models.train(single)

    def body(rank: int) -> tuple[list[float], dict[str, torch.Tensor], set[type]]:
        model = parallelize(copies[rank], T.Mesh((num_ranks,)))
        kinds = {type(parameter.data) for parameter in model.parameters()}
        losses = models.train(model)
        return losses, {name: value.full_tensor() for name, value in model.state_dict().items()}, kinds

    for losses, state, kinds in run_ranks(num_ranks, body):
        assert_close(losses, expected, rtol=1e-4, atol=1e-5)
        assert kinds == {T.DTensor}
        assert_close(state, dict(single.state_dict()), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "num_ranks", "options", "key_heads"),
    [
        ("Llama", 2, {}, [2, 1]),
        ("Qwen3", 4, {}, [1, 1, 1, 1]),  # two ranks share the first
        ("Llama", 3, {"tie_word_embeddings": True}, [1, 1, 1]),
    ],
)
def test_generate_gives_the_tokens_of_one_process_from_caches_of_a_ranks_heads(name, num_ranks, options, key_heads):
    single: Any = models.causal_lm(getattr(transformers, f"{name}ForCausalLM"), **options).double()
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
