"""Tables to and from fp8 whose scales travel beside the numbers, each in the same buffer as its box.

The kernels take the scales of a table one behind another. A run casts with such a list, which a table of copies fills
from the buffer before, or empties into it afterwards.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from tritondt.kernels.boxes import SCALE_BYTES, CopyBox


class ScalePlace(NamedTuple):
    """Place of the scale of a box: number of the tensor on the side of fp8, and byte in that tensor."""

    tensor: int
    start: int


class ScaledTable(Protocol):
    """Boxes to cast to fp8 or from it, with the list of their scales."""

    def run(self, source_ptrs: list[int], target_ptrs: list[int], scales_ptr: int, num_threads: int) -> None:
        """Casts every box; the scale of box i is number i of the float32 numbers at `scales_ptr`."""

    @property
    def num_bytes(self) -> int:
        """Bytes that one run moves, of the wider side."""

    @property
    def num_boxes(self) -> int:
        """Boxes that hold anything."""


class CopiedTable(Protocol):
    """Boxes to copy, prepared once."""

    def run(self, source_ptrs: list[int], target_ptrs: list[int], num_threads: int) -> None:
        """Copies every box."""


def scale_copies(places: Sequence[ScalePlace], *, to_places: bool) -> list[CopyBox]:
    """Copies between a list of adjacent scales and the places of these scales; neighbours go together.

    >>> places = [ScalePlace(0, 0), ScalePlace(0, 4), ScalePlace(1, 20)]
    >>> boxes = scale_copies(places, to_places=True)
    >>> [(box.target, box.source_offset, box.target_offset, box.lengths) for box in boxes]
    [(0, 0, 0, (8,)), (1, 8, 20, (4,))]
    """
    boxes: list[CopyBox] = []
    first = 0
    for end in range(1, len(places) + 1):
        tensor, start = places[first]
        if end < len(places) and places[end] == (tensor, start + (end - first) * SCALE_BYTES):
            continue
        num_bytes, listed = (end - first) * SCALE_BYTES, first * SCALE_BYTES
        sides = (0, tensor, listed, start) if to_places else (tensor, 0, start, listed)
        boxes.append(CopyBox(*sides, 1, (num_bytes,), (1,), (1,)))
        first = end
    return boxes


class _PlacedTable:
    """A table to or from fp8 and the copies of its scales; the memory between belongs to a run."""

    def __init__(self, cast: ScaledTable, copies: CopiedTable, num_scales: int, device: torch.device) -> None:
        self._cast, self._copies, self._num_scales, self._device = cast, copies, num_scales, device

    def _scales(self) -> torch.Tensor:
        return torch.empty(self._num_scales, dtype=torch.float32, device=self._device)

    @property
    def num_bytes(self) -> int:
        """Bytes that one run moves, of the wider side, without scales."""
        return self._cast.num_bytes

    @property
    def num_boxes(self) -> int:
        """Boxes that hold anything."""
        return self._cast.num_boxes


class PlacedQuantizeTable(_PlacedTable):
    """Table that casts to fp8 and writes each scale to its place."""

    def run(self, source_ptrs: list[int], target_ptrs: list[int], num_threads: int) -> None:
        """Writes every box and its scale."""
        scales = self._scales()
        self._cast.run(source_ptrs, target_ptrs, scales.data_ptr(), num_threads)
        self._copies.run([scales.data_ptr()], target_ptrs, num_threads)


class PlacedDequantizeTable(_PlacedTable):
    """Table that reads each scale from its place and casts from fp8."""

    def run(self, source_ptrs: list[int], target_ptrs: list[int], num_threads: int) -> None:
        """Writes every box."""
        scales = self._scales()
        self._copies.run(source_ptrs, [scales.data_ptr()], num_threads)
        self._cast.run(source_ptrs, target_ptrs, scales.data_ptr(), num_threads)
