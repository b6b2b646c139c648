"""Specs as plain values and as text, for files and for compiled graphs.

Plain values are all that torch.load with weights_only takes; they also outlive the world in which they were written.
"""

import json
from collections.abc import Sequence
from functools import lru_cache

import torch

from tritondt import identity
from tritondt.identity import Identity
from tritondt.sharding.lengths import are_open
from tritondt.sharding.mesh import Mesh
from tritondt.sharding.placement import parse_placements, placements_text
from tritondt.sharding.spec import DTensorSpec, TensorMeta
from tritondt.sharding.strides import dense_strides

# Mesh shape, axis names, ranks and device type; placements as text, global shape, strides and cut order.
SpecValues = tuple[
    tuple[tuple[int, ...], tuple[str, ...] | None, tuple[int, ...], str],
    tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]],
]


def spec_values(spec: DTensorSpec) -> SpecValues:
    """The spec as plain values, without its dtype, which the local tensor has."""
    mesh = spec.mesh
    return (
        (mesh.shape, mesh.names, mesh.ranks, mesh.device_type),
        (placements_text(spec.placements), spec.shape, spec.tensor_meta.stride, spec.order),
    )


def spec_from(values: SpecValues, dtype: torch.dtype) -> DTensorSpec:
    """The spec of these values in the calling thread's world; MeshError where it has not enough ranks."""
    (mesh_shape, names, ranks, device_type), (placements, shape, stride, order) = values
    mesh = Mesh(mesh_shape, names, ranks=ranks, device_type=device_type)
    return DTensorSpec(mesh, parse_placements(placements), TensorMeta(shape, stride, dtype), order)


def spec_text(spec: DTensorSpec) -> str:
    """The spec as text with its dtype, which an operator in a graph can take as an argument.

    Without sizes where a graph leaves some open: `open_shape` has them.
    """
    of_mesh, (placements, shape, stride, order) = spec_values(spec)
    sizes = (None, None) if spec.is_open else (shape, stride)
    return json.dumps([of_mesh, (placements, *sizes, order), str(spec.dtype).removeprefix("torch.")])


def open_shape(spec: DTensorSpec) -> tuple[int, ...] | None:
    """The global shape that goes with the text of a spec; None where the text has it."""
    return spec.shape if spec.is_open else None


def spec_from_text(text: str, shape: Sequence[int] | None = None) -> DTensorSpec:
    """The spec of a text by `spec_text` in the calling thread's world; MeshError where it has not enough ranks.

    With `shape`, by `open_shape`, that of a row-major tensor where the text has no sizes.
    """
    if shape is None:
        return _spec_of_rank(identity.current(), text, None)
    if are_open(shape):
        return _spec_of_rank.__wrapped__(identity.current(), text, tuple(shape))
    return _spec_of_rank(identity.current(), text, tuple(shape))


@lru_cache(maxsize=4096)
def _spec_of_rank(who: Identity, text: str, shape: tuple[int, ...] | None) -> DTensorSpec:
    (mesh_shape, names, ranks, device_type), (placements, *sizes, order), dtype = json.loads(text)
    if shape is not None and sizes[0] is None:
        sizes = [shape, dense_strides(shape)]
    of_mesh = tuple(mesh_shape), None if names is None else tuple(names), tuple(ranks), device_type
    of_shape, stride, axes = (tuple(item) for item in (*sizes, order))
    return spec_from((of_mesh, (placements, of_shape, stride, axes)), getattr(torch, dtype))


identity.on_end(_spec_of_rank.cache_clear)
