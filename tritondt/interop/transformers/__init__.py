"""Models of Hugging Face transformers as tensor-parallel models, by the plans that their configurations name.

    model = LlamaForCausalLM(config)
    parallelize(model, mesh)                # plan_of(model) says how

Heads that do not divide over the ranks, and fewer key heads than ranks, are cut whole. transformers is not imported
here; docs/transformers.md says which names of plans are known.
"""

from tritondt.interop.transformers.apply import parallelize
from tritondt.interop.transformers.plans import plan_of

__all__ = ["parallelize", "plan_of"]
