"""Margin losses: rows may be cut, the classes of a row must be whole."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload

from tritondt.ops.propagation.homomorphisms import LINEAR
from tritondt.ops.propagation.propagator import propagator
from tritondt.ops.propagation.schema import AxisStrategy, LocalOp, OpSchema, OutputSpecs
from tritondt.ops.rules.empty_shards import empty_shard_result
from tritondt.ops.rules.equations import declared_tensors, equation_strategies, equation_terms

aten = torch.ops.aten

_NONE, _MEAN, _SUM = 0, 1, 2


class _Loss(NamedTuple):
    """The reduction's position, and equation terms; # stands for a number, or one per row where nothing is reduced."""

    place: int
    arguments: str
    results: str

    @property
    def is_gradient(self) -> bool:
        """Whether the first argument is what the loss gave in the forward pass."""
        return self.arguments.startswith("#")


# torch's decomposition of the second takes what follows the first -1 of a target for class 0.
_LOSSES: Mapping[OpOverload, _Loss] = {
    aten.multi_margin_loss.default: _Loss(5, "n.,n,.", "#"),
    aten.multilabel_margin_loss_forward.default: _Loss(2, "n.,n.", "#,n."),
    aten.multi_margin_loss_backward.default: _Loss(6, "#,n.,n,.", "n."),
    aten.multilabel_margin_loss_backward.default: _Loss(3, "#,n.,n.,n.", "n."),
}


def _rows(schema: OpSchema) -> list[AxisStrategy]:
    """Tensors with rows are cut alike; a lone row is whole."""
    loss, tensors = _LOSSES[schema.op], declared_tensors(schema)
    equation = f"{loss.arguments}->{loss.results}"
    if schema.args_spec[loss.is_gradient].ndim < 2:
        terms = ["" if spec is None else "." * spec.ndim for spec in tensors]
        results = ["" if term == "#" else "." for term in loss.results.split(",")]
        equation = f"{','.join(terms)}->{','.join(results)}"
    reduced = "n" if schema.argument(loss.place, "reduction", _MEAN) == _NONE else ""
    equation = equation.replace("#", reduced)
    passing = [LINEAR.at(0)] if loss.is_gradient else []
    return [*equation_strategies(equation, tensors), *equation_terms(schema, equation, passing)]


def _of_all_rows(schema: OpSchema, outputs: OutputSpecs) -> LocalOp | None:
    """A mean is a sum over the number of all rows, and so is its gradient."""
    loss, nothing = _LOSSES[schema.op], empty_shard_result(schema, outputs)
    scores = schema.args_spec[loss.is_gradient]
    is_mean = schema.argument(loss.place, "reduction", _MEAN) == _MEAN
    if nothing is not None or not is_mean or scores.local_shape == scores.shape:
        return nothing
    run, count = schema.op._op, scores.shape[0]

    def of_mean(first: torch.Tensor, *args: Any, **options: Any) -> Any:
        changed = [first / count if loss.is_gradient else first, *args]
        if loss.place < len(changed):
            changed[loss.place] = _SUM
            found = run(*changed, **options)
        else:
            found = run(*changed, **{**options, "reduction": _SUM})
        if loss.is_gradient:
            return found
        return found / count if isinstance(found, torch.Tensor) else (found[0] / count, *found[1:])

    return of_mean


for _op in _LOSSES:
    propagator.set_strategy(_op, _rows, localize=_of_all_rows)
