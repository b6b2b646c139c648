"""Elements looked up in a tensor that is whole: in a sorted one, among others, by position; and distances of rows."""

from collections.abc import Mapping

from tritondt.ops.equations import lay_out
from tritondt.ops.schema import OpSchema
from tritondt.spec import DTensorSpec


def _whole(spec: DTensorSpec) -> str:
    return "." * spec.ndim


def _in_sorted(schema: OpSchema) -> str:
    """One sorted row for all, or one for each row of what is looked up."""
    table, *_ = schema.args_spec
    return ".,*,.->*" if table.ndim == 1 else "*.,*v,*.->*v"


def _in_turn(schema: OpSchema) -> str:
    """Every dim of the products is an index; a tensor lacks those along which it is expanded, the result the summed."""
    tensors, (expanded, summed) = schema.args_spec, (schema.args_schema[3:6], schema.args_schema[6])
    ndim = tensors[0].ndim + len(expanded[0])
    letters: Mapping[int, str] = {dim: chr(ord("a") + dim) for dim in range(ndim)}
    lacking = [{dim % ndim for dim in dims} for dims in expanded]
    terms = ["".join(letters[dim] for dim in range(ndim) if dim not in without) for without in lacking]
    return ",".join(terms) + "->" + "".join(letters[dim] for dim in range(ndim) if dim not in summed)


def _gradient_of_distances(schema: OpSchema) -> str:
    """The gradient of no distances has the rows' own leading dims, whatever they broadcast to."""
    if any(0 in spec.shape for spec in schema.args_spec):
        return f"{','.join(map(_whole, schema.args_spec))}->{_whole(schema.args_spec[1])}"
    return "*pr,*p.,*r.,*pr->*p."


lay_out("searchsorted.Tensor", _in_sorted)
lay_out("bucketize.Tensor", "*,.->*")
lay_out("isin.Tensor_Tensor", lambda schema: f"*,{_whole(schema.args_spec[1])}->*")
lay_out("take", lambda schema: f"{_whole(schema.args_spec[0])},*->*", linear_in=[(0,)])
lay_out("_cdist_forward", "*p.,*r.->*pr")
lay_out("_euclidean_dist", "*p.,*r.->*pr")
lay_out("_cdist_backward", _gradient_of_distances, linear_in=[(0,)])
lay_out("_trilinear", _in_turn, linear_in=[(0,), (1,), (2,)])
