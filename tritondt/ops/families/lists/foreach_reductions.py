"""Norms and maxima of every tensor of a list: one exchange carries one number for each sharded tensor of the list."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload

from tritondt.errors import LayoutError
from tritondt.ops.propagation.propagator import propagator
from tritondt.ops.propagation.schema import OpSchema, OutputSharding
from tritondt.ops.rules.reductions import accumulation_dtype
from tritondt.redistribution.compiled_step import identity_element
from tritondt.redistribution.run import redistribute_local
from tritondt.sharding.placement import Partial, Placement, ReduceOp, Replicate, Shard
from tritondt.sharding.spec import DTensorSpec, TensorMeta

aten = torch.ops.aten


class _Way(NamedTuple):
    """Completion of a reduction over all ranks: `term` of each rank's result, reduced, and the `root` of that."""

    reduce_op: ReduceOp
    term: Callable[[torch.Tensor], torch.Tensor] | None = None
    root: Callable[[torch.Tensor], torch.Tensor] | None = None


class _Group(NamedTuple):
    """Tensors of the list that the same axes shard, with the specs of their numbers, pending and complete."""

    places: list[int]
    pending: DTensorSpec
    complete: DTensorSpec


def _way(schema: OpSchema) -> _Way:
    if schema.op is aten._foreach_max.default:
        return _Way("max")
    order = float(schema.argument(1, "ord", 2))
    if schema.op is not aten._foreach_norm.Scalar or order in (0, 1):
        return _Way("sum")
    if order == float("inf"):
        return _Way("max")
    if order == float("-inf"):
        return _Way("min")
    if order == 2:
        return _Way("sum", torch.square, torch.sqrt)
    return _Way("sum", lambda x: x**order, lambda x: x ** (1 / order))


def list_reduction_rule(schema: OpSchema) -> OutputSharding:
    """The decision for lists: every result is whole on every rank; terms are added first, if possible into pieces."""
    specs: Sequence[DTensorSpec] = schema.args_schema[0]
    wanted = tuple(map(_without_terms, specs))
    given = schema.argument(2, "dtype")
    dtypes = [spec.dtype.to_real() if given is None else given.to_real() for spec in specs]
    way = _way(schema)
    everywhere = [Replicate()] * schema.mesh.ndim
    outputs = [DTensorSpec(schema.mesh, everywhere, TensorMeta((), (), dtype)) for dtype in dtypes]
    groups = _groups(wanted, dtypes, way.reduce_op, exact=schema.op is aten._foreach_max.default)
    moves = any(before is not after for before, after in zip(specs, wanted, strict=True))
    local = _Local(schema.op, wanted, dtypes, way, groups) if groups else None
    return OutputSharding(outputs, wanted if moves else None, local)


def _without_terms(spec: DTensorSpec) -> DTensorSpec:
    """The spec with terms reduced into pieces of the longest dim where the layout allows: half the bytes."""
    if not spec.layout.axes_where(Partial):
        return spec
    choices: list[Placement] = [Replicate()]
    if spec.ndim:
        choices.insert(0, Shard(max(range(spec.ndim), key=lambda dim: spec.shape[dim])))
    for choice in choices:
        try:
            return spec.with_placements([choice if isinstance(p, Partial) else p for p in spec.placements])
        except LayoutError:
            continue
    raise AssertionError(f"{spec} cannot be replicated")


def _groups(specs: Sequence[DTensorSpec], dtypes: Sequence[torch.dtype], op: ReduceOp, *, exact: bool) -> list[_Group]:
    places: dict[tuple[tuple[int, ...], torch.dtype], list[int]] = {}
    for place, (spec, dtype) in enumerate(zip(specs, dtypes, strict=True)):
        axes = spec.layout.axes_where(Shard)
        # A tensor without elements is left to the operator, which may refuse it.
        if axes and spec.layout.numel:
            places.setdefault((axes, dtype if exact else torch.float64), []).append(place)
    found = []
    for (axes, dtype), members in places.items():
        mesh = specs[0].mesh
        meta = TensorMeta.contiguous((len(members),), dtype)
        pending = [Partial(op) if axis in axes else Replicate() for axis in range(mesh.ndim)]
        made = DTensorSpec(mesh, pending, meta)
        found.append(_Group(members, made, made.with_placements([Replicate()] * mesh.ndim)))
    return found


class _Local:
    """Function of local tensors: the operator on this rank's parts, and an exchange for each group."""

    def __init__(
        self,
        op: OpOverload,
        specs: Sequence[DTensorSpec],
        dtypes: Sequence[torch.dtype],
        way: _Way,
        groups: Sequence[_Group],
    ) -> None:
        self._op, self._way, self._groups, self._dtypes = op, way, groups, dtypes
        sharded = {place for group in groups for place in group.places}
        self._held = [place for place, spec in enumerate(specs) if spec.local_numel or place not in sharded]
        # Results of 16 bits would be rounded twice.
        short = {accumulation_dtype(dtype) is not dtype for dtype in dtypes}
        floats = {torch.float16, torch.bfloat16, torch.float32}
        self._widens = True in short and "ord" in _names(op) and {spec.dtype for spec in specs} <= floats

    def __call__(self, tensors: Sequence[torch.Tensor], *options: Any, **named: Any) -> list[torch.Tensor]:
        """The results, each whole."""
        if self._widens:
            options, named = options[:1], {**named, "dtype": torch.float32}
        own: dict[int, torch.Tensor] = {}
        if self._held:
            found = self._op._op([tensors[place] for place in self._held], *options, **named)
            own = dict(zip(self._held, found, strict=True))
        for group in self._groups:
            own.update(zip(group.places, self._completed(group, own, tensors[0].device), strict=True))
        # A conversion that changes nothing takes 1.5 us a tensor all the same.
        return [
            own[place] if own[place].dtype is dtype else own[place].to(dtype)
            for place, dtype in enumerate(self._dtypes)
        ]

    def _completed(self, group: _Group, own: dict[int, torch.Tensor], device: torch.device) -> Sequence[torch.Tensor]:
        """The numbers of a group for all ranks together."""
        reduce_op, term, root = self._way
        dtype = group.pending.dtype
        held = [number for number, place in enumerate(group.places) if place in own]
        numbers = None
        if held:
            found = _stacked([own[group.places[number]] for number in held], dtype)
            numbers = found if term is None else term(found)
        if numbers is None or len(held) < len(group.places):
            known = numbers
            numbers = torch.full((len(group.places),), identity_element(reduce_op, dtype), dtype=dtype, device=device)
            if known is not None:
                numbers[held] = known
        whole = redistribute_local(numbers, group.pending, group.complete)
        whole = whole if root is None else root(whole)
        dtypes = {self._dtypes[place] for place in group.places}
        return (whole.to(dtypes.pop()) if len(dtypes) == 1 else whole).unbind()


def _stacked(numbers: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The numbers as one tensor, converted together where they are of one dtype."""
    first = numbers[0].dtype
    if all([number.dtype is first for number in numbers]):  # noqa: C419  a generator takes twice as long
        return torch.stack(list(numbers)).to(dtype)
    return torch.stack([number.to(dtype) for number in numbers])


def _names(op: OpOverload) -> list[str]:
    return [argument.name for argument in op._schema.arguments]


def _register() -> None:
    for name, overload in (("_foreach_norm", "Scalar"), ("_foreach_powsum", "Scalar"), ("_foreach_max", "default")):
        packet = getattr(aten, name, None)  # not every supported torch has all of them
        if packet is not None and overload in packet.overloads():
            propagator.set_rule(getattr(packet, overload), list_reduction_rule)


_register()
