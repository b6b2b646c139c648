"""flex_attention of distributed tensors that are cut by batch or by heads: every rank attends alone, and nothing moves.

torch.nn.attention.flex_attention calls a higher-order operator, which knows no subclass of a tensor unless it is told.
The score and mask functions of a user ask for the number of a batch entry and of a head; they get the numbers in the
whole tensor.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch._C import DispatchKey
from torch._higher_order_ops.flex_attention import flex_attention

from tritondt.dtensor.autograd import FromLocal
from tritondt.dtensor.tensor import DTensor
from tritondt.errors import LayoutError, MeshError, MixedTensorsError
from tritondt.ops import propagator
from tritondt.ops.propagation.schema import OpSchema
from tritondt.sharding.placement import Partial, Placement, Replicate, placements_code, placements_text
from tritondt.sharding.spec import DTensorSpec, TensorMeta

_BATCH, _HEADS = 0, 1
# torch looks at this key of a subclass, or of a mode, before autograd: a rank's part is taken with its gradient.
_FIRST = DispatchKey.PythonTLSSnapshot
# Decides how a fused kernel of the same tensors is laid out, for flex_attention is cut no differently.
_LIKE = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_index: Callable[..., torch.Tensor] = torch.ops.aten.index.Tensor

_Mod = Callable[..., torch.Tensor]


class _Places(NamedTuple):
    """Numbers, in the whole tensor, of the entries along a dim that this rank has."""

    numbers: tuple[int, ...]

    @property
    def start(self) -> int | None:
        """The first number where all follow each other, None where they do not."""
        first = self.numbers[0] if self.numbers else 0
        return first if self.numbers == tuple(range(first, first + len(self.numbers))) else None

    def table(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """The numbers as a tensor, where a function of positions must look them up."""
        return () if self.start is not None else (torch.tensor(self.numbers, dtype=torch.long, device=device),)

    def of(self, local: torch.Tensor, table: torch.Tensor | None) -> torch.Tensor:
        """The number in the whole tensor of a local one."""
        if table is not None:
            return _index(table, [local])
        return local + self.start if self.start else local


def _flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: _Mod,
    block_mask: tuple[Any, ...],
    *rest: Any,
) -> tuple[torch.Tensor, ...]:
    """Output, log-sum-exp and largest scores, laid out as the query is; torch's own for plain tensors."""
    given = {"query": query, "key": key, "value": value}
    if not any(isinstance(tensor, DTensor) for tensor in given.values()):
        return _plain(query, key, value, score_mod, block_mask, *rest)
    specs = _specs(given)
    _check_layouts(given, specs)
    spec = specs["query"]
    batches, heads = (_Places(_held(spec, dim)) for dim in (_BATCH, _HEADS))
    keys = _picked_keys(spec, specs["key"], heads)
    scale, options, *buffers = rest
    of_scores, of_mask = (tuple(map(_whole, of)) for of in (*buffers, (), ())[:2])
    tables = (*batches.table(query.device), *heads.table(query.device))
    scored = _renumbered(score_mod, 1, batches, heads, len(tables))
    masked = _renumbered(block_mask[-1], 0, batches, heads, len(tables))
    places = {_BATCH: batches.numbers, _HEADS: heads.numbers}
    mask = (*(_part_of_mask(item, places, query.shape) for item in block_mask[:-1]), masked)
    local_query = query.to_local()  # type: ignore[attr-defined]
    local_key, local_value = (_local_keys(given[name], spec, keys) for name in ("key", "value"))
    if not local_query.shape[_BATCH] or not local_query.shape[_HEADS]:
        found = local_query @ local_key.transpose(-1, -2) @ local_value
        sums = local_query.sum(-1, dtype=torch.float32)
        results: tuple[torch.Tensor, ...] = (found, sums, sums.detach())
    else:
        results = _plain(
            *(local_query, local_key, local_value, scored, mask, scale, options),
            *((*tables, *of_scores), (*tables, *of_mask)),
        )
    return tuple(_distributed(result, spec) for result in results)


def _plain(*args: Any) -> tuple[torch.Tensor, ...]:
    """The operator on plain tensors: the kernel that torch would have called, had none stood before it.

    No guard excludes the key meanwhile: without it modes, as of fake tensors, hear of nothing that kernels below do.
    """
    keys = torch._ops._compute_keyset(args, {}, flex_attention.non_fallthrough_keys.remove(_FIRST))
    found: tuple[torch.Tensor, ...] = flex_attention.dispatch(keys.highestPriorityTypeId(), *args)
    return found


def _specs(given: dict[str, torch.Tensor]) -> dict[str, DTensorSpec]:
    plain = [name for name, tensor in given.items() if not isinstance(tensor, DTensor)]
    if plain:
        raise MixedTensorsError(
            f"flex_attention got a plain {plain[0]} beside distributed tensors; make it distributed with "
            "distribute_tensor(x, mesh, placements), or give local tensors for all three"
        )
    return {name: tensor._spec for name, tensor in given.items()}  # type: ignore[attr-defined]


def _check_layouts(given: dict[str, torch.Tensor], specs: dict[str, DTensorSpec]) -> None:
    """Raises where tensors are on several meshes, or where one would have to move before ranks could attend alone."""
    meshes = {spec.mesh for spec in specs.values()}
    if len(meshes) > 1:
        raise MeshError(
            f"flex_attention got tensors on {len(meshes)} meshes, {', '.join(map(str, meshes))}; one is allowed"
        )
    decision = propagator.propagate(OpSchema(_LIKE, tuple(specs.values())))
    needed = decision.input_specs or tuple(specs.values())
    for (name, spec), target in zip(specs.items(), needed, strict=True):
        if target is not spec:
            raise LayoutError(
                f"flex_attention got {name} under {placements_text(spec.placements)}; ranks attend alone to query, key "
                f"and value that are cut alike by batch or heads: write {name}.redistribute(placements="
                f"{placements_code(target.placements)}), or tritondt.parallel.context_parallel_flex_attention for "
                "sequences that are cut"
            )
    batch = {tensor.shape[_BATCH] for tensor in given.values()}
    if len(batch) > 1 and specs["query"].layout.axes_of_dim[_BATCH]:
        raise LayoutError(
            f"flex_attention got batches of {sorted(batch)} entries, cut over ranks; allowed is one size, or "
            "Replicate() in place of Shard(0)"
        )


def _held(spec: DTensorSpec, dim: int) -> tuple[int, ...]:
    if spec.coordinate is None:
        return ()
    return tuple(n for start, stop in spec.layout.intervals(dim, spec.coordinate) for n in range(start, stop))


def _picked_keys(query: DTensorSpec, key: DTensorSpec, heads: _Places) -> tuple[int, ...] | None:
    """Places among this rank's key heads that its heads need; None for all of them, in their order."""
    held = _held(key, _HEADS)
    group = max(1, query.shape[_HEADS] // max(1, key.shape[_HEADS]))
    index = tuple(held.index(head // group) for head in heads.numbers)
    used = tuple(sorted(set(index)))
    per_key = len(index) // max(1, len(used))
    # Every key head serves as many heads as the others do, or every head gets a key head of its own.
    chosen = used if index == tuple(key for key in used for _ in range(per_key)) else index
    return None if chosen == tuple(range(len(held))) else chosen


def _local_keys(tensor: Any, query: DTensorSpec, picked: Sequence[int] | None) -> torch.Tensor:
    """This rank's keys or values; the gradients of those that ranks share are terms of a sum."""
    gradient: list[Placement] = [
        Partial() if isinstance(of_keys, Replicate) and not isinstance(of_query, Replicate) else of_keys
        for of_keys, of_query in zip(tensor.placements, query.placements, strict=True)
    ]
    local: torch.Tensor = tensor.to_local(grad_placements=gradient)
    return (
        local
        if picked is None
        else local.index_select(_HEADS, torch.tensor(picked, dtype=torch.long, device=local.device))
    )


def _part_of_mask(item: Any, places: dict[int, tuple[int, ...]], shape: Sequence[int]) -> Any:
    """The blocks of this rank's batch entries and heads; what is alike for all of them stays as it is."""
    if not isinstance(item, torch.Tensor) or item.ndim < 3:
        return item
    if isinstance(item, DTensor):
        item = item.full_tensor()
    for dim, numbers in places.items():
        if item.shape[dim] == shape[dim] != 1 and len(numbers) != shape[dim]:
            item = item.index_select(dim, torch.tensor(numbers, dtype=torch.long, device=item.device))
    return item


def _whole(buffer: Any) -> Any:
    """A tensor that a score or mask function has captured, whole on this rank."""
    if isinstance(buffer, DTensor):
        return buffer.redistribute(placements=[Replicate()] * buffer._spec.mesh.ndim).to_local(
            grad_placements=[Partial()] * buffer._spec.mesh.ndim
        )
    if isinstance(buffer, torch.Tensor) and buffer.requires_grad:
        raise MixedTensorsError(
            f"flex_attention of distributed tensors got a score_mod that captured a plain tensor of shape "
            f"{tuple(buffer.shape)} which needs a gradient; make it distributed, or detach it"
        )
    return buffer


def _renumbered(mod: _Mod, before: int, batches: _Places, heads: _Places, num_tables: int) -> _Mod:
    """The function with numbers of the whole tensor in place of local ones; `before` arguments come before them."""
    if batches.start == 0 and heads.start == 0:
        return mod

    def renumbered(*args: Any) -> torch.Tensor:
        first, (batch, head, *others) = args[:before], args[before:]
        positions, tables, captured = others[:2], others[2 : 2 + num_tables], others[2 + num_tables :]
        of_batch = tables[0] if batches.start is None else None
        of_head = tables[-1] if heads.start is None else None
        return mod(*first, batches.of(batch, of_batch), heads.of(head, of_head), *positions, *captured)

    return renumbered


def _distributed(local: torch.Tensor, query: DTensorSpec) -> DTensor:
    """A result of which every rank has the batch entries and heads of its queries."""
    meta = TensorMeta.contiguous((*query.shape[:2], *local.shape[2:]), local.dtype)
    spec = DTensorSpec(query.mesh, query.placements, meta, query.order)
    if not (torch.is_grad_enabled() and local.requires_grad):
        return DTensor(local.detach(), spec)
    return cast("DTensor", FromLocal.apply(local, DTensor, spec, spec, None))  # type: ignore[no-untyped-call]


flex_attention.py_impl(_FIRST)(_flex_attention)
