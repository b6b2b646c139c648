"""Text of distributed tensors and of what is refused, which single ranks make: nothing is sent for it."""

from typing import Any

import torch
from torch._ops import OpOverload

from tritondt.errors import PropagationError
from tritondt.sharding.placement import Replicate, placements_text
from tritondt.sharding.spec import DTensorSpec


def text_of(distributed: Any) -> str:
    """Placements, global shape and mesh of a tensor, and this rank's part of it."""
    spec, local = distributed._spec, distributed._local_tensor
    order = "" if spec.order == tuple(range(spec.mesh.ndim)) else f", order={spec.order}"
    grad = f", grad_fn=<{distributed.grad_fn.name()}>" if distributed.grad_fn is not None else ""
    grad = grad or (", requires_grad=True" if distributed.requires_grad else "")
    title = "Parameter containing:\n" if getattr(distributed, "_is_param", False) else ""
    shown = repr(local.detach())
    # Torch's own text, which leaves out the middle of more than 1,000 elements.
    gap = "\n" if "\n" in shown else " "
    return (
        f"{title}DTensor({placements_text(spec.placements)}{order} of {tuple(distributed.shape)} on {spec.mesh}, local "
        f"{tuple(local.shape)} ={gap}{shown}{grad})"
    )


def check_is_own(spec: DTensorSpec, format_spec: str) -> None:
    """Raises PropagationError where the number of a tensor without dims is no rank's own."""
    if not all(isinstance(placement, Replicate) for placement in spec.placements):
        raise PropagationError(
            f"format {format_spec!r} of {spec} would be a collective call; make it one on every rank: "
            f"{{x.item():{format_spec}}}"
        )


def mixed_text(op: OpOverload, spec: DTensorSpec, plain: torch.Tensor) -> str:
    """The sentence that refuses an operator on a distributed tensor and a plain one."""
    return (
        f"{op} got a distributed tensor {spec} and a plain one of shape {tuple(plain.shape)}; make the plain one "
        "distributed with distribute_tensor(x, mesh, placements), or DTensor.from_local(x, mesh, [Replicate()]) where "
        "every rank holds the same, or use to_local() on the other; where all plain ones are alike on every rank, as "
        "labels and the cos and sin of rotary embeddings are, call it within tritondt.implicit_replication(), or lay "
        "the model out by parallelize_module(..., plain_tensors='replicated')"
    )
