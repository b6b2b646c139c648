"""Models of Hugging Face transformers as tensor-parallel models, by the plans that their configurations name.

    model = LlamaForCausalLM(config)
    parallelize(model, mesh)                # plan_of(model) says how

Heads that do not divide over the ranks, and fewer key heads than ranks, are cut whole. `from_pretrained` and
`save_pretrained` read and write safetensors by parts. transformers is not imported before a model is loaded;
docs/transformers.md says which names of plans are known.
"""

from tritondt.interop.transformers.apply import parallelize
from tritondt.interop.transformers.experts import ShardedExperts
from tritondt.interop.transformers.loading import from_pretrained
from tritondt.interop.transformers.plans import plan_of
from tritondt.interop.transformers.saving import save_pretrained
from tritondt.interop.transformers.trainer import make_trainer

__all__ = ["ShardedExperts", "from_pretrained", "make_trainer", "parallelize", "plan_of", "save_pretrained"]
