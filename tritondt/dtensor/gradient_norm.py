"""`clip_grad_norm_`: the norm of the gradients of parameters on one mesh or several, and their clipping by it."""

from collections.abc import Iterable
from typing import cast

import torch
from torch.nn.utils import clip_grad

from tritondt.dtensor.many import Move, redistribute_many
from tritondt.dtensor.tensor import DTensor
from tritondt.errors import MixedTensorsError, check_not_of_torch
from tritondt.sharding.mesh import Mesh
from tritondt.sharding.placement import Replicate


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """The norm of all gradients together, a plain tensor without dims; they are scaled down to `max_norm` in place.

    As torch.nn.utils.clip_grad_norm_, for distributed parameters on any number of meshes, of which every rank may be in
    some only: a gradient counts once, however many ranks hold it. A collective call of all ranks of all of the meshes,
    with parameters in one order on all. Raises MixedTensorsError for a plain gradient and, on all ranks, RuntimeError
    for a norm that is not finite, where `error_if_nonfinite`.

    >>> import tritondt as T
    >>> from tritondt.comm.transports.threads import run_ranks
    >>> def norm_on(rank):
    ...     first, second = (torch.nn.Parameter(T.ones(2, device_mesh=T.Mesh((1,), ranks=(at,)))) for at in (0, 1))
    ...     first.grad, second.grad = 3 * first.detach(), 4 * second.detach()
    ...     return T.clip_grad_norm_([first, second], 1.0).item()
    >>> [round(norm, 3) for norm in run_ranks(2, norm_on)]
    [7.071, 7.071]
    """
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    of_mesh: dict[Mesh, list[torch.Tensor]] = {}
    for parameter in given:
        gradient = parameter.grad
        if gradient is None:
            continue
        check_not_of_torch(gradient, "clip_grad_norm_")
        if not isinstance(gradient, DTensor):
            raise MixedTensorsError(
                f"clip_grad_norm_ was given a plain gradient of shape {tuple(gradient.shape)}; allowed are distributed "
                "ones: make the parameter distributed, replicated where every rank holds all of it"
            )
        of_mesh.setdefault(gradient._spec.mesh, []).append(parameter)
    if not of_mesh:
        return torch.tensor(0.0)
    norms = [
        clip_grad._get_total_norm([cast(DTensor, x.grad) for x in found], norm_type, False, foreach)
        for found in of_mesh.values()
    ]
    total = _combined([cast(DTensor, norm) for norm in norms], norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"the norm of order {norm_type} of gradients is {total.item()}, and cannot be clipped; pass "
            "error_if_nonfinite=False to scale them by it all the same"
        )
    for mesh, found in of_mesh.items():
        on_mesh = total if mesh.coordinate is not None else total.new_empty(0)
        clip_grad._clip_grads_with_norm_(found, max_norm, _replicated(on_mesh, mesh), foreach)
    return total


def _replicated(total: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    return DTensor.from_local(total, mesh, [Replicate()] * mesh.ndim, shape=(), stride=())


def _combined(norms: list[DTensor], norm_type: float) -> torch.Tensor:
    """The norm of norms on several meshes, on every rank of any of them."""
    everywhere = sorted({rank for norm in norms for rank in norm._spec.mesh.ranks})
    mesh = Mesh((len(everywhere),), ranks=everywhere, device_type=norms[0]._spec.mesh.device_type)
    dtype = norms[0].dtype
    for norm in norms:
        dtype = torch.promote_types(dtype, norm.dtype)
    moves: list[Move] = [(cast(DTensor, norm.to(dtype)), mesh, [Replicate()]) for norm in norms]
    found = [norm.to_local() for norm in redistribute_many(moves)]
    return found[0] if len(found) == 1 else torch.linalg.vector_norm(torch.stack(found), norm_type)
