"""Pictures of which ranks hold which indices of a tensor."""

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from html import escape
from itertools import groupby, pairwise

from tritondt.dtensor.tensor import DTensor
from tritondt.errors import LayoutError
from tritondt.errors.arguments import checked, first
from tritondt.planning.explain import CAPTION
from tritondt.sharding.intervals import Interval
from tritondt.sharding.layout import Layout
from tritondt.sharding.placement import Partial
from tritondt.sharding.spec import DTensorSpec

# Of cells that hold different ranks; enough to tell neighbours apart.
_COLOURS = ("#9ed3e6", "#e6b39e", "#b7dba3", "#e6dc9e", "#b3b8ec", "#e3a9c4")
_LEGEND = {1: "cells: ranks", 2: "rows: indices of dim 0, columns: of dim 1, cells: ranks"}
_STYLES = ("cyan", "magenta", "green", "yellow", "blue", "red")


@first("dtensor", "header")  # printed on one rank alone
def visualize_sharding(dtensor: DTensor | DTensorSpec, header: str = "", use_rich: bool = False) -> None:
    """Prints `sharding_text` of a tensor or spec once, on the first rank of the mesh, under `header` if that is given.

    With `use_rich` it prints a table of the package rich, with a color for each rank; without that package, plain text
    and a note. Not a collective call. Raises LayoutError for a tensor of other than one or two dims. Source:
    torch.distributed.tensor.debug.visualize_sharding.

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
    if spec.coordinate is None or any(spec.coordinate):
        return
    if use_rich and importlib.util.find_spec("rich") is not None:
        _print_rich(spec, header)
        return
    missing = "(plain text: rich is not installed; pip install rich)\n" if use_rich else ""
    sys.stdout.write(f"{header}\n{text}\n{missing}" if header else f"{text}\n{missing}")


def _print_rich(spec: DTensorSpec, header: str) -> None:
    """Prints the cells of the picture as rich's table; rich is an extra, and imported here alone."""
    table = importlib.import_module("rich.table").Table(title=header or None, show_lines=True)
    head, *rows = _cells(spec)
    for name in head:
        table.add_column(name, justify="center")
    styles: dict[str, str] = {}
    for label, *cells in rows:
        for cell in cells:
            styles.setdefault(cell, _STYLES[len(styles) % len(_STYLES)])
        table.add_row(label, *(f"[{styles[cell]}]{cell}[/]" for cell in cells))
    console = importlib.import_module("rich.console").Console(file=sys.stdout)
    console.print(f"{spec} on {spec.mesh}", highlight=False, markup=False, soft_wrap=True)
    console.print(table)


@checked
def sharding_text(tensor: DTensor | DTensorSpec) -> str:
    """Draws which ranks hold which indices of a tensor of one or two dims, rows downwards, as text.

    "0, 1" are ranks with equal values; "0 + 1" are ranks with terms of one sum ("0 max 1" of a maximum). Not a
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
    _check_is_flat(spec)
    rows = _cells(spec)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [" | ".join(text.center(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    rule = "-+-".join("-" * width for width in widths)
    body = f"\n{rule}\n".join(lines)
    return f"{spec} on {spec.mesh}\n{body}"


@checked
def sharding_html(tensor: DTensor | DTensorSpec) -> str:
    """Draws which ranks hold which indices of a tensor of one or two dims, as an HTML table for notebooks.

    Cells with the same ranks have the same color; ranks are written as in `sharding_text`. Not a collective call.
    Raises LayoutError for a tensor of other than one or two dims.

    >>> from tritondt.comm.transports.threads import run_ranks
    >>> from tritondt.sharding.mesh import Mesh
    >>> from tritondt.sharding.placement import Shard
    >>> from tritondt.sharding.spec import TensorMeta
    >>> def html_on(rank):
    ...     return sharding_html(DTensorSpec(Mesh((2,)), (Shard(0),), TensorMeta.contiguous((3,))))
    >>> html = run_ranks(2, html_on)[0]
    >>> "(S0) of (3,) float32" in html, html.count("<td")
    (True, 2)
    """
    spec = tensor._spec if isinstance(tensor, DTensor) else tensor
    _check_is_flat(spec)
    head, *rows = _cells(spec)
    colours: dict[str, str] = {}
    lines = ["<tr>" + "".join(f"<th>{escape(name)}</th>" for name in head) + "</tr>"]
    for label, *cells in rows:
        line = f"<tr><th>{escape(label)}</th>"
        for cell in cells:
            colours.setdefault(cell, _COLOURS[len(colours) % len(_COLOURS)])
            style = f"background: {colours[cell]}; color: #111; text-align: center; padding: .3em .8em"
            line += f'<td style="{style}">{escape(cell)}</td>'
        lines.append(line + "</tr>")
    caption = escape(f"{spec} on {spec.mesh}; {_LEGEND[spec.ndim]}")
    return f'<table><caption style="{CAPTION}">{caption}</caption>{"".join(lines)}</table>'


@checked
def write_sharding_image(tensor: DTensor | DTensorSpec, path: str | os.PathLike[str]) -> None:
    """Writes a picture of which ranks hold which indices of a tensor of one or two dims, to scale, as an image.

    The suffix of the path selects the format: .png, .svg or .pdf. Cells with the same ranks have the same color; ranks
    are written as in `sharding_text`. Not a collective call: one rank is enough. Raises LayoutError for a tensor of
    other than one or two dims or without elements, and ImportError where matplotlib is not installed.

    >>> import tempfile, pathlib
    >>> from tritondt.comm.transports.threads import run_ranks
    >>> from tritondt.sharding.mesh import Mesh
    >>> from tritondt.sharding.placement import Shard
    >>> from tritondt.sharding.spec import TensorMeta
    >>> def draw_on(rank, path):
    ...     write_sharding_image(DTensorSpec(Mesh((1,)), (Shard(0),), TensorMeta.contiguous((3, 2))), path)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "weight.png")
    ...     _ = run_ranks(1, lambda rank: draw_on(rank, path))
    ...     path.read_bytes()[1:4]
    b'PNG'
    """
    spec = tensor._spec if isinstance(tensor, DTensor) else tensor
    _check_is_flat(spec)
    if 0 in spec.shape:
        raise LayoutError(f"an image is of a tensor with elements, {spec} has none")
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("write_sharding_image needs matplotlib, which is not installed: pip install matplotlib")
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(7, 5), layout="constrained")
    rectangle = importlib.import_module("matplotlib.patches").Rectangle
    axes = figure.subplots()
    *rest, columns = [_bounds(spec.layout, dim) for dim in range(spec.ndim)]
    rows = rest[0] if rest else [(0, 1)]
    colours: dict[str, str] = {}
    for (top, bottom), (_, *cells) in zip(rows, _cells(spec)[1:], strict=True):
        for (left, right), cell in zip(columns, cells, strict=True):
            colours.setdefault(cell, _COLOURS[len(colours) % len(_COLOURS)])
            size = right - left, bottom - top
            axes.add_patch(rectangle((left, top), *size, facecolor=colours[cell], edgecolor="#444"))
            axes.text((left + right) / 2, (top + bottom) / 2, cell, ha="center", va="center", clip_on=True)
    axes.set(xlim=(0, columns[-1][1]), ylim=(rows[-1][1], 0), title=f"{spec}\non {spec.mesh}; cells: ranks")
    axes.set_xlabel(f"index of dim {spec.ndim - 1}")
    axes.set_ylabel("index of dim 0" if rest else "")
    axes.set_xticks([0, *(right for _, right in columns)])
    axes.set_yticks([0, *(bottom for _, bottom in rows)] if rest else [])
    figure.savefig(path, dpi=120)


def _check_is_flat(spec: DTensorSpec) -> None:
    if spec.ndim not in (1, 2):
        raise LayoutError(f"a picture is of a tensor of 1 or 2 dims, {spec} has {spec.ndim}; take a slice of it")


def _cells(spec: DTensorSpec) -> list[list[str]]:
    """Cells of the picture: a head with the indices of columns, then each row with its indices first."""
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
        return [["", *map(_interval_text, bounds[0])], ["ranks", *map(cell, bounds[0])]]
    rows = [["", *map(_interval_text, bounds[1])]]
    return rows + [[_interval_text(row), *(cell(row, column) for column in bounds[1])] for row in bounds[0]]


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
