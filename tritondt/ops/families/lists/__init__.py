"""Operators on lists of tensors, as optimizers and gradient scaling call them: `_foreach_*`, `_fused_*`, `_amp_*`."""

from tritondt.ops.families.lists import foreach, foreach_reductions, fused, gradient_scaling  # noqa: F401
