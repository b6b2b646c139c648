"""Explanations of the redistributions of a trace, made after it from what they were compiled for."""

from typing import NamedTuple

import torch

from tritondt.comm.packing.wire_dtype import is_scaled
from tritondt.debug.tracing.record import Redistribution
from tritondt.kernels.boxes import SCALE_BYTES
from tritondt.planning.cost import CostTable
from tritondt.planning.explain import explain_layouts
from tritondt.redistribution.compile import is_one_grid
from tritondt.sharding.spec import DTensorSpec


class Compiled(NamedTuple):
    """The pair of specs that a transfer was compiled for, with the prices of its world."""

    source: DTensorSpec
    target: DTensorSpec
    wire_dtype: torch.dtype | None
    costs: CostTable


def explained(compiled: Compiled, site: str) -> Redistribution:
    """Explanation of a compiled redistribution; of one between two meshes its specs alone."""
    source, target, wire_dtype, costs = compiled
    kinds = {
        "site": site,
        "is_reduction": any(placement.is_partial() for placement in source.placements),
        "replicates": any(placement.is_replicate() for placement in target.placements),
        "itemsize": source.dtype.itemsize if wire_dtype is None else wire_dtype.itemsize,
    }
    if not is_one_grid(source, target):
        return Redistribution(explanation=f"{source} on {source.mesh} -> {target} on {target.mesh}", **kinds)  # type: ignore[arg-type]
    found = explain_layouts(
        source.layout,
        target.layout,
        source.dtype.itemsize,
        costs,
        source.coordinate,
        wire_itemsize=None if wire_dtype is None else wire_dtype.itemsize,
        scale_bytes=SCALE_BYTES if wire_dtype is not None and is_scaled(wire_dtype) else 0,
    )
    return Redistribution(explanation=str(found), **kinds)  # type: ignore[arg-type]
