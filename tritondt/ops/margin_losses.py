"""Gradients of margin losses: rows may be cut, the classes of a row must be whole."""

from typing import Any

import torch

from tritondt.ops.equations import declared_tensors, equation_strategies
from tritondt.ops.nothing import given_for_nothing
from tritondt.ops.propagator import propagator
from tritondt.ops.schema import AxisStrategy, LocalOp, OpSchema, OutputSpecs

aten = torch.ops.aten

_NONE, _MEAN, _SUM = 0, 1, 2
# Where each has its reduction, and its tensors beside gradient and scores: those with an n have as many rows.
_GRADIENTS = {
    aten.multi_margin_loss_backward.default: (6, ("n", ".")),
    aten.multilabel_margin_loss_backward.default: (3, ("n.", "n.")),
}


def _rows(schema: OpSchema) -> list[AxisStrategy]:
    """Alike in all that has rows; a lone row is whole."""
    place, others = _GRADIENTS[schema.op]
    tensors = declared_tensors(schema)
    gradient = "n" if schema.argument(place, "reduction", _MEAN) == _NONE else ""
    terms = [gradient, "n.", *others]
    if schema.args_spec[1].ndim < 2:
        terms = ["" if spec is None else "." * spec.ndim for spec in tensors]
    return equation_strategies(f"{','.join(terms)}->{terms[1]}", tensors, [(0,)])


def _of_all_rows(schema: OpSchema, outputs: OutputSpecs) -> LocalOp | None:
    """The gradient of a mean is that of a sum over the number of all rows."""
    scores = schema.args_spec[1]
    nothing = given_for_nothing(schema, outputs)
    place, _ = _GRADIENTS[schema.op]
    if nothing is not None or schema.argument(place, "reduction", _MEAN) != _MEAN or scores.local_shape == scores.shape:
        return nothing
    run, count = schema.op._op, scores.shape[0]

    def of_mean(gradient: torch.Tensor, *args: Any, **options: Any) -> Any:
        changed = (gradient / count, *args)
        if place < len(changed):
            return run(*changed[:place], _SUM, *changed[place + 1 :], **options)
        return run(*changed, **{**options, "reduction": _SUM})

    return of_mean


for _op in _GRADIENTS:
    propagator.set_strategy(_op, _rows, localize=_of_all_rows)
