"""The image of a sharding: its cells are to scale, and say who holds them."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

import tritondt as T
from tritondt.comm.transports.threads import run_ranks
from tritondt.debug import write_sharding_image
from tritondt.sharding.placement import parse_placements


def write_on(rank: int, path: Path, shape: tuple[int, ...], placements: str) -> None:
    mesh = T.Mesh((2, 2))
    write_sharding_image(T.DTensorSpec(mesh, parse_placements(placements), T.TensorMeta.contiguous(shape)), path)


@pytest.mark.parametrize(
    ("shape", "placements", "cells"),
    [
        ((3, 4), "S0,S1", {"0": (2, 2), "1": (2, 2), "2": (1, 2), "3": (1, 2)}),
        ((5,), "S0,R", {"0, 1": (1, 3), "2, 3": (1, 2)}),
        ((5,), "P,S0", {"0 + 2": (1, 3), "1 + 3": (1, 2)}),
    ],
)
def test_cells_are_to_scale_and_name_their_ranks(monkeypatch, tmp_path, shape, placements, cells):
    axes = pytest.importorskip("matplotlib.axes")
    drawn: list[tuple[float, float]] = []
    texts: list[str] = []
    real_patch, real_text = axes.Axes.add_patch, axes.Axes.text

    def add_patch(self: Any, patch: Any) -> Any:
        drawn.append((patch.get_height(), patch.get_width()))
        return real_patch(self, patch)

    def text(self: Any, x: float, y: float, label: str, **options: Any) -> Any:
        texts.append(label)
        return real_text(self, x, y, label, **options)

    named: list[str] = []
    monkeypatch.setattr(axes.Axes, "set_xlabel", lambda _, label: named.append(label))
    monkeypatch.setattr(axes.Axes, "set_ylabel", lambda _, label: named.append(label))
    monkeypatch.setattr(axes.Axes, "add_patch", add_patch)
    monkeypatch.setattr(axes.Axes, "text", text)
    path = tmp_path / "found.svg"
    run_ranks(4, lambda rank: write_on(rank, path, shape, placements) if rank == 0 else None)
    assert dict(zip(texts, drawn, strict=True)) == cells
    assert len(re.findall("<svg", path.read_text())) == 1
    assert [axis for axis in named if axis] == [f"index of dim {dim}" for dim in reversed(range(len(shape)))]


@pytest.mark.parametrize(
    ("shape", "message"),
    [((2, 2, 2), "has 3; take a slice of it"), ((0, 2), r"an image is of a tensor with elements, .* has none")],
)
def test_what_cannot_be_drawn_is_refused(tmp_path, shape, message):
    with pytest.raises(T.LayoutError, match=message):
        run_ranks(4, lambda rank: write_on(rank, tmp_path / "found.png", shape, "S0,R"))


def test_without_matplotlib_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ImportError, match="write_sharding_image needs matplotlib, which is not installed: pip install"):
        run_ranks(4, lambda rank: write_on(rank, tmp_path / "found.png", (2, 2), "S0,R"))
