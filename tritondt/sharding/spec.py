"""A layout on a real mesh, with stride and dtype: what a distributed tensor is, apart from its data."""

import os
import threading
from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch.distributed.device_mesh import DeviceMesh

from tritondt.errors import LayoutError, ReductionError
from tritondt.sharding.layout import Layout
from tritondt.sharding.mesh import Mesh, canonical_mesh
from tritondt.sharding.placement import OPS_OF_KIND, ElementKind, Partial, Placement, placements_text
from tritondt.sharding.strides import dense_strides

_interned: "WeakValueDictionary[object, DTensorSpec]" = WeakValueDictionary()
_interning = threading.Lock()
os.register_at_fork(before=_interning.acquire, after_in_parent=_interning.release, after_in_child=_interning.release)


class TensorMeta(NamedTuple):
    """Global shape, global stride and dtype of a distributed tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def contiguous(cls, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> "TensorMeta":
        """The meta of a row-major tensor.

        >>> TensorMeta.contiguous((2, 3))
        TensorMeta(shape=(2, 3), stride=(3, 1), dtype=torch.float32)
        """
        return cls(tuple(shape), dense_strides(tuple(shape)), dtype)


class DTensorSpec:
    """A tensor's placements on a mesh as this rank sees them; equal specs are one object.

    `mesh` is torch's DeviceMesh or a tritondt Mesh; `order` lists axes (names or numbers) in cut order. On a
    rank outside the mesh `coordinate` is None and the local tensor is empty. Specs whose sizes are symbolic
    compare by value, are never interned and have no layout. Raises LayoutError, MeshError, ReductionError.
    """

    __slots__ = (
        "__weakref__", "_layout", "coordinate", "local_shape", "mesh", "order", "placements", "tensor_meta",
    )  # fmt: skip

    mesh: Mesh
    placements: tuple[Placement, ...]
    tensor_meta: TensorMeta
    order: tuple[int, ...]
    coordinate: tuple[int, ...] | None
    local_shape: tuple[int, ...]
    _layout: Layout | None

    def __new__(
        cls,
        mesh: "Mesh | DeviceMesh",
        placements: Sequence[Placement],
        tensor_meta: TensorMeta | tuple[Sequence[int], Sequence[int], torch.dtype],
        order: Sequence[int | str] | None = None,
    ) -> "DTensorSpec":
        """The one spec of these values on the calling thread's rank."""
        canonical = canonical_mesh(mesh)
        axes = None if order is None else tuple(canonical.axis(name) for name in order)
        shape, stride, dtype = tensor_meta
        meta = TensorMeta(tuple(shape), tuple(stride), dtype)
        if not all(isinstance(length, int) for length in (*meta.shape, *meta.stride)):
            return cls._symbolic(canonical, tuple(placements), meta, axes)
        layout = Layout(canonical.shape, placements, meta.shape, axes)
        key = (canonical, layout, meta.stride, dtype)
        with _interning:
            found = _interned.get(key)
            if found is not None:
                return found
            check_reductions(layout.placements, dtype)
            made = cls._make(canonical, layout.placements, meta, layout.order, layout)
            _interned[key] = made
            return made

    @classmethod
    def _make(
        cls,
        mesh: Mesh,
        placements: tuple[Placement, ...],
        meta: TensorMeta,
        order: tuple[int, ...],
        layout: Layout | None,
    ) -> "DTensorSpec":
        made = object.__new__(_SymbolicSpec if layout is None else DTensorSpec)
        made.mesh, made.placements, made.tensor_meta = mesh, placements, meta
        made.order, made._layout, made.coordinate = order, layout, mesh.coordinate
        made.local_shape = (0,)
        if mesh.coordinate is not None and layout is not None:
            made.local_shape = layout.local_shape(mesh.coordinate)
        return made

    @classmethod
    def _symbolic(
        cls, mesh: Mesh, placements: tuple[Placement, ...], meta: TensorMeta, order: tuple[int, ...] | None
    ) -> "DTensorSpec":
        return cls._make(mesh, placements, meta, order or tuple(range(mesh.ndim)), None)

    def __reduce__(self) -> tuple[Any, ...]:
        return DTensorSpec, (self.mesh, self.placements, self.tensor_meta, self.order)

    def __repr__(self) -> str:
        return f"DTensorSpec({self} on {self.mesh})"

    def __str__(self) -> str:
        text = placements_text(self.placements) if self._layout is None else str(self._layout)
        shape, dtype = self.tensor_meta.shape, str(self.tensor_meta.dtype).removeprefix("torch.")
        return f"{text} of {shape} {dtype}"

    @property
    def layout(self) -> Layout:
        """The pure layout; LayoutError where sizes are symbolic."""
        if self._layout is None:
            raise LayoutError(f"{self} has symbolic sizes and no layout; give it sizes as ints")
        return self._layout

    @property
    def device_mesh(self) -> "DeviceMesh | Mesh":
        """The mesh as it was given: torch's where there is one."""
        return self.mesh.device_mesh or self.mesh

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return self.tensor_meta.shape

    @property
    def ndim(self) -> int:
        """Number of tensor dims."""
        return len(self.tensor_meta.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Element type."""
        return self.tensor_meta.dtype

    @property
    def local_numel(self) -> int:
        """Elements that this rank holds."""
        return prod(self.local_shape)

    def with_placements(
        self, placements: Sequence[Placement], order: Sequence[int | str] | None = None
    ) -> "DTensorSpec":
        """The same tensor on the same mesh under other placements, in the same cut order unless given."""
        return _under(self, tuple(placements), self.order if order is None else tuple(order))


@lru_cache(maxsize=4096)
def _under(spec: DTensorSpec, placements: tuple[Placement, ...], order: tuple[int | str, ...]) -> DTensorSpec:
    return DTensorSpec(spec.mesh, placements, spec.tensor_meta, order)


@lru_cache(maxsize=4096)
def target_spec(
    spec: DTensorSpec, placements: tuple[Placement, ...], order: tuple[int | str, ...] | None = None
) -> DTensorSpec:
    """The spec after a redistribution: `spec` itself where nothing changes, else of a dense row-major tensor."""
    wanted = spec.with_placements(placements, order)
    if wanted is spec:
        return spec
    meta = TensorMeta.contiguous(spec.shape, spec.dtype)
    return DTensorSpec(spec.mesh, wanted.placements, meta, wanted.order)


class _SymbolicSpec(DTensorSpec):
    """A spec with symbolic sizes: compared by value, where the others are one object if equal and hash as such."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SymbolicSpec) and self._values() == other._values()

    def __hash__(self) -> int:
        return hash((self.mesh, self.placements, self.order))

    def _values(self) -> tuple[object, ...]:
        return self.mesh, self.placements, self.tensor_meta, self.order


_REDUCIBLE = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128),
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool),
)


def element_kind(dtype: torch.dtype) -> ElementKind:
    """Which reductions a dtype has: those of floats, complex numbers, ints or bools."""
    if dtype.is_complex:
        return "complex"
    if dtype.is_floating_point:
        return "float"
    return "bool" if dtype is torch.bool else "int"


def check_reductions(placements: Sequence[Placement], dtype: torch.dtype) -> None:
    """Refuses a Partial whose op the dtype does not have."""
    allowed = OPS_OF_KIND[element_kind(dtype)]
    for placement in placements:
        if isinstance(placement, Partial) and dtype not in _REDUCIBLE:
            raise ReductionError(
                f"{placements_text(placements)} asks for {placement.reduce_op} of {dtype}, which has no reductions; "
                f"allowed are {', '.join(str(other).removeprefix('torch.') for other in _REDUCIBLE)}"
            )
        if isinstance(placement, Partial) and placement.reduce_op not in allowed:
            raise ReductionError(
                f"{placements_text(placements)} asks for {placement.reduce_op} of {dtype}; "
                f"{element_kind(dtype)} elements have {', '.join(allowed)}"
            )


def compute_local_shape_and_global_offset(
    global_shape: Sequence[int],
    mesh: "Mesh | DeviceMesh",
    placements: Sequence[Placement],
    order: Sequence[int | str] | None = None,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """This rank's local shape, and where its one box starts in the whole tensor.

    An empty piece starts at the end of its dim. Raises LayoutError where `repeats` gives the rank several
    boxes, which `DTensorSpec.layout.boxes(coordinate)` lists. A rank outside the mesh gets ((0,), ()).
    """
    canonical = canonical_mesh(mesh)
    axes = None if order is None else tuple(canonical.axis(name) for name in order)
    layout = Layout(canonical.shape, placements, global_shape, axes)
    if canonical.coordinate is None:
        return (0,), ()
    region = layout.region(canonical.coordinate)
    if any(len(intervals) > 1 for intervals in region):
        raise LayoutError(
            f"{layout} gives coordinate {canonical.coordinate} {len(layout.boxes(canonical.coordinate))} boxes, "
            "which have no one offset; layout.boxes(coordinate) lists them"
        )
    offset = tuple(
        intervals[0][0] if intervals else length for intervals, length in zip(region, layout.shape, strict=True)
    )
    return layout.local_shape(canonical.coordinate), offset
