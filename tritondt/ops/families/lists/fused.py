"""Fused optimizer steps: every list position has the layout of its parameter, and gradients move there."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from tritondt.errors import PropagationError
from tritondt.ops.propagation.propagator import propagator
from tritondt.ops.propagation.registration import NUMBERS_BY_TYPE
from tritondt.ops.propagation.schema import LocalOp, OpSchema, OutputSharding
from tritondt.sharding.placement import Partial
from tritondt.sharding.spec import DTensorSpec

_PARAMETERS, _GRADIENTS, _STEPS = "self", "grads", "state_steps"


def fused_rule(schema: OpSchema) -> OutputSharding:
    """The decision about a step: what the step writes stays where it is, and gradients come to it.

    PropagationError where a parameter's state has another layout, or a parameter holds terms of a sum.
    """
    named = _lists(schema)
    parameters = named[_PARAMETERS]
    for spec in parameters:
        if spec.layout.axes_where(Partial):
            raise PropagationError(
                f"{schema.op} got a parameter {spec}, which holds terms; redistribute it to Replicate or Shard first"
            )
    wanted: list[DTensorSpec] = []
    moves = False
    for name, specs in named.items():
        if name == _STEPS:
            wanted += specs
            continue
        targets = [spec.with_placements(of.placements, of.order) for spec, of in zip(specs, parameters, strict=True)]
        for spec, target in zip(specs, targets, strict=True):
            if spec is not target:
                _check_movable(schema, name, spec, target)
                moves = True
        wanted += targets
    wanted += [spec for spec in schema.kwargs_schema.values() if isinstance(spec, DTensorSpec)]
    return OutputSharding(None, tuple(wanted) if moves else None, _in_memory_order(schema.op))


def _lists(schema: OpSchema) -> dict[str, Sequence[DTensorSpec]]:
    """The list arguments by name, in order, each as long as that of the parameters or empty."""
    declared = [argument.name for argument in schema.op._schema.arguments]
    found = dict(zip(declared, schema.args_schema, strict=False))
    length = len(found[_PARAMETERS])
    for name, specs in found.items():
        if len(specs) not in (0, length):
            raise PropagationError(
                f"{schema.op} takes lists of equal length, got {length} tensors and {len(specs)} {name}"
            )
    return {name: specs for name, specs in found.items() if specs}


def _check_movable(schema: OpSchema, name: str, spec: DTensorSpec, target: DTensorSpec) -> None:
    if name != _GRADIENTS:
        raise PropagationError(
            f"{schema.op} writes to {name} laid out as {spec}, and to parameters as {target}; make the state like the "
            "parameters, or redistribute the gradients to the parameters' placements before the first step"
        )
    if schema.kwargs_schema.get("grad_scale") is not None:
        raise PropagationError(
            f"{schema.op} with grad_scale writes to gradients laid out as {spec}, and to parameters as {target}; "
            "redistribute the gradients to the parameters' placements first"
        )


def _in_memory_order(op: OpOverload) -> LocalOp:
    """The operator on contiguous local tensors, which the kernels take for granted."""
    run: Callable[..., Any] = op._op

    def step(*lists: Sequence[torch.Tensor], **options: Any) -> None:
        if all(tensor.is_contiguous() for tensors in lists for tensor in tensors):
            run(*lists, **options)
            return
        dense = [[tensor.contiguous() for tensor in tensors] for tensors in lists]
        run(*dense, **options)
        for tensors, copies in zip(lists, dense, strict=True):
            for tensor, made in zip(tensors, copies, strict=True):
                if made is not tensor:
                    tensor.copy_(made)

    return step


def _register() -> None:
    for name in ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"):
        packet = getattr(torch.ops.aten, name, None)  # not every supported torch has all of them
        for overload in packet.overloads() if packet is not None else ():
            op = getattr(packet, overload)
            if not op._schema.returns:
                propagator.set_rule(op, fused_rule, NUMBERS_BY_TYPE)


_register()
