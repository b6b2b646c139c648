"""Spec of the tensor that a local tensor is a part of, where only the part is known."""

from functools import lru_cache

import torch

from tritondt import identity
from tritondt.errors import LocalTensorError
from tritondt.sharding.layout import Layout
from tritondt.sharding.lengths import are_open
from tritondt.sharding.mesh import Mesh
from tritondt.sharding.placement import Placement, Shard, placements_text
from tritondt.sharding.spec import DTensorSpec, TensorMeta
from tritondt.sharding.strides import strides_in_order_of


def spec_of_local(
    mesh: Mesh,
    placements: tuple[Placement, ...],
    local_shape: tuple[int, ...],
    local_stride: tuple[int, ...],
    dtype: torch.dtype,
    shape: tuple[int, ...] | None = None,
    stride: tuple[int, ...] | None = None,
    order: tuple[int | str, ...] | None = None,
) -> DTensorSpec:
    """Spec under which a rank holds a local tensor of the given shape, strides and dtype.

    Without `shape` every rank is taken to hold as much as this one, except along dims whose `sizes` are given.
    Raises LocalTensorError where this rank's part does not have the local shape, and LayoutError.
    """
    given = mesh, placements, local_shape, local_stride, dtype, shape, stride, order
    try:
        return _spec_of_local(*given)
    except TypeError:  # a length that a graph leaves open has no hash
        if not are_open((*local_shape, *local_stride, *(shape or ()), *(stride or ()))):
            raise
        return _made_spec(*given)


def _made_spec(
    mesh: Mesh,
    placements: tuple[Placement, ...],
    local_shape: tuple[int, ...],
    local_stride: tuple[int, ...],
    dtype: torch.dtype,
    shape: tuple[int, ...] | None,
    stride: tuple[int, ...] | None,
    order: tuple[int | str, ...] | None,
) -> DTensorSpec:
    if any(isinstance(length, torch.Tensor) for length in local_shape):
        raise LocalTensorError(
            "torch.jit.trace was given a program that makes distributed tensors, whose collective calls it cannot "
            "record; compile the program by torch.compile, or export it by torch.export.export"
        )
    known = shape if shape is not None else _global_shape(mesh, placements, local_shape)
    # A rank outside the mesh holds an empty tensor of any number of dims.
    of_local = local_stride if len(local_stride) == len(known) else (1,) * len(known)
    strides = stride if stride is not None else strides_in_order_of(known, of_local)
    spec = DTensorSpec(mesh, placements, TensorMeta(known, strides, dtype), order)
    if mesh.coordinate is not None and spec.local_shape != local_shape:
        guess = "" if shape is not None else " (taken from the local shape; give shape=... for uneven shards)"
        raise LocalTensorError(
            f"rank {mesh.identity.rank} at coordinate {mesh.coordinate} gave a local tensor of shape {local_shape} for "
            f"{placements_text(placements)}; a tensor of shape {known}{guess} has {spec.local_shape} there"
        )
    return spec


_spec_of_local = lru_cache(maxsize=4096)(_made_spec)


def _global_shape(mesh: Mesh, placements: tuple[Placement, ...], local_shape: tuple[int, ...]) -> tuple[int, ...]:
    if mesh.coordinate is None:
        return local_shape
    # Placements are checked, and dims counted from the front, as for a tensor of the local shape.
    unsized = [Shard(p.dim) if isinstance(p, Shard) else p for p in placements]
    checked = Layout(mesh.shape, unsized, local_shape).placements
    shape = list(local_shape)
    for axis, placement in enumerate(checked):
        if isinstance(placement, Shard):
            given = placements[axis]
            assert isinstance(given, Shard), f"{given!r} was taken for a shard"
            dim, index = placement.dim, mesh.coordinate[axis]
            shape[dim] = given.whole_length(shape[dim], mesh.shape[axis], index)
    return tuple(shape)


identity.on_end(_spec_of_local.cache_clear)
