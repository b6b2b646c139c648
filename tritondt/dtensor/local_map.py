"""local_map: functions of local tensors, applied to distributed ones."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial, wraps
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_flatten, tree_unflatten

from tritondt.dtensor.tensor import DTensor
from tritondt.errors import LayoutError, LocalTensorError, MeshError, check_not_of_torch
from tritondt.errors.arguments import first
from tritondt.ops.rules.view_layouts import shard_of_sizes
from tritondt.redistribution.agreement import lengths_on_all
from tritondt.redistribution.refusals import refusing_comparison
from tritondt.sharding.layout import Layout
from tritondt.sharding.mesh import Mesh, canonical_mesh
from tritondt.sharding.placement import Placement, Shard, as_placement, placements_code, placements_text
from tritondt.sharding.strides import dense_strides

Placements = Sequence[Placement] | None


@first("func", "out_placements", "in_placements", "in_grad_placements", "device_mesh")  # kept until a call
def local_map(
    func: Callable[..., Any] | None = None,
    out_placements: Placements | tuple[Placements, ...] = None,
    in_placements: tuple[Placements, ...] | None = None,
    in_grad_placements: tuple[Placements, ...] | None = None,
    device_mesh: "DeviceMesh | Mesh | None" = None,
    *,
    redistribute_inputs: bool = False,
    spmd_types: bool = False,
) -> Callable[..., Any]:
    """Turns a function of local tensors into one of distributed tensors; a decorator where `func` is left out.

    `func` gets this rank's part of every distributed tensor among its (nested) positional arguments. `out_placements`
    lay out its results, with one entry for each, None for a result that is not a tensor. `in_placements` are the
    required placements of the arguments, one entry for each, None for any. With `redistribute_inputs` arguments are
    redistributed to them, a collective call; otherwise others raise LayoutError. `in_grad_placements` are the
    placements of the gradients that `func` returns. Without a distributed argument `func` is called as it is. Results
    may be cut unevenly: where an argument is uneven, the ranks exchange the lengths, a few bytes, in a collective call.
    `spmd_types` must be False; with True torch lets the package spmd_types check `func`. Raises MeshError, LayoutError,
    LocalTensorError.

    >>> import tritondt as T
    >>> from tritondt.comm.transports.threads import run_ranks
    >>> @local_map(out_placements=[T.Shard(0)], in_placements=([T.Shard(0)], [T.Replicate()]))
    ... def rows(x, weight):
    ...     return x @ weight
    >>> def product(rank):
    ...     x = T.ones(4, 2, device_mesh=T.Mesh((2,)), placements=[T.Shard(0)])
    ...     return rows(x, T.ones(2, 3, device_mesh=T.Mesh((2,))))
    >>> [(str(found.placements), tuple(found.shape)) for found in run_ranks(2, product)]
    [('(S0,)', (4, 3)), ('(S0,)', (4, 3))]
    """
    if spmd_types:
        raise LayoutError("local_map was given spmd_types=True; types of local tensors are not checked, leave it out")
    if func is None:
        return partial(
            local_map,
            out_placements=out_placements,
            in_placements=in_placements,
            in_grad_placements=in_grad_placements,
            device_mesh=device_mesh,
            redistribute_inputs=redistribute_inputs,
        )
    called = func

    @wraps(called)
    def on_local_tensors(*args: Any, **kwargs: Any) -> Any:
        leaves, form = tree_flatten(args)
        for leaf in leaves:
            check_not_of_torch(leaf, "local_map")
        distributed = [leaf for leaf in leaves if isinstance(leaf, DTensor)]
        if not distributed:
            return called(*args, **kwargs)
        mesh = canonical_mesh(device_mesh if device_mesh is not None else distributed[0].device_mesh)
        wanted = _per_item(in_placements, leaves, "in_placements")
        of_gradients = _per_item(in_grad_placements, leaves, "in_grad_placements")
        inputs = [
            _input(leaf, placements, mesh, redistribute=redistribute_inputs) if isinstance(leaf, DTensor) else leaf
            for leaf, placements in zip(leaves, wanted, strict=True)
        ]
        local = [
            leaf.to_local(grad_placements=placements) if isinstance(leaf, DTensor) else leaf
            for leaf, placements in zip(inputs, of_gradients, strict=True)
        ]
        uneven = any(_is_uneven(leaf._spec.layout) for leaf in inputs if isinstance(leaf, DTensor))
        # Ranks tell each other the lengths of results that are cut unevenly.
        with refusing_comparison(mesh) if uneven and _cuts(out_placements) else nullcontext():
            results, result_form = tree_flatten(called(*tree_unflatten(local, form), **kwargs))
            outputs = [
                _output(result, placements, mesh, uneven=uneven)
                for result, placements in zip(results, _of_results(out_placements, results), strict=True)
            ]
        return tree_unflatten(outputs, result_form)

    return on_local_tensors


def _per_item(given: tuple[Placements, ...] | None, items: Sequence[Any], name: str) -> Sequence[Placements]:
    if given is None:
        return [None] * len(items)
    if len(given) != len(items):
        raise LayoutError(f"local_map was given {name} for {len(given)} arguments, but is called with {len(items)}")
    return given


def _of_results(given: Any, results: Sequence[Any]) -> Sequence[Placements]:
    """One entry of `given` per result; a lone entry may come without a tuple around it."""
    entries = given if isinstance(given, tuple) and not _is_one_entry(given) else (given,)
    if len(entries) != len(results):
        raise LayoutError(f"local_map was given out_placements for {len(entries)} results, got {len(results)}")
    for entry, result in zip(entries, results, strict=True):
        if (entry is None) is isinstance(result, torch.Tensor):
            raise LayoutError(
                f"local_map: a result is a {type(result).__name__}, and its out_placements are {entry}; tensors need "
                "placements, and everything else None"
            )
    return entries


def _cuts(out_placements: Any) -> bool:
    """Whether a result is cut on some axis."""
    return any(isinstance(as_placement(item), Shard) for item in tree_flatten(out_placements)[0])


def _is_one_entry(given: tuple[Any, ...]) -> bool:
    return all(isinstance(as_placement(item), Placement) for item in given)


def _input(tensor: DTensor, placements: Placements, mesh: Mesh, *, redistribute: bool) -> DTensor:
    """The argument under the placements that are asked for; LayoutError where it may not be redistributed."""
    if tensor._spec.mesh is not mesh:
        raise MeshError(f"local_map got a tensor on {tensor._spec.mesh}, but works on {mesh}; all must be on one mesh")
    if placements is None:
        return tensor
    target = tensor._spec.with_placements(placements)
    if target is tensor._spec:
        return tensor
    if not redistribute:
        raise LayoutError(
            f"local_map got {tensor._spec} where it needs {placements_text(placements)}; give it x.redistribute("
            f"placements={placements_code(target.placements)}), or say redistribute_inputs=True"
        )
    return tensor.redistribute(placements=placements)


def _is_uneven(layout: Layout) -> bool:
    """Whether ranks may hold different lengths of a dim."""
    cuts = [layout.cut(axis) for axis in layout.axes_where(Shard)]
    return not all(cut.is_even for cut in cuts)


def _output(result: Any, placements: Placements, mesh: Mesh, *, uneven: bool) -> Any:
    if placements is None:
        return result
    if uneven and any(isinstance(placement, Shard) for placement in placements):
        held, shape = _uneven_placements(result, placements, mesh)
        return DTensor.from_local(result, mesh, held, shape=shape)
    return DTensor.from_local(result, mesh, placements)


def _uneven_placements(
    local: torch.Tensor, placements: Sequence[Placement], mesh: Mesh
) -> tuple[list[Placement], tuple[int, ...]]:
    """The placements with the sizes that the ranks hold, and the global shape: a collective call."""
    dims = [placement.dim % local.ndim for placement in placements if isinstance(placement, Shard)]
    if len(set(dims)) < len(dims):
        raise LocalTensorError(
            "local_map: arguments are cut unevenly, and several axes cut one dim of a result "
            f"{placements_text(placements)}; wrap it by DTensor.from_local(result, mesh, placements, shape=...) instead"
        )
    lengths = lengths_on_all(mesh, [local.shape[dim] for dim in dims])
    found, shape = list(placements), list(local.shape)
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            dim = placement.dim % local.ndim
            sizes = [of_rank[dims.index(dim)] for of_rank in _along_axis(lengths, mesh, axis)]
            found[axis], shape[dim] = shard_of_sizes(dim, sizes), sum(sizes)
    return found, tuple(shape)


def _along_axis(lengths: Sequence[Sequence[int]], mesh: Mesh, axis: int) -> list[Sequence[int]]:
    """Entries of the ranks that differ from the first in their index on one axis only."""
    stride = dense_strides(mesh.shape)[axis]
    return [lengths[index * stride] for index in range(mesh.shape[axis])]
