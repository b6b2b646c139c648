"""Specs of the inputs and outputs of a module on a mesh of one axis, where a layout is one placement."""

from functools import lru_cache
from typing import NamedTuple

import torch

from tritondt import identity
from tritondt.dtensor.tensor import DTensor
from tritondt.errors import MeshError
from tritondt.redistribution.autograd import gradient_spec
from tritondt.sharding.local_spec import spec_of_local
from tritondt.sharding.mesh import Mesh
from tritondt.sharding.placement import Partial, Placement
from tritondt.sharding.spec import DTensorSpec, TensorMeta


@lru_cache(maxsize=4096)
def activation_spec(mesh: Mesh, placement: Placement, shape: tuple[int, ...], dtype: torch.dtype) -> DTensorSpec:
    """Spec of a row-major tensor of global `shape` under one placement."""
    return DTensorSpec(mesh, (placement,), TensorMeta.contiguous(shape, dtype))


class InputPlan(NamedTuple):
    """Redistribution of an input from `source` to `target`; the gradient of the local part comes as `gradient`.

    An input that is so already keeps its spec, and its gradient stays as it comes: where several layers share an input,
    as q, k and v do, their terms are added before they are reduced.
    """

    source: DTensorSpec
    target: DTensorSpec
    gradient: DTensorSpec
    gradient_of_source: DTensorSpec
    moves: bool
    # Terms that a plain input comes as: a form without a short way.
    as_terms: bool
    # A distributed input that is so already, and whose gradient comes as terms: layers that have it share its part.
    is_shared: bool


def input_plan_of(
    x: torch.Tensor,
    mesh: Mesh,
    given: Placement,
    wanted: Placement,
    *,
    gradient: Placement | None = None,
    features: int | None = None,
) -> InputPlan:
    """Plan that brings an input in as `wanted`.

    A plain `x` is taken for a part under `given`, of a tensor whose last dim is `features` long where that is known;
    a distributed one says itself how it is laid out. `gradient` is how the gradient of the part will be laid out:
    Partial where ranks use one input for different outputs.
    """
    if isinstance(x, DTensor):
        source = x._spec
        if source.mesh is not mesh:
            raise MeshError(f"{source} is on {source.mesh}, the module on {mesh}; both must be on one mesh")
    else:
        source = _spec_of_plain(mesh, given, tuple(x.shape), x.dtype, features)
    target = activation_spec(mesh, wanted, source.shape, source.dtype)
    if source.layout is target.layout:
        target = source
    of_target = gradient_spec(target) if gradient is None else target.with_placements((gradient,))
    is_distributed, moves = isinstance(x, DTensor), source is not target
    return InputPlan(
        source,
        target,
        of_target,
        gradient_spec(source),
        moves,
        as_terms=not is_distributed and isinstance(source.placements[0], Partial),
        is_shared=is_distributed and not moves and of_target is not source,
    )


def _spec_of_plain(
    mesh: Mesh, given: Placement, local_shape: tuple[int, ...], dtype: torch.dtype, features: int | None
) -> DTensorSpec:
    """Spec of the tensor whose part is plain: every rank is taken to hold as much as this one, but for the features."""
    strides = TensorMeta.contiguous(local_shape).stride
    shape = None
    if features is not None and (given.is_shard(-1) or given.is_shard(len(local_shape) - 1)):
        shape = (*local_shape[:-1], features)
    spec = spec_of_local(mesh, (given,), local_shape, strides, dtype, shape)
    return activation_spec(mesh, spec.placements[0], spec.shape, dtype)


class OutputPlan(NamedTuple):
    """Redistribution of an output from `source` to `target`, and of gradients the other way."""

    source: DTensorSpec
    target: DTensorSpec
    gradient_of_target: DTensorSpec
    gradient_of_source: DTensorSpec
    moves: bool
    # Terms that the output goes out as: a form without a short way.
    as_terms: bool


def output_plan_of(
    mesh: Mesh, found: Placement, wanted: Placement, shape: tuple[int, ...], dtype: torch.dtype
) -> OutputPlan:
    """Plan that hands an output of global `shape`, laid out as `found`, out as `wanted`."""
    source, target = (activation_spec(mesh, placement, shape, dtype) for placement in (found, wanted))
    moves, as_terms = source is not target, isinstance(wanted, Partial)
    return OutputPlan(source, target, gradient_spec(target), gradient_spec(source), moves, as_terms)


identity.on_end(activation_spec.cache_clear)
