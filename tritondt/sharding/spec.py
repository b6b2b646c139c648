"""Specs of distributed tensors: a layout on a real mesh, with stride and dtype."""

import os
import threading
from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch.distributed.device_mesh import DeviceMesh

from tritondt import identity
from tritondt.errors import LayoutError, LocalTensorError, OpenLengthError, ReductionError, TransportError
from tritondt.errors.arguments import checked
from tritondt.sharding.dim_map import DimMaps, placements_of_map
from tritondt.sharding.layout import Layout
from tritondt.sharding.lengths import are_open, has_hint, settled
from tritondt.sharding.mesh import Mesh, canonical_mesh
from tritondt.sharding.placement import (
    OPS_OF_KIND,
    ElementKind,
    Partial,
    Placement,
    ReduceOp,
    as_placements,
    placements_text,
)
from tritondt.sharding.strides import dense_strides

_interned: "WeakValueDictionary[object, DTensorSpec]" = WeakValueDictionary()
_interning = threading.Lock()
os.register_at_fork(before=_interning.acquire, after_in_parent=_interning.release, after_in_child=_interning.release)


class TensorMeta(NamedTuple):
    """Global shape, in elements, global stride, in elements, and dtype of a distributed tensor.

    >>> TensorMeta((2, 3), (3, 1), torch.float32) == TensorMeta.contiguous((2, 3))
    True
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def contiguous(cls, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> "TensorMeta":
        """Meta of a row-major tensor of `shape`.

        >>> TensorMeta.contiguous((2, 3))
        TensorMeta(shape=(2, 3), stride=(3, 1), dtype=torch.float32)
        """
        return cls(tuple(shape), dense_strides(tuple(shape)), dtype)

    @property
    def shares_elements(self) -> bool:
        """Whether elements share memory, like those of expand.

        >>> TensorMeta((2, 3), (0, 1), torch.float32).shares_elements
        True
        """
        return any(length > 1 and step == 0 for length, step in zip(self.shape, self.stride, strict=True))


class DTensorSpec(DimMaps):
    """Placements of one tensor on one mesh, with global shape, stride and dtype, as this rank sees them.

    `mesh` is a DeviceMesh or a `Mesh`; `placements` has one placement per axis; `tensor_meta` is the global shape,
    stride and dtype; `order` lists the axes, by name or number, in the order in which they cut (default: left to
    right). Equal specs of one rank are one object, so specs can be compared by identity. Construction is not
    collective.

    `local_shape` is the shape of this rank's tensor, `coordinate` its index on every axis, `layout` the pure layout. On
    a rank outside the mesh `coordinate` is None and the local tensor empty, of shape (0,). Sizes may be SymInts of a
    graph. Unknown sizes, as of results whose shape depends on data, have no layout. A spec without `tensor_meta`, as
    operator strategies make them, has only placements on a mesh until `shallow_copy_with_tensor_meta` adds a tensor's
    properties.

    Raises LayoutError for placements that do not fit the shape or the mesh, MeshError for a mesh of another world, and
    ReductionError for a Partial whose op the dtype does not have. LocalTensorError for a quantised dtype.

    >>> from tritondt.comm.transports.threads import run_ranks
    >>> from tritondt.sharding.placement import Replicate, Shard
    >>> def spec_on(rank):
    ...     mesh = Mesh((2, 2), ("dp", "tp"))
    ...     return DTensorSpec(mesh, (Replicate(), Shard(0)), TensorMeta.contiguous((5, 3)))
    >>> spec = run_ranks(4, spec_on)[1]
    >>> spec, spec.coordinate, spec.local_shape
    (DTensorSpec((R, S0) of (5, 3) float32 on Mesh(dp=2, tp=2 over ranks 0..3, cpu)), (0, 1), (2, 3))
    """

    __slots__ = (
        "__weakref__", "_layout", "coordinate", "is_open", "local_shape", "mesh", "order", "placements", "tensor_meta",
    )  # fmt: skip

    mesh: Mesh
    placements: tuple[Placement, ...]
    tensor_meta: TensorMeta
    order: tuple[int, ...]
    coordinate: tuple[int, ...] | None
    local_shape: tuple[int, ...]
    # Whether a graph of torch.compile leaves lengths or strides open.
    is_open: bool
    _layout: Layout | None

    @checked
    def __new__(
        cls,
        mesh: "Mesh | DeviceMesh",
        placements: Sequence[Placement],
        tensor_meta: TensorMeta | tuple[Sequence[int], Sequence[int], torch.dtype] | None = None,
        order: Sequence[int | str] | None = None,
    ) -> "DTensorSpec":
        """Interned spec of the given values on the calling thread's rank."""
        canonical = canonical_mesh(mesh)
        axes = None if order is None else tuple(canonical.axis(name) for name in order)
        if tensor_meta is None:
            return _PlacementsAlone.of(canonical, as_placements(placements), axes)
        shape, stride, dtype = tensor_meta
        meta = TensorMeta(tuple(shape), tuple(stride), dtype)
        is_open = are_open((*meta.shape, *meta.stride))
        if is_open:
            meta = TensorMeta(tuple(map(settled, shape)), tuple(map(settled, stride)), dtype)
            is_open = are_open((*meta.shape, *meta.stride))
            if not all(map(has_hint, (*meta.shape, *meta.stride))):
                check_not_quantised("a distributed tensor", dtype)
                return cls._symbolic(canonical, as_placements(placements), meta, axes)
        layout = Layout(canonical.shape, placements, meta.shape, axes)
        if is_open:
            # Equal ones of two passes are not one: each has lengths that come from the arguments of its own pass.
            check_not_quantised("a distributed tensor", dtype)
            check_reductions(layout.placements, dtype)
            return cls._make(canonical, layout.placements, meta, layout.order, layout)
        key = (canonical, layout, meta.stride, dtype)
        with _interning:
            found = _interned.get(key)
            if found is not None:
                return found
            check_not_quantised("a distributed tensor", dtype)
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
        made.local_shape, made.is_open = (0,), are_open((*meta.shape, *meta.stride))
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
        """Pure layout of the spec; OpenLengthError where nothing is known of sizes."""
        if self._layout is None:
            raise OpenLengthError(f"{self} has symbolic sizes and no layout; give it sizes as ints")
        return self._layout

    @property
    def placed(self) -> "Placed":
        """The spec without its sizes."""
        return Placed(self.mesh, self.placements, self.order, self.tensor_meta.dtype)

    @property
    def is_known_now(self) -> bool:
        """Whether a guard has since fixed a length, or a stride, that a graph had left open."""
        if not self.is_open:
            return False
        left_open = [length for length in (*self.shape, *self.tensor_meta.stride) if not isinstance(length, int)]
        return any(isinstance(settled(length), int) for length in left_open)

    @property
    def device_mesh(self) -> "DeviceMesh | Mesh":
        """Mesh passed to the spec: torch's DeviceMesh where there is one."""
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

    @classmethod
    def from_dim_map(
        cls, mesh: "Mesh | DeviceMesh", dim_map: Sequence[int], sums: Sequence[int], tensor_meta: TensorMeta
    ) -> "DTensorSpec":
        """Spec in which axis dim_map[i] cuts dim i (-1: none), and which holds terms of sums on the axes `sums`.

        Raises LayoutError for an axis that the mesh lacks or that is named twice, and the errors of DTensorSpec.
        """
        return cls(mesh, placements_of_map(mesh, dim_map, sums), tensor_meta)

    def shallow_copy_with_tensor_meta(self, tensor_meta: TensorMeta) -> "DTensorSpec":
        """Spec of another tensor under these placements, in this cut order."""
        return DTensorSpec(self.mesh, self.placements, tensor_meta, self.order)

    @property
    def local_numel(self) -> int:
        """Number of elements that this rank holds."""
        return prod(self.local_shape)

    def with_placements(
        self, placements: Sequence[Placement], order: Sequence[int | str] | None = None
    ) -> "DTensorSpec":
        """Spec of this tensor on this mesh under other placements, in this spec's cut order unless `order` is given."""
        wanted, axes = as_placements(placements), self.order if order is None else tuple(order)
        if self.is_open:  # no cache keeps what belongs to a graph
            is_same = (wanted, axes) == (self.placements, self.order)
            return self if is_same else DTensorSpec(self.mesh, wanted, self.tensor_meta, axes)
        return _under(self, wanted, axes)


@lru_cache(maxsize=4096)
def _under(spec: DTensorSpec, placements: tuple[Placement, ...], order: tuple[int | str, ...]) -> DTensorSpec:
    return DTensorSpec(spec.mesh, placements, spec.tensor_meta, order)


class Placed(NamedTuple):
    """A spec without its sizes: mesh, placements, cut order and dtype."""

    mesh: Mesh
    placements: tuple[Placement, ...]
    order: tuple[int, ...]
    dtype: torch.dtype

    def of_size(self, shape: Sequence[int], stride: Sequence[int]) -> DTensorSpec:
        """The spec of a tensor of these global sizes."""
        if are_open((*shape, *stride)):
            return DTensorSpec(
                self.mesh, self.placements, TensorMeta(tuple(shape), tuple(stride), self.dtype), self.order
            )
        return _of_size(self, tuple(shape), tuple(stride))


@lru_cache(maxsize=4096)
def _of_size(placed: Placed, shape: tuple[int, ...], stride: tuple[int, ...]) -> DTensorSpec:
    return DTensorSpec(placed.mesh, placed.placements, TensorMeta(shape, stride, placed.dtype), placed.order)


@lru_cache(maxsize=4096)
def target_spec(
    spec: DTensorSpec,
    placements: tuple[Placement, ...],
    order: tuple[int | str, ...] | None = None,
    mesh: Mesh | None = None,
) -> DTensorSpec:
    """Spec after a redistribution: `spec` itself where nothing changes, else of a dense row-major tensor.

    `mesh` is the target's where it is another one than the source's; then axes cut from left to right unless `order` is
    given.
    """
    if mesh is None or mesh is spec.mesh:
        wanted = spec.with_placements(placements, order)
        if wanted is spec:
            return spec
    else:
        wanted = DTensorSpec(mesh, placements, spec.tensor_meta, order)
        is_one_grid = (mesh.ranks, mesh.device_type) == (spec.mesh.ranks, spec.mesh.device_type)
        if is_one_grid and wanted._layout is spec._layout:
            return wanted  # names of axes alone have changed: parts stay as they are
    meta = TensorMeta.contiguous(spec.shape, spec.dtype)
    return DTensorSpec(wanted.mesh, wanted.placements, meta, wanted.order)


class _SymbolicSpec(DTensorSpec):
    """Spec with sizes of which nothing is known, compared by value; other specs are interned, compared by identity."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SymbolicSpec) and self._values() == other._values()

    def __hash__(self) -> int:
        return hash((self.mesh, self.placements, self.order))

    def _values(self) -> tuple[object, ...]:
        return self.mesh, self.placements, self.tensor_meta, self.order


class _PlacementsAlone(_SymbolicSpec):
    """Placements on a mesh, of a tensor that is not known yet, compared by value."""

    __slots__ = ()

    @classmethod
    def of(cls, mesh: Mesh, placements: tuple[Placement, ...], order: tuple[int, ...] | None) -> "_PlacementsAlone":
        """The spec of these values; LayoutError where there is not one placement for each axis."""
        if len(placements) != mesh.ndim or not all(isinstance(placement, Placement) for placement in placements):
            raise LayoutError(
                f"DTensorSpec got placements {placements} for {mesh}; allowed is one of tritondt's placements per axis"
            )
        made: _PlacementsAlone = object.__new__(cls)
        made.mesh, made.placements, made.order = mesh, placements, order or tuple(range(mesh.ndim))
        made._layout, made.coordinate, made.local_shape, made.is_open = None, mesh.coordinate, (0,), False
        made.tensor_meta = None  # type: ignore[assignment]
        return made

    def __str__(self) -> str:
        return f"{placements_text(self.placements)} of a tensor yet to be known"

    @property
    def layout(self) -> Layout:
        """LayoutError: without a shape there is no layout."""
        raise self._lacks("layout")

    @property
    def placed(self) -> "Placed":
        """LayoutError, as `layout`."""
        raise self._lacks("dtype")

    @property
    def shape(self) -> tuple[int, ...]:
        """LayoutError, as `layout`."""
        raise self._lacks("shape")

    @property
    def ndim(self) -> int:
        """LayoutError, as `layout`."""
        raise self._lacks("shape")

    @property
    def stride(self) -> tuple[int, ...]:
        """LayoutError, as `layout`."""
        raise self._lacks("strides")

    @property
    def dtype(self) -> torch.dtype:
        """LayoutError, as `layout`."""
        raise self._lacks("dtype")

    def _lacks(self, what: str) -> LayoutError:
        return LayoutError(f"{self} has no {what}; give DTensorSpec the tensor's TensorMeta")

    def with_placements(
        self, placements: Sequence[Placement], order: Sequence[int | str] | None = None
    ) -> "DTensorSpec":
        """Other placements of the tensor that is not known yet."""
        return DTensorSpec(self.mesh, placements, order=self.order if order is None else order)


_REDUCIBLE = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128),
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool),
)
_QUANTISED = frozenset({torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4})


def element_kind(dtype: torch.dtype) -> ElementKind:
    """Kind of a dtype, which decides its reductions: float, complex, int or bool."""
    if dtype.is_complex:
        return "complex"
    if dtype.is_floating_point:
        return "float"
    return "bool" if dtype is torch.bool else "int"


def has_reduction(reduce_op: ReduceOp, dtype: torch.dtype) -> bool:
    """Whether elements of a dtype can be reduced by an op: bool has no sum, complex no max.

    >>> has_reduction("max", torch.bool), has_reduction("sum", torch.bool)
    (True, False)
    """
    return dtype in _REDUCIBLE and reduce_op in OPS_OF_KIND[element_kind(dtype)]


def check_reductions(placements: Sequence[Placement], dtype: torch.dtype) -> None:
    """Refuses a Partial whose op the dtype does not have, with a ReductionError."""
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


def check_not_quantised(what: str, dtype: torch.dtype) -> None:
    """Refuses the dtype of quantised tensors, whose scale and zero point are in no message, with a LocalTensorError.

    >>> check_not_quantised("a distributed tensor", torch.int8)
    """
    if dtype in _QUANTISED:
        raise LocalTensorError(
            f"{what} was asked for with elements of {str(dtype).removeprefix('torch.')}; those of a quantised tensor "
            "mean nothing without its scale and zero point, which do not travel: give x.dequantize(), or x.int_repr() "
            "and keep x.q_scale() and x.q_zero_point() beside it"
        )


def check_strided(what: str, tensor: torch.Tensor) -> None:
    """Refuses nested and sparse tensors, whose elements lie at no strides, with a TransportError.

    >>> check_strided("redistribute", torch.ones(2))
    """
    if tensor.is_nested:
        raise TransportError(
            f"{what} takes a strided tensor, got a nested one of {tensor.size(0)} tensors ({tensor.layout}); give it "
            "torch.nested.to_padded_tensor(x, 0.0), or x.values() and keep the lengths beside it"
        )
    if tensor.layout is not torch.strided:
        raise TransportError(f"{what} takes a strided tensor, got {tensor.layout}; call to_dense() first")


@checked
def compute_local_shape_and_global_offset(
    global_shape: Sequence[int],
    mesh: "Mesh | DeviceMesh",
    placements: Sequence[Placement],
    order: Sequence[int | str] | None = None,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shape of this rank's local tensor, in elements, and the index of the whole tensor at which its one
    box starts.

    `global_shape` has the tensor's lengths in elements, `placements` one placement per axis of `mesh`, `order` the cut
    order. An empty piece starts at the end of its dim. A rank outside the mesh gets ((0,), ()). Not a collective call.

    Raises LayoutError where `repeats` or `block` gives the rank several boxes, which the spec's
    `layout.boxes(coordinate)` lists, and the errors of DTensorSpec. Source:
    torch.distributed.tensor._utils.compute_local_shape_and_global_offset.

    >>> from tritondt.comm.transports.threads import run_ranks
    >>> from tritondt.sharding.placement import Shard
    >>> run_ranks(2, lambda rank: compute_local_shape_and_global_offset((5, 3), Mesh((2,)), (Shard(0),)))
    [((3, 3), (0, 0)), ((2, 3), (3, 0))]
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


identity.on_end(_under.cache_clear)
identity.on_end(_of_size.cache_clear)
identity.on_end(target_spec.cache_clear)
