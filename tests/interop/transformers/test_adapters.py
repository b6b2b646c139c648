"""LoRA of peft in models that are laid out: adapters before the plan train as on one process, later are refused."""

import copy
import re
from typing import Any

import peft
import pytest
import torch
import transformers
from torch.testing import assert_close

import tritondt as T
from tests.interop.transformers import models
from tritondt.comm.transports.threads import run_ranks
from tritondt.errors import CheckpointError, ParallelizeError
from tritondt.interop.transformers import parallelize, plan_of

# transformers 5.23 says of an attribute that peft 0.21 asks for that it will go; peft that biases do not merge.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed:UserWarning"),
]

LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
CASES = [
    ("LlamaForCausalLM", 4, LLAMA, {}),
    ("GPT2LMHeadModel", 4, ["c_attn", "c_proj", "c_fc"], {"fan_in_fan_out": True}),
    ("BertForMaskedLM", 3, ["query", "value", "dense"], {}),
    ("LlamaForCausalLM", 3, ["q_proj", "lm_head"], {"lora_bias": True}),
    ("LlamaForCausalLM", 2, ["down_proj"], {"modules_to_save": ["norm"]}),
]


def with_adapters(name: str, modules: list[str], **options: Any) -> Any:
    """A model with adapters that change what it computes."""
    model = models.model_of(getattr(transformers, name))
    torch.manual_seed(7)
    config = peft.LoraConfig(r=5, lora_alpha=8, target_modules=modules, init_lora_weights=False, **options)
    return peft.get_peft_model(model, config)


@pytest.mark.in_core(3)
@pytest.mark.parametrize(("name", "num_ranks", "modules", "options"), CASES)
def test_adapters_before_the_plan_train_as_on_one_process(name, num_ranks, modules, options):
    single = with_adapters(name, modules, **options)
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


def test_the_factor_that_is_as_wide_as_what_is_cut_is_cut_alike():
    def body(rank: int) -> dict[str, Any]:
        model: Any = parallelize(with_adapters("LlamaForCausalLM", LLAMA), T.Mesh((4,)))
        layer = model.get_base_model().model.layers[0]
        return {
            name: parameter.placements
            for name, parameter in (
                ("q_A", layer.self_attn.q_proj.lora_A.default.weight),
                ("q_B", layer.self_attn.q_proj.lora_B.default.weight),
                ("k_B", layer.self_attn.k_proj.lora_B.default.weight),
                ("o_A", layer.self_attn.o_proj.lora_A.default.weight),
                ("o_B", layer.self_attn.o_proj.lora_B.default.weight),
            )
        }

    heads = T.Shard(0, unit=4, sizes=(4, 4, 8, 8))
    assert run_ranks(4, body)[0] == {
        "q_A": (T.Replicate(),),
        "q_B": (heads,),
        "k_B": (T.Shard(0, sizes=(2, 2, 4, 4)),),
        "o_A": (T.Shard(1, unit=4, sizes=(4, 4, 8, 8)),),
        "o_B": (T.Replicate(),),
    }


def test_adapters_are_saved_by_the_first_rank_for_peft_on_one_process(tmp_path):
    def body(rank: int) -> dict[str, torch.Tensor]:
        model: Any = parallelize(with_adapters("LlamaForCausalLM", LLAMA), T.Mesh((3,)))
        models.train(model, 1)
        with pytest.raises(CheckpointError, match="a parallelized PeftModel was given selected_adapters; allowed is"):
            model.save_pretrained(tmp_path, selected_adapters=["default"])
        model.save_pretrained(tmp_path)
        return {name: value.full_tensor() for name, value in model.state_dict().items()}

    expected = run_ranks(3, body)[0]
    alone = peft.PeftModel.from_pretrained(models.model_of(transformers.LlamaForCausalLM), str(tmp_path))
    assert_close(dict(alone.state_dict()), expected, rtol=0, atol=0)


def test_adapters_after_the_plan_are_refused_and_nothing_is_changed():
    def body(rank: int) -> None:
        model = parallelize(models.model_of(transformers.LlamaForCausalLM), T.Mesh((2,)))
        before = [name for name, _ in model.named_parameters()]
        with pytest.raises(
            ParallelizeError, match=r"Linear that is laid out .*; allowed is peft first, then the plan: "
        ):
            peft.get_peft_model(model, peft.LoraConfig(target_modules=LLAMA))
        assert [name for name, _ in model.named_parameters()] == before

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (peft.LoraConfig(target_modules=["q_proj"], use_dora=True), r"q_proj has adapters \(lora_magnitude_vector"),
        (
            peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]),
            r"k_proj has adapters \(Linear\) that the tp",
        ),
        (
            peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
            "prompt_encoder.default.embedding.weight of PeftModelForCausalLM are beside the model",
        ),
    ],
    ids=["dora", "ia3", "prompts"],
)
def test_other_adapters_are_refused_before_anything_is_changed(config, said):
    def body(rank: int) -> None:
        model = peft.get_peft_model(models.model_of(transformers.LlamaForCausalLM), copy.deepcopy(config))
        with pytest.raises(ParallelizeError, match=said):
            parallelize(model, T.Mesh((2,)))
        assert not any(isinstance(parameter, T.DTensor) for parameter in model.parameters())

    run_ranks(2, body)


def test_a_plan_of_which_nothing_is_in_the_model_is_refused():
    model = torch.nn.Module()
    model.add_module("inner", models.model_of(transformers.LlamaForCausalLM))
    model.config = model.inner.config  # type: ignore[union-attr]
    with pytest.raises(
        ParallelizeError, match=re.escape("no pattern of the tp_plan matches a module or a parameter of")
    ):
        plan_of(model)
