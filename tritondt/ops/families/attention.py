"""Scaled dot product attention over batch and heads: torch's fused kernels for the CPU and for CUDA.

Query, output and their gradients are (batch, heads, queries, width), the log-sum-exp (batch, heads, ...), key and value
(batch, key heads, keys, width). With fewer key heads than heads (grouped queries) an axis either cuts both in whole
groups, or cuts the heads as it likes while every rank holds all key heads and uses those that its heads need.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum, auto
from itertools import product
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload

from tritondt.errors import LayoutError
from tritondt.ops.propagation.propagator import propagator
from tritondt.ops.propagation.registration import strategy_of
from tritondt.ops.propagation.schema import AxisStrategy, LocalOp, OpSchema, OutputSharding, OutputSpecs
from tritondt.ops.propagation.selection import decide, with_cuts
from tritondt.ops.random.generator import default_generator_seeded, shard_seed
from tritondt.sharding.layout import Layout
from tritondt.sharding.placement import Partial, Placement, Replicate, Shard
from tritondt.sharding.spec import DTensorSpec
from tritondt.sharding.strides import strides_in_order_of

aten = torch.ops.aten

# Dims of query, key and value; a mask has them too, counted from its last, or broadcasts along them.
_BATCH, _HEADS, _NUM_DIMS = 0, 1, 4


class _Role(Enum):
    """Role of a tensor in attention, which decides along which dims it is cut."""

    QUERY = auto()
    KEY = auto()
    MASK = auto()
    # The state of a random generator, and what only inputs of other kinds have: taken as alike on every rank.
    OTHER = auto()


_ARGUMENT_ROLES: Mapping[str, _Role] = {
    **dict.fromkeys(("query", "grad_out", "grad_out_", "out", "logsumexp"), _Role.QUERY),
    **dict.fromkeys(("key", "value"), _Role.KEY),
    **dict.fromkeys(("attn_mask", "attn_bias"), _Role.MASK),
}
_FORWARD = (_Role.QUERY, _Role.QUERY)
_BACKWARD = (_Role.QUERY, _Role.KEY, _Role.KEY)
_RESULT_ROLES: Mapping[str, tuple[_Role, ...]] = {
    "_scaled_dot_product_flash_attention_for_cpu": _FORWARD,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _BACKWARD,
    "_scaled_dot_product_flash_attention": (*_FORWARD, *(_Role.OTHER,) * 7),
    "_scaled_dot_product_flash_attention_backward": _BACKWARD,
    "_scaled_dot_product_efficient_attention": (*_FORWARD, *(_Role.OTHER,) * 2),
    "_scaled_dot_product_efficient_attention_backward": (*_BACKWARD, _Role.MASK),
    "_scaled_dot_product_cudnn_attention": (*_FORWARD, *(_Role.OTHER,) * 7),
    "_scaled_dot_product_cudnn_attention_backward": _BACKWARD,
}


class _Split(NamedTuple):
    """Placements of the query and of the key on one axis; cuts are open as in AxisStrategy unless `exact`."""

    query: Placement
    key: Placement
    exact: bool = False


class _Call:
    """One call: its tensors by name and role, and how many heads share a key head."""

    def __init__(self, schema: OpSchema) -> None:
        names = [declared.name for declared in schema.op._schema.arguments]
        self.schema = schema
        self.arguments = {**dict(zip(names, schema.args_schema, strict=False)), **schema.kwargs_schema}
        self.tensors = {name: value for name, value in self.arguments.items() if isinstance(value, DTensorSpec)}
        self.roles = [_ARGUMENT_ROLES.get(name, _Role.OTHER) for name in self.tensors]
        self.results = _RESULT_ROLES[schema.op._schema.name.removeprefix("aten::")]
        self.query, self.key = self.tensors["query"], self.tensors["key"]
        heads, key_heads = self.query.shape[_HEADS], self.key.shape[_HEADS]
        self.group = heads // key_heads if key_heads and heads % key_heads == 0 else 1

    @property
    def is_backward(self) -> bool:
        """Whether the results are gradients."""
        return "out" in self.tensors

    @property
    def has_dropout(self) -> bool:
        """Whether weights are dropped."""
        return bool(self.arguments.get("dropout_p"))


def attention(schema: OpSchema) -> OutputSharding:
    """The decision about a forward or a backward call."""
    call = _Call(schema)
    for cut_keys in (True, False):
        decision = decide([_offered(call, axis, cut_keys=cut_keys) for axis in range(schema.mesh.ndim)], schema)
        running = _Call(schema if decision.input_specs is None else schema.with_specs(decision.input_specs))
        # Cuts of heads and key heads that correspond on each axis may not do so where several axes cut them.
        if _needed_keys_are_held(running.query.layout, running.key.layout, call.group):
            break
    return replace(decision, local=_local_op(running, decision.output_spec))


def _register() -> None:
    for name in _RESULT_ROLES:
        if hasattr(aten, name):
            propagator.set_rule(getattr(aten, name).default, attention)


_register()


def _offered(call: _Call, axis: int, *, cut_keys: bool) -> list[AxisStrategy]:
    """The strategies for one axis; without `cut_keys` none that cuts both the heads and the key heads of groups."""
    whole = _Split(Replicate(), Replicate())
    if call.arguments.get("return_debug_mask"):
        return [_strategy(whole, call)]
    splits = [_Split(Shard(_BATCH), Shard(_BATCH))]
    if call.group == 1:
        splits.append(_Split(Shard(_HEADS), Shard(_HEADS)))
    else:
        splits.extend(split for split in _group_splits(call, axis) if cut_keys or isinstance(split.key, Replicate))
    offered = [_strategy(split, call) for split in (*splits, whole)]
    if not (call.is_backward and call.has_dropout):
        return offered
    # The masks come back from the state of the forward's generator, so every rank must have what it had there.
    place = list(call.tensors).index("out")
    current = tuple(spec.placements[axis] for spec in call.tensors.values())
    variants = (variant for template in offered for variant in with_cuts(template, current))
    return [variant for variant in variants if variant.inputs[place] == current[place]]


def _strategy(split: _Split, call: _Call) -> AxisStrategy:
    """The strategy in which every argument and result is split by its role; results that are terms are Partial."""
    specs = list(call.tensors.values())
    inputs = tuple(_placed(split, role, spec) for role, spec in zip(call.roles, specs, strict=True))
    mask = next((placed for placed, role in zip(inputs, call.roles, strict=True) if role is _Role.MASK), Replicate())
    results = {
        _Role.QUERY: split.query,
        _Role.KEY: split.key if isinstance(split.query, Replicate) or isinstance(split.key, Shard) else Partial(),
        _Role.MASK: mask if isinstance(split.query, Replicate) or isinstance(mask, Shard) else Partial(),
        _Role.OTHER: Replicate(),
    }
    return AxisStrategy(inputs, tuple(results[role] for role in call.results), split.exact)


def _placed(split: _Split, role: _Role, spec: DTensorSpec) -> Placement:
    if role is _Role.KEY:
        return split.key
    if role is _Role.OTHER or not isinstance(split.query, Shard):
        return Replicate()
    if role is _Role.QUERY:
        return split.query
    dim = split.query.dim - _NUM_DIMS + spec.ndim
    return Replicate() if dim < 0 or spec.shape[dim] == 1 else replace(split.query, dim=dim)


def _group_splits(call: _Call, axis: int) -> Iterator[_Split]:
    """The ways to cut the heads of groups: as heads or key heads are cut already."""
    for spec, role in zip(call.tensors.values(), call.roles, strict=True):
        cut = spec.placements[axis]
        if not (isinstance(cut, Shard) and cut.dim == _HEADS):
            continue
        if role is _Role.QUERY:
            yield from (_Split(cut, of_keys, exact=True) for of_keys in _cut_of_keys(cut, call, axis))
            yield _Split(cut, Replicate(), exact=True)
        elif role is _Role.KEY:
            yield _Split(cut.scaled(1, call.group), cut, exact=True)


def _cut_of_keys(cut: Shard, call: _Call, axis: int) -> Iterator[Shard]:
    """The cut of key heads with which every rank holds those of its heads, if there is one."""
    found = cut.divided(call.group)
    if found is None:
        return
    parts = call.schema.mesh.shape[axis : axis + 1]
    try:
        query, key = (Layout(parts, (of,), spec.shape) for of, spec in ((cut, call.query), (found, call.key)))
    except LayoutError:
        return
    if _needed_keys_are_held(query, key, call.group):
        yield found


def _needed_keys_are_held(query: Layout, key: Layout, group: int) -> bool:
    """Whether every coordinate holds the key heads of all its heads; looks only at axes that cut heads."""
    if group == 1:
        return True
    axes = sorted({*query.axes_of_dim[_HEADS], *key.axes_of_dim[_HEADS]})
    for indices in product(*(range(query.mesh_shape[axis]) for axis in axes)):
        coordinate = [0] * len(query.mesh_shape)
        for axis, index in zip(axes, indices, strict=True):
            coordinate[axis] = index
        heads, held = (_held_heads(layout, coordinate) for layout in (query, key))
        if not {head // group for head in heads} <= set(held):
            return False
    return True


def _held_heads(layout: Layout, coordinate: Sequence[int]) -> list[int]:
    intervals = layout.intervals(_HEADS, tuple(coordinate))
    return [head for start, stop in intervals for head in range(start, stop)]


def _local_op(call: _Call, outputs: OutputSpecs) -> LocalOp | None:
    """The function of local tensors where that is not the operator itself."""
    query = call.query
    if query.coordinate is None:
        return None
    local: LocalOp = call.schema.op._op
    if query.local_shape[_BATCH] == 0 or query.local_shape[_HEADS] == 0:
        local = _zeros(call.schema.op, outputs)
    elif call.group > 1:
        local = _with_needed_keys(local, call)
    if call.has_dropout and not call.is_backward:
        local = _seeded(local, query)
    return None if local is call.schema.op._op else local


def _zeros(op: OpOverload, outputs: OutputSpecs) -> LocalOp:
    """Empty results, and zero gradients of whole keys: kernels fail without batch or heads."""
    assert isinstance(outputs, list), f"{op} gives several tensors"
    numbers = [0 if str(result.type) in ("int", "SymInt") else None for result in op._schema.returns]

    def zeros(first: torch.Tensor | None, *_args: Any, **_options: Any) -> tuple[Any, ...]:
        if first is None:  # nobody asks for the gradient
            return (None,) * len(outputs)
        found: list[Any] = []
        for spec, number in zip(outputs, numbers, strict=True):
            if spec is None:
                found.append(number)
                continue
            strides = strides_in_order_of(spec.local_shape, spec.tensor_meta.stride)
            found.append(torch.empty_strided(spec.local_shape, strides, dtype=spec.dtype, device=first.device).zero_())
        return tuple(found)

    return zeros


def _with_needed_keys(local: LocalOp, call: _Call) -> LocalOp:
    """A kernel on the key heads that this rank's heads need, whose gradients are added up where they are held."""
    assert call.query.coordinate is not None, f"{call.schema} runs on a rank of its mesh"
    heads, held = (_held_heads(spec.layout, call.query.coordinate) for spec in (call.query, call.key))
    index = [held.index(head // call.group) for head in heads]
    used = sorted(set(index))
    per_key = len(index) // len(used)
    # Kernels take groups of one size: where heads begin or end within a group, every head gets a key head of its own.
    chosen = used if index == [key for key in used for _ in range(per_key)] else index
    if chosen == list(range(len(held))):
        return local
    # Only tensors come before them, so that these are places among all arguments too.
    keys = {place for place, role in enumerate(call.roles) if role is _Role.KEY}
    shape_of = {
        result: spec.local_shape for result, spec in zip((1, 2), (call.key, call.tensors["value"]), strict=True)
    }

    def run(*args: Any, **options: Any) -> Any:
        if args[0] is None:  # nobody asks for the gradient, and the kernel gives none
            return local(*args, **options)
        picked = torch.tensor(chosen, device=args[0].device)
        results = local(*(a.index_select(_HEADS, picked) if i in keys else a for i, a in enumerate(args)), **options)
        if not call.is_backward:
            return results
        return tuple(
            result.new_zeros(shape_of[place]).index_add_(_HEADS, picked, result) if place in shape_of else result
            for place, result in enumerate(results)
        )

    return run


def _seeded(local: LocalOp, shard: DTensorSpec) -> LocalOp:
    def run(query: torch.Tensor, *args: Any, **options: Any) -> Any:
        with default_generator_seeded(query.device, shard_seed(shard)):
            return local(query, *args, **options)

    return run


@strategy_of([aten._safe_softmax.default])
def safe_softmax(schema: OpSchema) -> list[AxisStrategy]:
    """Strategies of the weights where no fused kernel takes the call; a row without any allowed key gets zeros."""
    spec = schema.args_spec[0]
    reduced = schema.argument(1, "dim") % max(spec.ndim, 1)
    cut = [AxisStrategy((Shard(dim),), (Shard(dim),)) for dim in range(spec.ndim) if dim != reduced]
    return [*cut, AxisStrategy((Replicate(),), (Replicate(),))]
