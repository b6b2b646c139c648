"""Products of matrices in groups, as those of experts with their tokens: `torch._grouped_mm`.

Offsets say where the groups end in the dim that they share out; that dim is whole on every rank. Outer indices may be
cut, the contraction, and the groups: a rank then multiplies its own groups only.
"""

from collections.abc import Iterator, Sequence

import torch
from torch._ops import OpOverload

from tritondt.ops.propagation.homomorphisms import ADDITIVE, term_strategies
from tritondt.ops.propagation.registration import strategy_of
from tritondt.ops.propagation.schema import AxisStrategy, LocalOp, OpSchema, OutputSpecs
from tritondt.ops.propagation.tensor_meta import meta_of_call
from tritondt.ops.rules.einop import einop_strategies
from tritondt.sharding.placement import Replicate
from tritondt.sharding.spec import DTensorSpec, TensorMeta

aten = torch.ops.aten

# By the dims of the factors: the equation, and the letter of the dim that groups share out. Group letters: g.
_EQUATIONS = {
    (2, 3): ("tk,gkn->tn", "t"),
    (3, 2): ("gmk,kt->mt", "t"),
    (2, 2): ("mt,tn->gmn", "t"),
    (3, 3): ("gmk,gkn->gmn", ""),
}
# Kernels of torch (2.13) take rows that start at multiples of 16 bytes.
_ALIGNMENT = 16


# Torch 2.10 has the operator, older ones may not.
_OPS: list[OpOverload] = [aten._grouped_mm.default] if hasattr(aten, "_grouped_mm") else []


def _local_product(schema: OpSchema, outputs: OutputSpecs) -> LocalOp | None:
    """The product of own groups; group by group where torch's kernel does not take what a rank has."""
    assert isinstance(outputs, DTensorSpec), f"{schema.op} gives one tensor"
    first, second = schema.args_spec[:2]
    if first.ndim == second.ndim == 3:
        return _of_batches
    grouped = next((spec for spec in (first, second, outputs) if spec.ndim == 3), outputs)
    groups = _own_indices(grouped)
    op, is_whole = schema.op._op, len(groups) == grouped.shape[0]

    def run(
        left: torch.Tensor,
        right: torch.Tensor,
        offs: torch.Tensor,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        if is_whole and _is_aligned(left) and _is_aligned(right):
            found: torch.Tensor = op(left, right, offs, bias, out_dtype)
            return found
        return _group_by_group(left, right, list(_spans(offs, groups)), out_dtype or left.dtype)

    return run


@strategy_of(_OPS, localize=_local_product)
def grouped_product(schema: OpSchema) -> list[AxisStrategy]:
    """Cuts of every index but that which groups share out; terms of one factor are terms of the product."""
    first, second = schema.args_spec[:2]
    equation, shared = _EQUATIONS[first.ndim, second.ndim]
    letters = [letter for letter in dict.fromkeys(equation.partition("->")[0]) if letter.isalpha()]
    # Groups that only the product has are a dim that no rank cuts.
    offered = einop_strategies(equation if "g" in letters else equation.replace("g", "1"))
    found = [strategy for letter, strategy in zip(letters, offered, strict=False) if letter != shared]
    found.append(offered[-1])
    rest = (Replicate(),) * (len(schema.args_spec) - 2)
    strategies = [AxisStrategy((*strategy.inputs, *rest), strategy.outputs) for strategy in found]
    return [*strategies, *term_strategies(schema, [ADDITIVE.at(0), ADDITIVE.at(1)])]


def _meta(schema: OpSchema) -> TensorMeta:
    """The product, row-major; torch's fakes (2.13) know bfloat16 only. Rows are not padded to multiples of 16 bytes."""
    first, second, *rest = schema.args_spec
    equation, shared = _EQUATIONS.get((first.ndim, second.ndim), ("", ""))
    left, _, right = equation.partition("->")
    lengths: dict[str, int] = {}
    terms = list(zip(left.split(","), (first, second), strict=False))
    if bool(shared) == bool(rest):
        lengths = {"g": rest[0].shape[0]} if rest else {}
        for term, spec in terms:
            for letter, length in zip(term, spec.shape, strict=True):
                if lengths.setdefault(letter, length) != length:
                    equation = ""
    if not equation or bool(shared) != bool(rest) or first.dtype != second.dtype:
        shapes = ", ".join(f"{tuple(spec.shape)} of {spec.dtype}" for spec in schema.args_spec)
        raise RuntimeError(
            f"{schema.op} got {shapes}; allowed are two factors of one dtype, each of 2 or 3 dims, which contract "
            "alike, with an offset for each group unless both have 3"
        )
    dtype = next((value for value in _values(schema) if isinstance(value, torch.dtype)), first.dtype)
    return TensorMeta.contiguous(tuple(lengths[letter] for letter in right), dtype)


def _values(schema: OpSchema) -> list[object]:
    return [*schema.args_schema, *schema.kwargs_schema.values()]


meta_of_call.update(dict.fromkeys(_OPS, _meta))


def _own_indices(spec: DTensorSpec) -> list[int]:
    """Groups of this rank, by their number in the first dim of a tensor."""
    if spec.coordinate is None:
        return []
    return [index for start, stop in spec.layout.region(spec.coordinate)[0] for index in range(start, stop)]


def _of_batches(
    left: torch.Tensor,
    right: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """One product for each group, all of one size."""
    found = torch.bmm(left, right)
    return found if out_dtype is None else found.to(out_dtype)


def _is_aligned(x: torch.Tensor) -> bool:
    """Whether torch's kernel takes a tensor: rows or columns dense, all others at multiples of 16 bytes."""
    *batch, rows, columns = x.stride()
    across = rows if columns == 1 else columns
    is_dense = columns == 1 or rows == 1
    fits = across >= max(1, x.shape[-1] if columns == 1 else x.shape[-2])
    steps = [step * x.itemsize % _ALIGNMENT for step in (*batch, across)]
    return x.numel() > 0 and is_dense and fits and not any(steps) and x.data_ptr() % _ALIGNMENT == 0


def _spans(offs: torch.Tensor, groups: Sequence[int]) -> Iterator[slice]:
    """Indices of each of these groups in the dim that groups share out."""
    ends = [0, *offs.tolist()]
    return (slice(ends[group], ends[group + 1]) for group in groups)


def _group_by_group(
    left: torch.Tensor, right: torch.Tensor, spans: Sequence[slice], dtype: torch.dtype
) -> torch.Tensor:
    """Products of these groups; zeros for others."""
    rows, columns = left.shape[-2], right.shape[-1]
    if left.ndim == right.ndim == 2:
        found = left.new_zeros((len(spans), rows, columns), dtype=dtype)
        for place, span in enumerate(spans):
            found[place] = left[:, span] @ right[span]
        return found
    found = left.new_zeros((rows, columns), dtype=dtype)
    for place, span in enumerate(spans):
        if right.ndim == 3:
            found[span] = left[span] @ right[place]
        else:
            found[:, span] = left[place] @ right[:, span]
    return found
