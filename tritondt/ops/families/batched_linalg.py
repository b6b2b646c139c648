"""Linear algebra on matrices: leading dims may be cut, the matrices themselves must be whole."""

from collections.abc import Sequence
from typing import Any

import torch

from tritondt.ops.propagation.homomorphisms import LINEAR
from tritondt.ops.propagation.propagator import propagator
from tritondt.ops.propagation.schema import LocalOp, OpSchema, OutputSharding
from tritondt.ops.propagation.tensor_meta import propagate_tensor_meta
from tritondt.ops.rules.equations import declared_tensors, register_equation
from tritondt.sharding.placement import Partial, Replicate
from tritondt.sharding.spec import TensorMeta

aten = torch.ops.aten

# Arguments of each operator: a star for leading dims, a dot for a dim of a matrix or vector.
_ARGUMENTS = {
    **dict.fromkeys(("_linalg_det", "_linalg_slogdet", "_linalg_eigh", "_linalg_eigvals", "_linalg_svd"), "*.."),
    **dict.fromkeys(("cholesky", "cholesky_inverse", "linalg_cholesky_ex", "linalg_inv_ex"), "*.."),
    **dict.fromkeys(("geqrf", "linalg_eig", "linalg_qr", "linalg_matrix_exp"), "*.."),
    **dict.fromkeys(("linalg_lu", "linalg_lu_factor_ex", "linalg_ldl_factor_ex"), "*.."),
    "linalg_pinv.atol_rtol_tensor": "*..,*,*",
    **dict.fromkeys(("linalg_householder_product", "lu_unpack"), "*..,*."),
    "triangular_solve": "*..,*..",
    "ormqr": "*..,*.,*..",
}
# Those that are linear in the tensor at a place.
_SOLUTIONS = {
    "cholesky_solve": ("*..,*..->*..", 0),
    "_cholesky_solve_helper": ("*..,*..->*..", 0),
    "linalg_solve_triangular": ("*..,*..->*..", 1),
    "linalg_lu_solve": ("*..,*.,*..->*..", 2),
    "linalg_ldl_solve": ("*..,*.,*..->*..", 2),
}


def _with_results(arguments: str, schema: OpSchema) -> str:
    """The equation of a call: a result has the leading dims, or is empty because nobody asked for it."""
    tensors = [spec for spec in declared_tensors(schema) if spec is not None]
    leading = torch.broadcast_shapes(
        *(spec.shape[: spec.ndim - term.count(".")] for spec, term in zip(tensors, arguments.split(","), strict=False))
    )
    metas = propagate_tensor_meta(schema)
    several: Sequence[Any] = [metas] if isinstance(metas, TensorMeta) else metas or []
    results = [_result(meta.shape, tuple(leading)) for meta in several]
    return f"{arguments}->{','.join(results)}"


def _result(shape: tuple[int, ...], leading: tuple[int, ...]) -> str:
    rest = len(shape) - len(leading)
    return "*" + "." * rest if rest >= 0 and shape[: len(leading)] == leading else "-"


def _register() -> None:
    for name, arguments in _ARGUMENTS.items():

        def equation(schema: OpSchema, arguments: str = arguments) -> str:
            return _with_results(arguments, schema)

        register_equation(name, equation)
    for name, (text, place) in _SOLUTIONS.items():
        register_equation(name, text, passing=[LINEAR.at(place)])
    register_equation("_linalg_solve_ex", _solve)


def _solve(schema: OpSchema) -> str:
    """The equation of linalg_solve_ex: one right-hand side for each matrix, or a matrix of them."""
    matrices, right = schema.args_spec
    is_vector = right.ndim == 1 or (right.ndim == matrices.ndim - 1 and right.shape == matrices.shape[:-1])
    if is_vector:
        return "*..,*.->*.,*..,*.,*"
    # Fewer leading dims might, of a rank's matrices, look like one right-hand side for each.
    return "*..,*..->*..,*..,*.,*" if right.ndim >= matrices.ndim else "...,..->-,-,-,-"


def _checked(schema: OpSchema) -> OutputSharding:
    """The decision about an error check: each rank checks its part; others hear of a failure at their next exchange."""
    (spec,) = schema.args_spec
    placements = [Replicate() if isinstance(placement, Partial) else placement for placement in spec.placements]
    wanted = spec.with_placements(placements)
    return OutputSharding(None, None if wanted is spec else (wanted,), _local_check(schema))


def _local_check(schema: OpSchema) -> LocalOp:
    op = schema.op._op
    return lambda info, *args, **options: op(info, *args, **options) if info.numel() else None


_register()
propagator.set_rule(aten._linalg_check_errors.default, _checked)
