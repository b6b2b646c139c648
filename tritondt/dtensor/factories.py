"""Factories of distributed tensors: empty, of one value, evenly spaced, or random; nothing is sent."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from tritondt.dtensor.tensor import DTensor
from tritondt.errors import LayoutError, LocalTensorError
from tritondt.errors.arguments import checked
from tritondt.ops.random.distributions import normal, uniform
from tritondt.ops.random.generator import words_of
from tritondt.redistribution.run import redistribute_local
from tritondt.sharding.mesh import Mesh, canonical_mesh, mesh_or_current
from tritondt.sharding.placement import Partial, Placement, Replicate, as_placements
from tritondt.sharding.spec import DTensorSpec, TensorMeta

# Makes a plain tensor of a shape, given as `size`, with `dtype` and `device`.
_MakeLocal = Callable[..., torch.Tensor]


@checked
def empty(
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: "DeviceMesh | Mesh | None" = None,
    placements: Sequence[Placement] | None = None,
    order: Sequence[int | str] | None = None,
) -> DTensor:
    """A tensor of global shape `size` whose elements are whatever the memory holds.

    Not collective: nothing is sent. `device_mesh` defaults to that of the enclosing `with device_mesh:`, `placements`
    (one per mesh axis) to Replicate, and `dtype` to torch's default. `layout` must be torch.strided. `order` lists the
    axes in the order in which they cut a dim. Raises LayoutError, MeshError.

    >>> import tritondt as T
    >>> from tritondt.comm.transports.threads import run_ranks
    >>> run_ranks(2, lambda rank: empty(3, 2, device_mesh=T.Mesh((2,)), placements=[T.Shard(0)]).to_local().shape)
    [torch.Size([2, 2]), torch.Size([1, 2])]
    """
    return _make(torch.empty, size, dtype, layout, requires_grad, device_mesh, placements, order)


@checked
def zeros(
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: "DeviceMesh | Mesh | None" = None,
    placements: Sequence[Placement] | None = None,
    order: Sequence[int | str] | None = None,
) -> DTensor:
    """A tensor of zeros of global shape `size`; arguments and errors as in `empty`.

    >>> import tritondt as T
    >>> from tritondt.comm.transports.threads import run_ranks
    >>> run_ranks(2, lambda rank: zeros(3, device_mesh=T.Mesh((2,)), placements=[T.Shard(0)]).to_local().tolist())
    [[0.0, 0.0], [0.0]]
    """
    return _make(torch.zeros, size, dtype, layout, requires_grad, device_mesh, placements, order)


@checked
def ones(
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: "DeviceMesh | Mesh | None" = None,
    placements: Sequence[Placement] | None = None,
    order: Sequence[int | str] | None = None,
) -> DTensor:
    """A tensor of ones of global shape `size`; arguments and errors as in `empty`. Terms of a sum add up to one.

    >>> import tritondt as T
    >>> from tritondt.comm.transports.threads import run_ranks
    >>> run_ranks(2, lambda rank: ones(2, device_mesh=T.Mesh((2,)), placements=[T.Partial()]).to_local().tolist())
    [[1.0, 1.0], [0.0, 0.0]]
    """
    return _make(torch.ones, size, dtype, layout, requires_grad, device_mesh, placements, order)


@checked
def full(
    size: int | Sequence[int],
    fill_value: float | int | bool | complex,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: "DeviceMesh | Mesh | None" = None,
    placements: Sequence[Placement] | None = None,
    order: Sequence[int | str] | None = None,
) -> DTensor:
    """A tensor of global shape `size` with `fill_value` everywhere; arguments and errors as in `empty`.

    >>> import tritondt as T
    >>> from tritondt.comm.transports.threads import run_ranks
    >>> run_ranks(2, lambda rank: full((3,), 7, device_mesh=T.Mesh((2,)), placements=[T.Shard(0)]).to_local().tolist())
    [[7, 7], [7]]
    """

    def make(size: Sequence[int], **options: Any) -> torch.Tensor:
        return torch.full(size, fill_value, **options)

    return _make(make, (size,), dtype, layout, requires_grad, device_mesh, placements, order)


@checked
def linspace(
    start: float | complex | torch.Tensor,
    end: float | complex | torch.Tensor,
    steps: int,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: "DeviceMesh | Mesh | None" = None,
    placements: Sequence[Placement] | None = None,
    order: Sequence[int | str] | None = None,
) -> DTensor:
    """A tensor of `steps` evenly spaced numbers from `start` to `end`, to the bit those of torch.linspace.

    `start` and `end` are numbers, or tensors of no dims, alike on all ranks; a DTensor among them makes the call
    collective. Every rank makes all numbers and keeps its part. Other arguments and errors as in `empty`.

    >>> import tritondt as T
    >>> from tritondt.comm.transports.threads import run_ranks
    >>> layout = {"placements": [T.Shard(0)]}
    >>> run_ranks(2, lambda rank: linspace(0, 4, 5, device_mesh=T.Mesh((2,)), **layout).to_local().tolist())
    [[0.0, 1.0, 2.0], [3.0, 4.0]]
    """
    start, end = _number_of(start), _number_of(end)

    def make(size: Sequence[int], **options: Any) -> torch.Tensor:
        return torch.linspace(start, end, size[0] if size else 0, **options)

    return _make(make, (steps,), dtype, layout, requires_grad, device_mesh, placements, order, whole=True)


@checked
def logspace(
    start: float | complex | torch.Tensor,
    end: float | complex | torch.Tensor,
    steps: int,
    base: float = 10.0,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: "DeviceMesh | Mesh | None" = None,
    placements: Sequence[Placement] | None = None,
    order: Sequence[int | str] | None = None,
) -> DTensor:
    """A tensor of `base` to the power of `steps` evenly spaced numbers; arguments and errors as in `linspace`.

    >>> import tritondt as T
    >>> from tritondt.comm.transports.threads import run_ranks
    >>> layout = {"placements": [T.Shard(0)]}
    >>> run_ranks(2, lambda rank: logspace(0, 3, 4, 2.0, device_mesh=T.Mesh((2,)), **layout).to_local().tolist())
    [[1.0, 2.0], [4.0, 8.0]]
    """
    start, end = _number_of(start), _number_of(end)

    def make(size: Sequence[int], **options: Any) -> torch.Tensor:
        return torch.logspace(start, end, size[0] if size else 0, base, **options)

    return _make(make, (steps,), dtype, layout, requires_grad, device_mesh, placements, order, whole=True)


@checked
def rand(
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: "DeviceMesh | Mesh | None" = None,
    placements: Sequence[Placement] | None = None,
    order: Sequence[int | str] | None = None,
) -> DTensor:
    """A tensor of global shape `size` of numbers from [0, 1), the same whatever the placements.

    Arguments and errors as in `empty`. The first call after seeding compares the ranks' default generators, which is
    collective, and raises MismatchError where they differ (torch.manual_seed).

    >>> import tritondt as T
    >>> from tritondt.comm.transports.threads import run_ranks
    >>> def numbers(placement):
    ...     return run_ranks(2, lambda rank: rand(5, device_mesh=T.Mesh((2,)), placements=[placement]).full_tensor())[1]
    >>> numbers(T.Shard(0)).equal(numbers(T.Replicate()))
    True
    """
    return _make(torch.rand, size, dtype, layout, requires_grad, device_mesh, placements, order, uniform)


@checked
def randn(
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: "DeviceMesh | Mesh | None" = None,
    placements: Sequence[Placement] | None = None,
    order: Sequence[int | str] | None = None,
) -> DTensor:
    """A tensor of global shape `size` of numbers from the normal distribution; arguments and errors as in `rand`.

    >>> import tritondt as T
    >>> from tritondt.comm.transports.threads import run_ranks
    >>> def rows(rank):
    ...     torch.manual_seed(0)
    ...     return randn(4, 2, device_mesh=T.Mesh((2,)), placements=[T.Shard(0)])
    >>> [tuple(part.to_local().shape) for part in run_ranks(2, rows)]
    [(2, 2), (2, 2)]
    """
    return _make(torch.randn, size, dtype, layout, requires_grad, device_mesh, placements, order, normal)


def _make(
    make: _MakeLocal,
    size: Sequence[Any],
    dtype: torch.dtype | None,
    layout: torch.layout,
    requires_grad: bool,
    device_mesh: "DeviceMesh | Mesh | None",
    placements: Sequence[Placement] | None,
    order: Sequence[int | str] | None,
    distribution: Callable[[Sequence[torch.Tensor], torch.dtype], torch.Tensor] | None = None,
    *,
    whole: bool = False,
) -> DTensor:
    """The tensor whose parts `make` makes by their shapes, or which, if `whole`, is cut from all that it makes."""
    if layout is not torch.strided:
        raise LayoutError(f"a distributed tensor is strided, got layout={layout}; leave the layout out")
    mesh = canonical_mesh(mesh_or_current(device_mesh))
    shape = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else tuple(size)
    device = torch.device(mesh.device_type)
    dtype = make((), dtype=dtype, device="meta").dtype
    wanted = [Replicate()] * mesh.ndim if placements is None else as_placements(placements)
    # Terms are made of what is whole; the engine does it without a message.
    target = DTensorSpec(mesh, wanted, TensorMeta.contiguous(shape, dtype), order)
    spec = target.with_placements([Replicate() if whole or isinstance(p, Partial) else p for p in target.placements])
    if distribution is not None and spec.coordinate is not None:
        local = distribution(words_of(spec, device, None, 1 + dtype.is_complex), dtype)
    else:
        local = make(spec.local_shape, dtype=dtype, device=device)
    return DTensor(redistribute_local(local, spec, target), target, requires_grad=requires_grad)


def _number_of(given: Any) -> Any:
    """The number that a tensor without dims holds; what is no tensor stays."""
    if not isinstance(given, torch.Tensor):
        return given
    if given.dim():
        raise LocalTensorError(f"a range was given a bound of shape {tuple(given.shape)}; a tensor must have no dims")
    return given.item()
