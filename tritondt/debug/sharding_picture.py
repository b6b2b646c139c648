"""Pictures of which ranks hold which indices of a tensor."""

import sys
from collections.abc import Sequence
from itertools import groupby, pairwise

from tritondt.dtensor.tensor import DTensor
from tritondt.errors import LayoutError
from tritondt.sharding.intervals import Interval
from tritondt.sharding.layout import Layout
from tritondt.sharding.placement import Partial
from tritondt.sharding.spec import DTensorSpec


def visualize_sharding(dtensor: DTensor | DTensorSpec, header: str = "", use_rich: bool = False) -> None:
    """Prints `sharding_text` of a tensor or spec once, on the first rank of the mesh, under `header` if that is given.

    Always plain text; `use_rich` is there for torch's signature only. Not a collective call. Raises LayoutError for a
    tensor of other than one or two dims. Source: torch.distributed.tensor.debug.visualize_sharding.

    >>> import torch
    >>> import tritondt as T
    >>> from tritondt.comm.transports.threads import run_ranks
    >>> def show_on(rank):
    ...     visualize_sharding(T.DTensor.from_local(torch.ones(2), T.Mesh((2,)), (T.Shard(0),)), header="x")
    >>> _ = run_ranks(2, show_on)
    x
    (S0) of (4,) float32 on Mesh(2 over ranks 0..1, cpu)
          | 0-1 | 2-3
    ------+-----+----
    ranks |  0  |  1
    """
    spec = dtensor._spec if isinstance(dtensor, DTensor) else dtensor
    text = sharding_text(spec)
    if spec.coordinate is not None and not any(spec.coordinate):
        sys.stdout.write(f"{header}\n{text}\n" if header else f"{text}\n")


def sharding_text(tensor: DTensor | DTensorSpec) -> str:
    """Picture of which ranks hold which indices of a tensor of one or two dims, rows downwards, as text.

    "0, 1" are ranks that hold equal values, "0 + 1" ranks that hold terms of one sum ("0 max 1" of a maximum). Not a
    collective call. Raises LayoutError for a tensor of other than one or two dims.

    >>> from tritondt.comm.transports.threads import run_ranks
    >>> from tritondt.sharding.mesh import Mesh
    >>> from tritondt.sharding.placement import Shard
    >>> from tritondt.sharding.spec import TensorMeta
    >>> def text_on(rank):
    ...     return sharding_text(DTensorSpec(Mesh((2,)), (Shard(0),), TensorMeta.contiguous((3, 2))))
    >>> print(run_ranks(2, text_on)[0])
    (S0) of (3, 2) float32 on Mesh(2 over ranks 0..1, cpu)
        | 0-1
    ----+----
    0-1 |  0
    ----+----
    2   |  1
    """
    spec = tensor._spec if isinstance(tensor, DTensor) else tensor
    if spec.ndim not in (1, 2):
        raise LayoutError(f"a picture is of a tensor of 1 or 2 dims, {spec} has {spec.ndim}; take a slice of it")
    layout = spec.layout
    bounds = [_bounds(layout, dim) for dim in range(spec.ndim)]
    holders = {coordinate: layout.boxes(coordinate) for coordinate in layout.coordinates()}

    def cell(*corner: Interval) -> str:
        inside = [
            coordinate
            for coordinate, boxes in holders.items()
            if any(all(b[0] <= c[0] < b[1] for b, c in zip(box, corner, strict=True)) for box in boxes)
        ]
        return _holders_text(spec, inside)

    if spec.ndim == 1:
        rows = [["", *map(_interval_text, bounds[0])], ["ranks", *map(cell, bounds[0])]]
    else:
        rows = [["", *map(_interval_text, bounds[1])]]
        rows += [[_interval_text(row), *(cell(row, column) for column in bounds[1])] for row in bounds[0]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [" | ".join(text.center(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    rule = "-+-".join("-" * width for width in widths)
    body = f"\n{rule}\n".join(lines)
    return f"{spec} on {spec.mesh}\n{body}"


def _bounds(layout: Layout, dim: int) -> list[Interval]:
    """Pieces of a dim within which every rank holds all indices or none."""
    length = layout.shape[dim]
    edges = {0, length}
    for coordinate in layout.coordinates():
        for start, stop in layout.intervals(dim, coordinate):
            edges |= {start, stop}
    ordered = sorted(edges)
    return list(pairwise(ordered))


def _interval_text(interval: Interval) -> str:
    start, stop = interval
    return str(start) if stop == start + 1 else f"{start}-{stop - 1}"


def _holders_text(spec: DTensorSpec, coordinates: Sequence[tuple[int, ...]]) -> str:
    """Ranks as text: ranks of equal terms side by side, terms joined by their reduction."""
    axes = [axis for axis, placement in enumerate(spec.placements) if isinstance(placement, Partial)]

    def term(coordinate: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(coordinate[axis] for axis in axes)

    def ranks(of_term: Sequence[tuple[int, ...]]) -> str:
        return ", ".join(str(spec.mesh.ranks[spec.layout.position(coordinate)]) for coordinate in of_term)

    ordered = sorted(coordinates, key=lambda coordinate: (term(coordinate), coordinate))
    terms = [ranks(list(group)) for _, group in groupby(ordered, key=term)]
    first = spec.placements[axes[0]] if axes else None
    joint = f" {first.reduce_op} " if isinstance(first, Partial) and first.reduce_op != "sum" else " + "
    return joint.join(terms)
