"""Text of distributed tensors and of what is refused, which single ranks make: nothing is sent for it."""

import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch._ops import OpOverload

from tritondt.errors import PropagationError
from tritondt.sharding.placement import Replicate, placements_text
from tritondt.sharding.spec import DTensorSpec

_OWN = __name__.partition(".")[0]
_SHARDED_BY_TORCH = (
    "torch's data-parallel wrappers take plain parameters only: call tritondt.fsdp.fully_shard(module, mesh=mesh['dp'])"
)
_PARAMETRIZED = (
    "a parametrization computes the weight of a parallelized module: remove it by "
    "torch.nn.utils.parametrize.remove_parametrizations(module, 'weight') before parallelize_module, or register it on "
    "modules that the plan leaves plain"
)


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


# The cure of a call with plain and distributed tensors, by the function of torch's that made the call.
_CURES_BY_CALLER: Mapping[tuple[str, str], str] = {
    ("torch.distributed.fsdp", ""): _SHARDED_BY_TORCH,
    ("torch.nn.parallel.distributed", ""): _SHARDED_BY_TORCH,
    ("torch.nn.modules.module", "_load_from_state_dict"): (
        "load_state_dict was given a plain tensor for a distributed parameter; load whole tensors by "
        "torch.distributed.checkpoint.state_dict.set_model_state_dict(model, state_dict, "
        "options=StateDictOptions(full_state_dict=True)), which cuts them"
    ),
    ("torch.nn.utils.parametrizations", ""): _PARAMETRIZED,
    ("torch.nn.utils.weight_norm", ""): _PARAMETRIZED,
    ("torch.nn.utils.convert_parameters", ""): (
        "call it within tritondt.implicit_replication() where plain parameters are alike on every rank"
    ),
    ("torch.optim", ""): (
        "the optimizer's state is plain where its parameter is distributed, or the reverse; make the optimizer after "
        "the parameters, and load its state by "
        "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict(model, optimizer, state_dict)"
    ),
}
_ALIKE = (
    "where all plain ones are alike on every rank, as labels and the cos and sin of rotary embeddings are, call it "
    "within tritondt.implicit_replication(), or lay the model out by parallelize_module(..., "
    "plain_tensors='replicated')"
)
_TORCH_TENSORS = "torch.distributed.tensor"


def mixed_text(op: OpOverload, spec: DTensorSpec, plain: torch.Tensor) -> str:
    """The sentence that refuses an operator on a distributed tensor and a plain one, with the cure of its cause."""
    kind = "parameter" if isinstance(plain, torch.nn.Parameter) else "one"
    found = f"{op} got a distributed tensor {spec} and a plain {kind} of shape {tuple(plain.shape)}"
    return f"{found}; {_cure(op, plain)}"


def _cure(op: OpOverload, plain: torch.Tensor) -> str:
    if op._schema.name.startswith("aten::nll_loss") and _within_loss_parallel_of_torch():
        return (
            "torch's loss_parallel() knows torch's distributed tensors only: enter tritondt.parallel.loss_parallel() "
            f"in place of it; {_ALIKE}"
        )
    for caller in _callers():
        for (module, function), cure in _CURES_BY_CALLER.items():
            if caller.f_globals.get("__name__", "").startswith(module) and function in ("", caller.f_code.co_name):
                return cure
    if isinstance(plain, torch.nn.Parameter):
        return (
            "the parameter's module was left plain: give it a style in the plan, as SequenceParallel or "
            f"ReplicateParallel; {_ALIKE}"
        )
    return (
        "make the plain one distributed with distribute_tensor(x, mesh, placements), or DTensor.from_local(x, mesh, "
        f"[Replicate()]) where every rank holds the same, or use to_local() on the other; {_ALIKE}"
    )


def _within_loss_parallel_of_torch() -> bool:
    """Whether torch's own loss_parallel() is entered, which gives torch's class handlers of its own for losses."""
    torchs = sys.modules.get(_TORCH_TENSORS)
    handlers = getattr(getattr(torchs, "DTensor", None), "_op_dispatcher", None)
    return torch.ops.aten.nll_loss_forward.default in getattr(handlers, "_custom_op_handlers", ())


def _callers() -> Iterator[FrameType]:
    """Frames of torch's modules below the call, from the innermost; none beyond the first of another package's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package == "torch":
            yield frame
        elif package != _OWN:
            return
        frame = frame.f_back
